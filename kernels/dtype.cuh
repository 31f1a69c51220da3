// Number formats of rows: how values leave and enter 16 bytes of one, as the host does it bit for bit.
// (A NaN stays a NaN, but the bits that tell NaNs apart are not kept: no sum would keep them.)
#pragma once

#include "ptx.cuh"

using ptx::Quad;

namespace dtype {

constexpr u32 BF16 = 0;
constexpr u32 FP16 = 1;
constexpr u32 FP32 = 2;

template <u32 CODE>
struct Format;

template <>
struct Format<BF16> {
    static constexpr u32 VALUES = 8;

    static __device__ __forceinline__ void decode(const Quad &quad, float (&values)[VALUES]) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[2 * i] = __uint_as_float(quad.word[i] << 16);
            values[2 * i + 1] = __uint_as_float(quad.word[i] & 0xffff0000);
        }
    }

    static __device__ __forceinline__ Quad encode(const float (&values)[VALUES]) {
        Quad quad;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            quad.word[i] = ptx::to_bf16x2(values[2 * i], values[2 * i + 1]);
        }
        return quad;
    }
};

template <>
struct Format<FP16> {
    static constexpr u32 VALUES = 8;

    static __device__ __forceinline__ void decode(const Quad &quad, float (&values)[VALUES]) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            values[2 * i] = ptx::from_fp16(quad.word[i] & 0xffff);
            values[2 * i + 1] = ptx::from_fp16(quad.word[i] >> 16);
        }
    }

    static __device__ __forceinline__ Quad encode(const float (&values)[VALUES]) {
        Quad quad;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            quad.word[i] = ptx::to_fp16x2(values[2 * i], values[2 * i + 1]);
        }
        return quad;
    }
};

template <>
struct Format<FP32> {
    static constexpr u32 VALUES = 4;

    static __device__ __forceinline__ void decode(const Quad &quad, float (&values)[VALUES]) {
#pragma unroll
        for (u32 i = 0; i < VALUES; ++i) {
            values[i] = __uint_as_float(quad.word[i]);
        }
    }

    static __device__ __forceinline__ Quad encode(const float (&values)[VALUES]) {
        Quad quad;
#pragma unroll
        for (u32 i = 0; i < VALUES; ++i) {
            quad.word[i] = __float_as_uint(values[i]);
        }
        return quad;
    }
};

// Kernels whose arithmetic depends on the format are compiled for one. A kernel whose arithmetic does
// not, and a tool that compiles without constants, gets the widest.
#ifdef DTYPE
using Element = Format<DTYPE>;
#else
using Element = Format<FP32>;
#endif

// Zero, with which every sum begins.
__device__ __forceinline__ void clear(float (&sum)[Element::VALUES]) {
#pragma unroll
    for (u32 i = 0; i < Element::VALUES; ++i) {
        sum[i] = 0.0f;
    }
}

// Adds the values of `quad`.
__device__ __forceinline__ void add(float (&sum)[Element::VALUES], const Quad &quad) {
    float values[Element::VALUES];
    Element::decode(quad, values);
#pragma unroll
    for (u32 i = 0; i < Element::VALUES; ++i) {
        sum[i] = __fadd_rn(sum[i], values[i]);
    }
}

// Adds `weight` times the values of `quad`. Two roundings on purpose: the product, then the sum.
__device__ __forceinline__ void add_weighted(float (&sum)[Element::VALUES], float weight,
                                             const Quad &quad) {
    float values[Element::VALUES];
    Element::decode(quad, values);
#pragma unroll
    for (u32 i = 0; i < Element::VALUES; ++i) {
        sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, values[i]));
    }
}

// The e4m3 number nearest to `value`, ties to even, at most 448 in magnitude.
__device__ __forceinline__ u32 to_e4m3(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 sign = (bits >> 24) & 0x80;
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return sign | 0x7f;
    }
    if (magnitude >= 0x43e00000) { // 448
        return sign | 0x7e;
    }
    if (magnitude < 0x3c800000) { // 2^-6, the smallest normal number
        // The sum's last bit is worth 2^-9, as is that of a subnormal e4m3 number.
        const float shifted = __fadd_rn(__uint_as_float(magnitude), 16384.0f);
        return sign | (__float_as_uint(shifted) - 0x46800000);
    }
    const u32 rounded = magnitude + 0x7ffff + ((magnitude >> 20) & 1);
    return sign | ((rounded >> 20) - ((127 - 7) << 3));
}

// Four of them, the first in the lowest byte.
__device__ __forceinline__ u32 to_e4m3x4(const float (&values)[4]) {
#if __CUDA_ARCH__ >= 890
    return ptx::to_e4m3x2(values[0], values[1]) | ptx::to_e4m3x2(values[2], values[3]) << 16;
#else
    return to_e4m3(values[0]) | to_e4m3(values[1]) << 8 | to_e4m3(values[2]) << 16 |
           to_e4m3(values[3]) << 24;
#endif
}

} // namespace dtype

#include "dtype.cuh"

// Experts that read every payload and layout, forward and backward, as their host bodies do bit for
// bit. One thread takes a row, goes over its columns, and in each over its experts in their order:
// tests are small.

struct RowFormat {
    u32 hidden;
    u32 dtype;
    u32 payload;
    u32 row_bytes;
    u32 scale_bytes;
    u32 sum_bytes;
};
SAME_LAYOUT(RowFormat, 24, sum_bytes, 20);

struct RowParams {
    u64 rows;
    u64 scales;
    u64 expert_offsets;
    u64 tokens_per_expert;
    u64 row_weights;
    u64 row_experts;
    u64 expert_ids;
    RowFormat format;
    u32 slots;
    u32 width;
};
SAME_LAYOUT(RowParams, 88, width, 84);

struct ForwardParams {
    RowParams rows;
    u64 outputs;
};
SAME_LAYOUT(ForwardParams, 96, outputs, 88);

struct BackwardParams {
    RowParams rows;
    u64 grads;
    u64 weight_grads;
};
SAME_LAYOUT(BackwardParams, 104, weight_grads, 96);

constexpr u32 VALUES = 0;
constexpr u32 BYTES = 1;

// Values of a row of FP8 that share a scale.
constexpr u32 BLOCK = 128;

__device__ __forceinline__ float load(u32 format, u64 row, u32 column) {
    switch (format) {
    case dtype::BF16:
        return __uint_as_float(u32(at<const u16>(row)[column]) << 16);
    case dtype::FP16:
        return ptx::from_fp16(at<const u16>(row)[column]);
    default:
        return at<const float>(row)[column];
    }
}

__device__ __forceinline__ void store(u32 format, u64 row, u32 column, float value) {
    switch (format) {
    case dtype::BF16:
        at<u16>(row)[column] = u16(ptx::to_bf16x2(value, 0.0f));
        break;
    case dtype::FP16:
        at<u16>(row)[column] = u16(ptx::to_fp16x2(value, 0.0f));
        break;
    default:
        at<float>(row)[column] = value;
    }
}

__device__ __forceinline__ float round_to(u32 format, float value) {
    switch (format) {
    case dtype::BF16:
        return __uint_as_float(ptx::to_bf16x2(value, 0.0f) << 16);
    case dtype::FP16:
        return ptx::from_fp16(ptx::to_fp16x2(value, 0.0f) & 0xffff);
    default:
        return value;
    }
}

// The value of an e4m3 number.
__device__ __forceinline__ float from_e4m3(u32 code) {
    const u32 sign = (code & 0x80) << 24;
    const u32 magnitude = code & 0x7f;
    if (magnitude == 0x7f) {
        return __uint_as_float(sign | 0x7fc00000);
    }
    if (magnitude < 8) { // subnormal: multiples of 2^-9
        const float value = __fmul_rn(float(magnitude), 1.0f / 512.0f);
        return __uint_as_float(sign | __float_as_uint(value));
    }
    return __uint_as_float(sign | (magnitude << 20) + ((127 - 7) << 23));
}

// What experts read from a column of a row.
__device__ __forceinline__ float read(const RowParams &p, u32 row, u32 column) {
    const RowFormat &format = p.format;
    const u64 values = p.rows + u64(row) * format.row_bytes;
    const u64 scales = p.scales + u64(row) * format.scale_bytes;
    if (format.payload == VALUES) {
        return load(format.dtype, values, column);
    }
    if (format.payload == BYTES) {
        const float value = float(at<const signed char>(values)[column % format.row_bytes]);
        const bool scaled = p.scales != 0 && format.scale_bytes != 0;
        const float scale = scaled ? float(at<const u8>(scales)[column % format.scale_bytes]) : 0.0f;
        return __fadd_rn(__fmul_rn(value, 1.0f / 64.0f), __fmul_rn(scale, 1.0f / 1024.0f));
    }
    const float scale = at<const float>(scales)[column / BLOCK];
    return __fmul_rn(from_e4m3(at<const u8>(values)[column]), scale);
}

struct Coefficients {
    float scale;
    float shift;
};

// A multiple of 2^-8 in [-1, 1).
__device__ __forceinline__ float fraction(u32 bits) {
    return __fadd_rn(__fmul_rn(float(bits & 0x1ff), 1.0f / 256.0f), -1.0f);
}

// Those of the synthetic experts.
__device__ __forceinline__ Coefficients coefficients(u32 expert, u32 column) {
    u32 word = expert * 0x9e3779b9 ^ column * 0x85ebca6b ^ 0x5bd1e995;
    word = (word ^ word >> 16) * 0x7feb352d;
    word = (word ^ word >> 16) * 0x846ca68b;
    word ^= word >> 15;
    return {fraction(word), fraction(word >> 16)};
}

// What an expert makes of a value, in the number format.
__device__ __forceinline__ float apply(u32 format, u32 expert, u32 column, float value) {
    const Coefficients by = coefficients(expert, column);
    return round_to(format, __fadd_rn(__fmul_rn(by.scale, value), by.shift));
}

__device__ __forceinline__ u32 total(const RowParams &p) {
    return u32(at<const i32>(p.expert_offsets)[p.slots]);
}

// Calls `visit` with each expert of a row and the weight beside it, null where combine multiplies; not
// at all for padding.
template <typename Visit>
__device__ __forceinline__ void each_expert(const RowParams &p, u32 row, Visit visit) {
    const u32 *ids = at<const u32>(p.expert_ids);
    const float *weights =
        p.row_weights == 0 ? nullptr : at<const float>(p.row_weights) + u64(row) * p.width;
    if (p.row_experts != 0) {
        const i32 *slots = at<const i32>(p.row_experts) + u64(row) * p.width;
        for (u32 beside = 0; beside < p.width; ++beside) {
            if (slots[beside] >= 0) {
                visit(ids[slots[beside]], weights + beside);
            }
        }
        return;
    }
    const i32 *offsets = at<const i32>(p.expert_offsets);
    const i32 *counts = at<const i32>(p.tokens_per_expert);
    for (u32 slot = 0; slot < p.slots; ++slot) {
        const i32 place = i32(row) - offsets[slot];
        if (place >= 0 && place < counts[slot]) {
            visit(ids[slot], weights);
            return;
        }
    }
}

// Whether a row is a token's, rather than padding, which nothing is made of.
__device__ __forceinline__ bool is_of_a_token(const RowParams &p, u32 row) {
    if (p.row_experts != 0) {
        return true;
    }
    bool found = false;
    each_expert(p, row, [&](u32, const float *) { found = true; });
    return found;
}

__device__ __forceinline__ u32 thread() {
    return blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ u32 threads() {
    return gridDim.x * blockDim.x;
}

extern "C" __global__ void test_experts(const __grid_constant__ ForwardParams p) {
    const RowFormat &format = p.rows.format;
    for (u32 row = thread(); row < total(p.rows); row += threads()) {
        if (!is_of_a_token(p.rows, row)) {
            continue;
        }
        const u64 outputs = p.outputs + u64(row) * format.sum_bytes;
        for (u32 column = 0; column < format.hidden; ++column) {
            const float value = read(p.rows, row, column);
            float sum = 0.0f;
            each_expert(p.rows, row, [&](u32 expert, const float *weight) {
                const float result = apply(format.dtype, expert, column, value);
                // Two roundings: the product, then the sum.
                sum = weight == nullptr ? result : __fadd_rn(sum, __fmul_rn(*weight, result));
            });
            store(format.dtype, outputs, column, sum);
        }
    }
}

extern "C" __global__ void test_experts_backward(const __grid_constant__ BackwardParams p) {
    const RowFormat &format = p.rows.format;
    for (u32 row = thread(); row < total(p.rows); row += threads()) {
        if (!is_of_a_token(p.rows, row)) {
            continue;
        }
        const u64 grads = p.grads + u64(row) * format.sum_bytes;
        // Before the gradients are overwritten.
        if (p.weight_grads != 0) {
            float *weight_grads = at<float>(p.weight_grads) + u64(row) * p.rows.width;
            each_expert(p.rows, row, [&](u32 expert, const float *) {
                // As sums of Rust begin.
                float sum = -0.0f;
                for (u32 column = 0; column < format.hidden; ++column) {
                    const float value = read(p.rows, row, column);
                    const float result = apply(format.dtype, expert, column, value);
                    const float grad = load(format.dtype, grads, column);
                    sum = __fadd_rn(sum, __fmul_rn(result, grad));
                }
                *weight_grads++ = sum;
            });
        }
        for (u32 column = 0; column < format.hidden; ++column) {
            const float grad = load(format.dtype, grads, column);
            float sum = 0.0f;
            each_expert(p.rows, row, [&](u32 expert, const float *weight) {
                const float weighted = weight == nullptr ? grad : __fmul_rn(*weight, grad);
                sum = __fadd_rn(sum, __fmul_rn(coefficients(expert, column).scale, weighted));
            });
            store(format.dtype, grads, column, sum);
        }
    }
}

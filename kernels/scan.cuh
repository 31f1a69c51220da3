// Sums over the threads of a block.
#pragma once

#include "types.cuh"

namespace scan {

constexpr u32 WARP = 32;
constexpr u32 WHOLE = 0xffffffff;

__device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }

__device__ __forceinline__ u32 warp_sum(u32 value) {
#pragma unroll
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(WHOLE, value, step);
    }
    return value;
}

// The sum of the values of all lanes up to this one, of the `width` neighbouring lanes that it is one of: a power
// of two.
__device__ __forceinline__ u32 group_inclusive(u32 value, u32 width) {
    for (u32 step = 1; step < width; step *= 2) {
        const u32 below = __shfl_up_sync(WHOLE, value, step, width);
        value += (lane() & (width - 1)) >= step ? below : 0;
    }
    return value;
}

// The same of all lanes.
template <typename T> __device__ __forceinline__ T warp_inclusive(T value) {
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
        const T below = __shfl_up_sync(WHOLE, value, step);
        value += lane() >= step ? below : 0;
    }
    return value;
}

// The sum of the values of all threads before this one; `total` becomes that of all. Every thread of
// the block takes part, and the block is made of whole warps.
template <typename T> __device__ __forceinline__ T block_exclusive(T value, T &total) {
    __shared__ T of_warp[WARP];
    const T upto = warp_inclusive(value);
    // Whoever comes from an earlier sum has read it.
    __syncthreads();
    if (lane() == WARP - 1) {
        of_warp[threadIdx.x / WARP] = upto;
    }
    __syncthreads();
    const T warps = warp_inclusive(lane() < blockDim.x / WARP ? of_warp[lane()] : T(0));
    total = __shfl_sync(WHOLE, warps, WARP - 1);
    const T before = __shfl_sync(WHOLE, warps, (threadIdx.x / WARP + WARP - 1) % WARP);
    return (threadIdx.x < WARP ? 0 : before) + upto - value;
}

// Two sums that are made as one.
struct Two {
    u32 first;
    u32 second;
};
__device__ __forceinline__ Two block_exclusive(const Two &value, Two &total) {
    u64 both;
    const u64 before = block_exclusive(u64(value.second) << 32 | value.first, both);
    total = Two{u32(both), u32(both >> 32)};
    return Two{u32(before), u32(before >> 32)};
}

// The sum of the values of all threads.
__device__ __forceinline__ u32 block_sum(u32 value) {
    u32 total;
    block_exclusive(value, total);
    return total;
}

// Which of `count` numbers, `of(0)` and on, none below the one before it, is the last that is not above `value`. The
// first is not.
template <typename Of> __device__ __forceinline__ u32 last_upto(u32 count, u32 value, Of of) {
    u32 last = 0;
    for (u32 left = count; left > 1;) {
        const u32 half = left / 2;
        last += of(last + half) <= value ? half : 0;
        left -= half;
    }
    return last;
}

} // namespace scan

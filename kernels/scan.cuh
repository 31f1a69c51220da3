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

// The same of the first `count` lanes, where nobody asks the others.
__device__ __forceinline__ u32 first_inclusive(u32 value, u32 count) {
    for (u32 step = 1; step < count; step *= 2) {
        const u32 below = __shfl_up_sync(WHOLE, value, step);
        value += lane() >= step ? below : 0;
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

// Sums over a block that are made together.
template <u32 COUNT> struct Values {
    u32 of[COUNT];
};

// The sums of the values of all threads before this one; `totals` become those of all. Every thread of the block
// takes part, and the block is made of whole warps.
template <u32 COUNT>
__device__ __forceinline__ Values<COUNT> block_exclusive(const Values<COUNT> &values,
                                                         Values<COUNT> &totals) {
    __shared__ u32 of_warps[COUNT][WARP];
    const u32 warp = threadIdx.x / WARP;
    u32 of_warp[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        of_warp[i] = __reduce_add_sync(WHOLE, values.of[i]);
    }
    // Whoever comes from an earlier sum has read it.
    __syncthreads();
    Values<COUNT> before;
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (lane() == 0) {
            of_warps[i][warp] = of_warp[i];
        }
        before.of[i] = warp_inclusive(values.of[i]) - values.of[i];
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        const u32 theirs = lane() < blockDim.x / WARP ? of_warps[i][lane()] : 0;
        totals.of[i] = __reduce_add_sync(WHOLE, theirs);
        before.of[i] += __reduce_add_sync(WHOLE, lane() < warp ? theirs : 0);
    }
    return before;
}
__device__ __forceinline__ u32 block_exclusive(u32 value, u32 &total) {
    Values<1> totals;
    const u32 before = block_exclusive(Values<1>{{value}}, totals).of[0];
    total = totals.of[0];
    return before;
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

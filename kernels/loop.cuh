// The condition of a WHILE node.
#pragma once

#include "types.cuh"

// Provided by the device runtime that is built into every driver; declared here because its header
// belongs to the toolkit.
extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

// Called by one thread of the grid: concurrent calls for one condition race.
__device__ __forceinline__ void set_condition(u64 handle, u32 value) {
    cudaGraphSetConditional(handle, value);
}

// A replay of a step whose recording was shaped for a capacity that does not hold any more. The host
// refuses those that it launches itself; here it is found where somebody else launched the graph.
#pragma once

#include "params.cuh"

namespace stale {

// In what a rank says that it required: see the constant of the same name in Rust.
constexpr u32 MARK = 1u << 31;

// What a rank that runs a stale graph says that it required, or zero if all shapes hold.
__device__ __forceinline__ u32 found(const StepBeginParams &p) {
    for (u32 i = 0; i < p.shape_count; ++i) {
        const u64 recorded = p.shapes[i].recorded;
        const u64 now = *at<const u64>(p.shapes[i].generation);
        if (recorded != now) {
            return MARK | u32(min(recorded, u64(0x7fff))) << 16 | u32(min(now, u64(0xffff)));
        }
    }
    return 0;
}

} // namespace stale

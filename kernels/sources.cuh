// What every rank has for each expert, added up.
//
// The ranks of one expert lie in neighbouring lanes, as many experts side by side as a block has room for: a sum over
// R ranks takes log R steps, and one more for every 32 of them.
#pragma once

#include "scan.cuh"

namespace sources {

using scan::WARP;
using scan::WHOLE;

class Groups {
  public:
    __device__ __forceinline__ explicit Groups(u32 world)
        : world_(world), shift_(min(32 - __clz(world - 1), 5)) {}

    // Experts that a block adds up at a time, and which of them is this thread's.
    __device__ __forceinline__ u32 experts() const { return blockDim.x >> shift_; }
    __device__ __forceinline__ u32 expert() const { return threadIdx.x >> shift_; }
    // Whether the thread is the first of its expert's.
    __device__ __forceinline__ bool leads() const { return source() == 0; }

    // Calls `see(source)` for those of the expert that are this thread's.
    template <typename See> __device__ __forceinline__ void for_each(See see) const {
        for (u32 source = this->source(); source < world_; source += width()) {
            see(source);
        }
    }

    // The sum of what `read(source)` gives, for every thread of the expert; `keep(source, before)` gets that of the
    // sources before. Whole warps call this.
    template <typename Read, typename Keep>
    __device__ __forceinline__ u32 add(Read read, Keep keep) const {
        u32 before = 0;
#pragma unroll 1
        for (u32 first = 0; first < world_; first += width()) {
            const u32 source = first + this->source();
            const u32 own = source < world_ ? read(source) : 0;
            const u32 upto = scan::group_inclusive(own, width());
            if (source < world_) {
                keep(source, before + upto - own);
            }
            before += __shfl_sync(WHOLE, upto, width() - 1, width());
        }
        return before;
    }

    // What the first thread of the expert has.
    __device__ __forceinline__ u32 of_first(u32 value) const {
        return __shfl_sync(WHOLE, value, 0, width());
    }

  private:
    __device__ __forceinline__ u32 width() const { return 1u << shift_; }
    __device__ __forceinline__ u32 source() const { return threadIdx.x & (width() - 1); }

    u32 world_;
    // Of the lanes of an expert: a power of two, so that nothing is divided where all blocks are waited for.
    u32 shift_;
};

} // namespace sources

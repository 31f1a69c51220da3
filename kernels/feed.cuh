// Rows on their way into shared memory, in the order in which a warp adds them up.
//
// What a warp has in flight does not pass through its registers, so that it can ask for the rows of its
// next sum while it works on this one. Every lane copies the quads that it will add itself: nobody waits
// for another lane.
#pragma once

#include "rows.cuh"

namespace rows {

// DEPTH quads of each lane make a part of a row. As many parts are in flight as shared memory holds.
template <u32 DEPTH>
class Feed {
  public:
    static constexpr u32 PART_BYTES = DEPTH * WARP * sizeof(Quad);

    // `memory` is the block's dynamic shared memory, of which each warp gets its share: two parts or more,
    // the last of which is for `keep`.
    __device__ __forceinline__ explicit Feed(Quad *memory)
        : parts_(ptx::dynamic_shared_bytes() / (blockDim.x / WARP) / PART_BYTES - 1),
          memory_(memory + threadIdx.x / WARP * (parts_ + 1) * (DEPTH * WARP) + scan::lane()) {}

    __device__ __forceinline__ bool full() const { return ahead_ == parts_; }

    // Asks for the quads of `row` from `first` (a lane's own) up to `end`.
    __device__ __forceinline__ void ask(const Quad *row, u32 first, u32 end) {
        Quad *to = memory_ + next_ * (DEPTH * WARP);
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first + i * WARP < end) {
                ptx::copy_async(to + i * WARP, row + first + i * WARP);
            }
        }
        ptx::commit_copies();
        next_ = next_ + 1 == parts_ ? 0 : next_ + 1;
        ++ahead_;
    }

    // The oldest part that was asked for. What would lie behind its `end` is not defined.
    __device__ __forceinline__ void take(Quad (&quads)[DEPTH]) {
        --ahead_;
        wait_until_left(ahead_);
        const Quad *from = memory_ + oldest_ * (DEPTH * WARP);
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            quads[i] = from[i * WARP];
        }
        oldest_ = oldest_ + 1 == parts_ ? 0 : oldest_ + 1;
    }

    // Sets a part aside that is wanted later, where it takes no registers.
    __device__ __forceinline__ void keep(const Quad (&quads)[DEPTH]) {
        Quad *to = memory_ + parts_ * (DEPTH * WARP);
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            to[i * WARP] = quads[i];
        }
    }
    __device__ __forceinline__ void kept(Quad (&quads)[DEPTH]) const {
        const Quad *from = memory_ + parts_ * (DEPTH * WARP);
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            quads[i] = from[i * WARP];
        }
    }

  private:
    // Waits until at most `parts` parts are in flight, or fewer: the number is part of the instruction.
    static __device__ __forceinline__ void wait_until_left(u32 parts) {
        if (parts >= 11) {
            ptx::wait_for_copies<11>();
        } else if (parts >= 6) {
            ptx::wait_for_copies<6>();
        } else if (parts >= 4) {
            ptx::wait_for_copies<4>();
        } else if (parts >= 3) {
            ptx::wait_for_copies<3>();
        } else if (parts >= 2) {
            ptx::wait_for_copies<2>();
        } else if (parts >= 1) {
            ptx::wait_for_copies<1>();
        } else {
            ptx::wait_for_copies<0>();
        }
    }

    u32 parts_;
    Quad *memory_;
    u32 next_ = 0;
    u32 oldest_ = 0;
    u32 ahead_ = 0;
};

} // namespace rows

// Rows on their way into shared memory, in the order in which a warp adds them up.
//
// What a warp has in flight does not pass through its registers, so that it can ask for the rows of its
// next sum while it works on this one. Every lane copies the quads that it will add itself: nobody waits
// for another lane.
#pragma once

#include "rows.cuh"

namespace rows {

// DEPTH quads of each lane make a part of a row. As many parts are in flight as shared memory holds.
//
// What is done for each part is a good third of the instructions of a combine, and on few multiprocessors
// those are its limit: places in shared memory are kept as addresses, and wrap by comparison.
template <u32 DEPTH>
class Feed {
  public:
    static constexpr u32 PART_BYTES = DEPTH * WARP * sizeof(Quad);

    // `memory` is the block's dynamic shared memory, of which each warp gets its share: two parts or more,
    // the last of which is for `keep`.
    __device__ __forceinline__ explicit Feed(Quad *memory)
        : parts_(ptx::dynamic_shared_bytes() / (blockDim.x / WARP) / PART_BYTES - 1),
          first_(ptx::shared_address(memory) + threadIdx.x / WARP * (parts_ + 1) * PART_BYTES +
                 scan::lane() * u32(sizeof(Quad))),
          kept_(first_ + parts_ * PART_BYTES), next_(first_), oldest_(first_) {}

    __device__ __forceinline__ bool full() const { return ahead_ == parts_; }

    // Asks for quads from address `from` on, where this lane's first one is: as many as a part has, at most
    // those of the next `left` that are this lane's.
    __device__ __forceinline__ void ask(u64 from, i32 left) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (left > i32(i * WARP)) {
                ptx::copy_async(next_ + i * STRIDE, from + i * STRIDE);
            }
        }
        ptx::commit_copies();
        next_ = behind(next_);
        ++ahead_;
    }

    // The oldest part that was asked for. What would lie behind what was `left` is not defined.
    __device__ __forceinline__ void take(Quad (&quads)[DEPTH]) {
        --ahead_;
        wait_until_left(ahead_);
        load(oldest_, quads);
        oldest_ = behind(oldest_);
    }

    // Sets a part aside that is wanted later, where it takes no registers.
    __device__ __forceinline__ void keep(const Quad (&quads)[DEPTH]) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            ptx::store_shared(kept_ + i * STRIDE, quads[i]);
        }
    }
    __device__ __forceinline__ void kept(Quad (&quads)[DEPTH]) const { load(kept_, quads); }

  private:
    // From one quad of a lane to its next.
    static constexpr u32 STRIDE = WARP * sizeof(Quad);

    static __device__ __forceinline__ void load(u32 from, Quad (&quads)[DEPTH]) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            quads[i] = ptx::load_shared(from + i * STRIDE);
        }
    }

    __device__ __forceinline__ u32 behind(u32 part) const {
        part += PART_BYTES;
        return part == kept_ ? first_ : part;
    }

    // Waits until at most `parts` parts are in flight, or fewer: the number is part of the instruction. What
    // is in flight while there is enough to do comes first, where shared memory holds six parts of each warp,
    // and where it holds five.
    static __device__ __forceinline__ void wait_until_left(u32 parts) {
        if (parts == 4) {
            ptx::wait_for_copies<4>();
        } else if (parts == 3) {
            ptx::wait_for_copies<3>();
        } else if (parts >= 2) {
            ptx::wait_for_copies<2>();
        } else if (parts == 1) {
            ptx::wait_for_copies<1>();
        } else {
            ptx::wait_for_copies<0>();
        }
    }

    u32 parts_;
    // Of this lane: its first part, and the place of what is kept, which lies behind the last.
    u32 first_;
    u32 kept_;
    u32 next_;
    u32 oldest_;
    u32 ahead_ = 0;
};

} // namespace rows

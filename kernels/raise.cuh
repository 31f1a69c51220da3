// Flags that the warps of a block raise together.
//
// A flag may be raised once all is there that it stands for, and that takes a fence which waits for the link:
// for whatever this multiprocessor has stored, by whichever warp. One fence serves them all. A warp that has
// something else to do posts a note of its flag, and raises all that are posted unless another warp is at it. In
// the end every warp raises its last flag itself, or a note of it that nobody has taken.
#pragma once

#include "scan.cuh"

namespace push {

constexpr u32 MOST_WARPS = 16;

struct Board {
    // A note of each warp; zero where there is none.
    u64 posted[MOST_WARPS];
    // Whether a warp is raising flags.
    u32 busy;

    // Before the first note. Every thread of the block calls it.
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < MOST_WARPS) {
            posted[threadIdx.x] = 0;
        }
        if (threadIdx.x == MOST_WARPS) {
            busy = 0;
        }
        __syncthreads();
    }
};
__shared__ Board board;

// `Raise` takes a note and stores the flags that it stands for, relaxed.
template <typename Raise>
class Raiser {
  public:
    __device__ __forceinline__ explicit Raiser(const Raise &raise) : raise_(raise) {}

    // For what the warp has stored; every lane calls it, with the same note.
    __device__ __forceinline__ void post(u64 note) const {
        const u32 lane = scan::lane();
        __syncwarp();
        // One that nobody has raised yet comes back, and goes with the others.
        u64 taken = 0;
        bool alone = false;
        if (lane == MOST_WARPS) {
            taken = ptx::exchange_acq_rel_cta(own(), note);
            alone = ptx::exchange_acq_rel_cta(&board.busy, 1u) == 0;
        }
        alone = __any_sync(scan::WHOLE, alone);
        if (alone && lane < MOST_WARPS) {
            taken = ptx::exchange_acq_rel_cta(&board.posted[lane], u64(0));
        }
        raise_all(taken);
        __syncwarp();
        if (alone && lane == 0) {
            ptx::store_release_cta(&board.busy, 0u);
        }
    }

    // The last of the warp, or zero. A note that another warp has taken by now, that one raises.
    __device__ __forceinline__ void finish(u64 note) const {
        __syncwarp();
        u64 taken = 0;
        if (scan::lane() == 0) {
            taken = note;
        } else if (scan::lane() == 1) {
            taken = ptx::exchange_acq_rel_cta(own(), u64(0));
        }
        raise_all(taken);
    }

  private:
    __device__ __forceinline__ u64 *own() const {
        return &board.posted[threadIdx.x / scan::WARP];
    }

    // Those that each lane has taken.
    __device__ __forceinline__ void raise_all(u64 taken) const {
        if (__any_sync(scan::WHOLE, taken != 0)) {
            ptx::fence_acq_rel_sys();
            if (taken != 0) {
                raise_(taken);
            }
        }
    }

    const Raise raise_;
};

} // namespace push

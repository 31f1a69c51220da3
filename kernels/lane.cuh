// A lane and the counters of a step, as every kernel sees them.
#pragma once

#include "params.cuh"
#include "scan.cuh"

__device__ __forceinline__ u32 round_up(u32 value, u32 power_of_two) {
    return (value + power_of_two - 1) & ~(power_of_two - 1);
}

// The shared blocks of a lane, by rank.
class Blocks {
  public:
    __device__ __forceinline__ Blocks(const LaneParams &lane, const Geometry &geometry)
        : table_(at<const u64>(lane.blocks)), rank_(geometry.rank) {}
    // Of an operation that has them in its parameters.
    template <typename Params>
    __device__ __forceinline__ explicit Blocks(const Params &p) : table_(p.blocks), rank_(p.geometry.rank) {}

    // An address in the block of `rank`, `offset` bytes from its first.
    template <typename T>
    __device__ __forceinline__ T *of(u32 rank, u64 offset) const {
        return at<T>(table_[rank] + offset);
    }

    // The same in this rank's own block.
    template <typename T>
    __device__ __forceinline__ T *own(u64 offset) const {
        return of<T>(rank_, offset);
    }

  private:
    const u64 *table_;
    u32 rank_;
};

// Ranks one after the other, the next one first: so that ranks do not all turn to the same peer.
__device__ __forceinline__ u32 nth_peer(const Geometry &g, u32 n) {
    const u32 rank = g.rank + 1 + n;
    return rank < g.world ? rank : rank - g.world;
}

// The next of the units of work that warps take as they come free; the same in every lane.
__device__ __forceinline__ u32 take_next(u32 *taken) {
    const u32 unit = scan::lane() == 0 ? atomicAdd(taken, 1u) : 0;
    return __shfl_sync(scan::WHOLE, unit, 0);
}

// What updates of counters cost is measured against kernels that are compiled without them. Overflow goes
// unnoticed by those.
#ifndef COUNTERS
#define COUNTERS 1
#endif

// Whether a dispatch moves nothing: the step drains, or, where routing depends on outputs, an earlier dispatch is
// known to be over budget. May become true at any time, so that one thread asks for all.
struct Silence {
    u32 drained;
    u32 first_over;

    __device__ __forceinline__ bool is_of(u32 ordinal, bool dependent) const {
        return drained != 0 || (dependent && first_over < ordinal);
    }
};

// The counters of a step. Lanes may update them at the same time, so every update is atomic.
class StepView {
  public:
    __device__ __forceinline__ explicit StepView(u64 state) : state_(at<StepState>(state)) {}

    __device__ __forceinline__ u32 step() const { return look(state_->step); }
    __device__ __forceinline__ u32 required() const { return look(state_->required); }
    __device__ __forceinline__ u32 first_over() const { return look(state_->first_over); }
    __device__ __forceinline__ bool drained() const { return look(state_->drained) != 0; }

    __device__ __forceinline__ Silence silence() const {
        return Silence{look(state_->drained), first_over()};
    }
    __device__ __forceinline__ bool is_silent(u32 ordinal, bool dependent) const {
        return silence().is_of(ordinal, dependent);
    }

    __device__ __forceinline__ void note_over(u32 ordinal) const {
        if (COUNTERS && ordinal != NONE) {
            atomicMin(&state_->first_over, ordinal);
        }
    }
    __device__ __forceinline__ void note_required(u32 rows) const {
        if (COUNTERS) {
            atomicMax(&state_->required, rows);
        }
    }
    __device__ __forceinline__ void note_dispatch(u32 ordinal) const {
        if (COUNTERS) {
            atomicMax(&state_->dispatches, ordinal + 1);
        }
    }
    __device__ __forceinline__ void note_window(u32 windows, u32 capacity) const {
        if (COUNTERS) {
            atomicMax(&state_->windows, windows);
            atomicMin(&state_->capacity, capacity);
        }
    }
    __device__ __forceinline__ void add_delivered(u64 pairs) const {
        if (COUNTERS) {
            atomicAdd(&state_->delivered, pairs);
        }
    }
    __device__ __forceinline__ void add_dropped(u64 pairs) const {
        if (COUNTERS) {
            atomicAdd(&state_->dropped, pairs);
        }
    }
    __device__ __forceinline__ void add_bad_ids(u32 invalid, u32 repeated) const {
        if (COUNTERS && invalid != 0) {
            atomicAdd(&state_->invalid_ids, u64(invalid));
        }
        if (COUNTERS && repeated != 0) {
            atomicAdd(&state_->repeated_ids, u64(repeated));
        }
    }

  private:
    static __device__ __forceinline__ u32 look(const u32 &word) {
        return ptx::load_relaxed_sys(&word);
    }

    StepState *state_;
};

// Whether this rank holds a fault, the same answer for all threads of the block. Every thread of the block calls it.
// Costs no look across the bus; see `wait::Waiter::held`. `poison` is `waiter.own_poison()`, asked for before.
__device__ __forceinline__ bool faulted(const wait::Waiter &waiter, u64 poison) {
    return __syncthreads_or(threadIdx.x == 0 && poison != 0 && waiter.held() != 0);
}
__device__ __forceinline__ bool faulted(const wait::Waiter &waiter) {
    return faulted(waiter, waiter.own_poison());
}

// Waits for the word of every rank; whether all came. Every thread of the block calls it; all of them
// see what the peers wrote before. Each peer has a thread of its own that waits, so the deadline of
// the phase runs for all of them at once.
__device__ __forceinline__ bool wait_all(const wait::Waiter &waiter, wait::Phase phase,
                                         const u32 *words, u32 world, u32 expected) {
    bool failed = false;
    u64 spent_ns = 0;
    for (u32 peer = threadIdx.x; peer < world && !failed; peer += blockDim.x) {
        failed = waiter.wait(phase, peer, words + peer, expected, spent_ns) != 0;
    }
    return !__syncthreads_or(failed);
}

// How the rows travel that a header announces.
__device__ __forceinline__ u32 transfer_of(const DispatchHeader &header) { return header.transfer; }
__device__ __forceinline__ u32 transfer_of(const CombineHeader &) { return NONE; }

// Whether all of `world` headers are of this step and dispatch, and announce rows that travel as
// `transfer` says; else the fault is raised that names the first rank that is elsewhere. Every thread of
// the block calls it.
template <typename Header>
__device__ __forceinline__ bool all_here(const wait::Waiter &waiter, wait::Phase phase,
                                         const Header *headers, u32 world, u32 step, u32 ordinal,
                                         u32 transfer) {
    __shared__ u32 elsewhere;
    if (threadIdx.x == 0) {
        elsewhere = NONE;
    }
    __syncthreads();
    for (u32 peer = threadIdx.x; peer < world; peer += blockDim.x) {
        const Header &header = headers[peer];
        if (header.step != step || header.ordinal != ordinal || transfer_of(header) != transfer) {
            atomicMin(&elsewhere, peer);
        }
    }
    __syncthreads();
    if (elsewhere == NONE) {
        return true;
    }
    if (threadIdx.x == 0) {
        waiter.fail(wait::FaultKind::OutOfStep, phase, elsewhere);
    }
    return false;
}

// Counts the blocks of an operation as they begin, so that the last of them may change what all read first. Counted
// as they end, each would have one more trip to memory before it, with nothing else to do.
class Beginning {
  public:
    // Behind a barrier of the block, before which its threads have read all that is to be changed. Every thread of
    // every block calls it once.
    __device__ __forceinline__ void count(u32 *begun) {
        if (counts()) {
            before_ = ptx::fetch_add_release_gpu(begun, 1);
        }
    }

    // Whether all blocks had begun with this one. One thread of one block is told so, and all that they read lies
    // before.
    __device__ __forceinline__ bool is_last() const {
        const bool last = counts() && before_ + 1 == gridDim.x;
        if (last) {
            ptx::fence_acq_rel_gpu();
        }
        return last;
    }

  private:
    // A thread of a warp that is seldom the one that others wait for.
    static __device__ __forceinline__ bool counts() { return threadIdx.x == blockDim.x / 2; }

    u32 before_ = 0;
};

// The end of every block's part of a kernel whose last act is one block's: true in the last block to
// come here, which then sees what all of them wrote. Every thread of every block comes here once.
__device__ __forceinline__ bool last_to_arrive(LaneState *lane) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        // What this block wrote to peers is ordered too, for the signals that follow.
        ptx::fence_acq_rel_sys();
        last = ptx::fetch_add_acq_rel_gpu(&lane->arrivals, 1) + 1 == gridDim.x;
        if (last) {
            // Operations of one lane follow each other, so the next finds zero.
            lane->arrivals = 0;
        }
    }
    __syncthreads();
    return last;
}

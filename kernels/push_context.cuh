// What all parts of a pushed dispatch have in common.
#pragma once

#include "lists.cuh"
#include "push.cuh"

namespace dispatch {

using scan::WARP;
using scan::WHOLE;

constexpr u32 THREADS = 512;
// Quads of a lane in flight.
constexpr u32 DEPTH = 7;
// Ranks of a group that pushes.
constexpr u32 MOST_RANKS = 32;

// Tables of the lists, and afterwards the first row of each source's pairs for each expert, and behind
// them the end of each expert's rows.
extern __shared__ u32 tables[];

struct Shared {
    u32 items[MOST_RANKS + 1];
    u32 pairs[MOST_RANKS + 1];
    // Items that the window takes.
    u32 end;
    bool silent;
    bool last;
};
__shared__ Shared shared;

struct Context {
    const PushDispatchParams &p;
    const wait::Waiter &waiter;
    const Blocks &blocks;
    u32 tokens;
    u32 epoch;
    u64 turn;
    u32 step;
    u32 capacity;

    __device__ __forceinline__ const Geometry &g() const { return p.geometry; }
    __device__ __forceinline__ LaneState *lane() const { return at<LaneState>(p.lane.state); }

    // The block that fills the handle and the counters of the step, behind those that list. Others may
    // have to wait for it, so that it neither lists nor sends.
    __device__ __forceinline__ bool keeps_books() const { return blockIdx.x == p.listers; }

    // Waits until `word`, which blocks of this device count up, has `value`; whether it got there.
    // Every thread of the block calls it.
    __device__ __forceinline__ bool await_blocks(const u32 *word, u32 value) const {
        const bool failed =
            threadIdx.x == 0 && waiter.wait_here(wait::Phase::Dispatch, word, value) != 0;
        return !__syncthreads_or(failed);
    }

    // What `source` tells this rank, or this rank tells `to`, of its lists: see `tally`.
    __device__ __forceinline__ u64 *tallies(u32 to, u32 source) const {
        return blocks.of<u64>(to, g().lane.tallies) + u64(source) * (g().slots + 2);
    }
};

// A number that travels with the turn to which it belongs, in one word: whoever finds the turn has the
// number, and nobody has to signal it. Every word is written in every turn, so that what it held before is
// of the turn before.
namespace tally {

__device__ __forceinline__ void store(u64 *word, u64 turn, u32 number) {
    ptx::store_relaxed_sys(word, turn << 32 | number);
}
__device__ __forceinline__ bool is_of(u64 found, u64 turn) { return u32(found >> 32) == u32(turn); }

} // namespace tally

} // namespace dispatch

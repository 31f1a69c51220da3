// What all parts of a pushed dispatch have in common.
#pragma once

#include "lists.cuh"
#include "push.cuh"
#include "turns.cuh"

namespace dispatch {

using scan::WARP;
using scan::WHOLE;

constexpr u32 THREADS = 512;
// Quads of a lane in flight: no piece has more, or each has several times so many.
constexpr u32 DEPTH = 7;
using turns::MOST_RANKS;

// Tables of the lists, and afterwards `Places`.
extern __shared__ u32 tables[];

// Where rows belong.
class Places {
  public:
    __device__ __forceinline__ explicit Places(const Geometry &g)
        : world_(g.world), slots_(g.slots), ends_(tables + g.world * g.slots) {}

    // The first row of a source's pairs for an expert. Sources lie side by side, as they are added up.
    __device__ __forceinline__ u32 &first(u32 source, u32 slot) const {
        return tables[slot * world_ + source];
    }
    // Behind the last row of an expert's pairs.
    __device__ __forceinline__ u32 &end(u32 slot) const { return ends_[slot]; }
    // Rows of padding of all experts before this one; that of `slots` is the number of all.
    __device__ __forceinline__ u32 &padding_before(u32 slot) const { return ends_[slots_ + slot]; }

    // The row that is number `number` of all that are padding.
    __device__ __forceinline__ u32 padding_row(u32 number) const {
        const u32 slot =
            scan::last_upto(slots_, number, [&](u32 slot) { return padding_before(slot); });
        return end(slot) + number - padding_before(slot);
    }

  private:
    u32 world_;
    u32 slots_;
    u32 *ends_;
};

// What the warps of a block know of how much there is for this rank.
enum class Told : u32 { NOTHING, ALL, FAILED };

struct Shared {
    u32 items[MOST_RANKS + 1];
    u32 pairs[MOST_RANKS + 1];
    // Items that the window takes.
    u32 end;
    turns::Turns turns;
    u32 told;
    bool silent;
    bool last;
};
__shared__ Shared shared;

// A number that travels with the turn to which it belongs, in one word: whoever finds the turn has the
// number, and nobody has to signal it. Every word is written in every turn, so that what it held before is of
// the turn before.
namespace tally {

// What a rank tells another: items, pairs, pairs for each expert slot; then the dispatch and the step that these are
// of, which only the books look at.
constexpr u32 ITEMS = 0;
constexpr u32 PAIRS = 1;
constexpr u32 EXPERTS = 2;
__device__ __forceinline__ u32 ordinal(const Geometry &g) { return EXPERTS + g.slots; }
__device__ __forceinline__ u32 step(const Geometry &g) { return ordinal(g) + 1; }
__device__ __forceinline__ u32 all(const Geometry &g) { return step(g) + 1; }

__device__ __forceinline__ u64 of(u64 turn, u32 number) { return turn << 32 | number; }
__device__ __forceinline__ bool is_of(u64 found, u64 turn) { return u32(found >> 32) == u32(turn); }

} // namespace tally

struct Context {
    const PushDispatchParams &p;
    const wait::Waiter &waiter;
    const Blocks &blocks;
    u32 tokens;
    u32 epoch;
    u64 turn;
    u32 step;
    bool drained;
    u32 capacity;

    __device__ __forceinline__ const Geometry &g() const { return p.geometry; }
    __device__ __forceinline__ LaneState *lane() const { return at<LaneState>(p.lane.state); }
    __device__ __forceinline__ TurnCounters *counters() const { return &lane()->counters[turn % 2]; }

    // The block that fills the handle and the counters of the step, behind those that list. Others may
    // have to wait for it, so that it neither lists nor sends.
    __device__ __forceinline__ bool keeps_books() const { return blockIdx.x == p.listers; }

    // Waits until `word`, which blocks of this device store to, has `value`; whether it got there.
    // Every thread of the block calls it.
    template <typename Word>
    __device__ __forceinline__ bool await_blocks(const Word *word, Word value) const {
        const bool failed =
            threadIdx.x == 0 && waiter.wait_here(wait::Phase::Dispatch, word, value) != 0;
        return !__syncthreads_or(failed);
    }

    // What `source` tells this rank, or this rank tells `to`: see `tally`.
    __device__ __forceinline__ u64 *tallies(u32 to, u32 source) const {
        return blocks.of<u64>(to, g().lane.tallies) + u64(source) * tally::all(g());
    }
};

} // namespace dispatch

// The longest prefix of the items that are left whose rows, each expert's padded to the alignment, fit
// the capacity. An item is taken whole or not at all.
//
// Where all that is left fits, which the counts alone tell, the lists are not looked at. Else every item is
// looked at once, in order, until one does not fit: by the numbers of its pairs it is known which of them
// begin a new group of rows, so that the rows of a prefix are a sum over its items.
//
// Written over parameter blocks that have the fields of `WindowParams`; one block calls these.
#pragma once

#include "items.cuh"
#include "loop.cuh"

namespace windows {

// What this window has so far.
struct Taken {
    u32 items;
    u32 pairs;
};

// Sum over the local experts of the rows that `count(expert)` gives, each padded.
template <typename Count>
__device__ __forceinline__ u32 padded_rows(const Geometry &g, Count count) {
    u32 rows = 0;
    for (u32 expert = threadIdx.x; expert < g.local_experts; expert += blockDim.x) {
        rows += round_up(count(expert), g.alignment);
    }
    return scan::block_sum(rows);
}

// Pairs of this window for an expert. They are counted by atomics, which do not go through this
// multiprocessor's cache.
template <typename Params>
__device__ __forceinline__ u32 count_of(const Params &p, u32 expert) {
    return ptx::load_relaxed_sys(at<const u32>(p.handle.tokens_per_expert) + expert);
}

// Pairs for an expert that no window has taken yet.
template <typename Params>
__device__ __forceinline__ u32 left_of(const Params &p, const Blocks &blocks, u32 expert) {
    const Geometry &g = p.geometry;
    const u64 last = u64(g.world - 1) * g.slots + expert;
    const u32 all = at<const u32>(p.handle.bases)[last] + blocks.own<u32>(g.lane.counts)[last];
    return all - at<const u32>(p.handle.taken)[expert];
}

// The slots of an item's first pairs, kept from when they are read until it is known whether the item is
// taken.
constexpr u32 KEPT = 4;

// One item that is left, as a thread sees it.
struct Candidate {
    u32 source = 0;
    // Of the items of the source for this rank.
    u32 place = 0;
    Item item{};
    u32 slots[KEPT];
    // Rows by which a prefix grows that it ends.
    u32 rows = 0;
};

// Rows by which a prefix grows with a pair behind it: those of a new group, if it is the first of one. Pairs
// of an expert are numbered in the order of the items.
template <typename Params>
__device__ __forceinline__ u32 rows_of(const Params &p, u32 source, u32 slot, u32 index) {
    const Geometry &g = p.geometry;
    const u32 base = at<const u32>(p.handle.bases)[u64(source) * g.slots + slot];
    const u32 number = base + index - at<const u32>(p.handle.taken)[slot];
    return number % g.alignment == 0 ? g.alignment : 0;
}

// The item at `position` of all items for this rank.
template <typename Params>
__device__ __forceinline__ Candidate look_at(const Params &p, const Blocks &blocks, u32 position) {
    const u32 *source_items = at<const u32>(p.handle.source_items);
    Candidate found;
    found.source =
        scan::last_upto(p.geometry.world, position, [&](u32 source) { return source_items[source]; });
    found.place = position - source_items[found.source];
    const items::Lists lists(p.geometry, blocks, found.source);
    found.item = lists.item(found.place);
    // All in flight at once.
    u32 indices[KEPT];
#pragma unroll
    for (u32 i = 0; i < KEPT; ++i) {
        if (i < found.item.pairs) {
            const Pair pair = lists.pair(found.place, found.item, i);
            found.slots[i] = pair.slot;
            indices[i] = pair.index;
        }
    }
#pragma unroll
    for (u32 i = 0; i < KEPT; ++i) {
        if (i < found.item.pairs) {
            found.rows += rows_of(p, found.source, found.slots[i], indices[i]);
        }
    }
    for (u32 i = KEPT; i < found.item.pairs; ++i) {
        const Pair pair = lists.pair(found.place, found.item, i);
        found.rows += rows_of(p, found.source, pair.slot, pair.index);
    }
    return found;
}

// Adds its pairs to the experts' counts, which are those that the experts will see; nothing else looks at
// them yet.
template <typename Params>
__device__ __forceinline__ void add(const Params &p, const Blocks &blocks, const Candidate &taken) {
    i32 *counts = at<i32>(p.handle.tokens_per_expert);
#pragma unroll
    for (u32 i = 0; i < KEPT; ++i) {
        if (i < taken.item.pairs) {
            atomicAdd(counts + taken.slots[i], 1);
        }
    }
    for (u32 i = KEPT; i < taken.item.pairs; ++i) {
        const items::Lists lists(p.geometry, blocks, taken.source);
        atomicAdd(counts + lists.pair(taken.place, taken.item, i).slot, 1);
    }
}

// Counts of the experts are zero before this, and those of the window afterwards.
template <typename Params>
__device__ __forceinline__ Taken take_some(const Params &p, const Blocks &blocks, u32 begin,
                                           u32 left, u32 capacity) {
    const Geometry &g = p.geometry;
    // In the flat layout every item has a row.
    const u32 most = g.flat != 0 ? min(capacity / g.alignment * g.alignment, left) : left;
    Taken taken{};
    u32 rows = 0;
    for (u32 first = 0; first < most && rows <= capacity; first += blockDim.x) {
        const bool mine = first + threadIdx.x < most;
        const Candidate candidate =
            mine ? look_at(p, blocks, begin + first + threadIdx.x) : Candidate{};
        u32 more = 0;
        const u32 before = g.flat != 0 ? 0 : scan::block_exclusive(candidate.rows, more);
        // Rows only grow: whatever fits comes before all that does not.
        const bool fits =
            mine && (g.flat != 0 || rows + before + candidate.rows <= capacity);
        if (fits) {
            add(p, blocks, candidate);
        }
        taken.items += u32(__syncthreads_count(fits));
        taken.pairs += scan::block_sum(fits ? candidate.item.pairs : 0);
        rows += more;
    }
    __syncthreads();
    return taken;
}

template <typename Params>
__device__ __forceinline__ Taken take(const Params &p, const Blocks &blocks,
                                      const WindowState &window, u32 capacity) {
    const Geometry &g = p.geometry;
    const u32 left = window.items - window.end;
    if (left == 0) {
        return Taken{};
    }
    const u32 rows = g.flat != 0
                         ? round_up(left, g.alignment)
                         : padded_rows(g, [&](u32 expert) { return left_of(p, blocks, expert); });
    if (rows > capacity) {
        return take_some(p, blocks, window.end, left, capacity);
    }
    for (u32 expert = threadIdx.x; expert < g.local_experts; expert += blockDim.x) {
        at<i32>(p.handle.tokens_per_expert)[expert] = i32(left_of(p, blocks, expert));
    }
    __syncthreads();
    return Taken{left, window.pairs - window.pair_begin - window.window_pairs};
}

// First row of each expert; returns the end of the last.
template <typename Params>
__device__ __forceinline__ u32 lay_out(const Params &p, u32 items) {
    const Geometry &g = p.geometry;
    i32 *offsets = at<i32>(p.handle.expert_offsets);
    u32 end = 0;
    for (u32 first = 0; first < g.local_experts; first += blockDim.x) {
        const u32 expert = first + threadIdx.x;
        const bool mine = expert < g.local_experts;
        const u32 rows = mine && g.flat == 0 ? round_up(count_of(p, expert), g.alignment) : 0;
        u32 more;
        const u32 before = scan::block_exclusive(rows, more);
        if (mine) {
            offsets[expert] = i32(end + before);
        }
        end += more;
    }
    end = g.flat == 0 ? end : items;
    if (threadIdx.x == 0) {
        offsets[g.local_experts] = i32(end);
    }
    return end;
}

// What one thread does with the result: `window` is as before.
template <typename Params>
__device__ __forceinline__ void conclude(const Params &p, const wait::Waiter &waiter,
                                         WindowState window, const Taken &taken, u32 capacity,
                                         u32 total) {
    window.begin = window.end;
    window.end += taken.items;
    window.pair_begin += window.window_pairs;
    window.window_pairs = taken.pairs;
    window.capacity = capacity;
    window.windows += window.silent == 0;
    *at<WindowState>(p.handle.window) = window;
    *at<i32>(p.handle.total) = i32(total);
    const StepView step(p.state);
    step.note_window(window.windows, capacity);
    step.add_delivered(taken.pairs);
    const bool left = window.silent == 0 && window.end < window.items;
    if (p.condition != 0) {
        if (left && taken.items == 0) {
            waiter.fail(wait::FaultKind::NoProgress, wait::Phase::Dispatch, p.geometry.rank);
        }
        set_condition(p.condition, left && taken.items > 0);
    }
    if (p.last != 0) {
        step.add_dropped(window.pairs - window.pair_begin - window.window_pairs);
    }
}

// Takes the next window and lays it out.
template <typename Params>
__device__ __forceinline__ void advance(const Params &p, const wait::Waiter &waiter,
                                        const Blocks &blocks) {
    const Geometry &g = p.geometry;
    const WindowState state = *at<const WindowState>(p.handle.window);
    const u32 capacity = min(*at<const u32>(p.capacity), p.row_limit);
    for (u32 expert = threadIdx.x; expert < g.local_experts; expert += blockDim.x) {
        i32 *count = at<i32>(p.handle.tokens_per_expert) + expert;
        at<u32>(p.handle.taken)[expert] += u32(*count);
        *count = 0;
    }
    __syncthreads();
    const Taken taken = state.silent == 0 ? take(p, blocks, state, capacity) : Taken{};
    const u32 total = lay_out(p, taken.items);
    if (threadIdx.x == 0) {
        conclude(p, waiter, state, taken, capacity, total);
    }
}

// Makes of the handle one that received nothing: whatever the caller runs behind a dispatch that was given
// up finds no rows, and not those of a dispatch before, for which there may be no memory any more. One block.
template <typename Params>
__device__ __forceinline__ void leave_empty(const Params &p) {
    const Geometry &g = p.geometry;
    for (u32 expert = threadIdx.x; expert <= g.local_experts; expert += blockDim.x) {
        at<i32>(p.handle.expert_offsets)[expert] = 0;
        if (expert < g.local_experts) {
            at<i32>(p.handle.tokens_per_expert)[expert] = 0;
        }
    }
    if (threadIdx.x == 0) {
        *at<i32>(p.handle.total) = 0;
    }
}

} // namespace windows

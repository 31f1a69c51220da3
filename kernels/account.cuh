// What all ranks together have for this one, and what it requires.
//
// Written over parameter blocks that have the fields of `CountParams`; one block calls these.
#pragma once

#include "lane.cuh"
#include "loop.cuh"
#include "sources.cuh"

namespace account {

// First item and pair of each source; the sums of all.
template <typename Params>
__device__ __forceinline__ void add_sources(const Params &p, const DispatchHeader *headers,
                                            u32 &items, u32 &pairs) {
    const u32 world = p.geometry.world;
    u32 *source_items = at<u32>(p.handle.source_items);
    u32 *source_pairs = at<u32>(p.handle.source_pairs);
    items = pairs = 0;
    for (u32 first = 0; first < world; first += blockDim.x) {
        const u32 source = first + threadIdx.x;
        const bool mine = source < world;
        u32 more_items, more_pairs;
        const u32 items_before =
            scan::block_exclusive(mine ? headers[source].items : 0, more_items);
        const u32 pairs_before =
            scan::block_exclusive(mine ? headers[source].pairs : 0, more_pairs);
        if (mine) {
            source_items[source] = items + items_before;
            source_pairs[source] = pairs + pairs_before;
        }
        items += more_items;
        pairs += more_pairs;
    }
    if (threadIdx.x == 0) {
        source_items[world] = items;
        source_pairs[world] = pairs;
    }
}

// Rows of each expert that come from earlier sources; the rows of all experts, each padded.
template <typename Params>
__device__ __forceinline__ u32 add_experts(const Params &p, const u32 *counts) {
    const Geometry &g = p.geometry;
    u32 *bases = at<u32>(p.handle.bases);
    const sources::Groups groups(g.world);
    u32 rows = 0;
    for (u32 from = 0; from < g.slots; from += groups.experts()) {
        const u32 slot = from + groups.expert();
        const bool mine = slot < g.slots;
        const auto entry = [&](u32 source) { return u64(source) * g.slots + slot; };
        const u32 sum = groups.add([&](u32 source) { return mine ? counts[entry(source)] : 0; },
                                   [&](u32 source, u32 before) {
                                       if (mine) {
                                           bases[entry(source)] = before;
                                       }
                                   });
        if (mine && groups.leads()) {
            rows += round_up(sum, g.alignment);
            at<u32>(p.handle.taken)[slot] = 0;
            if (slot < g.local_experts) {
                at<i32>(p.handle.tokens_per_expert)[slot] = 0;
            }
        }
    }
    return scan::block_sum(rows);
}

// What one thread does with the sums.
template <typename Params>
__device__ __forceinline__ void conclude(const Params &p, u32 items, u32 pairs, u32 required) {
    const StepView step(p.state);
    const u32 capacity = min(*at<const u32>(p.capacity), p.row_limit);
    // Where routing depends on outputs a dispatch behind an over-budget one does not count. Its senders
    // had nothing for anybody then; a sender that did not know yet does not change that.
    const bool silent = step.is_silent(p.ordinal, p.dependent != 0);
    if (!silent) {
        step.note_required(required);
        if (p.budgeted != 0 && required > capacity) {
            step.note_over(p.ordinal);
        }
        if (p.ordinal < p.max_dispatches) {
            at<u32>(p.required_by_dispatch)[p.ordinal] = required;
        }
    }
    WindowState *window = at<WindowState>(p.handle.window);
    window->items = items;
    window->pairs = pairs;
    window->required = required;
    window->silent = silent;
    if (p.condition != 0) {
        set_condition(p.condition, !silent && items > 0);
    }
}

// All of it: from the headers and counts of every rank, which were acquired.
template <typename Params>
__device__ __forceinline__ void take_stock(const Params &p, const Blocks &blocks) {
    const Geometry &g = p.geometry;
    u32 items, pairs;
    add_sources(p, blocks.own<DispatchHeader>(g.lane.dispatch_headers), items, pairs);
    const u32 grouped = add_experts(p, blocks.own<u32>(g.lane.counts));
    if (threadIdx.x == 0) {
        conclude(p, items, pairs, g.flat == 0 ? grouped : round_up(items, g.alignment));
    }
    __syncthreads();
}

} // namespace account

// Where the rows of a pushed dispatch belong.
#pragma once

#include "account.cuh"
#include "push_context.cuh"
#include "sources.cuh"
#include "window.cuh"

namespace dispatch {

// Every block finds the places by itself, from the counts that every rank tells. One of them writes down
// what later operations need.
class Placing {
  public:
    __device__ __forceinline__ explicit Placing(const Context &c) : c_(c) {}

    // Waits for the counts of every rank, and lays out the rows; whether that could be done. Every thread
    // of the block calls it.
    __device__ __forceinline__ bool run() const {
        const Geometry &geometry = c_.g();
        const Places places(geometry);
        // In the flat layout a row's place follows from its item, and experts concern the books only.
        const u32 slots = geometry.flat == 0 || c_.keeps_books() ? geometry.slots : 0;
        const u32 width = tally::EXPERTS + slots;
        bool failed = false;
        for (u32 i = threadIdx.x; i < geometry.world * width; i += THREADS) {
            const u32 source = i / width;
            const u32 entry = i % width;
            const u32 number = told(source, entry, failed);
            if (entry >= tally::EXPERTS) {
                places.first(source, entry - tally::EXPERTS) = number;
            } else {
                (entry == tally::ITEMS ? shared.items : shared.pairs)[source] = number;
            }
        }
        if (__syncthreads_or(failed)) {
            return false;
        }
        if (threadIdx.x >= THREADS - WARP) {
            add_sources();
            take_turns();
        }
        const sources::Groups groups(geometry.world);
        u32 end = 0;
        u32 padding = 0;
        for (u32 from = 0; from < slots; from += groups.experts()) {
            const u32 slot = from + groups.expert();
            const bool mine = slot < slots;
            const bool leads = mine && groups.leads();
            const u32 rows = groups.add(
                [&](u32 source) { return mine ? places.first(source, slot) : 0; },
                [&](u32 source, u32 before) {
                    if (mine) {
                        places.first(source, slot) = before;
                    }
                });
            const u32 padded = leads ? round_up(rows, geometry.alignment) : 0;
            scan::Two more;
            const scan::Two here =
                scan::block_exclusive(scan::Two{padded, leads ? padded - rows : 0}, more);
            const u32 before = groups.of_first(end + here.first);
            if (mine) {
                note_sources(groups, slot, before);
            }
            if (leads) {
                if (c_.keeps_books()) {
                    note_expert(slot, rows, before);
                }
                places.end(slot) = before + rows;
                places.padding_before(slot) = padding + here.second;
            }
            end += more.first;
            padding += more.second;
        }
        if (threadIdx.x == 0) {
            places.padding_before(geometry.slots) = padding;
        }
        __syncthreads();
        const u32 required = geometry.flat != 0
                                 ? round_up(shared.items[geometry.world], geometry.alignment)
                                 : end;
        const bool fits = required <= c_.capacity;
        if (c_.keeps_books()) {
            keep_books(fits, required, end);
        }
        return fits || place_some();
    }

    // Says to every rank that this one is at this dispatch, and has done with all that was before. The block that
    // keeps the books does so first of all, when nothing that it has stored is on its way.
    __device__ __forceinline__ void say_here() const {
        const Geometry &geometry = c_.g();
        for (u32 n = threadIdx.x; n < geometry.world; n += THREADS) {
            u64 *words = c_.tallies(nth_peer(geometry, n), geometry.rank);
            ptx::store_relaxed_sys(words + tally::ordinal(geometry),
                                   tally::of(c_.turn, c_.p.ordinal));
            ptx::store_release_sys(words + tally::step(geometry), tally::of(c_.turn, c_.step));
        }
    }

    // Waits until every rank has said so; whether all are at this dispatch. Every thread of the block calls it.
    __device__ __forceinline__ bool ranks_here() const {
        const Geometry &geometry = c_.g();
        bool failed = false;
        for (u32 source = threadIdx.x; source < geometry.world; source += THREADS) {
            const u64 *words = c_.tallies(geometry.rank, source);
            u64 step = 0;
            failed |= c_.waiter.wait_until(wait::Phase::Dispatch, source, [&] {
                step = ptx::load_acquire_sys(words + tally::step(geometry));
                return tally::is_of(step, c_.turn);
            }) != 0;
            const u32 ordinal = u32(ptx::load_relaxed_sys(words + tally::ordinal(geometry)));
            if (!failed && (u32(step) != c_.step || ordinal != c_.p.ordinal)) {
                c_.waiter.fail(wait::FaultKind::OutOfStep, wait::Phase::Dispatch, source);
                failed = true;
            }
        }
        return !__syncthreads_or(failed);
    }

    // Waits for the lists of every rank; whether all came, of this dispatch and pushed. Every thread of
    // the block calls it.
    __device__ __forceinline__ bool lists_here() const {
        using wait::Phase;
        const Geometry &geometry = c_.g();
        const u32 *words = c_.blocks.own<u32>(geometry.lane.dispatch_words);
        const DispatchHeader *headers =
            c_.blocks.own<DispatchHeader>(geometry.lane.dispatch_headers);
        bool failed = false;
        bool elsewhere = false;
        for (u32 source = threadIdx.x; source < geometry.world; source += THREADS) {
            failed |= c_.waiter.wait(Phase::Dispatch, source, words + source, c_.epoch) != 0;
            const DispatchHeader header = headers[source];
            elsewhere |= header.step != c_.step || header.ordinal != c_.p.ordinal ||
                         header.transfer != TRANSFER_PUSH;
        }
        return !__syncthreads_or(failed) &&
               (!__syncthreads_or(elsewhere) ||
                all_here(c_.waiter, Phase::Dispatch, headers, geometry.world, c_.step, c_.p.ordinal,
                         TRANSFER_PUSH));
    }

  private:
    // Waits for one number that `source` tells. Every thread waits for those that it reads, so that
    // nobody waits for another thread. All come together, so that one of them for each source looks across
    // the bus often, and the others seldom.
    __device__ __forceinline__ u32 told(u32 source, u32 entry, bool &failed) const {
        const u64 *word = c_.tallies(c_.g().rank, source) + entry;
        u64 found = 0;
        const auto is_there = [&] {
            found = ptx::load_relaxed_sys(word);
            return tally::is_of(found, c_.turn);
        };
        if (entry != tally::ITEMS) {
            failed |= c_.waiter.wait_until(wait::Phase::Dispatch, source, is_there,
                                           wait::LOOKS_OF_MANY) != 0;
        } else {
            // A rank that does not push tells nothing, but signals.
            const u32 *signal = c_.blocks.own<u32>(c_.g().lane.dispatch_words) + source;
            failed |= c_.waiter.wait_until(wait::Phase::Dispatch, source, [&] {
                return is_there() || ptx::load_acquire_sys(signal) == c_.epoch;
            }) != 0;
            if (!failed && !is_there()) {
                c_.waiter.fail(wait::FaultKind::OutOfStep, wait::Phase::Dispatch, source);
                failed = true;
            }
        }
        return u32(found);
    }

    // From how many items and pairs each source has to how many come before it. One warp calls this: no more
    // ranks push than it has lanes.
    __device__ __forceinline__ void add_sources() const {
        const u32 world = c_.g().world;
        const u32 source = scan::lane();
        const u32 items = source < world ? shared.items[source] : 0;
        const u32 pairs = source < world ? shared.pairs[source] : 0;
        const u32 upto_items = scan::warp_inclusive(items);
        const u32 upto_pairs = scan::warp_inclusive(pairs);
        __syncwarp();
        if (source < world) {
            shared.items[source] = upto_items - items;
            shared.pairs[source] = upto_pairs - pairs;
        }
        if (source + 1 == world) {
            shared.items[world] = upto_items;
            shared.pairs[world] = upto_pairs;
            shared.end = upto_items;
        }
        __syncwarp();
    }

    // From the rows of an expert that come from earlier sources, which the handle has too, to where those of
    // each source begin, if the expert's lie from `first` on.
    __device__ __forceinline__ void note_sources(const sources::Groups &groups, u32 slot,
                                                 u32 first) const {
        groups.for_each([&](u32 source) {
            u32 &place = Places(c_.g()).first(source, slot);
            if (c_.keeps_books()) {
                at<u32>(c_.p.handle.bases)[source * c_.g().slots + slot] = place;
            }
            place += first;
        });
    }

    // What the handle says of an expert whose `rows` rows lie from `first` on, where all fits. In the
    // flat layout rows do not lie by expert.
    __device__ __forceinline__ void note_expert(u32 slot, u32 rows, u32 first) const {
        const Geometry &geometry = c_.g();
        at<u32>(c_.p.handle.taken)[slot] = 0;
        if (slot < geometry.local_experts) {
            at<i32>(c_.p.handle.tokens_per_expert)[slot] = i32(rows);
            at<i32>(c_.p.handle.expert_offsets)[slot] = geometry.flat != 0 ? 0 : i32(first);
        }
    }

    // Fills the handle and the counters of the step. Where all fits there is little left to say; else,
    // or where an earlier dispatch turned out to be over budget, it is found out as for rows that are
    // pulled.
    __device__ __forceinline__ void keep_books(bool fits, u32 required, u32 end) const {
        const Geometry &geometry = c_.g();
        const StepView state(c_.p.state);
        if (threadIdx.x == 0) {
            shared.silent = state.is_silent(c_.p.ordinal, c_.p.dependent != 0);
        }
        __syncthreads();
        if (fits && !shared.silent) {
            for (u32 source = threadIdx.x; source <= geometry.world; source += THREADS) {
                at<u32>(c_.p.handle.source_items)[source] = shared.items[source];
                at<u32>(c_.p.handle.source_pairs)[source] = shared.pairs[source];
            }
            if (threadIdx.x == 0) {
                const u32 total = geometry.flat != 0 ? shared.items[geometry.world] : end;
                WindowState window{};
                window.tokens = c_.tokens;
                window.items = window.end = shared.items[geometry.world];
                window.pairs = window.window_pairs = shared.pairs[geometry.world];
                window.required = required;
                window.capacity = c_.capacity;
                window.windows = 1;
                *at<WindowState>(c_.p.handle.window) = window;
                at<i32>(c_.p.handle.expert_offsets)[geometry.local_experts] = i32(total);
                *at<i32>(c_.p.handle.total) = i32(total);
                state.note_required(required);
                state.note_window(1, c_.capacity);
                state.add_delivered(window.pairs);
                if (c_.p.ordinal < c_.p.max_dispatches) {
                    at<u32>(c_.p.required_by_dispatch)[c_.p.ordinal] = required;
                }
            }
        } else {
            if (!lists_here()) {
                return;
            }
            if (threadIdx.x == 0) {
                WindowState window{};
                window.tokens = c_.tokens;
                *at<WindowState>(c_.p.handle.window) = window;
            }
            __syncthreads();
            account::take_stock(c_.p, c_.blocks);
            windows::advance(c_.p, c_.waiter, c_.blocks);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::store_release_gpu(&c_.lane()->placed, c_.epoch);
        }
    }

    // The same where not all fits: the block that keeps the books finds out what does.
    __device__ __forceinline__ bool place_some() const {
        const Geometry &geometry = c_.g();
        // Whoever is late is named by a wait for it, not by one for the block that waits for it too.
        if (!lists_here() || !c_.await_blocks(&c_.lane()->placed, c_.epoch)) {
            return false;
        }
        if (threadIdx.x == 0) {
            shared.end = at<const WindowState>(c_.p.handle.window)->end;
        }
        for (u32 i = threadIdx.x; i < geometry.world * geometry.slots; i += THREADS) {
            const u32 slot = i % geometry.slots;
            const u32 first = slot < geometry.local_experts
                                  ? u32(at<const i32>(c_.p.handle.expert_offsets)[slot])
                                  : 0;
            Places(geometry).first(i / geometry.slots, slot) =
                first + at<const u32>(c_.p.handle.bases)[i];
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            take_turns();
        }
        __syncthreads();
        return true;
    }

    // Of the items that the window takes. One warp calls this.
    __device__ __forceinline__ void take_turns() const {
        shared.turns.lay_out(c_.g(), [](u32 source) {
            return min(shared.items[source + 1], shared.end) -
                   min(shared.items[source], shared.end);
        });
    }

    const Context &c_;
};

} // namespace dispatch

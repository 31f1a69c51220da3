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

    // Waits for the counts of every rank, and lays out the rows; whether that could be done. `on_counts` is called as
    // soon as counts are there. Every thread of the block calls it. The block that keeps the books makes sure first
    // that every rank is here.
    template <typename OnCounts>
    __device__ __forceinline__ bool run(OnCounts on_counts) const {
        const bool books = c_.keeps_books();
        const bool done = (!books || ranks_here()) && lay_out(on_counts);
        if (books && !done) {
            windows::leave_empty(c_.p);
        }
        return done;
    }

    // Whether all rows fit that there are. Known behind `run`, as what follows.
    __device__ __forceinline__ bool fits() const { return shared.end == shared.items[c_.g().world]; }
    // Items of a source that the window takes.
    static __device__ __forceinline__ u32 items_of(u32 source) {
        return min(shared.items[source + 1], shared.end) - min(shared.items[source], shared.end);
    }

    // Before anybody asks what the block was told; a barrier follows.
    static __device__ __forceinline__ void begin() {
        if (threadIdx.x == 0) {
            shared.told = u32(Told::NOTHING);
        }
    }
    // Waits for how many items and pairs every rank has, and tells the other warps of the block. One warp calls this.
    __device__ __forceinline__ void tell_block() const {
        const u32 source = scan::lane();
        const bool asks = source < c_.g().world;
        u64 items = 0;
        u64 pairs = 0;
        bool failed = false;
        if (asks) {
            const u64 *words = c_.tallies(c_.g().rank, source);
            const auto is_there = [&] {
                items = ptx::load_relaxed_sys(words + tally::ITEMS);
                pairs = ptx::load_relaxed_sys(words + tally::PAIRS);
                return tally::is_of(items, c_.turn) && tally::is_of(pairs, c_.turn);
            };
            failed = c_.waiter.wait_until(wait::Phase::Dispatch, source, is_there, wait::LOOKS_OF_MANY) != 0;
        }
        failed = __any_sync(WHOLE, failed);
        add_sources(u32(items), u32(pairs));
        if (scan::lane() == 0) {
            ptx::store_release_cta(&shared.told, u32(failed ? Told::FAILED : Told::ALL));
        }
        __syncwarp();
    }
    static __device__ __forceinline__ Told told_block() {
        return Told(ptx::load_acquire_cta(&shared.told));
    }
    // Waits for the warp that tells, which waits for no longer than a deadline.
    static __device__ __forceinline__ Told await_told() {
        Told told = told_block();
        while (told == Told::NOTHING) {
            told = told_block();
        }
        __syncwarp();
        return told;
    }

    // Clears what no pair has of the rows of each expert. Needs the places only: rows and lists may still be on their
    // way. The whole team calls this.
    __device__ __forceinline__ void clear_padding(const items::Team &team) const {
        const Geometry &geometry = c_.g();
        const items::Clear clear{geometry, c_.p.handle, c_.p.rows, c_.p.received_scales};
        if (geometry.flat != 0 || geometry.clear_padding == 0) {
            return;
        }
        if (!fits()) {
            items::clear_padding(clear, team,
                                 [&](u32 expert) { return items::padding_of(c_.p.handle, expert); });
            return;
        }
        const Places places(geometry);
        const u32 units = places.padding_before(geometry.slots) * items::Clear::PARTS;
        // From the other end than rows: whose first row is on its way has less to clear.
        for (u32 unit = team.warps - 1 - team.warp; unit < units; unit += team.warps) {
            clear(places.padding_row(unit / items::Clear::PARTS), unit % items::Clear::PARTS);
        }
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

    // Waits until every rank has said so; whether all are at this dispatch. The block that keeps the books calls it
    // while there is nothing to be kept yet, and finds out meanwhile whether this dispatch sends nothing. Every
    // thread of the block calls it.
    __device__ __forceinline__ bool ranks_here() const {
        const Geometry &geometry = c_.g();
        if (threadIdx.x == THREADS - 1) {
            shared.silent = StepView(c_.p.state).is_silent(c_.p.ordinal, c_.p.dependent != 0);
        }
        bool failed = false;
        for (u32 source = threadIdx.x; source < geometry.world; source += THREADS) {
            const u64 *words = c_.tallies(geometry.rank, source);
            const u32 *signal = signal_of(source);
            u64 step = 0;
            failed |= c_.waiter.wait_until(wait::Phase::Dispatch, source, [&] {
                const bool signalled = ptx::load_relaxed_sys(signal) == c_.epoch;
                step = ptx::load_acquire_sys(words + tally::step(geometry));
                return tally::is_of(step, c_.turn) || (signalled && pulls(source));
            }) != 0;
            const bool here = tally::is_of(step, c_.turn) && u32(step) == c_.step;
            const u32 ordinal = u32(ptx::load_relaxed_sys(words + tally::ordinal(geometry)));
            if (!failed && (!here || ordinal != c_.p.ordinal)) {
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
    // Lays out the rows by the counts of every rank.
    template <typename OnCounts>
    __device__ __forceinline__ bool lay_out(OnCounts on_counts) const {
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
        on_counts();
        if (threadIdx.x >= THREADS - WARP) {
            const bool has_source = scan::lane() < geometry.world;
            add_sources(has_source ? shared.items[scan::lane()] : 0,
                        has_source ? shared.pairs[scan::lane()] : 0);
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
            if (geometry.flat != 0) {
                if (leads) {
                    note_expert(slot, rows, 0);
                }
                continue;
            }
            const u32 padded = leads ? round_up(rows, geometry.alignment) : 0;
            scan::Values<2> more;
            const scan::Values<2> here =
                scan::block_exclusive(scan::Values<2>{{padded, leads ? padded - rows : 0}}, more);
            const u32 before = groups.of_first(end + here.of[0]);
            if (mine) {
                groups.for_each([&](u32 source) { places.first(source, slot) += before; });
            }
            if (leads) {
                if (c_.keeps_books()) {
                    note_expert(slot, rows, before);
                }
                places.end(slot) = before + rows;
                places.padding_before(slot) = padding + here.of[1];
            }
            end += more.of[0];
            padding += more.of[1];
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

    // Waits for one number that `source` tells. Every thread waits for those that it reads, so that
    // nobody waits for another thread. All come together, so that one of them for each source looks across
    // the bus often, and the others seldom.
    __device__ __forceinline__ u32 told(u32 source, u32 entry, bool &failed) const {
        const u64 *word = c_.tallies(c_.g().rank, source) + entry;
        u64 found = 0;
        if (entry != tally::ITEMS) {
            failed |= c_.waiter.wait_until(wait::Phase::Dispatch, source, [&] {
                found = ptx::load_relaxed_sys(word);
                return tally::is_of(found, c_.turn);
            }, wait::LOOKS_OF_MANY) != 0;
        } else {
            const u32 *signal = signal_of(source);
            bool pulled = false;
            failed |= c_.waiter.wait_until(wait::Phase::Dispatch, source, [&] {
                // Both at once, since most looks find neither.
                const bool signalled = ptx::load_relaxed_sys(signal) == c_.epoch;
                found = ptx::load_relaxed_sys(word);
                const bool is_there = tally::is_of(found, c_.turn);
                pulled = !is_there && signalled && pulls(source);
                return is_there || pulled;
            }) != 0;
            if (!failed && pulled) {
                c_.waiter.fail(wait::FaultKind::OutOfStep, wait::Phase::Dispatch, source);
                failed = true;
            }
        }
        return u32(found);
    }

    // The dispatch word of `source`.
    __device__ __forceinline__ const u32 *signal_of(u32 source) const {
        return c_.blocks.own<u32>(c_.g().lane.dispatch_words) + source;
    }
    // Whether a rank that was seen to signal does not push: then it has told nothing, where others tell before.
    __device__ __forceinline__ bool pulls(u32 source) const {
        return ptx::load_acquire_sys(signal_of(source)) == c_.epoch &&
               !tally::is_of(ptx::load_relaxed_sys(c_.tallies(c_.g().rank, source) + tally::ITEMS), c_.turn);
    }

    // From how many items and pairs the lane's source has to how many come before it. One warp calls this: no more
    // ranks push than it has lanes.
    __device__ __forceinline__ void add_sources(u32 items, u32 pairs) const {
        const u32 world = c_.g().world;
        const u32 source = scan::lane();
        const u32 upto_items = scan::first_inclusive(items, world);
        const u32 upto_pairs = scan::first_inclusive(pairs, world);
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

    // What the handle says of an expert whose `rows` rows lie from `first` on, where all fits. In the
    // flat layout rows do not lie by expert, and begin nowhere.
    __device__ __forceinline__ void note_expert(u32 slot, u32 rows, u32 first) const {
        const Geometry &geometry = c_.g();
        if (slot < geometry.local_experts) {
            at<i32>(c_.p.handle.tokens_per_expert)[slot] = i32(rows);
            at<i32>(c_.p.handle.expert_offsets)[slot] = i32(first);
        }
    }

    // Fills the handle and the counters of the step. Where all fits there is little left to say; else,
    // or where an earlier dispatch turned out to be over budget, it is found out as for rows that are
    // pulled.
    __device__ __forceinline__ void keep_books(bool fits, u32 required, u32 end) const {
        const Geometry &geometry = c_.g();
        const StepView state(c_.p.state);
        if (fits && !shared.silent) {
            for (u32 source = threadIdx.x; source <= geometry.world; source += THREADS) {
                at<u32>(c_.p.handle.source_items)[source] = shared.items[source];
                at<u32>(c_.p.handle.source_pairs)[source] = shared.pairs[source];
            }
            // A warp each: one thread would take as long as all that was before.
            if (threadIdx.x == 0) {
                WindowState window{};
                window.tokens = c_.tokens;
                window.items = window.end = shared.items[geometry.world];
                window.pairs = window.window_pairs = shared.pairs[geometry.world];
                window.required = required;
                window.capacity = c_.capacity;
                window.windows = 1;
                *at<WindowState>(c_.p.handle.window) = window;
            } else if (threadIdx.x == WARP) {
                const u32 total = geometry.flat != 0 ? shared.items[geometry.world] : end;
                at<i32>(c_.p.handle.expert_offsets)[geometry.local_experts] = i32(total);
                *at<i32>(c_.p.handle.total) = i32(total);
                if (c_.p.ordinal < c_.p.max_dispatches) {
                    at<u32>(c_.p.required_by_dispatch)[c_.p.ordinal] = required;
                }
            } else if (threadIdx.x == 2 * WARP) {
                state.note_required(required);
                state.note_window(1, c_.capacity);
                state.add_delivered(shared.pairs[geometry.world]);
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
            __syncthreads();
            if (threadIdx.x == 0) {
                ptx::store_release_gpu(&c_.lane()->placed, c_.turn);
            }
        }
    }

    // The same where not all fits: the block that keeps the books finds out what does.
    __device__ __forceinline__ bool place_some() const {
        const Geometry &geometry = c_.g();
        // Whoever is late is named by a wait for it, not by one for the block that waits for it too.
        if (!lists_here() || !c_.await_blocks(&c_.lane()->placed, c_.turn)) {
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

    // Of the items that the window takes. One warp calls this. Where rows are stamped nobody takes turns.
    __device__ __forceinline__ void take_turns() const {
        if (!stamped::ROWS) {
            shared.turns.lay_out(c_.g(), [](u32 source) { return items_of(source); });
        }
    }

    const Context &c_;
};

} // namespace dispatch

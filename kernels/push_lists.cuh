// Which ranks get which tokens, and telling them.
#pragma once

#include "push_context.cuh"

namespace dispatch {

// The lists of a dispatch, each in the block of the rank that it is for.
class PeerLists {
  public:
    __device__ __forceinline__ explicit PeerLists(const Context &c) : c_(c) {}

    __device__ __forceinline__ void put(const Item &item, u32 rank, u32 position) const {
        stamped::store(items::pushed_item(c_.g(), c_.blocks, rank, c_.g().rank, position),
                       stamped::of(c_.g(), item, c_.turn));
    }
    __device__ __forceinline__ void put(const Pair &pair, u32 rank, u32 position, u32,
                                        u32 place) const {
        stamped::store(items::pushed_pair(c_.g(), c_.blocks, rank, c_.g().rank, position, place),
                       stamped::of(pair, c_.turn));
    }

  private:
    const Context &c_;
};

class Listing {
  public:
    // What this block begins with is on its way from here on.
    __device__ __forceinline__ explicit Listing(const Context &c)
        : c_(c), totals_(tables),
          counted_(c.g(), tables + columns(c.g()), ptx::dynamic_shared_bytes() / sizeof(u32) - columns(c.g()),
                   (tokens() + c.p.listers - 1) / c.p.listers),
          stretch_(lists::stretch_of(lists() ? tokens() : 0, blockIdx.x * counted_.warps() + warp(),
                                     c.p.listers * counted_.warps())),
          ahead_(lists::read_ahead(c.p, stretch_)),
          silence_(StepView(c.p.state).silence()) {}

    // This block's part of the lists.
    __device__ __forceinline__ void run() const {
        const PushDispatchParams &p = c_.p;
        const lists::Counts counts = counted_.of_warp(lists::own_warp(counted_));
        lists::Kept kept;
        decide();
        counted_.clear();
        const lists::BadIds bad = lists::count_all(p, stretch_, counts, ahead_, kept);
        __syncthreads();
        counted_.sum([&](u32 column, u32 sum) { totals_[column] = sum; });
        if (p.listers > 1 && !add_blocks()) {
            return;
        }
        if (blockIdx.x == 0) {
            tell();
        }
        if (!shared.silent) {
            StepView(p.state).add_bad_ids(bad.invalid, bad.repeated);
            lists::write_all(p, PeerLists(c_), stretch_, counts, kept);
        } else {
            for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < c_.tokens;
                 i += p.listers * THREADS) {
                at<u32>(p.handle.fanouts)[i] = 0;
            }
        }
        if (p.listers == 1 || arrive(&c_.counters()->listed)) {
            announce();
        }
    }

  private:
    // Counts of a warp.
    static __device__ __forceinline__ u32 columns(const Geometry &g) { return g.world * (g.slots + 2); }
    static __device__ __forceinline__ u32 warp() { return threadIdx.x / WARP; }

    // No more tokens are read than the caller has memory for, whatever the device's word says.
    __device__ __forceinline__ u32 tokens() const { return min(c_.tokens, c_.p.num_tokens); }
    // Whether this warp has tokens of its own.
    __device__ __forceinline__ bool lists() const { return warp() < counted_.warps(); }
    // The first block decides for all, since the answer may change at any time. Its last warp has no tokens of
    // its own where there are few.
    __device__ __forceinline__ bool decides() const {
        return blockIdx.x == 0 && threadIdx.x == THREADS - 1;
    }

    // Adds this block to those that `word` counts, behind all that it wrote. Every thread calls it;
    // whether it was the last of those that list.
    __device__ __forceinline__ bool arrive(u32 *word) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::fence_acq_rel_sys();
            shared.last = ptx::fetch_add_acq_rel_gpu(word, 1) + 1 == c_.p.listers;
        }
        __syncthreads();
        return shared.last;
    }

    // Whether this dispatch sends nothing.
    __device__ __forceinline__ void decide() const {
        if (decides()) {
            StepView(c_.p.state).note_dispatch(c_.p.ordinal);
            shared.silent = silence_.is_of(c_.p.ordinal, c_.p.dependent != 0);
            if (c_.p.listers > 1) {
                c_.lane()->silent = shared.silent;
            }
        }
    }

    // Exchanges the counts of this block for those of all blocks that list: what comes before it, and
    // the totals.
    __device__ __forceinline__ bool add_blocks() const {
        const PushDispatchParams &p = c_.p;
        u32 *of_blocks = at<u32>(p.block_counts);
        const u32 columns = counted_.columns();
        for (u32 i = threadIdx.x; i < columns; i += THREADS) {
            of_blocks[blockIdx.x * columns + i] = totals_[i];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            // Behind what the whole block wrote, for blocks of this device.
            ptx::fence_acq_rel_gpu();
            ptx::fetch_add_acq_rel_gpu(&c_.counters()->counted, 1);
        }
        if (!c_.await_blocks(&c_.counters()->counted, p.listers)) {
            return false;
        }
        if (threadIdx.x == 0) {
            shared.silent = ptx::load_relaxed_sys(&c_.lane()->silent) != 0;
        }
        counted_.shift([&](u32 column) {
            u32 before = 0;
            u32 sum = 0;
            for (u32 first = 0; first < p.listers; first += AT_ONCE) {
                u32 part[AT_ONCE];
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) {
                    const u32 block = first + j;
                    part[j] = block < p.listers
                                  ? ptx::load_relaxed_gpu(of_blocks + block * columns + column)
                                  : 0;
                }
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) {
                    before += first + j < blockIdx.x ? part[j] : 0;
                    sum += part[j];
                }
            }
            totals_[column] = sum;
            return before;
        });
        return true;
    }

    // Tells every rank, this one included, how much there is for it: all that it needs in order to lay
    // out its rows, before the lists are written. Where most warps have no tokens, those do it.
    __device__ __forceinline__ void tell() const {
        const Geometry &geometry = c_.g();
        constexpr u32 WARPS = THREADS / WARP;
        const u32 first = counted_.warps() <= WARPS / 2 ? counted_.warps() : 0;
        if (warp() < first) {
            return;
        }
        const u32 width = tally::ordinal(geometry);
        const u32 parts = (width + WARP - 1) / WARP;
        const u32 *of_experts = totals_;
        const u32 *of_ranks = totals_ + geometry.world * geometry.slots;
        for (u32 unit = warp() - first; unit < geometry.world * parts; unit += WARPS - first) {
            const u32 to = nth_peer(geometry, unit / parts);
            const u32 entry = unit % parts * WARP + scan::lane();
            if (entry < width) {
                const u32 number = entry < tally::EXPERTS
                                       ? of_ranks[2 * to + entry]
                                       : of_experts[to * geometry.slots + entry - tally::EXPERTS];
                ptx::store_relaxed_sys(c_.tallies(to, geometry.rank) + entry,
                                       tally::of(c_.turn, shared.silent ? 0 : number));
            }
        }
    }

    // Tells every rank that its lists are there.
    __device__ __forceinline__ void announce() const {
        const Geometry &geometry = c_.g();
        const u32 experts = geometry.world * geometry.slots;
        const u32 sends = shared.silent ? 0 : 1;
        __syncthreads();
        for (u32 to = threadIdx.x; to < geometry.world; to += THREADS) {
            DispatchHeader header{};
            header.step = c_.step;
            header.ordinal = c_.p.ordinal;
            header.items = sends * totals_[experts + 2 * to];
            header.pairs = sends * totals_[experts + 2 * to + 1];
            header.transfer = TRANSFER_PUSH;
            c_.blocks.of<DispatchHeader>(to, geometry.lane.dispatch_headers)[geometry.rank] = header;
        }
        for (u32 i = threadIdx.x; i < experts; i += THREADS) {
            u32 *counts = c_.blocks.of<u32>(i / geometry.slots, geometry.lane.counts) +
                          u64(geometry.rank) * geometry.slots;
            counts[i % geometry.slots] = sends * totals_[i];
        }
        __syncthreads();
        for (u32 n = threadIdx.x; n < geometry.world; n += THREADS) {
            const u32 to = nth_peer(geometry, n);
            c_.waiter.signal(c_.blocks.of<u32>(to, geometry.lane.dispatch_words) + geometry.rank,
                             c_.epoch);
        }
    }

    // Counts that a thread reads before it uses the first of them.
    static constexpr u32 AT_ONCE = 16;

    const Context &c_;
    // What all blocks that list have counted: for experts, then for ranks.
    u32 *totals_;
    lists::Tables counted_;
    lists::Stretch stretch_;
    lists::Ahead ahead_;
    Silence silence_;
};

} // namespace dispatch

#include "lists.cuh"
#include "stage.cuh"

// The sender's half of a dispatch that is pulled. The first block builds the lists while the others stage tokens; the
// last to be done tells every rank what is for it.

// Where each rank's lists begin, then the tables of `lists::Tables`.
extern __shared__ u32 shared[];

// The lists of this rank's own block: those of one rank behind those of another.
class OwnLists {
  public:
    __device__ __forceinline__ OwnLists(const Geometry &g, const Blocks &blocks, const u32 *bases)
        : items_(blocks.own<Item>(g.lane.items)), pairs_(blocks.own<Pair>(g.lane.pairs)),
          bases_(bases) {}

    __device__ __forceinline__ void put(const Item &item, u32 rank, u32 position) const {
        items_[bases_[2 * rank] + position] = item;
    }
    __device__ __forceinline__ void put(const Pair &pair, u32 rank, u32, u32 pair_begin,
                                        u32 place) const {
        pairs_[bases_[2 * rank + 1] + pair_begin + place] = pair;
    }

  private:
    Item *items_;
    Pair *pairs_;
    const u32 *bases_;
};

// From the totals of each rank to where its lists begin.
__device__ __forceinline__ void find_bases(const Geometry &g, const u32 *per_rank, u32 *bases) {
    u32 items = 0;
    u32 pairs = 0;
    for (u32 first = 0; first < g.world; first += blockDim.x) {
        const u32 rank = first + threadIdx.x;
        const bool mine = rank < g.world;
        u32 more_items, more_pairs;
        const u32 items_before = scan::block_exclusive(mine ? per_rank[2 * rank] : 0, more_items);
        const u32 pairs_before =
            scan::block_exclusive(mine ? per_rank[2 * rank + 1] : 0, more_pairs);
        if (mine) {
            bases[2 * rank] = items + items_before;
            bases[2 * rank + 1] = pairs + pairs_before;
        }
        items += more_items;
        pairs += more_pairs;
    }
    __syncthreads();
}

__device__ __forceinline__ void clear_totals(const RouteParams &p) {
    const Geometry &g = p.geometry;
    for (u32 i = threadIdx.x; i < 2 * g.world; i += blockDim.x) {
        at<u32>(p.rank_counts)[i] = 0;
    }
    for (u32 i = threadIdx.x; i < g.world * g.slots; i += blockDim.x) {
        at<u32>(p.expert_counts)[i] = 0;
    }
    __syncthreads();
}

// Builds all lists; one whole block calls this. Where shared memory has no room for the counts of a
// warp, one warp does it with the lane's scratch as its counts.
__device__ __forceinline__ void build(const RouteParams &p, const Blocks &blocks, u32 tokens) {
    const Geometry &g = p.geometry;
    u32 *bases = shared;
    u32 *rest = shared + 2 * g.world;
    const lists::Tables tables(g, rest, ptx::dynamic_shared_bytes() / sizeof(u32) - 2 * g.world,
                               tokens);
    const OwnLists into(g, blocks, bases);
    const lists::Counts all{at<u32>(p.expert_counts), at<u32>(p.rank_counts)};
    lists::Kept kept;
    const u32 warp = threadIdx.x / lists::WARP;
    if (tables.warps() != 0) {
        const bool mine = warp < tables.warps();
        const lists::Stretch stretch =
            lists::stretch_of(mine ? tokens : 0, warp, tables.warps());
        const lists::Counts counts = tables.of_warp(lists::own_warp(tables));
        const lists::Ahead ahead = lists::read_ahead(p, stretch);
        tables.clear();
        const lists::BadIds bad = lists::count_all(p, stretch, counts, ahead, kept);
        StepView(p.state).add_bad_ids(bad.invalid, bad.repeated);
        __syncthreads();
        const u32 experts = g.world * g.slots;
        tables.sum([&](u32 column, u32 sum) {
            (column < experts ? all.experts[column] : all.ranks[column - experts]) = sum;
        });
        find_bases(g, all.ranks, bases);
        lists::write_all(p, into, stretch, counts, kept);
    } else {
        const lists::Stretch stretch{0, warp == 0 ? tokens : 0};
        clear_totals(p);
        const lists::BadIds bad = lists::count_all(p, stretch, all, lists::read_ahead(p, stretch), kept);
        StepView(p.state).add_bad_ids(bad.invalid, bad.repeated);
        __syncthreads();
        find_bases(g, all.ranks, bases);
        // Counted again from zero while the lists are written, so that they end as they were.
        clear_totals(p);
        lists::write_all(p, into, stretch, all, kept);
    }
    __syncthreads();
}

__device__ __forceinline__ void prepare(const RouteParams &p, const Blocks &blocks, u32 tokens) {
    const StepView step(p.state);
    __shared__ bool silent;
    if (threadIdx.x == 0) {
        step.note_dispatch(p.ordinal);
        silent = step.is_silent(p.ordinal, p.dependent != 0);
        WindowState window{};
        window.tokens = tokens;
        *at<WindowState>(p.handle.window) = window;
    }
    __syncthreads();
    if (!silent) {
        build(p, blocks, tokens);
        return;
    }
    for (u32 i = threadIdx.x; i < tokens; i += blockDim.x) {
        at<u32>(p.handle.fanouts)[i] = 0;
    }
    clear_totals(p);
}

// Tells every rank, this one included, what is for it.
__device__ __forceinline__ void announce(const RouteParams &p, const Blocks &blocks,
                                         const wait::Waiter &waiter) {
    const Geometry &g = p.geometry;
    LaneState *lane = at<LaneState>(p.lane.state);
    const u32 epoch = lane->epoch + 1;
    const u32 step = StepView(p.state).step();
    const u32 *per_rank = at<const u32>(p.rank_counts);
    u32 item_base = 0;
    u32 pair_base = 0;
    for (u32 first = 0; first < g.world; first += blockDim.x) {
        const u32 to = first + threadIdx.x;
        DispatchHeader header{};
        header.step = step;
        header.ordinal = p.ordinal;
        header.items = to < g.world ? per_rank[2 * to] : 0;
        header.pairs = to < g.world ? per_rank[2 * to + 1] : 0;
        header.transfer = TRANSFER_PULL;
        u32 items, pairs;
        header.item_base = item_base + scan::block_exclusive(header.items, items);
        header.pair_base = pair_base + scan::block_exclusive(header.pairs, pairs);
        item_base += items;
        pair_base += pairs;
        if (to < g.world) {
            blocks.of<DispatchHeader>(to, g.lane.dispatch_headers)[g.rank] = header;
        }
    }
    const u32 *per_expert = at<const u32>(p.expert_counts);
    for (u32 i = threadIdx.x; i < g.world * g.slots; i += blockDim.x) {
        u32 *counts = blocks.of<u32>(i / g.slots, g.lane.counts) + u64(g.rank) * g.slots;
        counts[i % g.slots] = per_expert[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        lane->epoch = epoch;
    }
    for (u32 n = threadIdx.x; n < g.world; n += blockDim.x) {
        const u32 to = nth_peer(g, n);
        waiter.signal(blocks.of<u32>(to, g.lane.dispatch_words) + g.rank, epoch);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) route(const __grid_constant__ RouteParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    const u32 given = p.num_tokens_word != 0 ? *at<const u32>(p.num_tokens_word) : p.num_tokens;
    const bool listing = blockIdx.x == 0;
    if (!faulted(waiter)) {
        if (given > p.num_tokens) {
            if (listing && threadIdx.x == 0) {
                waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Dispatch, p.geometry.rank);
            }
        } else {
            if (listing) {
                prepare(p, blocks, given);
            }
            // Staging does not hurt where the dispatch turns out to be silent, which another lane
            // may decide while this runs.
            if ((!listing || gridDim.x == 1) && !StepView(p.state).drained()) {
                const u32 others = max(gridDim.x - 1, 1u);
                stage::tokens(p, {blockIdx.x % others, others}, blocks, given);
            }
        }
    }
    // Nothing is announced where any block raised or found a fault.
    if (last_to_arrive(at<LaneState>(p.lane.state)) && !faulted(waiter)) {
        announce(p, blocks, waiter);
    }
}

#include "lists.cuh"
#include "stage.cuh"

// The sender's half of dispatch. The first block builds the lists while the others stage tokens; the
// last to be done tells every rank what is for it.

// Tables of the lists; see `lists::Tables`.
extern __shared__ u32 tables[];

__device__ __forceinline__ void prepare(const RouteParams &p, const Blocks &blocks, u32 tokens) {
    const Geometry &g = p.geometry;
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
        lists::build(p, blocks, tokens, tables, ptx::dynamic_shared_bytes() / sizeof(u32));
        return;
    }
    for (u32 i = threadIdx.x; i < tokens; i += blockDim.x) {
        at<u32>(p.handle.fanouts)[i] = 0;
    }
    for (u32 i = threadIdx.x; i < 2 * g.world; i += blockDim.x) {
        at<u32>(p.rank_counts)[i] = 0;
    }
    for (u32 i = threadIdx.x; i < g.world * g.slots; i += blockDim.x) {
        at<u32>(p.expert_counts)[i] = 0;
    }
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

#include "items.cuh"

// For each item of the window the weighted sum of its rows, written into the owner's landing slot;
// after the last window the signal, with how many items of each owner were processed.

constexpr u32 DEPTH = 2;

__device__ __forceinline__ void push(const ReducePushParams &p, const Blocks &blocks,
                                     const WindowState &window) {
    const Geometry &g = p.geometry;
    const u32 quads = g.sum_bytes / sizeof(Quad);
    const u32 pieces = rows::pieces<DEPTH>(quads);
    const u32 count = window.end - window.begin;
    for (u64 unit = rows::warp(); unit < u64(count) * pieces; unit += rows::warps()) {
        const WindowItem item = at<const WindowItem>(p.handle.items)[unit / pieces];
        rows::Sum<DEPTH> sum(u32(unit % pieces), quads);
        // In the flat layout all pairs of an item share one row, which its experts made together.
        const u32 terms = g.flat == 0 ? item.rows : 1;
        const RowRef *pairs = at<const RowRef>(p.handle.pairs) + item.begin;
        for (u32 first = 0; first < terms; first += scan::WARP) {
            const bool mine = first + scan::lane() < terms;
            const RowRef pair = mine ? pairs[first + scan::lane()] : RowRef{};
            const u32 lanes = __ballot_sync(scan::WHOLE, mine);
            sum.add(p.expert_rows, pair.row, pair.weight, p.weighted != 0, lanes);
        }
        const u64 landing = u64(blocks.of<u8>(item.source, g.lane.landing));
        sum.store(rows::row_of(landing, item.slot, quads));
    }
}

// One block does this, after all have pushed.
__device__ __forceinline__ void release(const ReducePushParams &p, const Blocks &blocks,
                                        const wait::Waiter &waiter, u32 end) {
    const Geometry &g = p.geometry;
    const StepView step(p.state);
    const u32 epoch = at<const LaneState>(p.lane.state)->epoch;
    const u32 *source_items = at<const u32>(p.handle.source_items);
    for (u32 n = threadIdx.x; n < g.world; n += blockDim.x) {
        const u32 to = nth_peer(g, n);
        const u32 first = source_items[to];
        CombineHeader header{};
        header.step = step.step();
        header.ordinal = p.ordinal;
        header.prefix = min(max(end, first), source_items[to + 1]) - first;
        header.required = step.required();
        header.first_over = step.first_over();
        blocks.of<CombineHeader>(to, g.lane.combine_headers)[g.rank] = header;
        waiter.signal(blocks.of<u32>(to, g.lane.combine_words) + g.rank, epoch);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    reduce_push(const __grid_constant__ ReducePushParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    const WindowState &window = *at<const WindowState>(p.handle.window);
    if (!faulted(waiter) && p.push != 0) {
        if (u32(*at<const i32>(p.handle.total)) <= p.row_limit) {
            push(p, blocks, window);
        } else if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Combine, p.geometry.rank);
        }
    }
    if (p.release != 0 && last_to_arrive(at<LaneState>(p.lane.state)) && !faulted(waiter)) {
        release(p, blocks, waiter, window.end);
    }
}

#include "lane.cuh"
#include "rows.cuh"

// Adds the partial sums of each token in the order of the ranks, after the fold has acquired them.

constexpr u32 DEPTH = 2;

__device__ __forceinline__ void add_partials(const ReduceParams &p, const Blocks &blocks,
                                             u32 tokens) {
    const Geometry &g = p.geometry;
    const u32 quads = g.sum_bytes / sizeof(Quad);
    const u32 pieces = rows::pieces<DEPTH>(quads);
    const u64 landing = u64(blocks.own<u8>(g.lane.landing));
    const CombineHeader *headers = blocks.own<CombineHeader>(g.lane.combine_headers);
    for (u64 unit = rows::warp(); unit < u64(tokens) * pieces; unit += rows::warps()) {
        const u32 token = u32(unit / pieces);
        const u32 reached = at<const u32>(p.handle.fanouts)[token];
        rows::Sum<DEPTH> sum(u32(unit % pieces), quads);
        for (u32 first = 0; first < reached; first += scan::WARP) {
            const u32 slot = token * g.fanout + first + scan::lane();
            bool arrived = false;
            if (first + scan::lane() < reached) {
                const Destination from = at<const Destination>(p.handle.destinations)[slot];
                arrived = from.position < headers[from.rank].prefix;
            }
            const u32 lanes = __ballot_sync(scan::WHOLE, arrived);
            sum.add(landing, slot, 1.0f, false, lanes);
        }
        sum.store(rows::row_of(p.output, token, quads));
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) reduce(const __grid_constant__ ReduceParams p) {
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    if (faulted(waiter)) {
        return;
    }
    const Blocks blocks(p.lane, g);
    const u32 tokens = at<const WindowState>(p.handle.window)->tokens;
    if (tokens > p.num_tokens) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Combine, g.rank);
        }
        return;
    }
    if (p.output != 0) {
        add_partials(p, blocks, tokens);
    }
    if (p.weight_grads != 0) {
        const float *grads = blocks.own<const float>(g.lane.weight_grads);
        const u64 count = u64(tokens) * g.top_k;
        const u64 threads = u64(gridDim.x) * blockDim.x;
        for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
            at<float>(p.weight_grads)[i] = grads[i];
        }
    }
}

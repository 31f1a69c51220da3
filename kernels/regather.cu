#include "items.cuh"

// Brings each gradient to the rows of its token, times their weights, and returns the gradients of the
// weights: the products of gradient and expert output, summed over the columns by a tree whose shape
// the number of columns alone decides. That sum is the same from run to run, but not bit for bit that
// of the host, which adds one column after the other.

constexpr u32 DEPTH = 4;
using scan::WARP;
using scan::WHOLE;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        value = __fadd_rn(value, __shfl_xor_sync(WHOLE, value, step));
    }
    return value;
}

// One item, by one warp: the gradient is read once for every 32 pairs.
__device__ __forceinline__ void bring(const RegatherParams &p, const Blocks &blocks,
                                      const WindowItem &item) {
    const Geometry &g = p.geometry;
    const u32 quads = g.sum_bytes / sizeof(Quad);
    const u64 staging = u64(blocks.of<u8>(item.source, g.lane.staging));
    const Quad *gradient = rows::row_of(staging, item.slot / g.fanout, quads);
    const RowRef *pairs = at<const RowRef>(p.handle.pairs) + item.begin;
    const u32 terms = g.flat == 0 ? item.rows : 1;
    for (u32 first = 0; first < terms; first += WARP) {
        const u32 count = min(terms - first, WARP);
        const bool mine = scan::lane() < count;
        const RowRef pair = mine ? pairs[first + scan::lane()] : RowRef{};
        float product = 0.0f;
        for (u32 number = 0; number < rows::pieces<DEPTH>(quads); ++number) {
            rows::Piece<DEPTH> piece(number, quads);
            piece.load(gradient);
            for (u32 i = 0; i < count; ++i) {
                const u32 row = __shfl_sync(WHOLE, pair.row, i);
                const float weight = __shfl_sync(WHOLE, pair.weight, i);
                Quad *to = rows::row_of(p.rows, row, quads);
                if (g.weighted != 0) {
                    piece.store_times(weight, to);
                } else {
                    piece.store(to);
                }
                if (p.expert_rows != 0) {
                    const float part =
                        warp_sum(piece.dot(rows::row_of(p.expert_rows, row, quads)));
                    product = scan::lane() == i ? __fadd_rn(product, part) : product;
                }
            }
        }
        if (mine && p.expert_rows != 0) {
            *items::weight_grad(g, blocks, item, pair.choice) = product;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    regather(const __grid_constant__ RegatherParams p) {
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    if (faulted(waiter)) {
        return;
    }
    const WindowState *window = at<const WindowState>(p.handle.window);
    // Which dispatch filled the handle last, replays decide.
    const bool too_long = u32(*at<const i32>(p.handle.total)) > p.row_limit;
    if (too_long || (p.whole != 0 && window->begin != 0)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(too_long ? wait::FaultKind::TooManyTokens : wait::FaultKind::OutOfStep,
                        wait::Phase::Dispatch, g.rank);
        }
        return;
    }
    const Blocks blocks(p.lane, g);
    const u32 count = window->end - window->begin;
    for (u32 i = rows::warp(); i < count; i += rows::warps()) {
        bring(p, blocks, at<const WindowItem>(p.handle.items)[i]);
    }
    if (g.flat == 0) {
        const auto padding_of = [&](u32 expert) { return items::padding_of(p.handle, expert); };
        items::for_each_padding(g, items::Team::of_blocks(0, gridDim.x), padding_of, [&](u32 row) {
            const u32 quads = g.sum_bytes / sizeof(Quad);
            rows::clear(rows::row_of(p.rows, row, quads), 0, quads);
        });
    }
}

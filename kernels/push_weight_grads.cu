#include "items.cuh"

// Returns gradients of weights that the caller computed, one for each row or choice.
extern "C" __global__ void __launch_bounds__(256, 2)
    push_weight_grads(const __grid_constant__ PushWeightGradsParams p) {
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    // On its way while it is found out whether there is a fault.
    const u32 total = u32(*at<const i32>(p.handle.total));
    if (faulted(waiter)) {
        return;
    }
    // Which dispatch filled the handle last, replays decide.
    if (total > p.row_limit) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Combine, g.rank);
        }
        return;
    }
    const Blocks blocks(p.lane, g);
    const WindowState *window = at<const WindowState>(p.handle.window);
    const u32 count = window->end - window->begin;
    for (u32 i = rows::warp(); i < count; i += rows::warps()) {
        const WindowItem item = at<const WindowItem>(p.handle.items)[i];
        const RowRef *pairs = at<const RowRef>(p.handle.pairs) + item.begin;
        for (u32 place = scan::lane(); place < item.rows; place += scan::WARP) {
            const RowRef pair = pairs[place];
            const u64 entry = g.flat == 0 ? pair.row : u64(pair.row) * g.flat_width + place;
            *items::weight_grad(g, blocks, item, pair.choice) = at<const float>(p.row_grads)[entry];
        }
    }
}

#include "fold.cuh"

// Waits for the partial sums of every rank. One block, since it waits.
extern "C" __global__ void __launch_bounds__(256, 2) fold(const __grid_constant__ FoldParams p) {
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    if (faulted(waiter)) {
        return;
    }
    const Blocks blocks(p.lane, g);
    const u32 *words = blocks.own<u32>(g.lane.combine_words);
    const u32 epoch = at<const LaneState>(p.lane.state)->epoch;
    wait_and_fold(g, blocks, waiter, wait::Phase::Combine, words, epoch, p.state, p.peer_required,
                  p.ordinal);
}

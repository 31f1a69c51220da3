#include "lane.cuh"

// Waits for the gradients of every rank. One block, since it waits.
extern "C" __global__ void __launch_bounds__(256, 2) acquire(const __grid_constant__ AcquireParams p) {
    using wait::Phase;
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    if (faulted(waiter)) {
        return;
    }
    const Blocks blocks(p.lane, g);
    const u32 *words = blocks.own<u32>(g.lane.dispatch_words);
    const u32 epoch = at<const LaneState>(p.lane.state)->epoch;
    if (wait_all(waiter, Phase::Dispatch, words, g.world, epoch)) {
        const DispatchHeader *headers = blocks.own<DispatchHeader>(g.lane.dispatch_headers);
        all_here(waiter, Phase::Dispatch, headers, g.world, StepView(p.state).step(), p.ordinal,
                 TRANSFER_PULL);
    }
}

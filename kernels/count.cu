#include "account.cuh"

// Acquires the signal of every rank, adds up what each has for this one, and folds the rows that all
// of it requires into the counters of the step. One block, since it waits.

extern "C" __global__ void __launch_bounds__(512, 1) count(const __grid_constant__ CountParams p) {
    using wait::Phase;
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, g);
    const u32 epoch = at<const LaneState>(p.lane.state)->epoch;
    const DispatchHeader *headers = blocks.own<DispatchHeader>(g.lane.dispatch_headers);
    const u32 *words = blocks.own<u32>(g.lane.dispatch_words);
    const u32 step = StepView(p.state).step();
    if (faulted(waiter) || !wait_all(waiter, Phase::Dispatch, words, g.world, epoch) ||
        !all_here(waiter, Phase::Dispatch, headers, g.world, step, p.ordinal, TRANSFER_PULL)) {
        // A loop behind this makes no trip.
        if (p.condition != 0 && threadIdx.x == 0) {
            set_condition(p.condition, 0);
        }
        return;
    }
    account::take_stock(p, blocks);
}

#include "fold.cuh"

// One more round of signals, so that a step that ends in a dispatch leaves every rank with the same
// verdict, and its staging areas free. One block, since it waits.
extern "C" __global__ void __launch_bounds__(256, 2)
    acknowledge(const __grid_constant__ AcknowledgeParams p) {
    const Geometry &g = p.geometry;
    const wait::Waiter waiter(p.wait);
    if (faulted(waiter)) {
        return;
    }
    const Blocks blocks(p.lane, g);
    const StepView step(p.state);
    // The words of combine, with the epoch of the dispatch that is closed: whether a pair ends in a
    // combine or here, its words move on by one.
    const u32 epoch = at<const LaneState>(p.lane.state)->epoch;
    for (u32 n = threadIdx.x; n < g.world; n += blockDim.x) {
        const u32 to = nth_peer(g, n);
        CombineHeader header{};
        header.step = step.step();
        header.ordinal = p.ordinal;
        header.required = step.required();
        header.first_over = step.first_over();
        blocks.of<CombineHeader>(to, g.lane.combine_headers)[g.rank] = header;
        waiter.signal(blocks.of<u32>(to, g.lane.combine_words) + g.rank, epoch);
    }
    const u32 *words = blocks.own<u32>(g.lane.combine_words);
    wait_and_fold(g, blocks, waiter, wait::Phase::Acknowledge, words, epoch, p.state,
                  p.peer_required, p.ordinal);
}

#include "wait.cuh"

struct AlignParams {
    wait::WaitParams wait;
    // Of each rank, as mapped here: two sets of words, in each one word for every rank that signals.
    u64 blocks;
    // How many barriers have begun.
    u64 begun;
};
SAME_LAYOUT(AlignParams, 48, begun, 40);

// Waits until every rank has come here. One block, since it waits.
//
// A rank that has passed may signal the next barrier while a slower one still looks for its signal of
// this one, so barriers use the two sets in turn: nobody begins the next barrier of the same set before
// all have passed the one between.
extern "C" __global__ void __launch_bounds__(1024, 1)
    limit_align(const __grid_constant__ AlignParams p) {
    const wait::Waiter waiter(p.wait);
    u64 *begun = at<u64>(p.begun);
    const u64 barrier = *begun;
    __syncthreads();
    if (threadIdx.x == 0) {
        *begun = barrier + 1;
    }
    const u32 set = u32(barrier & 1) * p.wait.world;
    const u32 value = u32(barrier >> 1) + 1;
    const u64 *blocks = at<const u64>(p.blocks);
    for (u32 n = threadIdx.x; n < p.wait.world; n += blockDim.x) {
        const u32 peer = (p.wait.rank + 1 + n) % p.wait.world;
        waiter.signal(at<u32>(blocks[peer]) + set + p.wait.rank, value);
    }
    const u32 *words = at<const u32>(blocks[p.wait.rank]) + set;
    u64 spent_ns = 0;
    for (u32 peer = threadIdx.x; peer < p.wait.world; peer += blockDim.x) {
        if (waiter.wait(wait::Phase::Agreement, peer, words + peer, value, spent_ns) != 0) {
            return;
        }
    }
}

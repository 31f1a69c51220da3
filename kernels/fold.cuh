// Folding what every rank said into the counters of the step.
#pragma once

#include "lane.cuh"

// What `peer` said, once it was acquired. Lanes may fold at the same time.
__device__ __forceinline__ void fold_header(u64 peer_required, const StepView &step, u32 peer,
                                            const CombineHeader &header) {
    if (COUNTERS) {
        atomicMax(at<u32>(peer_required) + peer, header.required);
    }
    step.note_over(header.first_over);
}

// Waits for every rank's word and folds its header at once, since it may be overwritten later. Fails if
// a rank is elsewhere. Every thread of the one block calls it.
__device__ __forceinline__ void wait_and_fold(const Geometry &g, const Blocks &blocks,
                                              const wait::Waiter &waiter, wait::Phase phase,
                                              const u32 *words, u32 epoch, u64 state,
                                              u64 peer_required, u32 ordinal) {
    const StepView step(state);
    const CombineHeader *headers = blocks.own<CombineHeader>(g.lane.combine_headers);
    if (!wait_all(waiter, phase, words, g.world, epoch) ||
        !all_here(waiter, phase, headers, g.world, step.step(), ordinal, NONE)) {
        return;
    }
    for (u32 peer = threadIdx.x; peer < g.world; peer += blockDim.x) {
        fold_header(peer_required, step, peer, headers[peer]);
    }
}

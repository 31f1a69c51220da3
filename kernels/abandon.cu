#include "params.cuh"

// Gives the group up in the name of this rank: its host found that it cannot go on.
extern "C" __global__ void __launch_bounds__(32, 1) abandon(const __grid_constant__ AbandonParams p) {
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    const wait::Waiter waiter(p.wait);
    if (p.fault != 0 && waiter.fault(wait::Phase::Record) == 0) {
        waiter.fail(wait::FaultKind((p.fault >> 40) & 0xff), wait::Phase((p.fault >> 32) & 0xff),
                    u32(p.fault));
    }
}

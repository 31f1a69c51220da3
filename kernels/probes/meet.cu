#include "wait.cuh"

struct Params {
    wait::WaitParams wait;
    // The word of the peer that is signalled, zero for none; the word that is waited for; and where
    // one more than the fault (or zero) that ended the wait goes.
    u64 theirs;
    u64 ours;
    u64 outcome;
    u32 peer;
    u32 epoch;
};
SAME_LAYOUT(Params, 64, epoch, 60);

extern "C" __global__ void meet(const __grid_constant__ Params p) {
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    const wait::Waiter waiter(p.wait);
    if (p.theirs != 0) {
        waiter.signal(at<u32>(p.theirs), p.epoch);
    }
    const u64 fault = waiter.wait(wait::Phase::Dispatch, p.peer, at<const u32>(p.ours), p.epoch);
    ptx::store_relaxed_sys(at<u64>(p.outcome), fault + 1);
}

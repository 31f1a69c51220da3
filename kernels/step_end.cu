#include "scan.cuh"
#include "stale.cuh"

// Publishes the record of the step, and holds back later steps after an overflow. One block, of two warps
// at least.
extern "C" __global__ void __launch_bounds__(256, 2)
    step_end(const __grid_constant__ StepEndParams p) {
    StepState *state = at<StepState>(p.state);
    const u32 step = state->step;
    const u32 kept = min(state->dispatches, p.max_dispatches);
    const u64 record = p.ring + u64(step % p.records) * p.stride;
    u64 *sequence = at<u64>(record);
    __shared__ u64 fault;
    if (threadIdx.x == scan::WARP) {
        // Looks across the bus, while another warp's fence waits for it.
        fault = wait::Waiter(p.wait).fault(wait::Phase::Record);
    }
    if (threadIdx.x == 0) {
        // A reader that still looks at the record that was here before sees that it is going.
        ptx::store_relaxed_sys(sequence, u64(0));
        ptx::fence_acq_rel_sys();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // A rank that drained by itself, its graph being stale, is held back as its peers are.
        const bool counts = state->drained == 0 || (state->required & stale::MARK) != 0;
        if (p.hold != 0 && state->first_over != NONE && counts) {
            state->held = 1;
        }
        RecordHeader *header = at<RecordHeader>(record);
        header->step = step;
        header->drained = state->drained;
        header->first_over = state->first_over;
        header->required = state->required;
        header->dispatches = state->dispatches;
        header->windows = state->windows;
        header->capacity = state->capacity;
        header->fault = fault;
        header->dropped = state->dropped;
        header->delivered = state->delivered;
        header->invalid_ids = state->invalid_ids;
        header->repeated_ids = state->repeated_ids;
    }
    u32 *peers = at<u32>(record + sizeof(RecordHeader));
    for (u32 i = threadIdx.x; i < p.wait.world; i += blockDim.x) {
        peers[i] = at<const u32>(p.peer_required)[i];
    }
    u32 *dispatches = peers + p.wait.world;
    for (u32 i = threadIdx.x; i < kept; i += blockDim.x) {
        dispatches[i] = at<const u32>(p.required_by_dispatch)[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::fence_acq_rel_sys();
        ptx::store_release_sys(sequence, u64(step) + 1);
    }
}

#include "params.cuh"
#include "stale.cuh"

// Counts the step and clears what is counted within one. One block.
//
// A step that was recorded for other shapes than those that hold moves nothing on this rank, and says so
// to all as if its first dispatch were over budget. One that is held back moves nothing on any rank.
extern "C" __global__ void __launch_bounds__(256, 2)
    step_begin(const __grid_constant__ StepBeginParams p) {
    if (threadIdx.x == 0) {
        StepState *state = at<StepState>(p.state);
        StepState fresh{};
        fresh.step = state->step + 1;
        fresh.held = state->held;
        fresh.drained = state->held;
        fresh.first_over = NONE;
        fresh.capacity = 0xffffffff;
        const u32 stale = fresh.held != 0 ? 0 : stale::found(p);
        if (stale != 0) {
            fresh.drained = 1;
            fresh.first_over = 0;
            fresh.required = stale;
        }
        *state = fresh;
    }
    for (u32 i = threadIdx.x; i < p.wait.world; i += blockDim.x) {
        at<u32>(p.peer_required)[i] = 0;
    }
    for (u32 i = threadIdx.x; i < p.max_dispatches; i += blockDim.x) {
        at<u32>(p.required_by_dispatch)[i] = 0;
    }
}

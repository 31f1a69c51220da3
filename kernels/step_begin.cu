#include "params.cuh"

// Counts the step and clears what is counted within one. One block.
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
        *state = fresh;
    }
    for (u32 i = threadIdx.x; i < p.wait.world; i += blockDim.x) {
        at<u32>(p.peer_required)[i] = 0;
    }
    for (u32 i = threadIdx.x; i < p.max_dispatches; i += blockDim.x) {
        at<u32>(p.required_by_dispatch)[i] = 0;
    }
}

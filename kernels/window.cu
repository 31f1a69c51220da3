#include "window.cuh"

// Takes the next window of a dispatch and lays it out. One block.

extern "C" __global__ void __launch_bounds__(1024, 1) window(const __grid_constant__ WindowParams p) {
    const wait::Waiter waiter(p.wait);
    if (faulted(waiter)) {
        windows::leave_empty(p);
        if (p.condition != 0 && threadIdx.x == 0) {
            set_condition(p.condition, 0);
        }
        return;
    }
    windows::advance(p, waiter, Blocks(p.lane, p.geometry));
}

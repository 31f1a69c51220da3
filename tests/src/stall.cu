#include "ptx.cuh"

struct StallParams {
    u64 word;
    u64 limit_ns;
};
SAME_LAYOUT(StallParams, 16, limit_ns, 8);

// Waits until the host sets the word, for so long at most.
extern "C" __global__ void stall(const __grid_constant__ StallParams p) {
    const u64 start = ptx::global_time_ns();
    while (ptx::load_acquire_sys(at<const u32>(p.word)) == 0 &&
           ptx::global_time_ns() - start < p.limit_ns) {
        ptx::sleep_ns(1000);
    }
}

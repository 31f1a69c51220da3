#include "loop.cuh"

struct TripParams {
    u64 left;
    u64 condition;
    // Trips to begin with; zero in the body of the loop.
    u64 begin;
};
SAME_LAYOUT(TripParams, 24, begin, 16);

// Begins a loop of so many trips, or makes one of them.
extern "C" __global__ void __launch_bounds__(32) limit_trip(const __grid_constant__ TripParams p) {
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    u64 *left = at<u64>(p.left);
    const u64 now = p.begin != 0 ? p.begin : *left - 1;
    *left = now;
    set_condition(p.condition, now != 0);
}

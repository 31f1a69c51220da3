#include "wait.cuh"

struct PingPongParams {
    wait::WaitParams wait;
    // The word of the peer that is signalled, and the one of this rank that is waited for.
    u64 theirs;
    u64 ours;
    u32 peer;
    // The value of the first trip; the words hold the one before it.
    u32 first;
    u32 trips;
    // Whether this rank signals before it waits.
    u32 serves;
};
SAME_LAYOUT(PingPongParams, 64, serves, 60);

// About a second, after which nobody needs to know how fast it is.
constexpr u32 LOOKS = 1 << 20;

// Looks without a pause, which is the least that a word can take, and leaves what takes too long to the
// wait that knows a deadline and faults. Whether the word came.
__device__ __forceinline__ bool arrives(const wait::Waiter &waiter, const PingPongParams &p, u32 value) {
    const u32 *word = at<const u32>(p.ours);
    for (u32 look = 0; look < LOOKS; ++look) {
        if (ptx::load_acquire_sys(word) == value) {
            return true;
        }
    }
    return waiter.wait(wait::Phase::Agreement, p.peer, word, value) == 0;
}

// Sends a word to and fro between two ranks.
extern "C" __global__ void __launch_bounds__(32) limit_ping_pong(const __grid_constant__ PingPongParams p) {
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    const wait::Waiter waiter(p.wait);
    for (u32 trip = 0; trip < p.trips; ++trip) {
        const u32 value = p.first + trip;
        if (p.serves != 0) {
            waiter.signal(at<u32>(p.theirs), value);
        }
        if (!arrives(waiter, p, value)) {
            return;
        }
        if (p.serves == 0) {
            waiter.signal(at<u32>(p.theirs), value);
        }
    }
}

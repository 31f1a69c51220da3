#include "types.cuh"

#ifndef STRIDE
#define STRIDE 1
#endif

struct Params {
    u64 words;
    u32 count;
    u32 addend;
};
SAME_LAYOUT(Params, 16, addend, 12);

// Adds `addend` to every STRIDE-th of `count` words.
extern "C" __global__ void add(const __grid_constant__ Params p) {
    u32 *words = at<u32>(p.words);
    const u32 threads = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i * STRIDE < p.count; i += threads) {
        words[i * STRIDE] += p.addend;
    }
}

#include "ptx.cuh"

struct CopyParams {
    u64 to;
    u64 from;
    u64 quads;
};
SAME_LAYOUT(CopyParams, 24, quads, 16);

// Quads that a thread has in flight: with a full block, 128 KiB of a multiprocessor's.
constexpr u32 DEPTH = 8;

// Copies from end to end, as fast as so many blocks can. Whether it reads a peer's memory, writes it,
// or does neither, lies in the addresses.
extern "C" __global__ void __launch_bounds__(1024, 1)
    limit_copy(const __grid_constant__ CopyParams p) {
    const ptx::Quad *from = at<const ptx::Quad>(p.from);
    ptx::Quad *to = at<ptx::Quad>(p.to);
    const u64 piece = u64(DEPTH) * blockDim.x;
    for (u64 first = blockIdx.x * piece; first < p.quads; first += gridDim.x * piece) {
        const u64 mine = first + threadIdx.x;
        if (first + piece <= p.quads) {
            ptx::Quad quads[DEPTH];
#pragma unroll
            for (u32 i = 0; i < DEPTH; ++i) {
                quads[i] = ptx::load_once(from + mine + i * blockDim.x);
            }
#pragma unroll
            for (u32 i = 0; i < DEPTH; ++i) {
                ptx::store_quad(to + mine + i * blockDim.x, quads[i]);
            }
        } else {
            for (u64 quad = mine; quad < p.quads; quad += blockDim.x) {
                ptx::store_quad(to + quad, ptx::load_once(from + quad));
            }
        }
    }
}

#include "stage.cuh"

// Stages the gradients of a rank's outputs and clears where gradients of weights arrive; the last
// block to be done signals every rank.

__device__ __forceinline__ void prepare(const RestageParams &p, const Blocks &blocks,
                                        u32 tokens) {
    const Geometry &g = p.geometry;
    u8 *staging = blocks.own<u8>(g.lane.staging);
    if (p.rows != u64(staging)) {
        stage::copy({blockIdx.x, gridDim.x}, staging, p.rows, u64(tokens) * g.sum_bytes);
    }
    float *grads = blocks.own<float>(g.lane.weight_grads);
    const u64 threads = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < u64(tokens) * g.top_k;
         i += threads) {
        grads[i] = 0.0f;
    }
}

__device__ __forceinline__ void announce(const RestageParams &p, const Blocks &blocks,
                                         const wait::Waiter &waiter) {
    const Geometry &g = p.geometry;
    const StepView step(p.state);
    LaneState *lane = at<LaneState>(p.lane.state);
    const u32 epoch = lane->epoch + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        lane->epoch = epoch;
        step.note_dispatch(p.ordinal);
    }
    for (u32 n = threadIdx.x; n < g.world; n += blockDim.x) {
        const u32 to = nth_peer(g, n);
        // There is nothing to say but that the gradients are there: the routes are known.
        DispatchHeader header{};
        header.step = step.step();
        header.ordinal = p.ordinal;
        header.transfer = TRANSFER_PULL;
        blocks.of<DispatchHeader>(to, g.lane.dispatch_headers)[g.rank] = header;
        waiter.signal(blocks.of<u32>(to, g.lane.dispatch_words) + g.rank, epoch);
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) restage(const __grid_constant__ RestageParams p) {
    const wait::Waiter waiter(p.wait);
    const Blocks blocks(p.lane, p.geometry);
    if (!faulted(waiter)) {
        // Which dispatch filled the handle last, replays decide.
        const u32 tokens = at<const WindowState>(p.handle.window)->tokens;
        if (tokens <= p.num_tokens) {
            prepare(p, blocks, tokens);
        } else if (blockIdx.x == 0 && threadIdx.x == 0) {
            waiter.fail(wait::FaultKind::TooManyTokens, wait::Phase::Dispatch, p.geometry.rank);
        }
    }
    // Nothing is announced where any block raised or found a fault.
    if (last_to_arrive(at<LaneState>(p.lane.state)) && !faulted(waiter)) {
        announce(p, blocks, waiter);
    }
}

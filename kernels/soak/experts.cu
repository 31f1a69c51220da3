#include "soak.cuh"

// The experts of a soak, on rows in either layout: expert e makes scale(e) * x + shift(e, column) of a
// value x. Where the caller applies weights they multiply by them, and in the flat layout they add up.

struct SoakExpertsParams {
    SoakShape shape;
    u64 rows;
    u64 outputs;
    u64 expert_offsets;
    u64 tokens_per_expert;
    u64 row_weights;
    u64 row_experts;
    u32 slots;
    u32 width;
};
SAME_LAYOUT(SoakExpertsParams, 112, width, 108);

using soak::Element;

// The expert that holds `row`: the last whose rows begin at or before it.
__device__ __forceinline__ u32 slot_of(const i32 *offsets, u32 slots, i32 row) {
    u32 low = 0;
    u32 high = slots;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        (offsets[middle] <= row ? low : high) = middle;
    }
    return low;
}

__device__ __forceinline__ void add_expert(float (&sum)[Element::VALUES],
                                           const float (&values)[Element::VALUES], u32 expert,
                                           float weight, u32 column) {
    const float scale = float(soak::scale(expert));
#pragma unroll
    for (u32 i = 0; i < Element::VALUES; ++i) {
        const float shift = float(soak::shift(expert, column + i));
        const float result = __fadd_rn(__fmul_rn(scale, values[i]), shift);
        sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, result));
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    soak_experts(const __grid_constant__ SoakExpertsParams p) {
    const i32 *offsets = at<const i32>(p.expert_offsets);
    const u32 total = p.slots == 0 ? 0 : u32(offsets[p.slots]);
    const u32 quads = p.shape.hidden / Element::VALUES;
    const u32 first = p.shape.rank * p.slots;
    const float *weights = at<const float>(p.row_weights);
    for (u32 row = rows::warp(); row < total; row += rows::warps()) {
        const u64 beside = u64(row) * p.width;
        const bool flat = p.row_experts != 0;
        const u32 slot = flat ? 0 : slot_of(offsets, p.slots, i32(row));
        if (!flat && i32(row) - offsets[slot] >= at<const i32>(p.tokens_per_expert)[slot]) {
            continue;
        }
        const Quad *from = rows::row_of(p.rows, row, quads);
        Quad *to = rows::row_of(p.outputs, row, quads);
        for (u32 quad = scan::lane(); quad < quads; quad += scan::WARP) {
            const u32 column = quad * Element::VALUES;
            float values[Element::VALUES];
            float sum[Element::VALUES];
            Element::decode(ptx::load_once(from + quad), values);
            dtype::clear(sum);
            if (flat) {
                for (u32 at_beside = 0; at_beside < p.width; ++at_beside) {
                    const i32 local = at<const i32>(p.row_experts)[beside + at_beside];
                    if (local >= 0) {
                        const float weight = weights[beside + at_beside];
                        add_expert(sum, values, first + u32(local), weight, column);
                    }
                }
            } else {
                const float weight = p.row_weights != 0 ? weights[beside] : 1.0f;
                add_expert(sum, values, first + slot, weight, column);
            }
            ptx::store_quad(to + quad, Element::encode(sum));
        }
    }
}

#include "rows.cuh"

// Experts that need no weights: expert e makes of a row x the row scale(e, c) * x[c] + shift(e, c), with
// a rounding after the product and one after the sum.

struct SyntheticExpertParams {
    u64 rows;
    u64 outputs;
    u64 expert_offsets;
    u64 tokens_per_expert;
    u64 expert_ids;
    u32 local_experts;
    u32 hidden;
    u32 dtype;
    u32 reserved;
};
SAME_LAYOUT(SyntheticExpertParams, 56, reserved, 52);

using dtype::Element;

// A multiple of 2^-8 in [-1, 1).
__device__ __forceinline__ float fraction(u32 bits) {
    return __fadd_rn(float(bits & 0x1ff) / 256.0f, -1.0f);
}

// Two rounds of a 32-bit finaliser of expert and column: cheap, and without visible pattern.
__device__ __forceinline__ u32 mix(u32 expert, u32 column) {
    u32 word = expert * 0x9e3779b9 ^ column * 0x85ebca6b ^ 0x5bd1e995;
    word = (word ^ word >> 16) * 0x7feb352d;
    word = (word ^ word >> 16) * 0x846ca68b;
    return word ^ word >> 15;
}

// The expert that holds `row`: the last whose rows begin at or before it.
__device__ __forceinline__ u32 expert_of(const i32 *offsets, u32 experts, i32 row) {
    u32 low = 0;
    u32 high = experts;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        (offsets[middle] <= row ? low : high) = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256, 2)
    synthetic_experts(const __grid_constant__ SyntheticExpertParams p) {
    const i32 *offsets = at<const i32>(p.expert_offsets);
    const u32 quads = p.hidden / Element::VALUES;
    const u32 total = p.local_experts == 0 ? 0 : u32(offsets[p.local_experts]);
    for (u32 row = rows::warp(); row < total; row += rows::warps()) {
        const u32 local = expert_of(offsets, p.local_experts, i32(row));
        if (i32(row) - offsets[local] >= at<const i32>(p.tokens_per_expert)[local]) {
            continue;
        }
        const u32 expert = at<const u32>(p.expert_ids)[local];
        const Quad *from = rows::row_of(p.rows, row, quads);
        Quad *to = rows::row_of(p.outputs, row, quads);
        for (u32 quad = scan::lane(); quad < quads; quad += scan::WARP) {
            float values[Element::VALUES];
            Element::decode(ptx::load_once(from + quad), values);
#pragma unroll
            for (u32 i = 0; i < Element::VALUES; ++i) {
                const u32 word = mix(expert, quad * Element::VALUES + i);
                const float product = __fmul_rn(fraction(word), values[i]);
                values[i] = __fadd_rn(product, fraction(word >> 16));
            }
            ptx::store_quad(to + quad, Element::encode(values));
        }
    }
}

#include "soak.cuh"

// Makes the inputs of the step that the state names: how many tokens, and of every layer their values,
// experts and weights. Keeps the state as the step finds it, from where a step that is replayed gets it
// back.

struct SoakInputParams {
    SoakShape shape;
    u64 before;
    u64 count;
    u64 tokens;
    u64 ids;
    u64 weights;
};
SAME_LAYOUT(SoakInputParams, 96, weights, 88);

using soak::Element;

extern "C" __global__ void __launch_bounds__(256, 2)
    soak_input(const __grid_constant__ SoakInputParams p) {
    const SoakShape &s = p.shape;
    const SoakState &state = *at<const SoakState>(s.state);
    const soak::Draw draw(s, state.step);
    const u32 tokens = draw.tokens(s.rank);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *at<SoakState>(p.before) = state;
        *at<u32>(p.count) = tokens;
    }
    const u32 quads = s.hidden / Element::VALUES;
    for (u32 unit = rows::warp(); unit < s.layers * s.max_tokens; unit += rows::warps()) {
        const u32 layer = unit / s.max_tokens;
        const u32 token = unit % s.max_tokens;
        if (token >= tokens) {
            continue;
        }
        const u64 word = draw.token(layer, s.rank, token);
        const soak::Choices choices(s, draw, layer, word);
        if (scan::lane() < s.top_k) {
            const u32 at_choice = unit * s.top_k + scan::lane();
            const bool none = choices.is_none(scan::lane());
            at<i32>(p.ids)[at_choice] = none ? -1 : i32(choices.expert(scan::lane()));
            at<float>(p.weights)[at_choice] = float(choices.weight(scan::lane()));
        }
        Quad *row = rows::row_of(p.tokens, unit, quads);
        for (u32 quad = scan::lane(); quad < quads; quad += scan::WARP) {
            float values[Element::VALUES];
#pragma unroll
            for (u32 i = 0; i < Element::VALUES; ++i) {
                values[i] = float(soak::value(word, quad * Element::VALUES + i));
            }
            ptx::store_quad(row + quad, Element::encode(values));
        }
    }
}

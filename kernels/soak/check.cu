#include "soak.cuh"

// Compares the outputs of all layers with what they have to be, counts, keeps where the first mismatch
// is, and ends the step.
//
// An item, a token for one rank, is processed whole or left out whole. So where rows may be dropped an
// output is right if it is the sum over some set of ranks; the largest such set counts, and what the
// others would have added is missing.

struct SoakCheckParams {
    SoakShape shape;
    u64 outputs;
    u32 dropping;
    u32 reserved;
};
SAME_LAYOUT(SoakCheckParams, 72, reserved, 68);

using soak::Element;

constexpr u32 NO_COLUMN = 0xffffffff;

// A token and what it sends where.
struct Token {
    const SoakShape &shape;
    u64 word;
    soak::Choices choices;

    // The rank of a choice's expert.
    __device__ __forceinline__ u32 rank(u32 choice) const {
        return choices.expert(choice) / (shape.experts / shape.world);
    }

    // What a column has to be where only ranks in the set take part.
    __device__ __forceinline__ i32 expected(u32 ranks, u32 column) const {
        const i32 value = soak::value(word, column);
        i32 sum = 0;
        for (u32 choice = 0; choice < shape.top_k; ++choice) {
            if (choices.is_none(choice) || !(ranks >> rank(choice) & 1)) {
                continue;
            }
            const u32 expert = choices.expert(choice);
            const i32 result = soak::scale(expert) * value + soak::shift(expert, column);
            sum += choices.weight(choice) * result;
        }
        return sum;
    }

    // Pairs for ranks outside of the set.
    __device__ __forceinline__ u32 missing(u32 ranks) const {
        u32 count = 0;
        for (u32 choice = 0; choice < shape.top_k; ++choice) {
            count += !choices.is_none(choice) && !(ranks >> rank(choice) & 1);
        }
        return count;
    }
};

// What a warp has found out about one output.
struct Found {
    u32 sets;   // bit s: the output may be the sum over the ranks in set s; without drops, bit 0: over all
    u32 column; // the first that is not the sum over all ranks
};

__device__ __forceinline__ Found compare(const Token &token, const Quad *row, u32 all, bool dropping) {
    const u32 candidates = dropping ? all + 1 : 1;
    u32 sets = 0xffffffff >> (32 - candidates);
    u32 column = NO_COLUMN;
    for (u32 quad = scan::lane(); quad < token.shape.hidden / Element::VALUES; quad += scan::WARP) {
        float values[Element::VALUES];
        Element::decode(ptx::load_once(row + quad), values);
#pragma unroll
        for (u32 i = 0; i < Element::VALUES; ++i) {
            const u32 here = quad * Element::VALUES + i;
            for (u32 set = 0; set < candidates; ++set) {
                const u32 ranks = dropping ? set : all;
                if (values[i] != float(token.expected(ranks, here))) {
                    sets &= ~(1u << set);
                    column = ranks == all ? min(column, here) : column;
                }
            }
        }
    }
#pragma unroll
    for (u32 step = scan::WARP / 2; step > 0; step /= 2) {
        sets &= __shfl_xor_sync(scan::WHOLE, sets, step);
        column = min(column, __shfl_xor_sync(scan::WHOLE, column, step));
    }
    return {sets, column};
}

__device__ __forceinline__ float value_at(const Quad *row, u32 column) {
    float values[Element::VALUES];
    Element::decode(ptx::load_once(row + column / Element::VALUES), values);
    float value = 0.0f;
#pragma unroll
    for (u32 i = 0; i < Element::VALUES; ++i) {
        value = column % Element::VALUES == i ? values[i] : value;
    }
    return value;
}

// Counts a mismatch and, if it is the first, keeps where it is.
__device__ void complain(SoakState &state, u64 step, u32 layer, u32 at_token, const Token &token,
                         const Quad *row, u32 all, u32 column) {
    atomicAdd(&state.mismatches, 1ull);
    if (atomicCAS(&state.claimed, 0u, 1u) != 0) {
        return;
    }
    state.bad_step = step;
    state.bad_layer = layer;
    state.bad_token = at_token;
    state.bad_column = column;
    state.bad_found = __float_as_uint(value_at(row, column));
    state.bad_expected = __float_as_uint(float(token.expected(all, column)));
}

extern "C" __global__ void __launch_bounds__(256, 2)
    soak_check(const __grid_constant__ SoakCheckParams p) {
    const SoakShape &s = p.shape;
    SoakState &state = *at<SoakState>(s.state);
    const u64 step = state.step;
    const soak::Draw draw(s, step);
    const u32 tokens = draw.tokens(s.rank);
    const u32 all = 0xffffffff >> (32 - s.world);
    const u32 quads = s.hidden / Element::VALUES;
    u64 compared = 0;
    u64 missing = 0;
    for (u32 unit = rows::warp(); unit < s.layers * s.max_tokens; unit += rows::warps()) {
        const u32 layer = unit / s.max_tokens;
        const u32 at_token = unit % s.max_tokens;
        if (at_token >= tokens) {
            continue;
        }
        const u64 word = draw.token(layer, s.rank, at_token);
        const Token token{s, word, soak::Choices(s, draw, layer, word)};
        const Quad *row = rows::row_of(p.outputs, unit, quads);
        const Found found = compare(token, row, all, p.dropping != 0);
        ++compared;
        if (found.sets == 0) {
            if (scan::lane() == 0) {
                complain(state, step, layer, at_token, token, row, all, found.column);
            }
        } else if (p.dropping != 0) {
            missing += token.missing(31 - __clz(found.sets));
        }
    }
    if (scan::lane() == 0 && compared != 0) {
        atomicAdd(&state.compared, compared);
        atomicAdd(&state.missing, missing);
    }
    __syncthreads();
    if (threadIdx.x == 0 && ptx::fetch_add_acq_rel_gpu(&state.arrived, 1) == gridDim.x - 1) {
        // Every block has read the step by now.
        state.arrived = 0;
        state.step = step + 1;
    }
}

// What a soak computes in closed form: from the number of a step follow its routing, its tokens, and
// what has to come out. All of it is whole numbers of magnitude 192 at most, which every number format
// and every sum of them holds exactly, in whatever order it is added.
#pragma once

#include "rows.cuh"

// What has been found so far. One thread writes a word, or many count in it.
struct SoakState {
    u64 step;       // which runs, or will next
    u64 compared;   // outputs of tokens that were compared
    u64 mismatches; // of these
    u64 missing;    // pairs of token and expert that outputs lack
    u64 bad_step;   // where the first mismatch was, if `claimed`
    u32 bad_layer;
    u32 bad_token;
    u32 bad_column;
    u32 bad_found; // bits of f32 numbers
    u32 bad_expected;
    u32 claimed;
    u32 arrived; // blocks of the comparison that are done
    u32 reserved;
};
SAME_LAYOUT(SoakState, 72, reserved, 68);

struct SoakShape {
    u64 seed;
    u64 state;
    u32 rank;
    u32 world;
    u32 experts; // a multiple of `world`: rank r has a share of consecutive ones
    u32 top_k;
    u32 hidden;
    u32 max_tokens;
    u32 layers;
    u32 burst;  // one step of so many sends all tokens to one rank; zero for none
    u32 ragged; // nonzero: ranks have fewer tokens than the most, differently in each step
    u32 format; // for the host: this is compiled for one
};
SAME_LAYOUT(SoakShape, 56, format, 52);

namespace soak {

using dtype::Element;

constexpr u32 MOST_TOP_K = 8;
constexpr u64 GOLDEN = 0x9e3779b97f4a7c15;

__device__ __forceinline__ u64 mix(u64 word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

// The upper three bits of two words well mixed, less four: a whole number from -4 to 3.
__device__ __forceinline__ i32 digit(u32 one, u32 column) {
    u32 word = one ^ column * 0x9e3779b9;
    word = (word ^ word >> 16) * 0x7feb352d;
    word = (word ^ word >> 15) * 0x846ca68b;
    return i32(word >> 29) - 4;
}

// A step, of which everything else is drawn.
class Draw {
  public:
    __device__ __forceinline__ Draw(const SoakShape &shape, u64 step)
        : shape_(shape), step_(mix(shape.seed + step * GOLDEN)) {}

    __device__ __forceinline__ bool is_burst() const {
        return shape_.burst != 0 && u32(step_ >> 32) % shape_.burst == 0;
    }

    __device__ __forceinline__ u32 tokens(u32 rank) const {
        const bool all = shape_.ragged == 0 || is_burst();
        const u32 drawn = u32(mix(step_ - (rank + 1) * GOLDEN) >> 32) % (shape_.max_tokens + 1);
        return all ? shape_.max_tokens : drawn;
    }

    __device__ __forceinline__ u64 token(u32 layer, u32 rank, u32 token) const {
        const u64 place = u64(layer) << 48 | u64(rank) << 32 | token;
        return mix(step_ + (place + 1) * GOLDEN);
    }

    __device__ __forceinline__ u64 word() const { return step_; }

  private:
    const SoakShape &shape_;
    u64 step_;
};

// The experts of a token: an arithmetic sequence, so that all differ; some are none.
class Choices {
  public:
    __device__ __forceinline__ Choices(const SoakShape &shape, const Draw &draw, u32 layer, u64 token)
        : experts_(shape.experts) {
        const u64 one = mix(token);
        const u64 two = mix(one);
        doubled_ = u32(two >> 56);
        if (draw.is_burst()) {
            const u32 share = shape.experts / shape.world;
            const u32 first = (u32(draw.word()) + layer) % shape.world * share;
            first_ = min(first, shape.experts - shape.top_k);
            stride_ = 1;
            none_ = 0;
        } else {
            first_ = u32(one) % shape.experts;
            stride_ = 1 + u32(one >> 32) % (shape.experts / shape.top_k);
            none_ = u32(two & two >> 8 & two >> 16 & two >> 24) & 0xff;
        }
    }

    __device__ __forceinline__ bool is_none(u32 choice) const { return none_ >> choice & 1; }
    __device__ __forceinline__ u32 expert(u32 choice) const {
        return (first_ + choice * stride_) % experts_;
    }
    __device__ __forceinline__ i32 weight(u32 choice) const { return 1 + i32(doubled_ >> choice & 1); }

  private:
    u32 experts_;
    u32 first_;
    u32 stride_;
    u32 none_;
    u32 doubled_;
};

__device__ __forceinline__ i32 value(u64 token, u32 column) { return digit(u32(token), column); }

// What an expert multiplies by: 1 or 2, so that a sum over experts never loses the token.
__device__ __forceinline__ i32 scale(u32 expert) { return 1 + i32(expert * 0x9e3779b9 >> 31); }

// And what it adds.
__device__ __forceinline__ i32 shift(u32 expert, u32 column) {
    return digit(expert * 0x85ebca6b + 0x5bd1e995, column);
}

} // namespace soak

// Entries of pushed lists that carry the turn to which they belong.
//
// An entry is sixteen bytes, stored and loaded in one access each. Whoever finds the turn has the entry: it
// needs no fence behind it and no flag, either of which would wait for a link that rows have filled. A turn
// has 48 bits here, of which a lane that takes one every five microseconds has enough for forty years.
#pragma once

#include "structs.cuh"

namespace stamped {

constexpr u32 TAG_BITS = 16;

// The turn above a tag, and what else there is.
struct alignas(16) Word {
    u64 low;
    u64 high;

    __device__ __forceinline__ bool is_of(u64 turn) const {
        return (low ^ turn << TAG_BITS) >> TAG_BITS == 0;
    }
    __device__ __forceinline__ u32 tag() const { return u32(low) & ((1u << TAG_BITS) - 1); }
};

__device__ __forceinline__ Word load(const Word *from) {
    Word word;
    ptx::load_relaxed_sys(from, word.low, word.high);
    return word;
}
__device__ __forceinline__ void store(Word *to, const Word &word) {
    ptx::store_relaxed_sys(to, word.low, word.high);
}

// Ranks and choices of a token, of either of which there are at most 32 where rows are pushed, have a byte
// each.
__device__ __forceinline__ Word of(const Geometry &g, const Item &item, u64 turn) {
    const u32 reached = item.slot - item.token * g.fanout;
    return Word{turn << TAG_BITS | reached << 8 | item.pairs, u64(item.pair_begin) << 32 | item.token};
}
__device__ __forceinline__ Item item_of(const Geometry &g, const Word &word) {
    const u32 token = u32(word.high);
    return Item{token, token * g.fanout + (word.tag() >> 8), u32(word.high >> 32), word.tag() & 0xff};
}

// A pair's number among those of its expert is less than the most tokens of a rank, of which there are at
// most 2^20 where rows are pushed.
constexpr u32 CHOICE_BITS = 12;
constexpr u32 MOST_TOKENS = 1 << 20;
static_assert(MOST_TOKENS <= 1u << (32 - CHOICE_BITS), "a pair's number has the other bits");
__device__ __forceinline__ Word of(const Pair &pair, u64 turn) {
    return Word{turn << TAG_BITS | pair.slot,
                u64(__float_as_uint(pair.weight)) << 32 | pair.index << CHOICE_BITS | pair.choice};
}
__device__ __forceinline__ Pair pair_of(const Word &word) {
    const u32 low = u32(word.high);
    return Pair{word.tag(), low >> CHOICE_BITS, __uint_as_float(u32(word.high >> 32)),
                low & ((1u << CHOICE_BITS) - 1)};
}

} // namespace stamped

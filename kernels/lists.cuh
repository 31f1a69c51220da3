// From expert ids to a list for each destination.
//
// The lists are in the order of tokens, and a pair's number among those of its expert too. They come
// from a scan and never from a race: each warp of a team of blocks takes a stretch of consecutive tokens
// and counts it, sums over the warps, and over the blocks if there are several, say where each stretch
// begins, and each warp then goes through its stretch again, in order, with running counts of its own.
//
// Within a warp the choices of one token lie in neighbouring lanes, and as many tokens as fit stand side
// by side. Compiled for TOP_K, the most choices of a token.
#pragma once

#include "lane.cuh"
#include "scan.cuh"

#ifndef TOP_K
#define TOP_K 64
#endif

namespace lists {

using scan::lane;
using scan::WARP;
using scan::WHOLE;

__device__ constexpr u32 ceil_power_of_two(u32 value) {
    u32 power = 1;
    while (power < value) {
        power *= 2;
    }
    return power;
}

// Lanes of a token, choices of a lane, tokens side by side.
constexpr u32 GROUP = TOP_K >= WARP ? WARP : ceil_power_of_two(TOP_K);
constexpr u32 SPLIT = (TOP_K + GROUP - 1) / GROUP;
constexpr u32 ABREAST = WARP / GROUP;

// Which of the token's choices is the `part`-th of this lane.
__device__ __forceinline__ u32 choice_of(u32 part) { return part * GROUP + lane() % GROUP; }

// Where the counts of a warp's tokens are: of pairs for each expert slot of each rank, of items and
// pairs for each rank.
struct Counts {
    u32 *experts;
    u32 *ranks;
};

// What a lane knows of its choices of one token.
struct Choices {
    // The rank and the expert: the order in which a token's pairs stand. NONE: no valid choice.
    u32 key[SPLIT];
    u32 slot[SPLIT];
    // The pairs of the token for the same rank, and those of them before this one.
    u32 pairs[SPLIT];
    u32 place[SPLIT];
    // Ranks before this one that the token goes to.
    u32 reached[SPLIT];
    float weight[SPLIT];
    // All ranks that it goes to.
    u32 fanout;

    __device__ __forceinline__ bool valid(u32 part) const { return key[part] != NONE; }
    __device__ __forceinline__ bool leads(u32 part) const { return valid(part) && place[part] == 0; }
    __device__ __forceinline__ u32 rank(u32 part) const { return key[part] >> 16; }
};

// Ids that are none, by why.
struct BadIds {
    u32 invalid = 0;
    u32 repeated = 0;
};

// What the caller says of a token, before anything is made of it, not even of a short id a long one: whoever asks
// ahead has not waited for it.
struct Given {
    u32 low[SPLIT];
    u32 high[SPLIT];
    float weight[SPLIT];

    // -1: none.
    __device__ __forceinline__ i64 id(u32 part, u32 id_bytes) const {
        return id_bytes == 8 ? i64(u64(high[part]) << 32 | low[part]) : i64(i32(low[part]));
    }
};

// Reads what is said of a token; lanes without a token say so.
template <typename Params>
__device__ __forceinline__ Given read(const Params &p, u32 token, bool present) {
    const Geometry &g = p.geometry;
    Given given;
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        given.low[part] = given.high[part] = NONE;
        given.weight[part] = 1.0f;
        if (present && choice_of(part) < g.top_k) {
            const u64 entry = u64(token) * g.top_k + choice_of(part);
            if (p.topk_weights != 0) {
                given.weight[part] = at<const float>(p.topk_weights)[entry];
            }
            if (p.id_bytes == 8) {
                const u64 id = at<const u64>(p.topk_ids)[entry];
                given.low[part] = u32(id);
                given.high[part] = u32(id >> 32);
            } else {
                given.low[part] = at<const u32>(p.topk_ids)[entry];
            }
        }
    }
    return given;
}

// Where the experts live that a token names; nowhere for what is no expert.
struct Homes {
    ExpertHomeEntry of[SPLIT];
};
template <typename Params>
__device__ __forceinline__ Homes find(const Params &p, const Given &given) {
    Homes homes;
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        const i64 id = given.id(part, p.id_bytes);
        homes.of[part] = ExpertHomeEntry{};
        if (id >= 0 && id < i64(p.geometry.experts)) {
            homes.of[part] = at<const ExpertHomeEntry>(p.homes)[id];
        }
    }
    return homes;
}

// Compares the choices of a token, of which each lane has several. Of those that name the same expert the first
// counts.
__device__ __forceinline__ void compare(Choices &c, BadIds &bad) {
    bool repeated[SPLIT] = {};
#pragma unroll
    for (u32 other_part = 0; other_part < SPLIT; ++other_part) {
        for (u32 from = 0; from < GROUP; ++from) {
            const u32 other = __shfl_sync(WHOLE, c.key[other_part], from, GROUP);
#pragma unroll
            for (u32 part = 0; part < SPLIT; ++part) {
                const bool before = other_part * GROUP + from < choice_of(part);
                repeated[part] |= before && other == c.key[part] && other != NONE;
            }
        }
    }
    u32 lead[SPLIT];
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        bad.repeated += repeated[part];
        c.key[part] = repeated[part] ? NONE : c.key[part];
        c.pairs[part] = c.place[part] = c.reached[part] = 0;
    }
#pragma unroll
    for (u32 other_part = 0; other_part < SPLIT; ++other_part) {
        for (u32 from = 0; from < GROUP; ++from) {
            const u32 other = __shfl_sync(WHOLE, c.key[other_part], from, GROUP);
#pragma unroll
            for (u32 part = 0; part < SPLIT; ++part) {
                const bool same = other != NONE && other >> 16 == c.rank(part);
                c.pairs[part] += same;
                c.place[part] += same && other < c.key[part];
            }
        }
    }
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        lead[part] = c.leads(part) ? c.rank(part) : NONE;
    }
    c.fanout = 0;
#pragma unroll
    for (u32 other_part = 0; other_part < SPLIT; ++other_part) {
        for (u32 from = 0; from < GROUP; ++from) {
            const u32 other = __shfl_sync(WHOLE, lead[other_part], from, GROUP);
            c.fanout += other != NONE;
#pragma unroll
            for (u32 part = 0; part < SPLIT; ++part) {
                c.reached[part] += other < c.rank(part);
            }
        }
    }
}

// The same where each lane has one: its place among the token's, in the order of ranks and experts, less that of its
// rank.
__device__ __forceinline__ void place(Choices &c) {
    const u32 key = c.key[0];
    u32 below = 0;
    u32 below_rank = 0;
    u32 upto_rank = 0;
#pragma unroll
    for (u32 from = 0; from < GROUP; ++from) {
        const u32 other = __shfl_sync(WHOLE, key, from, GROUP);
        below += other < key;
        below_rank += other < (key & 0xffff0000);
        upto_rank += other <= (key | 0xffff);
    }
    c.place[0] = c.valid(0) ? below - below_rank : 0;
    c.pairs[0] = c.valid(0) ? upto_rank - below_rank : 0;
}
__device__ __forceinline__ void compare_one(const Geometry &g, Choices &c, BadIds &bad) {
    const u32 key = c.key[0];
    bool repeated = false;
#pragma unroll
    for (u32 from = 0; from + 1 < GROUP; ++from) {
        repeated |= __shfl_sync(WHOLE, key, from, GROUP) == key && from < choice_of(0);
    }
    if (repeated && c.valid(0)) {
        c.key[0] = NONE;
        ++bad.repeated;
    }
    place(c);
    const bool leads = c.leads(0);
    if (g.world <= WARP) {
        // Ranks as bits of a word.
        const u32 own = c.valid(0) ? 1u << c.rank(0) : 0;
        u32 ranks = own;
#pragma unroll
        for (u32 step = 1; step < GROUP; step *= 2) {
            ranks |= __shfl_xor_sync(WHOLE, ranks, step);
        }
        c.fanout = __popc(ranks);
        c.reached[0] = own != 0 ? __popc(ranks & (own - 1)) : 0;
    } else {
        c.fanout = 0;
        c.reached[0] = 0;
        for (u32 from = 0; from < GROUP; ++from) {
            const u32 other = __shfl_sync(WHOLE, leads ? c.rank(0) : NONE, from, GROUP);
            c.fanout += other != NONE;
            c.reached[0] += other < c.rank(0);
        }
    }
}

// Makes choices of what was read; a whole warp calls this.
template <typename Params>
__device__ __forceinline__ Choices look(const Params &p, const Given &given, const Homes &homes, BadIds &bad) {
    const Geometry &g = p.geometry;
    Choices c{};
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        const i64 id = given.id(part, p.id_bytes);
        c.key[part] = NONE;
        c.slot[part] = 0;
        c.weight[part] = given.weight[part];
        if (id >= 0 && id < i64(g.experts)) {
            // There are at most 2^16 experts, and fewer ranks.
            c.key[part] = homes.of[part].rank << 16 | u32(id);
            c.slot[part] = homes.of[part].slot;
        } else {
            bad.invalid += id != -1;
        }
    }
    if constexpr (SPLIT == 1) {
        compare_one(g, c, bad);
    } else {
        compare(c, bad);
    }
    return c;
}

template <typename Params>
__device__ __forceinline__ Choices look(const Params &p, const Given &given, BadIds &bad) {
    return look(p, given, find(p, given), bad);
}

// Adds the choices to the counts.
__device__ __forceinline__ void count(const Geometry &g, const Choices &c, const Counts &counts) {
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        if (c.valid(part)) {
            atomicAdd(counts.experts + c.rank(part) * g.slots + c.slot[part], 1u);
        }
        if (c.leads(part)) {
            atomicAdd(counts.ranks + 2 * c.rank(part), 1u);
            atomicAdd(counts.ranks + 2 * c.rank(part) + 1, c.pairs[part]);
        }
    }
}

// Where the entries of a choice go: in the lists of its rank, and among the pairs of its expert.
struct Entry {
    u32 position;
    u32 pair_begin;
    u32 index;
};

// Finds the places of the choices of `tokens` tokens that stand side by side, from what came before them, in
// `counts`, which then says what came before the tokens behind these. A whole warp calls this.
__device__ __forceinline__ void take_places(const Geometry &g, const Choices &c, u32 tokens, const Counts &counts,
                                            Entry (&entries)[SPLIT]) {
    // One token after the other, which is quicker than to find what they have in common if there are few of them.
    constexpr u32 FEW = 8;
    if constexpr (ABREAST <= FEW) {
        for (u32 turn = 0; turn < min(ABREAST, tokens); ++turn) {
            const bool mine = lane() / GROUP == turn;
#pragma unroll
            for (u32 part = 0; part < SPLIT; ++part) {
                if (mine && c.valid(part)) {
                    entries[part] = Entry{counts.ranks[2 * c.rank(part)], counts.ranks[2 * c.rank(part) + 1],
                                          counts.experts[c.rank(part) * g.slots + c.slot[part]]};
                }
            }
            __syncwarp();
#pragma unroll
            for (u32 part = 0; part < SPLIT; ++part) {
                if (mine && c.valid(part)) {
                    counts.experts[c.rank(part) * g.slots + c.slot[part]] = entries[part].index + 1;
                }
                if (mine && c.leads(part)) {
                    counts.ranks[2 * c.rank(part)] = entries[part].position + 1;
                    counts.ranks[2 * c.rank(part) + 1] = entries[part].pair_begin + c.pairs[part];
                }
            }
            __syncwarp();
        }
    } else {
        static_assert(SPLIT == 1 || ABREAST <= FEW, "a choice in each lane");
        const u32 rank = c.rank(0);
        const u32 bucket = rank * g.slots + c.slot[0];
        // Lanes of tokens before this one.
        const u32 before = (1u << (lane() / GROUP * GROUP)) - 1;
        const u32 leaders = __ballot_sync(WHOLE, c.leads(0));
        const u32 same_rank = __match_any_sync(WHOLE, c.valid(0) ? rank : NONE) & before;
        const u32 same_expert = __match_any_sync(WHOLE, c.valid(0) ? bucket : NONE) & before;
        if (c.valid(0)) {
            entries[0] = Entry{counts.ranks[2 * rank] + u32(__popc(same_rank & leaders)),
                               counts.ranks[2 * rank + 1] + u32(__popc(same_rank)),
                               counts.experts[bucket] + u32(__popc(same_expert))};
        }
        __syncwarp();
        count(g, c, counts);
        __syncwarp();
    }
}

// Writes the list entries of `tokens` tokens that stand side by side, of which this lane has `token`. `counts` is
// what came before them, and afterwards what came before those behind them; `into` is where each rank's lists are.
template <typename Params, typename Lists>
__device__ __forceinline__ void write(const Params &p, const Lists &into, const Choices &c, u32 token,
                                      u32 tokens, const Counts &counts) {
    const Geometry &g = p.geometry;
    Destination *destinations = at<Destination>(p.handle.destinations) + u64(token) * g.fanout;
    Entry entries[SPLIT];
    take_places(g, c, tokens, counts, entries);
#pragma unroll
    for (u32 part = 0; part < SPLIT; ++part) {
        if (!c.valid(part)) {
            continue;
        }
        const u32 rank = c.rank(part);
        const Entry &entry = entries[part];
        into.put(Pair{c.slot[part], entry.index, c.weight[part], choice_of(part)}, rank, entry.position,
                 entry.pair_begin, c.place[part]);
        if (c.leads(part)) {
            into.put(Item{token, token * g.fanout + c.reached[part], entry.pair_begin, c.pairs[part]}, rank,
                     entry.position);
            destinations[c.reached[part]] = Destination{rank, entry.position};
        }
    }
    if (lane() / GROUP >= tokens) {
        return;
    }
    if (lane() % GROUP == 0) {
        at<u32>(p.handle.fanouts)[token] = c.fanout;
    }
    for (u32 i = c.fanout + lane() % GROUP; i < g.fanout; i += GROUP) {
        destinations[i] = Destination{NONE, NONE};
    }
}

// The counts of the warps of one block, in shared memory for as many warps as it has room for.
class Tables {
  public:
    // Of a block that lists so many tokens: no more warps than find something to do, since what is done for each
    // column is done for each warp.
    __device__ __forceinline__ Tables(const Geometry &g, u32 *shared, u32 shared_words, u32 tokens)
        : experts_(g.world * g.slots), columns_(experts_ + 2 * g.world), shared_(shared),
          warps_(min(min(blockDim.x / WARP, shared_words / columns_),
                     max((tokens + ABREAST - 1) / ABREAST, 1u))) {}

    // Zero where shared memory does not hold the counts of a single warp.
    __device__ __forceinline__ u32 warps() const { return warps_; }
    // Counts of one warp: those of experts, then those of ranks.
    __device__ __forceinline__ u32 columns() const { return columns_; }

    __device__ __forceinline__ Counts of_warp(u32 warp) const {
        u32 *experts = shared_ + warp * columns_;
        return Counts{experts, experts + experts_};
    }

    __device__ __forceinline__ void clear() const {
        for (u32 i = threadIdx.x; i < warps_ * columns_; i += blockDim.x) {
            shared_[i] = 0;
        }
        __syncthreads();
    }

    // Turns the counts of the warps into what comes before each of them; `keep(column, sum)` gets the
    // sum over all.
    template <typename Keep>
    __device__ __forceinline__ void sum(Keep keep) const {
        for (u32 i = threadIdx.x; i < columns_; i += blockDim.x) {
            u32 before = 0;
            for (u32 first = 0; first < warps_; first += AT_ONCE) {
                u32 own[AT_ONCE];
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) {
                    const u32 warp = first + j;
                    own[j] = warp < warps_ ? shared_[warp * columns_ + i] : 0;
                }
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; ++j) {
                    if (first + j < warps_) {
                        shared_[(first + j) * columns_ + i] = before;
                    }
                    before += own[j];
                }
            }
            keep(i, before);
        }
        __syncthreads();
    }

    // Adds what comes before this block; `before(column)` says how much.
    template <typename Before>
    __device__ __forceinline__ void shift(Before before) const {
        for (u32 i = threadIdx.x; i < columns_; i += blockDim.x) {
            const u32 more = before(i);
            for (u32 warp = 0; warp < warps_; ++warp) {
                shared_[warp * columns_ + i] += more;
            }
        }
        __syncthreads();
    }

  private:
    // Counts that a thread reads before it uses the first of them.
    static constexpr u32 AT_ONCE = 8;

    u32 experts_;
    u32 columns_;
    u32 *shared_;
    u32 warps_;
};

// The tokens that a warp goes through, in order.
struct Stretch {
    u32 begin;
    u32 end;
};

// That of warp `warp` of `warps`.
__device__ __forceinline__ Stretch stretch_of(u32 tokens, u32 warp, u32 warps) {
    const u32 length = (tokens + warps - 1) / warps;
    const u32 begin = min(warp * length, tokens);
    return Stretch{begin, min(begin + length, tokens)};
}

// The choices of the first tokens of a stretch, kept from when they are counted until they are written.
struct Kept {
    static constexpr u32 ROUNDS = 2;
    Choices choices[ROUNDS];
};

// What is said of those tokens, read ahead of everything else.
struct Ahead {
    Given given[Kept::ROUNDS];
};

template <typename Params>
__device__ __forceinline__ Ahead read_ahead(const Params &p, const Stretch &stretch) {
    Ahead ahead;
    const u32 token = stretch.begin + lane() / GROUP;
#pragma unroll
    for (u32 round = 0; round < Kept::ROUNDS; ++round) {
        const u32 here = token + round * ABREAST;
        ahead.given[round] = read(p, here, here < stretch.end);
    }
    return ahead;
}

// Counts the choices of a stretch, and returns this lane's share of those that are none.
template <typename Params>
__device__ __forceinline__ BadIds count_all(const Params &p, const Stretch &stretch,
                                          const Counts &counts, const Ahead &ahead, Kept &kept) {
    BadIds bad;
    const u32 token = stretch.begin + lane() / GROUP;
    Homes homes[Kept::ROUNDS];
#pragma unroll
    for (u32 round = 0; round < Kept::ROUNDS; ++round) {
        homes[round] = find(p, ahead.given[round]);
    }
#pragma unroll
    for (u32 round = 0; round < Kept::ROUNDS; ++round) {
        if (stretch.begin + round * ABREAST < stretch.end) {
            kept.choices[round] = look(p, ahead.given[round], homes[round], bad);
            count(p.geometry, kept.choices[round], counts);
        }
    }
    for (u32 skip = Kept::ROUNDS * ABREAST; stretch.begin + skip < stretch.end; skip += ABREAST) {
        const u32 here = token + skip;
        count(p.geometry, look(p, read(p, here, here < stretch.end), bad), counts);
    }
    return bad;
}

// Writes the entries of a stretch. `counts` is what comes before it, and ends behind it.
template <typename Params, typename Lists>
__device__ __forceinline__ void write_all(const Params &p, const Lists &into, const Stretch &stretch,
                                          const Counts &counts, const Kept &kept) {
    const auto write_next = [&](u32 first, const Choices &choices) {
        write(p, into, choices, first + lane() / GROUP, stretch.end - first, counts);
    };
    BadIds bad;
    u32 first = stretch.begin;
#pragma unroll
    for (u32 round = 0; round < Kept::ROUNDS; ++round, first += ABREAST) {
        if (first < stretch.end) {
            write_next(first, kept.choices[round]);
        }
    }
    for (; first < stretch.end; first += ABREAST) {
        const u32 token = first + lane() / GROUP;
        write_next(first, look(p, read(p, token, token < stretch.end), bad));
    }
}

// Counts of a warp of this block that has no stretch of its own are those of another: it touches none.
__device__ __forceinline__ u32 own_warp(const Tables &tables) {
    return min(threadIdx.x / WARP, tables.warps() - 1);
}

} // namespace lists

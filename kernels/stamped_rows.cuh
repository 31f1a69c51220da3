// Pieces of rows that carry the turn to which they belong.
//
// With few tokens it is not bytes that count but how often the link is waited for, and a flag costs that twice:
// the fence before it waits until all is there that it stands for, and whoever finds it has still to ask for that.
// So every sixteen bytes travel with the turn beside twelve of the row, and whoever finds the turn has them. Three
// quads of a lane go as four: three words of each, and in the fourth the last word of all three.
//
// The turn has 32 bits here, and a place is written only where routing has something for it. What one still holds of
// 2^32 turns ago would be taken for what is waited for; so whoever owns it clears it long before.
#pragma once

#include "scan.cuh"
#include "structs.cuh"

// Whether rows travel so: compiled for few tokens or for many.
#ifndef STAMPED
#define STAMPED 0
#endif

namespace stamped {

using scan::WARP;

constexpr bool ROWS = STAMPED != 0;

// Quads of a lane in a piece of a row, and the bytes of a piece on its way.
constexpr u32 ROW_QUADS = 3;
constexpr u32 PIECE_BYTES = (ROW_QUADS + 1) * WARP * sizeof(Quad);

// Every so many turns all places are cleared: some seconds apart where turns follow each other, and within the soak.
constexpr u32 CLEARED_EVERY = 1 << 17;
__device__ __forceinline__ bool is_cleared_after(u64 turn) {
    return ROWS && turn % CLEARED_EVERY == 0;
}

// Clears `count` rows of `pieces` pieces each; one whole block calls this.
__device__ __forceinline__ void clear(u8 *rows, u32 count, u32 pieces) {
    const u64 bytes = u64(count) * pieces * PIECE_BYTES;
    for (u64 at = threadIdx.x * sizeof(Quad); at < bytes; at += blockDim.x * sizeof(Quad)) {
        ptx::store_relaxed_sys(rows + at, 0, 0);
    }
}

// How many pieces a row of so many quads has.
__device__ __forceinline__ u32 pieces_of(u32 quads) {
    return (quads + ROW_QUADS * WARP - 1) / (ROW_QUADS * WARP);
}

// A piece with so many quads of a row: at hand, in the row, or at a place where it lands.
class Piece {
  public:
    __device__ __forceinline__ explicit Piece(u32 quads) : left_(i32(quads) - i32(scan::lane())) {}

    // This lane's quads of a row whose piece begins at `row`.
    __device__ __forceinline__ void load(const Quad *row, Quad (&quads)[ROW_QUADS]) const {
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; ++i) {
            quads[i] = has(i) ? ptx::load_once(row + i * WARP + scan::lane()) : Quad{};
        }
    }
    __device__ __forceinline__ void store(Quad *row, const Quad (&quads)[ROW_QUADS]) const {
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; ++i) {
            if (has(i)) {
                ptx::store_streaming(row + i * WARP + scan::lane(), quads[i]);
            }
        }
    }

    // Sends it.
    __device__ __forceinline__ void put(u64 place, const Quad (&quads)[ROW_QUADS], u64 turn) const {
        Quad rest{};
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; ++i) {
            rest.word[i] = quads[i].word[LAST];
            if (has(i)) {
                put(place, i, quads[i], turn);
            }
        }
        if (has(0)) {
            put(place, ROW_QUADS, rest, turn);
        }
    }

    // What lies there now: a piece on its way or, if it is not `stamped`, the piece as it is in a row. What the lane
    // has no part of stays as it was.
    struct Found {
        Quad quad[ROW_QUADS + 1];
    };
    __device__ __forceinline__ void look(u64 place, Found &found, bool stamped = true) const {
#pragma unroll
        for (u32 i = 0; i <= ROW_QUADS; ++i) {
            if (has(i % ROW_QUADS) && (i < ROW_QUADS || stamped)) {
                u64 low, high;
                ptx::load_relaxed_sys(of_lane(place, i), low, high);
                found.quad[i] = Quad{{u32(low), u32(low >> 32), u32(high), u32(high >> 32)}};
            }
        }
    }
    // Whether that is this lane's part of what was sent in a turn.
    __device__ __forceinline__ bool is_of(const Found &found, u64 turn) const {
        bool all = true;
#pragma unroll
        for (u32 i = 0; i <= ROW_QUADS; ++i) {
            all &= !has(i % ROW_QUADS) || found.quad[i].word[LAST] == u32(turn);
        }
        return all;
    }
    static __device__ __forceinline__ void take(const Found &found, Quad (&quads)[ROW_QUADS]) {
#pragma unroll
        for (u32 i = 0; i < ROW_QUADS; ++i) {
            quads[i] = found.quad[i];
            quads[i].word[LAST] = found.quad[ROW_QUADS].word[i];
        }
    }

  private:
    static constexpr u32 LAST = 3;

    __device__ __forceinline__ bool has(u32 i) const { return i32(i * WARP) < left_; }
    static __device__ __forceinline__ Quad *of_lane(u64 place, u32 i) {
        return at<Quad>(place) + i * WARP + scan::lane();
    }
    static __device__ __forceinline__ void put(u64 place, u32 i, const Quad &quad, u64 turn) {
        ptx::store_relaxed_sys(of_lane(place, i), u64(quad.word[1]) << 32 | quad.word[0],
                               turn << 32 | quad.word[2]);
    }

    // From the lane's first quad to the end of the piece, in quads.
    i32 left_;
};

} // namespace stamped

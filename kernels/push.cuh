// Rows that are pushed into a peer's block, piece by piece, with a flag behind each.
//
// A warp moves one piece of a row and signals it, or waits for one and takes it. Flags hold the turn of
// the lane, which never comes round; what a flag holds of another turn says nothing.
#pragma once

#include "items.cuh"
#include "raise.cuh"
#include "stamped_rows.cuh"

namespace push {

using scan::WARP;
using scan::WHOLE;

// Quads of a row that belong to one of its pieces.
struct Piece {
    u32 begin;
    u32 end;
};

__device__ __forceinline__ Piece piece_of(u32 quads, u32 number, u32 pieces) {
    // Whole accesses of a warp, so that all pieces but the last are alike.
    const u32 length = (quads + pieces * WARP - 1) / (pieces * WARP) * WARP;
    const u32 begin = min(number * length, quads);
    return Piece{begin, min(begin + length, quads)};
}

// Where the tokens of `source` lie in the block of `to`, another rank.
__device__ __forceinline__ u64 rows_in(const Blocks &blocks, const Geometry &g, u64 region, u32 to,
                                       u32 source, u32 row_bytes) {
    const u32 place = source - (source > to);
    return u64(blocks.of<u8>(to, region)) + u64(place) * g.max_tokens * row_bytes;
}

// Bytes of a row where it lands.
__device__ __forceinline__ u32 landed_bytes(u32 row_bytes) {
    return !stamped::ROWS ? row_bytes
                         : stamped::pieces_of(row_bytes / sizeof(Quad)) * stamped::PIECE_BYTES;
}

// The flag in the block of `to` for a piece of a token of `source`: pieces are numbered through all tokens.
__device__ __forceinline__ u64 *arrived(const Blocks &blocks, const Geometry &g, u32 to, u32 source,
                                        u32 piece) {
    return blocks.of<u64>(to, g.lane.arrived) + (u64(source) * g.max_tokens * g.row_pieces + piece);
}

// The flag in the block of `owner` for a piece of a partial sum.
__device__ __forceinline__ u64 *returned(const Blocks &blocks, const Geometry &g, u32 owner, u32 slot,
                                         u32 piece) {
    return blocks.of<u64>(owner, g.lane.returned) + u64(slot) * g.sum_pieces + piece;
}

// Waits for a flag, the same in every lane; whether it came. Then every lane sees what lies before it.
__device__ __forceinline__ bool await(const wait::Waiter &waiter, wait::Phase phase, u32 culprit,
                                      const u64 *flag, u64 turn) {
    bool failed = false;
    if (scan::lane() == 0) {
        failed = waiter.wait_flag(phase, culprit, flag, turn) != 0;
    }
    failed = __shfl_sync(WHOLE, failed, 0);
    __syncwarp();
    return !failed;
}

// Looks again at where a piece lands that carries its turn, until each lane has found its part; whether it came.
__device__ __forceinline__ bool await_stamped(const wait::Waiter &waiter, wait::Phase phase, u32 culprit,
                                              const stamped::Piece &piece, u64 place, u64 turn,
                                              stamped::Piece::Found &found) {
    bool failed = false;
    if (!piece.is_of(found, turn)) {
        // Very many threads may wait at once, for what comes together with what another waits for.
        const u32 between = scan::lane() == 0 ? wait::LOOKS_BETWEEN_CONTROL : wait::LOOKS_OF_MANY;
        const auto is_there = [&] {
            piece.look(place, found);
            return piece.is_of(found, turn);
        };
        failed = waiter.wait_until(phase, culprit, is_there, between) != 0;
    }
    return !__any_sync(WHOLE, failed);
}

// Where to store a row: to an address in each of the lanes in `lanes`.
struct Targets {
    u64 row;
    u32 lanes;

    __device__ __forceinline__ Quad *of(u32 lane) const {
        return at<Quad>(__shfl_sync(WHOLE, row, lane));
    }
};

// The same for rows of one table.
struct RowTargets {
    u64 table;
    u32 row_bytes;
    u32 row;
    u32 lanes;

    __device__ __forceinline__ Quad *of(u32 lane) const {
        return at<Quad>(table + u64(__shfl_sync(WHOLE, row, lane)) * row_bytes);
    }
};

// How bytes are read that go elsewhere: once; for the first of two times that are not far apart; or for the
// last, into rows that nobody reads soon. A token that is sent is read again for this rank's own experts, and
// found in L2 then, if that keeps it before what is stored meanwhile. Nothing orders the two, and a token that has no
// expert here stays until others push it out: worth it while most tokens have one. What the last reader stores, only
// another kernel reads.
enum class Reading { ONCE, FIRST, LAST };

// As much of a row as a warp has in flight: DEPTH quads in each lane.
template <u32 DEPTH, Reading READING>
class Tile {
  public:
    // The quads of `piece` from `begin` on.
    __device__ __forceinline__ Tile(const Quad *row, u32 begin, const Piece &piece)
        : first_(begin + scan::lane()), end_(piece.end) {
#pragma unroll
        for (u32 i = 0; i < DEPTH; ++i) {
            if (first_ + i * WARP < end_) {
                quad_[i] = load(row + first_ + i * WARP);
            }
        }
    }

    template <typename To>
    __device__ __forceinline__ void store(const To &to) const {
        for (u32 left = to.lanes; left != 0; left &= left - 1) {
            Quad *row = to.of(__ffs(left) - 1);
#pragma unroll
            for (u32 i = 0; i < DEPTH; ++i) {
                if (first_ + i * WARP < end_) {
                    if (READING == Reading::LAST) {
                        ptx::store_streaming(row + first_ + i * WARP, quad_[i]);
                    } else {
                        ptx::store_quad(row + first_ + i * WARP, quad_[i]);
                    }
                }
            }
        }
    }

  private:
    static __device__ __forceinline__ Quad load(const Quad *from) {
        switch (READING) {
        case Reading::FIRST:
            return ptx::load_kept(from);
        case Reading::LAST:
            return ptx::load_last(from);
        default:
            return ptx::load_once(from);
        }
    }

    u32 first_;
    u32 end_;
    // Defined, though what is not loaded is not stored: else these registers would be taken from the beginning of the
    // kernel on.
    Quad quad_[DEPTH] = {};
};

// Copies a piece of a row to several. Its first part is on its way before `find` says where to.
template <u32 DEPTH, Reading READING = Reading::ONCE, typename Find>
__device__ __forceinline__ bool move(u64 from, const Piece &piece, Find find) {
    const Quad *row = at<const Quad>(from);
    const Tile<DEPTH, READING> tile(row, piece.begin, piece);
    const auto to = find();
    if (to.lanes == 0) {
        return false;
    }
    tile.store(to);
    for (u32 begin = piece.begin + DEPTH * WARP; begin < piece.end; begin += DEPTH * WARP) {
        Tile<DEPTH, READING>(row, begin, piece).store(to);
    }
    return true;
}

} // namespace push

// The items of several ranks, taken from each in turn as long as it has any.
//
// The ranks are kept in the order of how many items they have. Between one rank's last item and that of the
// next all that are left take turns, so that a number says which rank's item it is, and where in its list,
// without a search through the ranks, and no number is of a rank that has none left.
#pragma once

#include "lane.cuh"

namespace turns {

using scan::WARP;
using scan::WHOLE;

// At most a warp of ranks takes turns.
constexpr u32 MOST_RANKS = MOST_PUSHING;
static_assert(MOST_RANKS == WARP, "a rank in each lane");

struct Turn {
    u32 rank;
    u32 position;
};

// In shared memory.
class Turns {
  public:
    // Of `count(rank)` items of each rank, those of the next rank first. One whole warp calls this, and a
    // barrier of the block follows it.
    template <typename Count>
    __device__ __forceinline__ void lay_out(const Geometry &g, Count count) {
        const u32 lane = scan::lane();
        const u32 rank = nth_peer(g, min(lane, g.world - 1));
        const u32 items = lane < g.world ? count(rank) : NONE;
        u32 place = 0;
        for (u32 other = 0; other < g.world; ++other) {
            const u32 theirs = __shfl_sync(WHOLE, items, other);
            place += theirs < items || (theirs == items && other < lane);
        }
        if (lane < g.world) {
            rank_[place] = rank;
            upto_[place] = items;
        }
        __syncwarp();
        const u32 from = lane == 0 ? 0 : upto_[lane - 1];
        const u32 taken = lane < g.world ? (upto_[lane] - from) * (g.world - lane) : 0;
        behind_[lane] = scan::warp_inclusive(taken);
    }

    __device__ __forceinline__ u32 items(const Geometry &g) const { return behind_[g.world - 1]; }

    // Whose item `number` is; a whole warp asks.
    __device__ __forceinline__ Turn turn(const Geometry &g, u32 number) const {
        const u32 done = __popc(__ballot_sync(WHOLE, behind_[scan::lane()] <= number));
        const u32 number_here = number - (done == 0 ? 0 : behind_[done - 1]);
        const u32 left = g.world - done;
        return Turn{rank_[done + number_here % left],
                    (done == 0 ? 0 : upto_[done - 1]) + number_here / left};
    }

  private:
    // Ranks by their items, from the fewest; how many each has; items of all that come before the last of
    // each.
    u32 rank_[MOST_RANKS];
    u32 upto_[MOST_RANKS];
    u32 behind_[MOST_RANKS];
};

} // namespace turns

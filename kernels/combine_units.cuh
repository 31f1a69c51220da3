// What a warp of a pushed combine adds up, piece by piece: partial sums for other ranks, then the sums of
// its own rank's tokens.
#pragma once

#include "push.cuh"
#include "rows.cuh"
#include "turns.cuh"

namespace combine {

using scan::WARP;
using scan::WHOLE;

// What all units of a combine have in common.
struct Context {
    const PushCombineParams &p;
    const wait::Waiter &waiter;
    const Blocks &blocks;
    u64 turn;
    // Items that the window took, and tokens of this rank.
    u32 end;
    u32 tokens;
    // For each rank, how many of this rank's items it processes; known once every header is there.
    const u32 *prefix;

    __device__ __forceinline__ const Geometry &g() const { return p.geometry; }
    __device__ __forceinline__ LaneState *lane() const { return at<LaneState>(p.lane.state); }
    __device__ __forceinline__ u32 quads() const { return g().sum_bytes / sizeof(Quad); }
    __device__ __forceinline__ u64 landing(u32 rank) const {
        return u64(blocks.of<u8>(rank, g().lane.landing));
    }
};

// One piece of a sum and what is added up for it: rows of this rank's experts, one in each of the lanes
// in `rows`, and landing slots, one in each of those in `landed`.
struct Unit {
    // Where the sum goes; null: there are no more units.
    Quad *out;
    u32 piece;
    u32 begin;
    u32 end;
    // The lane's row and its weight.
    u32 row;
    float weight;
    u32 rows;
    u32 landed;
    // Those landing slots that are added before the sum of the rows.
    u32 below;
    // The landing slot of lane 0.
    u32 slot;
    // The rank of the lane's landing slot.
    u32 rank;

    __device__ __forceinline__ void take_piece(const Context &c, u32 number) {
        const push::Piece bounds = push::piece_of(c.quads(), number, c.g().sum_pieces);
        piece = number;
        begin = bounds.begin;
        end = bounds.end;
    }

    // The rows of an item. In the flat layout all its pairs share one row, which its experts made
    // together.
    __device__ __forceinline__ void take_rows(const Context &c, const WindowItem &item) {
        const bool mine = scan::lane() < (c.g().flat == 0 ? item.rows : min(item.rows, 1u));
        const RowRef pair =
            mine ? at<const RowRef>(c.p.handle.pairs)[item.begin + scan::lane()] : RowRef{};
        row = pair.row;
        weight = pair.weight;
        rows = __ballot_sync(WHOLE, mine);
    }
};

// The items of other ranks.
__shared__ turns::Turns turns;

// Partial sums for other ranks, an item of each in turn, into the landing slots of the items' owners.
// Nobody is waited for.
class Partials {
  public:
    // What lands is a partial sum as it was rounded.
    static constexpr bool ADDS_RANKS = false;

    // Before the first of them; every thread of the block calls it.
    static __device__ __forceinline__ void prepare(const Context &c) {
        if (threadIdx.x < WARP) {
            const u32 *items = at<const u32>(c.p.handle.source_items);
            turns.lay_out(c.g(), [&](u32 source) {
                return source == c.g().rank ? 0 : min(items[source + 1], c.end) - min(items[source], c.end);
            });
        }
        push::board.clear();
    }

    __device__ __forceinline__ explicit Partials(const Context &c)
        : c_(c), units_(turns.items(c.g()) * c.g().sum_pieces),
          shares_(units_ > c.p.senders * (blockDim.x / WARP)),
          unit_(shares_ ? 0 : threadIdx.x / WARP * c.p.senders + blockIdx.x) {}

    __device__ __forceinline__ Unit next() {
        Unit unit{};
        if (unit_ >= units_) {
            return unit;
        }
        const u32 number = shares_ ? take_next(&c_.lane()->pushed) : unit_;
        if (!shares_ || number >= units_) {
            unit_ = units_;
        }
        if (number < units_) {
            const u32 pieces = c_.g().sum_pieces;
            const turns::Turn turn = turns.turn(c_.g(), number / pieces);
            const u32 arrival = at<const u32>(c_.p.handle.source_items)[turn.rank] + turn.position;
            const WindowItem item = at<const WindowItem>(c_.p.handle.items)[arrival];
            unit.take_piece(c_, number % pieces);
            unit.take_rows(c_, item);
            unit.slot = item.slot;
            unit.rank = turn.rank;
            unit.out = rows::row_of(c_.landing(turn.rank), item.slot, c_.quads());
        }
        return unit;
    }

    __device__ __forceinline__ bool ready(u32, u32, u32) const { return true; }
    __device__ __forceinline__ bool await(const Unit &) const { return true; }

    __device__ __forceinline__ void finish(const Unit &unit) {
        pending_ = u64(push::returned(c_.blocks, c_.g(), unit.rank, unit.slot, unit.piece));
    }
    // While something else is on its way: the flag of the last.
    __device__ __forceinline__ void flush() {
        if (pending_ != 0) {
            Raiser(Raise{c_.turn}).post(pending_);
            pending_ = 0;
        }
    }
    __device__ __forceinline__ void end() const { Raiser(Raise{c_.turn}).finish(pending_); }
    // Raises what the warp has left to others, and none of them has seen to yet.
    static __device__ __forceinline__ void settle(const Context &c) { Raiser(Raise{c.turn}).finish(0); }

  private:
    // A note is the address of the flag.
    struct Raise {
        u64 turn;
        __device__ __forceinline__ void operator()(u64 flag) const {
            ptx::store_relaxed_sys(at<u64>(flag), turn);
        }
    };
    using Raiser = push::Raiser<Raise>;

    const Context &c_;
    u32 units_;
    bool shares_;
    // Where they are shared, only whether there are any left.
    u32 unit_;
    u64 pending_ = 0;
};

// The sums of this rank's tokens: the partial sum of its own experts straight from their rows, those of
// other ranks from landing slots, in the order of ranks.
class Sums {
  public:
    // Partial sums are added to zero, also where there is only one.
    static constexpr bool ADDS_RANKS = true;

    __device__ __forceinline__ explicit Sums(const Context &c)
        : c_(c), units_(c.tokens * c.g().sum_pieces),
          shares_(units_ > gridDim.x * (blockDim.x / WARP)),
          unit_((blockDim.x - 1 - threadIdx.x) / WARP * gridDim.x + (gridDim.x - 1 - blockIdx.x)) {}

    // The next unit, as far as it can be known before the headers of all ranks: without what lands. `to` is
    // where the token went, a rank in each lane.
    __device__ __forceinline__ Unit next_own(Destination &to) {
        const Geometry &g = c_.g();
        Unit unit{};
        to = Destination{NONE, NONE};
        const u32 number = take();
        if (number >= units_) {
            return unit;
        }
        const u32 token = number / g.sum_pieces;
        // Behind the last rank that the token went to there is none.
        if (scan::lane() < g.fanout) {
            to = at<const Destination>(
                c_.p.handle.destinations)[u64(token) * g.fanout + scan::lane()];
        }
        const u32 first = at<const u32>(c_.p.handle.source_items)[g.rank];
        const bool comes = to.rank == g.rank && first + to.position < c_.end;
        const u32 own = __ballot_sync(WHOLE, comes);
        if (own != 0) {
            const u32 position = __shfl_sync(WHOLE, to.position, __ffs(own) - 1);
            unit.take_rows(c_, at<const WindowItem>(c_.p.handle.items)[first + position]);
        }
        unit.take_piece(c_, number % g.sum_pieces);
        unit.slot = token * g.fanout;
        unit.rank = to.rank;
        unit.out = rows::row_of(c_.p.output, token, c_.quads());
        return unit;
    }

    // What lands for it.
    __device__ __forceinline__ void take_landed(Unit &unit, const Destination &to) const {
        const bool comes = to.rank != NONE && to.position < c_.prefix[to.rank];
        const u32 own = __ballot_sync(WHOLE, to.rank == c_.g().rank);
        unit.landed = __ballot_sync(WHOLE, comes) & ~own;
        // Lanes are in the order of ranks.
        unit.below = __ballot_sync(WHOLE, comes && to.rank < c_.g().rank);
    }

    __device__ __forceinline__ Unit next() {
        Destination to;
        Unit unit = next_own(to);
        if (unit.out != nullptr) {
            take_landed(unit, to);
        }
        return unit;
    }

    // Whether all is there that other ranks push for a unit.
    __device__ __forceinline__ bool ready(u32 slot, u32 landed, u32 piece) const {
        const bool there =
            !awaits(landed) || ptx::load_acquire_sys(flag(slot, piece)) == c_.turn;
        const bool all = __all_sync(WHOLE, there);
        // What one lane acquired, all read.
        __syncwarp();
        return all;
    }

    // Waits for it, each lane for one landing slot; whether it came.
    __device__ __forceinline__ bool await(const Unit &unit) const {
        const bool failed =
            awaits(unit.landed) &&
            c_.waiter.wait_flag(wait::Phase::Combine, unit.rank, flag(unit.slot, unit.piece),
                                c_.turn) != 0;
        const bool any = __any_sync(WHOLE, failed);
        __syncwarp();
        return !any;
    }

    __device__ __forceinline__ void finish(const Unit &) const {}
    __device__ __forceinline__ void flush() const {}
    __device__ __forceinline__ void end() const {}

  private:
    // Where there is at most one unit for each warp there is nothing to share out: the last warps have one
    // then, since the first have had one to push.
    __device__ __forceinline__ u32 take() {
        const u32 number = shares_ ? take_next(&c_.lane()->reduced) : unit_;
        unit_ = units_;
        return number;
    }

    static __device__ __forceinline__ bool awaits(u32 landed) {
        return (landed >> scan::lane() & 1) != 0;
    }
    __device__ __forceinline__ const u64 *flag(u32 slot, u32 piece) const {
        return push::returned(c_.blocks, c_.g(), c_.g().rank, slot + scan::lane(), piece);
    }

    const Context &c_;
    u32 units_;
    bool shares_;
    u32 unit_;
};

} // namespace combine

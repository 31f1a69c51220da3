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
    __device__ __forceinline__ TurnCounters *counters() const {
        return &at<LaneState>(p.lane.state)->counters[turn % 2];
    }
    __device__ __forceinline__ u32 quads() const { return g().sum_bytes / sizeof(Quad); }
    __device__ __forceinline__ u64 landing(u32 rank) const {
        return u64(blocks.of<u8>(rank, g().lane.landing));
    }
    // What `source` says to `to`: how many of its items it processes.
    __device__ __forceinline__ stamped::Word *prefix_of(u32 to, u32 source) const {
        return blocks.of<stamped::Word>(to, g().lane.prefixes) + source;
    }
    // Where a stamped piece of a partial sum lands.
    __device__ __forceinline__ u64 stamped_sum(u32 rank, u32 slot, u32 piece) const {
        return u64(blocks.of<u8>(rank, g().lane.returned)) +
               (u64(slot) * g().sum_pieces + piece) * stamped::PIECE_BYTES;
    }
};

// How many pieces of a sum a warp takes together, as a power of two. Flags are those of single pieces, so that
// whoever waits need not know. The more it takes, the less it has to find out for each.
struct Span {
    static constexpr u32 MOST = 3;
    u32 shift;

    // Units of each sum.
    __device__ __forceinline__ u32 units(const Geometry &g) const {
        return (g.sum_pieces + (1u << shift) - 1) >> shift;
    }
    // Pieces of the unit whose first is `piece`.
    __device__ __forceinline__ u32 pieces(const Geometry &g, u32 piece) const {
        return min(1u << shift, g.sum_pieces - piece);
    }
};

// Pieces of a sum and what is added up for them: rows of this rank's experts, one in each of the lanes
// in `rows`, and landing slots, one in each of those in `landed`.
struct Unit {
    // Where the sum goes; null: there are no more units.
    Quad *out;
    // The first of the pieces.
    u32 piece;
    // The quads that they have.
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
    // Where the sum goes to another rank: that rank.
    u32 rank;

    __device__ __forceinline__ void take_pieces(const Context &c, Span span, u32 number) {
        const u32 all = c.g().sum_pieces;
        piece = number << span.shift;
        begin = push::piece_of(c.quads(), piece, all).begin;
        end = push::piece_of(c.quads(), piece + span.pieces(c.g(), piece) - 1, all).end;
    }

    // The rows of an item. In the flat layout all its pairs share one row, which its experts made
    // together.
    __device__ __forceinline__ void take_rows(const Context &c, const WindowItem &item) {
        const bool mine = scan::lane() < (c.g().flat == 0 ? item.rows : min(item.rows, 1u));
        const RowRef pair =
            mine ? at<const RowRef>(c.p.handle.pairs)[item.begin + scan::lane()] : RowRef{};
        row = pair.row;
        // Always a product, since to choose for each part costs more than it: one times a number is that number.
        weight = c.p.weighted != 0 ? pair.weight : 1.0f;
        rows = __ballot_sync(WHOLE, mine);
    }
};

// The items of other ranks.
__shared__ turns::Turns turns;

// Which items came from the lane's rank: the next rank's in the first lane.
struct Share {
    u32 begin;
    u32 end;

    static __device__ __forceinline__ Share of_lane(const Geometry &g, u64 source_items) {
        const u32 *items = at<const u32>(source_items) + nth_peer(g, min(scan::lane(), g.world - 1));
        return Share{items[0], items[1]};
    }

    // That of this rank, in every lane.
    __device__ __forceinline__ Share of_own(const Geometry &g) const {
        return Share{__shfl_sync(WHOLE, begin, g.world - 1), __shfl_sync(WHOLE, end, g.world - 1)};
    }
};

// Partial sums for other ranks, an item of each in turn, into the landing slots of the items' owners.
// Nobody is waited for.
class Partials {
  public:
    // What lands is a partial sum as it was rounded.
    static constexpr bool ADDS_RANKS = false;

    // Before the first of them; every thread of the block calls it.
    static __device__ __forceinline__ void prepare(const Context &c, const Share &share) {
        if (threadIdx.x < WARP) {
            turns.lay_out(c.g(), [&](u32 source) {
                return source == c.g().rank ? 0 : min(share.end, c.end) - min(share.begin, c.end);
            });
        }
        push::board.clear();
    }

    __device__ __forceinline__ explicit Partials(const Context &c)
        : c_(c), span_{c.p.push_span}, units_(turns.items(c.g()) * span_.units(c.g())),
          shares_(units_ > c.p.senders * (blockDim.x / WARP)),
          unit_(shares_ ? 0 : threadIdx.x / WARP * c.p.senders + blockIdx.x) {}

    __device__ __forceinline__ Unit next() {
        Unit unit{};
        if (unit_ >= units_) {
            return unit;
        }
        const u32 number = shares_ ? take_next(&c_.counters()->pushed) : unit_;
        if (!shares_ || number >= units_) {
            unit_ = units_;
        }
        if (number < units_) {
            const u32 units = span_.units(c_.g());
            const turns::Turn turn = turns.turn(c_.g(), number / units);
            const u32 arrival = at<const u32>(c_.p.handle.source_items)[turn.rank] + turn.position;
            const WindowItem item = at<const WindowItem>(c_.p.handle.items)[arrival];
            unit.take_pieces(c_, span_, number % units);
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
        pending_ = u64(push::returned(c_.blocks, c_.g(), unit.rank, unit.slot, unit.piece)) +
                   (span_.pieces(c_.g(), unit.piece) - 1);
    }
    // While something else is on its way: the flag of the last.
    __device__ __forceinline__ void flush() {
        if (pending_ != 0) {
            Raiser(Raise{c_.turn}).post(pending_);
            pending_ = 0;
        }
    }
    __device__ __forceinline__ void end() const { Raiser(Raise{c_.turn}).finish(pending_); }

  private:
    // A note is the address of the first flag, and in the bits that are zero there, how many more follow.
    struct Raise {
        static constexpr u64 MORE = sizeof(u64) - 1;
        static_assert((1u << Span::MOST) - 1 <= MORE, "a note says how many flags a unit has");
        u64 turn;
        __device__ __forceinline__ void operator()(u64 note) const {
            u64 *flag = at<u64>(note & ~MORE);
            for (u32 i = 0; i <= u32(note & MORE); ++i) {
                ptx::store_relaxed_sys(flag + i, turn);
            }
        }
    };
    using Raiser = push::Raiser<Raise>;

    const Context &c_;
    Span span_;
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
        : c_(c), span_{c.p.sum_span}, units_(c.tokens * span_.units(c.g())),
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
        const u32 token = number / span_.units(g);
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
        unit.take_pieces(c_, span_, number % span_.units(g));
        unit.slot = token * g.fanout;
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
        bool there = true;
        for (Flags flags(*this, piece); flags.in(c_.g().fanout); flags.step()) {
            if (flags.is_awaited(landed)) {
                there &= ptx::load_acquire_sys(flags.of(slot)) == c_.turn;
            }
        }
        there = __all_sync(WHOLE, there);
        // What one lane acquired, all read.
        __syncwarp();
        return there;
    }

    // Waits for it, each lane for some of the flags; whether it came.
    __device__ __forceinline__ bool await(const Unit &unit) const {
        bool failed = false;
        for (Flags flags(*this, unit.piece); !failed && flags.in(c_.g().fanout); flags.step()) {
            if (flags.is_awaited(unit.landed)) {
                const u32 from = at<const Destination>(c_.p.handle.destinations)[unit.slot + flags.slot()].rank;
                failed = c_.waiter.wait_flag(wait::Phase::Combine, from, flags.of(unit.slot), c_.turn) != 0;
            }
        }
        failed = __any_sync(WHOLE, failed);
        __syncwarp();
        return !failed;
    }

    __device__ __forceinline__ void finish(const Unit &) const {}
    __device__ __forceinline__ void flush() const {}
    __device__ __forceinline__ void end() const {}

  private:
    // Where there is at most one unit for each warp there is nothing to share out: the last warps have one
    // then, since the first have had one to push.
    __device__ __forceinline__ u32 take() {
        const u32 number = shares_ ? take_next(&c_.counters()->reduced) : unit_;
        unit_ = units_;
        return number;
    }

    // The flags of pieces in landing slots that a lane looks at, one after the other: those of one slot, and
    // then those of the next.
    class Flags {
      public:
        __device__ __forceinline__ Flags(const Sums &sums, u32 piece)
            : sums_(sums), piece_(piece), pieces_(sums.span_.pieces(sums.c_.g(), piece)),
              number_(scan::lane()) {}

        __device__ __forceinline__ bool in(u32 slots) const { return slot() < slots; }
        __device__ __forceinline__ void step() { number_ += WARP; }
        // Counted from the token's first.
        __device__ __forceinline__ u32 slot() const { return number_ >> sums_.span_.shift; }
        // Whether there is such a piece, and something lands in the slot.
        __device__ __forceinline__ bool is_awaited(u32 landed) const {
            return within() < pieces_ && (landed >> slot() & 1) != 0;
        }
        __device__ __forceinline__ const u64 *of(u32 first) const {
            const Context &c = sums_.c_;
            return push::returned(c.blocks, c.g(), c.g().rank, first + slot(), piece_ + within());
        }

      private:
        __device__ __forceinline__ u32 within() const {
            return number_ & ((1u << sums_.span_.shift) - 1);
        }

        const Sums &sums_;
        u32 piece_;
        u32 pieces_;
        u32 number_;
    };

    const Context &c_;
    Span span_;
    u32 units_;
    bool shares_;
    u32 unit_;
};

} // namespace combine

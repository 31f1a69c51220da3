// A pushed combine of few tokens, whose sums carry their turn.
//
// Each warp knows from its number which pieces it pushes and which it adds up, and waits for nothing but those. The
// first block keeps the books, and leaves this to others if there are any.
#pragma once

#include "combine_units.cuh"

namespace combine {

// What a warp's lanes set aside, where it takes no registers while they wait: the sum of its own experts' rows.
__shared__ Quad kept[stamped::ROW_QUADS][push::MOST_WARPS * WARP];

class Few {
  public:
    __device__ __forceinline__ Few(const Context &c, const Share &share)
        : c_(c), own_begin_(min(share.of_own(c.g()).begin, c.end)),
          own_end_(min(share.of_own(c.g()).end, c.end)) {}

    // Whether there is something here for this block.
    __device__ __forceinline__ bool works() const { return gridDim.x == 1 || blockIdx.x != 0; }

    // Partial sums into the landing slots of their items' owners, those of the next rank first, so that ranks do not
    // all turn to the same peer. Nobody is waited for.
    __device__ __forceinline__ void push() const {
        const u32 pieces = c_.g().sum_pieces;
        const u32 behind = c_.end - own_end_;
        const u32 units = (behind + own_begin_) * pieces;
        for (u32 unit = warp(); unit < units; unit += warps()) {
            const u32 number = unit / pieces;
            const u32 arrival = number < behind ? own_end_ + number : number - behind;
            const WindowItem item = this->item(arrival);
            const Part part(c_, unit % pieces);
            const auto sum = add_rows(part, rows_of(arrival, item)).rounded();
            part.stamped().put(c_.stamped_sum(item.source, item.slot, part.number), sum.quad, c_.turn);
        }
    }

    // The sums of this rank's tokens, in the order of ranks: the partial sum of its own experts straight from their
    // rows, those of other ranks as they land; whether all came. The last warps have the first, since the first
    // warps had one more to push.
    __device__ __forceinline__ bool add() const {
        const u32 pieces = c_.g().sum_pieces;
        const u32 units = c_.tokens * pieces;
        for (u32 unit = warps() - 1 - warp(); unit < units; unit += warps()) {
            if (!add(unit / pieces, Part(c_, unit % pieces))) {
                return false;
            }
        }
        return true;
    }

  private:
    // Pieces go through registers, four rows at a time.
    using Sum = rows::Sum<stamped::ROW_QUADS, 4>;

    // A piece of a sum, by its number.
    struct Part {
        u32 number;
        u32 begin;
        u32 end;
        u32 quads;

        __device__ __forceinline__ Part(const Context &c, u32 number) : number(number), quads(c.quads()) {
            const push::Piece piece = push::piece_of(quads, number, c.g().sum_pieces);
            begin = piece.begin;
            end = piece.end;
        }
        __device__ __forceinline__ stamped::Piece stamped() const { return stamped::Piece(end - begin); }
    };

    // Rows of this rank's experts and their weights, one in each of the lanes in `lanes`.
    struct Rows {
        u32 row;
        float weight;
        u32 lanes;
    };

    // Of the blocks that work.
    static __device__ __forceinline__ u32 warps() { return max(gridDim.x - 1, 1u) * (blockDim.x / WARP); }
    static __device__ __forceinline__ u32 warp() {
        return threadIdx.x / WARP * max(gridDim.x - 1, 1u) + max(blockIdx.x, 1u) - 1;
    }

    __device__ __forceinline__ WindowItem item(u32 arrival) const {
        return at<const WindowItem>(c_.p.handle.items)[arrival];
    }

    // In the flat layout an item has the row at its own place, which its experts made together.
    __device__ __forceinline__ Rows rows_of(u32 arrival, const WindowItem &item) const {
        if (c_.g().flat != 0 && c_.p.weighted == 0) {
            return Rows{arrival, 1.0f, 1};
        }
        const bool mine = scan::lane() < (c_.g().flat == 0 ? item.rows : min(item.rows, 1u));
        const RowRef pair =
            mine ? at<const RowRef>(c_.p.handle.pairs)[item.begin + scan::lane()] : RowRef{};
        // Always a product: one times a number is that number.
        return Rows{pair.row, c_.p.weighted != 0 ? pair.weight : 1.0f, __ballot_sync(WHOLE, mine)};
    }

    __device__ __forceinline__ Sum add_rows(const Part &part, const Rows &rows) const {
        Sum sum(part.begin, part.end, part.quads);
        sum.add(c_.p.expert_rows, rows.row, rows.weight, true, rows.lanes);
        return sum;
    }

    // A piece of the sum of one token; whether all came.
    __device__ __forceinline__ bool add(u32 token, const Part &part) const {
        const Geometry &g = c_.g();
        // Where it went, a rank in each lane, in the order of ranks. Behind the last there is none.
        Destination to{NONE, NONE};
        if (scan::lane() < g.fanout) {
            to = at<const Destination>(c_.p.handle.destinations)[token * g.fanout + scan::lane()];
        }
        const u32 own = __ballot_sync(WHOLE, to.rank == g.rank);
        const u32 arrival = own_begin_ + __shfl_sync(WHOLE, to.position, own == 0 ? 0 : __ffs(own) - 1);
        const bool is_ours = own != 0 && arrival < own_end_;
        const Rows rows = is_ours ? rows_of(arrival, item(arrival)) : Rows{0, 0.0f, 0};
        keep(add_rows(part, rows).rounded().quad);
        Sum sum(part.begin, part.end, part.quads);
        for (u32 lanes = __ballot_sync(WHOLE, to.rank != NONE); lanes != 0; lanes &= lanes - 1) {
            const u32 lane = __ffs(lanes) - 1;
            const Destination from{__shfl_sync(WHOLE, to.rank, lane), __shfl_sync(WHOLE, to.position, lane)};
            if (from.rank != g.rank) {
                if (!add_landed(sum, part, token * g.fanout + lane, from)) {
                    return false;
                }
            } else if (is_ours) {
                Quad ours[stamped::ROW_QUADS];
                take_kept(ours);
                sum.add(ours);
            }
        }
        sum.store(rows::row_of(c_.p.output, token, part.quads));
        return true;
    }

    // Adds what lands in a slot of one rank, unless that has no room for the item; whether one or the other is known.
    __device__ __forceinline__ bool add_landed(Sum &sum, const Part &part, u32 slot,
                                               const Destination &from) const {
        const stamped::Piece piece = part.stamped();
        const u64 place = c_.stamped_sum(c_.g().rank, slot, part.number);
        stamped::Piece::Found found{};
        piece.look(place, found);
        bool failed = false;
        bool comes = true;
        if (!piece.is_of(found, c_.turn)) {
            const auto is_known = [&] {
                // How far the rank goes it says at once.
                const stamped::Word prefix = stamped::load(c_.prefix_of(c_.g().rank, from.rank));
                comes = !prefix.is_of(c_.turn) || from.position < u32(prefix.high);
                piece.look(place, found);
                return !comes || piece.is_of(found, c_.turn);
            };
            failed = c_.waiter.wait_until(wait::Phase::Combine, from.rank, is_known,
                                          scan::lane() == 0 ? wait::LOOKS_BETWEEN_CONTROL
                                                            : wait::LOOKS_OF_MANY) != 0;
        }
        if (__any_sync(WHOLE, failed)) {
            return false;
        }
        if (__all_sync(WHOLE, comes)) {
            Quad quads[stamped::ROW_QUADS];
            stamped::Piece::take(found, quads);
            sum.add(quads);
        }
        return true;
    }

    static __device__ __forceinline__ void keep(const Quad (&quads)[stamped::ROW_QUADS]) {
#pragma unroll
        for (u32 i = 0; i < stamped::ROW_QUADS; ++i) {
            kept[i][threadIdx.x] = quads[i];
        }
    }
    static __device__ __forceinline__ void take_kept(Quad (&quads)[stamped::ROW_QUADS]) {
#pragma unroll
        for (u32 i = 0; i < stamped::ROW_QUADS; ++i) {
            quads[i] = kept[i][threadIdx.x];
        }
    }

    const Context &c_;
    // This rank's own items, of those that the window took.
    u32 own_begin_;
    u32 own_end_;
};

} // namespace combine

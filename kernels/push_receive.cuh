// From where rows are to the rows of their experts.
#pragma once

#include "push_places.cuh"

namespace dispatch {

// This rank's own tokens from where the caller left them, those of other ranks from where they were pushed,
// as their flags come.
class Receiving {
  public:
    __device__ __forceinline__ explicit Receiving(const Context &c) : c_(c) {}

    // Pieces of the window's items as warps come free: of every source in turn, in the order in which
    // each sends them.
    __device__ __forceinline__ void run() const {
        const Geometry &geometry = c_.g();
        const u32 pieces = geometry.row_pieces;
        const u32 units = shared.turns.items(geometry) * pieces;
        // Blocks that neither list nor send come first, so that each of their warps has a piece of its own.
        const u32 busy = c_.p.listers + 1 + c_.p.senders;
        const u32 idle = gridDim.x - busy;
        const u32 shared_from = idle * (THREADS / WARP);
        u32 unit = blockIdx.x >= busy ? threadIdx.x / WARP * idle + (blockIdx.x - busy) : units;
        if (blockIdx.x < busy && units > shared_from) {
            unit = shared_from + take_next(&c_.counters()->taken);
        }
        while (unit < units) {
            const turns::Turn turn = shared.turns.turn(geometry, unit / pieces);
            if (!receive(turn.rank, turn.position, unit % pieces)) {
                return;
            }
            unit = units > shared_from ? shared_from + take_next(&c_.counters()->taken) : units;
        }
    }

  private:
    // Waits for the item at a position of the list of `source`, and for its pairs, of which each lane gets
    // one; whether they came. Pairs are read before the item says how many of them there are.
    __device__ __forceinline__ bool await_entries(u32 source, u32 position, Item &item,
                                                  Pair &pair) const {
        const Geometry &geometry = c_.g();
        const stamped::Word *of_item =
            items::pushed_item(geometry, c_.blocks, geometry.rank, source, position);
        const stamped::Word *of_pair = items::pushed_pair(geometry, c_.blocks, geometry.rank, source,
                                                          position, scan::lane());
        stamped::Word item_word = stamped::load(of_item);
        stamped::Word pair_word{};
        if (scan::lane() < items::pair_width(geometry)) {
            pair_word = stamped::load(of_pair);
        }
        bool failed = !await(source, of_item, item_word);
        item = stamped::item_of(geometry, item_word);
        if (!failed && scan::lane() < item.pairs) {
            failed = !await(source, of_pair, pair_word);
            pair = stamped::pair_of(pair_word);
        }
        return !__any_sync(WHOLE, failed);
    }

    // Looks again until an entry is of this turn. Very many threads may do so, for what comes with something
    // for which the books wait.
    __device__ __forceinline__ bool await(u32 source, const stamped::Word *from,
                                          stamped::Word &word) const {
        return word.is_of(c_.turn) ||
               c_.waiter.wait_until(
                   wait::Phase::Dispatch, source,
                   [&] {
                       word = stamped::load(from);
                       return word.is_of(c_.turn);
                   },
                   wait::LOOKS_OF_MANY) == 0;
    }

    // Brings one piece of an item to the rows of its experts; whether that could be done.
    __device__ __forceinline__ bool receive(u32 source, u32 position, u32 number) const {
        const Geometry &geometry = c_.g();
        const u32 arrival = shared.items[source] + position;
        const bool first_piece = number == 0;
        RowRef reference{};
        Item item;
        Pair pair{};
        if (!await_entries(source, position, item, pair)) {
            return false;
        }
        const u32 begin = shared.pairs[source] + item.pair_begin;
        if (scan::lane() < item.pairs) {
            const u32 row = geometry.flat != 0
                                ? arrival
                                : Places(geometry).first(source, pair.slot) + pair.index;
            reference = RowRef{row, pair.weight, pair.choice, pair.slot};
            if (first_piece) {
                at<RowRef>(c_.p.handle.pairs)[begin + scan::lane()] = reference;
                if (c_.p.handle.row_weights != 0) {
                    items::annotate(geometry, c_.p.handle, reference, scan::lane());
                }
            }
        }
        // In the flat layout all pairs of an item share one row.
        const u32 lanes = geometry.flat != 0 ? 1 : __ballot_sync(WHOLE, scan::lane() < item.pairs);
        if (first_piece && scan::lane() == 0) {
            at<WindowItem>(c_.p.handle.items)[arrival] =
                WindowItem{source, item.slot, begin, item.pairs};
        }
        if (first_piece && geometry.flat != 0 && c_.p.handle.row_weights != 0) {
            items::annotate_rest(geometry, c_.p.handle, arrival, item.pairs);
        }
        const bool own = source == geometry.rank;
        if (!own) {
            const u64 *flag =
                push::arrived(c_.blocks, geometry, geometry.rank, source,
                              item.token * geometry.row_pieces + number);
            if (!push::await(c_.waiter, wait::Phase::Dispatch, source, flag, c_.turn)) {
                return false;
            }
        }
        const u32 scale_bytes = geometry.scale_bytes;
        if (first_piece && scale_bytes != 0) {
            const u64 scales = own ? c_.p.scales
                                   : push::rows_in(c_.blocks, geometry, geometry.lane.pushed_scales,
                                                   geometry.rank, source, scale_bytes);
            const push::Piece whole{0, u32(scale_bytes / sizeof(Quad))};
            push::move<1>(scales + u64(item.token) * scale_bytes, whole, [&] {
                return push::RowTargets{c_.p.received_scales, scale_bytes, reference.row, lanes};
            });
        }
        const u32 row_bytes = geometry.row_bytes;
        const u64 from = own ? c_.p.tokens
                             : push::rows_in(c_.blocks, geometry, geometry.lane.pushed_rows,
                                             geometry.rank, source, row_bytes);
        const push::Piece piece =
            push::piece_of(row_bytes / sizeof(Quad), number, geometry.row_pieces);
        push::move<DEPTH, push::Reading::LAST>(from + u64(item.token) * row_bytes, piece, [&] {
            return push::RowTargets{c_.p.rows, row_bytes, reference.row, lanes};
        });
        return true;
    }

    const Context &c_;
};

} // namespace dispatch

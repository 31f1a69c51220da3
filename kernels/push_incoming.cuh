// One piece of an item that carries its turn, from the first look for it until it is in its rows.
#pragma once

#include "push_context.cuh"

namespace dispatch {

// A whole warp has it. What comes first is looked for first: the entries of the item, which say which token it is;
// then the piece itself; and only then its rows have to be known.
class Incoming {
  public:
    // Whose item it belongs to, at which position of that rank's list, and which piece of the row it is.
    struct Place {
        u32 source;
        u32 position;
        u32 number;
    };

    // The entries that say which token it is: the item's, and in each lane that of one of its pairs, which are read
    // before the item says how many of them there are. They may not be there yet.
    struct Entries {
        Place place;
        stamped::Word item;
        stamped::Word pair;

        __device__ __forceinline__ void look(const Context &c) {
            const Geometry &g = c.g();
            if (place.position >= g.max_tokens) {
                return;
            }
            item = stamped::load(items::pushed_item(g, c.blocks, g.rank, place.source, place.position));
            if (scan::lane() < items::pair_width(g)) {
                pair = stamped::load(items::pushed_pair(g, c.blocks, g.rank, place.source, place.position,
                                                        scan::lane()));
            }
        }
        // Whether those of this lane were there.
        __device__ __forceinline__ bool are_there(const Context &c) const {
            return item.is_of(c.turn) &&
                   (scan::lane() >= stamped::item_of(c.g(), item).pairs || pair.is_of(c.turn));
        }
    };

    __device__ __forceinline__ Incoming(const Context &c, const Place &place) : c_(c), entries_{place, {}, {}} {}

    __device__ __forceinline__ const Place &place() const { return entries_.place; }
    __device__ __forceinline__ void look() { entries_.look(c_); }
    __device__ __forceinline__ bool is_listed() const { return entries_.are_there(c_); }

    // Turns to another, whose entries were looked for.
    __device__ __forceinline__ void turn_to(const Entries &entries) { entries_ = entries; }

    // Waits for them, and looks for the piece; whether they came. Very many threads may wait, for what comes with
    // something for which the books wait.
    __device__ __forceinline__ bool find() {
        bool failed = false;
        if (!is_listed()) {
            const auto is_there = [&] {
                look();
                return is_listed();
            };
            failed = c_.waiter.wait_until(wait::Phase::Dispatch, place().source, is_there,
                                          wait::LOOKS_OF_MANY) != 0;
        }
        if (__any_sync(WHOLE, failed)) {
            return false;
        }
        const u64 own = c_.p.tokens + u64(item().token) * c_.g().row_bytes + row_piece().begin * sizeof(Quad);
        stamped_piece().look(is_own() ? own : landed(), found_, !is_own());
        return true;
    }

    // Brings it to the rows of its experts, and the token's scales with its first piece; whether it came. `first_row`
    // is asked for the first row of this source's pairs for an expert; in the flat layout the item has the row at its
    // place among those of all sources. Before those of this source come `items` and `pairs`.
    template <typename FirstRow>
    __device__ __forceinline__ bool store(u32 items, u32 pairs, FirstRow first_row) {
        const Geometry &geometry = c_.g();
        const bool has_pair = scan::lane() < item().pairs;
        const Pair pair = stamped::pair_of(entries_.pair);
        u32 row = items + place().position;
        if (geometry.flat == 0 && has_pair) {
            row = first_row(pair.slot) + pair.index;
        }
        // In the flat layout all pairs of an item share one row.
        const u32 lanes = geometry.flat != 0 ? 1 : __ballot_sync(WHOLE, has_pair);
        if (place().number == 0) {
            note(items + place().position, pairs + item().pair_begin,
                 RowRef{row, pair.weight, pair.choice, pair.slot});
            if (!store_scales(row, lanes)) {
                return false;
            }
        }
        if (!is_own() && !push::await_stamped(c_.waiter, wait::Phase::Dispatch, place().source, stamped_piece(),
                                              landed(), c_.turn, found_)) {
            return false;
        }
        put(row_piece(), found_, push::RowTargets{c_.p.rows, geometry.row_bytes, row, lanes});
        return true;
    }

  private:
    __device__ __forceinline__ bool is_own() const { return place().source == c_.g().rank; }
    __device__ __forceinline__ Item item() const { return stamped::item_of(c_.g(), entries_.item); }

    __device__ __forceinline__ push::Piece row_piece() const {
        return push::piece_of(c_.g().row_bytes / sizeof(Quad), place().number, c_.g().row_pieces);
    }
    __device__ __forceinline__ stamped::Piece stamped_piece() const {
        const push::Piece piece = row_piece();
        return stamped::Piece(piece.end - piece.begin);
    }
    // Where it lands.
    __device__ __forceinline__ u64 landed() const {
        const u32 bytes = c_.g().row_pieces * stamped::PIECE_BYTES;
        return push::rows_in(c_.blocks, c_.g(), c_.g().lane.pushed_rows, c_.g().rank, place().source, bytes) +
               u64(item().token) * bytes + place().number * stamped::PIECE_BYTES;
    }

    // What the handle says of the item: its number among those of all sources, where its pairs begin, and this lane's
    // pair.
    __device__ __forceinline__ void note(u32 arrival, u32 begin, const RowRef &reference) const {
        const Geometry &geometry = c_.g();
        const HandleParams &handle = c_.p.handle;
        const Item item = this->item();
        if (scan::lane() < item.pairs) {
            at<RowRef>(handle.pairs)[begin + scan::lane()] = reference;
            if (handle.row_weights != 0) {
                items::annotate(geometry, handle, reference, scan::lane());
            }
        }
        if (scan::lane() == 0) {
            at<WindowItem>(handle.items)[arrival] = WindowItem{place().source, item.slot, begin, item.pairs};
        }
        if (geometry.flat != 0 && handle.row_weights != 0) {
            items::annotate_rest(geometry, handle, arrival, item.pairs);
        }
    }

    // The scales of the token, all of them.
    __device__ __forceinline__ bool store_scales(u32 row, u32 lanes) const {
        const Geometry &geometry = c_.g();
        const u32 quads = geometry.scale_bytes / sizeof(Quad);
        const u32 pieces = stamped::pieces_of(quads);
        const push::RowTargets to{c_.p.received_scales, geometry.scale_bytes, row, lanes};
        for (u32 i = 0; i < pieces; ++i) {
            const push::Piece piece = push::piece_of(quads, i, pieces);
            const stamped::Piece whole(piece.end - piece.begin);
            stamped::Piece::Found found;
            if (is_own()) {
                const u64 scales = c_.p.scales + u64(item().token) * geometry.scale_bytes;
                whole.look(scales + piece.begin * sizeof(Quad), found, false);
            } else {
                const u32 bytes = pieces * stamped::PIECE_BYTES;
                const u64 at_scales = push::rows_in(c_.blocks, geometry, geometry.lane.pushed_scales,
                                                geometry.rank, place().source, bytes) +
                                  u64(item().token) * bytes + i * stamped::PIECE_BYTES;
                whole.look(at_scales, found);
                if (!push::await_stamped(c_.waiter, wait::Phase::Dispatch, place().source, whole, at_scales,
                                         c_.turn, found)) {
                    return false;
                }
            }
            put(piece, found, to);
        }
        return true;
    }

    // Stores a piece that is there: as it was found where it landed, or as it lies in the caller's tensor.
    __device__ __forceinline__ void put(const push::Piece &piece, const stamped::Piece::Found &found,
                                        const push::RowTargets &to) const {
        Quad quads[stamped::ROW_QUADS];
        if (is_own()) {
#pragma unroll
            for (u32 i = 0; i < stamped::ROW_QUADS; ++i) {
                quads[i] = found.quad[i];
            }
        } else {
            stamped::Piece::take(found, quads);
        }
        const stamped::Piece whole(piece.end - piece.begin);
        for (u32 left = to.lanes; left != 0; left &= left - 1) {
            whole.store(to.of(__ffs(left) - 1) + piece.begin, quads);
        }
    }

    const Context &c_;
    Entries entries_;
    stamped::Piece::Found found_;
};

} // namespace dispatch

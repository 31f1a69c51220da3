// From where rows are to the rows of their experts.
#pragma once

#include "push_context.cuh"

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
        u32 most = 0;
        for (u32 source = 0; source < geometry.world; ++source) {
            const u32 first = min(shared.items[source], shared.end);
            const u32 items = min(shared.items[source + 1], shared.end) - first;
            most = max(most, items);
        }
        const u32 pieces = geometry.row_pieces;
        const u32 units = most * geometry.world * pieces;
        // Where there is at most one for each warp there is nothing to share out. The block that keeps
        // the books gets none then.
        const u32 workers = gridDim.x - 1;
        const bool shares = units > workers * (THREADS / WARP);
        const u32 worker = blockIdx.x - (blockIdx.x > c_.p.listers);
        u32 unit = c_.keeps_books() ? units : threadIdx.x / WARP * workers + worker;
        for (;;) {
            if (shares) {
                unit = scan::lane() == 0 ? atomicAdd(&c_.lane()->taken, 1) : 0;
                unit = __shfl_sync(WHOLE, unit, 0);
            }
            if (unit >= units) {
                return;
            }
            const u32 source = nth_peer(geometry, unit / pieces % geometry.world);
            const u32 position = unit / pieces / geometry.world;
            const u32 end = min(shared.items[source + 1], shared.end);
            if (shared.items[source] + position < end &&
                !receive(source, position, unit % pieces)) {
                return;
            }
            if (!shares) {
                return;
            }
        }
    }

    // Needs the places only: rows and lists may still be on their way.
    __device__ __forceinline__ void clear_padding() const {
        const Geometry &geometry = c_.g();
        if (geometry.flat != 0) {
            return;
        }
        const bool all = shared.end == shared.items[geometry.world];
        items::clear_padding(geometry, c_.p.handle, c_.p.rows, c_.p.received_scales, [&](u32 expert) {
            if (!all) {
                return items::padding_of(c_.p.handle, expert);
            }
            const u32 begin = tables[geometry.world * geometry.slots + expert];
            const u32 rows = begin - tables[expert];
            return items::Padding{begin, tables[expert] + round_up(rows, geometry.alignment)};
        });
    }

  private:
    // Brings one piece of an item to the rows of its experts; whether that could be done.
    __device__ __forceinline__ bool receive(u32 source, u32 position, u32 number) const {
        const Geometry &geometry = c_.g();
        const u32 arrival = shared.items[source] + position;
        const Item item =
            items::load(items::Lists::pushed_items(geometry, c_.blocks, geometry.rank, source) + position);
        const u32 begin = shared.pairs[source] + item.pair_begin;
        const bool first_piece = number == 0;
        RowRef reference{};
        push::Targets rows{0, 0};
        // Read before the item says how many of them there are.
        Pair pair{};
        if (scan::lane() < items::pair_width(geometry)) {
            pair = items::load(items::Lists::pushed_pairs(geometry, c_.blocks, geometry.rank, source) +
                               u64(position) * items::pair_width(geometry) + scan::lane());
        }
        if (scan::lane() < item.pairs) {
            const u32 row = geometry.flat != 0
                                ? arrival
                                : tables[source * geometry.slots + pair.slot] + pair.index;
            reference = RowRef{row, pair.weight, pair.choice, pair.slot};
            rows.row = c_.p.rows + u64(row) * geometry.row_bytes;
            if (first_piece) {
                at<RowRef>(c_.p.handle.pairs)[begin + scan::lane()] = reference;
                if (c_.p.handle.row_weights != 0) {
                    items::annotate(geometry, c_.p.handle, reference, scan::lane());
                }
            }
        }
        // In the flat layout all pairs of an item share one row.
        rows.lanes = geometry.flat != 0 ? 1 : __ballot_sync(WHOLE, scan::lane() < item.pairs);
        if (first_piece && scan::lane() == 0) {
            at<WindowItem>(c_.p.handle.items)[arrival] =
                WindowItem{source, item.slot, begin, item.pairs};
        }
        const bool own = source == geometry.rank;
        if (!own) {
            const u64 *flag =
                push::arrived(c_.blocks, geometry, geometry.rank, source, item.token, number);
            if (!push::await(c_.waiter, wait::Phase::Dispatch, source, flag, c_.turn)) {
                return false;
            }
        }
        const u32 row_bytes = geometry.row_bytes;
        const u64 from = own ? c_.p.tokens
                             : push::rows_in(c_.blocks, geometry, geometry.lane.pushed_rows,
                                             geometry.rank, source, row_bytes);
        const push::Piece piece =
            push::piece_of(row_bytes / sizeof(Quad), number, geometry.row_pieces);
        push::move<DEPTH, true>(from + u64(item.token) * row_bytes, piece, [&] { return rows; });
        const u32 scale_bytes = geometry.scale_bytes;
        if (first_piece && scale_bytes != 0) {
            const u64 scales = own ? c_.p.scales
                                   : push::rows_in(c_.blocks, geometry, geometry.lane.pushed_scales,
                                                   geometry.rank, source, scale_bytes);
            rows.row = c_.p.received_scales + u64(reference.row) * scale_bytes;
            const push::Piece whole{0, u32(scale_bytes / sizeof(Quad))};
            push::move<1>(scales + u64(item.token) * scale_bytes, whole, [&] { return rows; });
        }
        if (first_piece && geometry.flat != 0 && c_.p.handle.row_weights != 0) {
            items::annotate_rest(geometry, c_.p.handle, arrival, item.pairs);
        }
        return true;
    }

    const Context &c_;
};

} // namespace dispatch

#include "items.cuh"

// Reads each row of the window once from its sender, stores it to each of its experts' rows, clears
// the padding unless that is to be left, and keeps the way back in the handle.
//
// A warp brings a piece of a row. Several of them read an item's entry in the sender's lists, which is
// little beside the piece and saves them waiting for each other.

constexpr u32 DEPTH = 8;

struct Window {
    u32 begin;
    u32 items;
    u32 pair_begin;
};

// A pair of a peer's list as a row of the window.
__device__ __forceinline__ RowRef place(const GatherParams &p, u32 source, u32 arrival,
                                        const Pair &pair) {
    const Geometry &g = p.geometry;
    u32 row = arrival;
    if (g.flat == 0) {
        const u32 first = u32(at<const i32>(p.handle.expert_offsets)[pair.slot]);
        const u32 base = at<const u32>(p.handle.bases)[u64(source) * g.slots + pair.slot];
        row = first + base + pair.index - at<const u32>(p.handle.taken)[pair.slot];
    }
    return RowRef{row, pair.weight, pair.choice, pair.slot};
}

__device__ __forceinline__ void bring(const GatherParams &p, const Blocks &blocks,
                                      const Window &window, u32 arrival, u32 number) {
    const Geometry &g = p.geometry;
    const u32 position = window.begin + arrival;
    const u32 *source_items = at<const u32>(p.handle.source_items);
    const u32 source = items::source_of(source_items, g.world, position);
    const items::Lists lists(g, blocks, source);
    const u32 place_in_list = position - source_items[source];
    const Item item = lists.item(place_in_list);
    const u32 quads = g.row_bytes / sizeof(Quad);
    rows::Piece<DEPTH> piece(number, quads);
    piece.load(rows::row_of(u64(blocks.of<u8>(source, g.lane.staging)), item.token, quads));
    const u32 begin = at<const u32>(p.handle.source_pairs)[source] + item.pair_begin -
                      window.pair_begin;
    const bool first_piece = number == 0;
    if (first_piece && scan::lane() == 0) {
        at<WindowItem>(p.handle.items)[arrival] = WindowItem{source, item.slot, begin, item.pairs};
    }
    for (u32 first = 0; first < item.pairs; first += scan::WARP) {
        const u32 count = min(item.pairs - first, scan::WARP);
        RowRef reference{};
        if (scan::lane() < count) {
            const u32 place_in_item = first + scan::lane();
            reference = place(p, source, arrival,
                              lists.pair(place_in_list, item, place_in_item));
            if (first_piece) {
                at<RowRef>(p.handle.pairs)[begin + place_in_item] = reference;
                if (p.handle.row_weights != 0) {
                    items::annotate(g, p.handle, reference, place_in_item);
                }
            }
        }
        // In the flat layout all pairs of an item share one row.
        const u32 stores = g.flat == 0 ? count : (first == 0 ? 1 : 0);
        for (u32 i = 0; i < stores; ++i) {
            const u32 row = __shfl_sync(scan::WHOLE, reference.row, i);
            piece.store(rows::row_of(p.rows, row, quads));
        }
        if (first_piece) {
            const u32 scale_quads = g.scale_bytes / sizeof(Quad);
            const u64 scales = u64(blocks.of<u8>(source, g.lane.scales));
            for (u32 part = 0; part < rows::pieces<1>(scale_quads); ++part) {
                rows::Piece<1> few(part, scale_quads);
                few.load(rows::row_of(scales, item.token, scale_quads));
                for (u32 i = 0; i < stores; ++i) {
                    const u32 row = __shfl_sync(scan::WHOLE, reference.row, i);
                    few.store(rows::row_of(p.scales, row, scale_quads));
                }
            }
        }
    }
    if (first_piece && g.flat != 0 && p.handle.row_weights != 0) {
        items::annotate_rest(g, p.handle, arrival, item.pairs);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) gather(const __grid_constant__ GatherParams p) {
    const Geometry &g = p.geometry;
    if (faulted(wait::Waiter(p.wait))) {
        return;
    }
    const Blocks blocks(p.lane, g);
    const WindowState *state = at<const WindowState>(p.handle.window);
    const Window window{state->begin, state->end - state->begin, state->pair_begin};
    const u32 pieces = rows::pieces<DEPTH>(g.row_bytes / sizeof(Quad));
    for (u64 unit = rows::warp(); unit < u64(window.items) * pieces; unit += rows::warps()) {
        bring(p, blocks, window, u32(unit / pieces), u32(unit % pieces));
    }
    if (g.flat == 0 && g.clear_padding != 0) {
        items::clear_padding(items::Clear{g, p.handle, p.rows, p.scales},
                             items::Team::of_blocks(0, gridDim.x),
                             [&](u32 expert) { return items::padding_of(p.handle, expert); });
    }
}

//! The receiver brings the rows of its window to their experts.

use ep_context::signal::HostWaiter;
use ep_context::{Kernel, Phase};

use super::memory::{LaneBlocks, load, table, table_mut};
use crate::params::{DispatchHeader, GatherParams, Item, Pair, RowRef, WindowItem, WindowState};

/// Reads each row of the window once from its sender, stores it to each of its experts' rows, clears
/// the padding, and keeps the way back in the handle.
#[derive(Debug)]
pub(crate) struct Gather;

impl Kernel for Gather {
    type Params = GatherParams;
    const NAME: &'static str = "gather";

    unsafe fn run_on_host(p: &GatherParams) {
        let g = &p.geometry;
        let (world, slots, local) = (g.world as usize, g.slots as usize, g.local_experts as usize);
        let row_bytes = g.row_bytes as usize;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. What peers wrote was
        // acquired by the count that ran before in this stream, and stays until this rank's combine
        // signal. Receive buffer and handle belong to this stream, and the window, which the
        // capacity bounds, says how many of their rows there are.
        if unsafe { HostWaiter::from_params(&p.wait) }.fault(Phase::Dispatch).is_some() {
            return;
        }
        // SAFETY: see above; the tables that are written do not overlap.
        let (window, blocks, headers, source_items, source_pairs, bases, taken, offsets, counts) = unsafe {
            let blocks = LaneBlocks::new(&p.lane, g);
            (
                load::<WindowState>(p.handle.window),
                blocks,
                table::<DispatchHeader>(blocks.own(g.lane.dispatch_headers), world),
                table::<u32>(p.handle.source_items, world + 1),
                table::<u32>(p.handle.source_pairs, world + 1),
                table::<u32>(p.handle.bases, world * slots),
                table::<u32>(p.handle.taken, slots),
                table::<i32>(p.handle.expert_offsets, local + 1),
                table::<i32>(p.handle.tokens_per_expert, local),
            )
        };
        // SAFETY: see above.
        let (items_out, rows_out) = unsafe {
            (
                table_mut::<WindowItem>(p.handle.items, (window.end - window.begin) as usize),
                table_mut::<RowRef>(p.handle.rows, window.window_pairs as usize),
            )
        };
        for source in 0..world {
            let header = &headers[source];
            let bases = &bases[source * slots..][..slots];
            let first = window.begin.max(source_items[source]);
            let end = window.end.min(source_items[source + 1]);
            for position in first..end {
                let at = (header.item_base + position - source_items[source]) as usize;
                // SAFETY: `at` is inside the sender's list, and the item's pairs are too.
                let (item, pairs) = unsafe {
                    let list = blocks.at(source, g.lane.items);
                    let item: Item = load(list + (at * size_of::<Item>()) as u64);
                    let begin = (header.pair_base + item.pair_begin) as usize;
                    let list = blocks.at(source, g.lane.pairs);
                    let pairs = list + (begin * size_of::<Pair>()) as u64;
                    (item, table::<Pair>(pairs, item.pairs as usize))
                };
                // SAFETY: `token` is below the sender's number of tokens.
                let from = unsafe {
                    let staging = blocks.at(source, g.lane.staging);
                    let row = staging + (item.token as usize * row_bytes) as u64;
                    table::<u8>(row, row_bytes)
                };
                let begin = source_pairs[source] + item.pair_begin - window.pair_begin;
                items_out[(position - window.begin) as usize] =
                    WindowItem { source: source as u32, slot: item.slot, begin, rows: item.pairs };
                for (at, pair) in (begin as usize..).zip(pairs) {
                    let slot = pair.slot as usize;
                    let row =
                        offsets[slot].cast_unsigned() + bases[slot] + pair.index - taken[slot];
                    rows_out[at] = RowRef { row, weight: pair.weight };
                    // SAFETY: the row is one of the window's, so below the capacity.
                    unsafe { row_of(p.rows, row as usize, row_bytes) }.copy_from_slice(from);
                }
            }
        }
        for expert in 0..local {
            for row in offsets[expert] + counts[expert]..offsets[expert + 1] {
                // SAFETY: padding rows lie below the end of the window's rows.
                unsafe { row_of(p.rows, row.cast_unsigned() as usize, row_bytes) }.fill(0);
            }
        }
    }
}

/// # Safety
///
/// `row` is below the capacity of the buffer at `rows`, and nothing else touches it.
unsafe fn row_of<'a>(rows: u64, row: usize, row_bytes: usize) -> &'a mut [u8] {
    // SAFETY: as this function's contract says.
    unsafe { table_mut(rows + (row * row_bytes) as u64, row_bytes) }
}

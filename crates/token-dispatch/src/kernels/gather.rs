//! The receiver brings the rows of its window to their experts.

use ep_context::signal::HostWaiter;
use ep_context::{Kernel, KernelSource, Phase};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, load, row_address, store, table, table_mut};
use super::received::ReceivedLists;
use super::source;
use crate::params::{GatherParams, RowRef, WindowItem, WindowState};

/// Reads each row of the window once from its sender, stores it to each of its experts' rows, clears
/// the padding unless that is to be left, and keeps the way back in the handle.
#[derive(Debug)]
pub(crate) struct Gather;

impl Kernel for Gather {
    type Params = GatherParams;
    const NAME: &'static str = "gather";
    const SOURCE: Option<KernelSource> = Some(source(device::GATHER));

    unsafe fn run_on_host(p: &GatherParams) {
        // SAFETY: for this whole body, the launch vouches for every address in `p`. What peers wrote was
        // acquired by the count that ran before in this stream, and stays until this rank's combine
        // signal. Receive buffer and handle belong to this stream, and the window, which the
        // capacity bounds, says how many of their rows there are.
        if unsafe { HostWaiter::from_params(&p.wait) }.fault(Phase::Dispatch).is_some() {
            return;
        }
        let g = &p.geometry;
        // SAFETY: see above.
        unsafe {
            let blocks = LaneBlocks::new(&p.lane, g);
            receive(p, &blocks, |source, token| {
                let row = row_address(blocks.at(source, g.lane.staging), token, g.row_bytes);
                Some((row, row_address(blocks.at(source, g.lane.scales), token, g.scale_bytes)))
            });
        }
    }
}

/// Brings every row of the window from where `find(source, token)` says that it and its scales are; ends
/// early where that is nowhere.
///
/// # Safety
///
/// As for [`Gather`].
pub(super) unsafe fn receive(
    p: &GatherParams,
    blocks: &LaneBlocks<'_>,
    find: impl Fn(usize, usize) -> Option<(u64, u64)>,
) {
    let g = &p.geometry;
    let (world, slots, local) = (g.world as usize, g.slots as usize, g.local_experts as usize);
    // SAFETY: this function's contract; the tables that are written do not overlap.
    let (window, lists, source_items, source_pairs, bases, taken, offsets, counts) = unsafe {
        (
            load::<WindowState>(p.handle.window),
            ReceivedLists::new(g, *blocks),
            table::<u32>(p.handle.source_items, world + 1),
            table::<u32>(p.handle.source_pairs, world + 1),
            table::<u32>(p.handle.bases, world * slots),
            table::<u32>(p.handle.taken, slots),
            table::<i32>(p.handle.expert_offsets, local + 1),
            table::<i32>(p.handle.tokens_per_expert, local),
        )
    };
    // SAFETY: as above.
    let (items_out, pairs_out) = unsafe {
        (
            table_mut::<WindowItem>(p.handle.items, (window.end - window.begin) as usize),
            table_mut::<RowRef>(p.handle.pairs, window.window_pairs as usize),
        )
    };
    for source in 0..world {
        let bases = &bases[source * slots..][..slots];
        let first = window.begin.max(source_items[source]);
        let end = window.end.min(source_items[source + 1]);
        for position in first..end {
            // SAFETY: the sender's list is that long.
            let (item, pairs) = unsafe { lists.item(source, position - source_items[source]) };
            let begin = source_pairs[source] + item.pair_begin - window.pair_begin;
            let arrival = position - window.begin;
            items_out[arrival as usize] =
                WindowItem { source: source as u32, slot: item.slot, begin, rows: item.pairs };
            let references = &mut pairs_out[begin as usize..][..pairs.len()];
            for (reference, pair) in references.iter_mut().zip(pairs) {
                let slot = pair.slot as usize;
                let row = match g.flat {
                    0 => offsets[slot].cast_unsigned() + bases[slot] + pair.index - taken[slot],
                    _ => arrival,
                };
                *reference =
                    RowRef { row, weight: pair.weight, choice: pair.choice, slot: pair.slot };
            }
            let Some(from) = find(source, item.token as usize) else { return };
            // SAFETY: the references name rows of the window; `find` vouches for what it found.
            unsafe { bring(p, from, references) };
        }
    }
    if g.flat != 0 || g.clear_padding == 0 {
        return;
    }
    for expert in 0..local {
        for row in offsets[expert] + counts[expert]..offsets[expert + 1] {
            // SAFETY: padding rows lie below the end of the window's rows.
            unsafe { clear(p, row.cast_unsigned()) };
        }
    }
}

/// Copies a token's row, with its scales and weights, to each of its rows here.
///
/// # Safety
///
/// As for the kernel; the references name rows of the window, all of one item, and `from` are the
/// addresses of the token's row and row of scales.
unsafe fn bring(p: &GatherParams, from: (u64, u64), references: &[RowRef]) {
    let g = &p.geometry;
    // In the flat layout all pairs of an item share one row.
    let rows = if g.flat == 0 { references } else { &references[..1] };
    for (from, base, bytes) in [(from.0, p.rows, g.row_bytes), (from.1, p.scales, g.scale_bytes)] {
        if bytes == 0 {
            continue;
        }
        // SAFETY: this function's contract.
        let from = unsafe { table::<u8>(from, bytes as usize) };
        for reference in rows {
            // SAFETY: the row is one of the window's, so below the capacity.
            unsafe { row_of(base, reference.row, bytes) }.copy_from_slice(from);
        }
    }
    if p.handle.row_weights == 0 {
        return;
    }
    let width = g.flat_width as usize;
    for (place, reference) in references.iter().enumerate() {
        let row = reference.row as usize;
        let at = if g.flat == 0 { row } else { row * width + place };
        // SAFETY: the list has an entry for each row, in the flat layout `width` of them.
        unsafe { store(p.handle.row_weights + (at * size_of::<f32>()) as u64, reference.weight) };
    }
    if g.flat != 0 {
        let first = references[0].row as usize * width;
        for place in 0..width {
            let slot = references.get(place).map_or(-1, |reference| reference.slot.cast_signed());
            let at = ((first + place) * size_of::<i32>()) as u64;
            // SAFETY: as above.
            unsafe {
                store(p.handle.row_experts + at, slot);
                if slot < 0 {
                    store(p.handle.row_weights + at, 0f32);
                }
            }
        }
    }
}

/// Zeroes a padding row.
///
/// # Safety
///
/// As for the kernel; `row` is one of the window's.
unsafe fn clear(p: &GatherParams, row: u32) {
    let g = &p.geometry;
    for (base, bytes) in [(p.rows, g.row_bytes), (p.scales, g.scale_bytes)] {
        if bytes > 0 {
            // SAFETY: the row is below the capacity.
            unsafe { row_of(base, row, bytes) }.fill(0);
        }
    }
    if p.handle.row_weights != 0 {
        // SAFETY: the list has an entry for each row.
        unsafe { store(p.handle.row_weights + u64::from(row) * size_of::<f32>() as u64, 0f32) };
    }
}

/// # Safety
///
/// Row `row` lies in the memory at `base`, and nothing else touches it.
unsafe fn row_of<'a>(base: u64, row: u32, row_bytes: u32) -> &'a mut [u8] {
    // SAFETY: as this function's contract says.
    unsafe { table_mut(row_address(base, row as usize, row_bytes), row_bytes as usize) }
}

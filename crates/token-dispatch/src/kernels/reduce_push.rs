//! The expert rank's half of combine: partial sums to the tokens' owners.

use ep_context::signal::HostWaiter;
use ep_context::{FaultKind, Kernel, KernelSource, Phase};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, StepView, load, raise, row_address, table, table_mut};
use super::source;
use crate::dtype::DType;
use crate::params::{CombineHeader, LaneState, ReducePushParams, RowRef, WindowItem, WindowState};

/// For each item of the window the weighted sum of its rows, written into the owner's landing slot;
/// after the last window the signal, with how many items of each owner were processed.
#[derive(Debug)]
pub(crate) struct ReducePush;

impl Kernel for ReducePush {
    type Params = ReducePushParams;
    const NAME: &'static str = "reduce_push";
    const SOURCE: Option<KernelSource> = Some(source(device::REDUCE_PUSH));

    unsafe fn run_on_host(p: &ReducePushParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. The handle and the
        // expert rows belong to this stream. A landing slot is written by the one rank that its item
        // was sent to, between the owner's dispatch signal and this rank's combine signal.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Combine).is_some() {
            return;
        }
        // SAFETY: see above.
        let (blocks, window) =
            unsafe { (LaneBlocks::new(&p.lane, g), load::<WindowState>(p.handle.window)) };
        if p.push != 0 {
            // SAFETY: see above.
            if unsafe { load::<i32>(p.handle.total) }.cast_unsigned() > p.row_limit {
                return raise(&waiter, g, Phase::Combine, FaultKind::TooManyTokens);
            }
            // SAFETY: see above.
            unsafe { push(p, &blocks, &window, |_| ()) };
        }
        if p.release != 0 {
            // SAFETY: see above.
            unsafe { release(p, &blocks, &waiter, &window) };
        }
    }
}

/// Sums the rows of each item and sends the sum to the item's owner; `sent` is told of each.
///
/// # Safety
///
/// As for the kernel.
pub(super) unsafe fn push(
    p: &ReducePushParams,
    blocks: &LaneBlocks<'_>,
    window: &WindowState,
    sent: impl Fn(&WindowItem),
) {
    let g = &p.geometry;
    // SAFETY: the kernel's contract; the gather filled these lists.
    let (items, pairs) = unsafe {
        (
            table::<WindowItem>(p.handle.items, (window.end - window.begin) as usize),
            table::<RowRef>(p.handle.pairs, window.window_pairs as usize),
        )
    };
    let dtype = DType::from_code(g.dtype).unwrap_or(DType::Fp32);
    let (hidden, row_bytes) = (g.hidden as usize, g.sum_bytes as usize);
    let (mut sum, mut values) = (vec![0f32; hidden], vec![0f32; hidden]);
    for item in items {
        sum.fill(0.0);
        // In the flat layout all pairs of an item share one row, which its experts made together.
        let rows = if g.flat == 0 { item.rows } else { 1 };
        for pair in &pairs[item.begin as usize..][..rows as usize] {
            let from = row_address(p.expert_rows, pair.row as usize, g.sum_bytes);
            // SAFETY: the row is one of the window's.
            dtype.decode(unsafe { table::<u8>(from, row_bytes) }, &mut values);
            for (sum, value) in sum.iter_mut().zip(&values) {
                // Two roundings on purpose: the product, then the sum.
                *sum += if p.weighted != 0 { pair.weight * value } else { *value };
            }
        }
        let landing = blocks.at(item.source as usize, g.lane.landing);
        // SAFETY: the slot is one that its owner set aside for this rank.
        let slot = unsafe {
            table_mut::<u8>(row_address(landing, item.slot as usize, g.sum_bytes), row_bytes)
        };
        dtype.encode(&sum, slot);
        sent(item);
    }
}

/// Tells every rank how many of its items are processed.
///
/// # Safety
///
/// As for the kernel.
pub(super) unsafe fn release(
    p: &ReducePushParams,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    window: &WindowState,
) {
    let g = &p.geometry;
    let world = g.world as usize;
    // SAFETY: the kernel's contract.
    let (step, lane, source_items) = unsafe {
        (
            StepView::new(p.state),
            load::<LaneState>(p.lane.state),
            table::<u32>(p.handle.source_items, world + 1),
        )
    };
    for to in blocks.peers_first() {
        let header = CombineHeader {
            step: step.step(),
            ordinal: p.ordinal,
            prefix: window.end.clamp(source_items[to], source_items[to + 1]) - source_items[to],
            required: step.required(),
            first_over: step.first_over(),
            reserved: [0; 3],
        };
        // SAFETY: this rank's header and word in the peer's block; the peer read the last header
        // before it signalled the dispatch that this combine belongs to.
        unsafe {
            let header = (g.lane.combine_headers, header);
            blocks.tell(waiter, to, header, g.lane.combine_words, lane.epoch);
        }
    }
}

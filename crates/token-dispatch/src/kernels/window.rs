//! The receiver takes the next window and lays its rows out.

use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Kernel, KernelSource, Phase, Rank};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, StepView, load, set_condition, store, table, table_mut};
use super::received::ReceivedLists;
use super::source;
use crate::params::{HandleParams, WindowParams, WindowState};

/// The longest prefix of the items that are left whose rows, each expert's padded to the alignment,
/// fit the capacity. An item is taken whole or not at all.
#[derive(Debug)]
pub(crate) struct Window;

impl Kernel for Window {
    type Params = WindowParams;
    const NAME: &'static str = "window";
    const SOURCE: Option<KernelSource> = Some(source(device::WINDOW));

    unsafe fn run_on_host(p: &WindowParams) {
        // SAFETY: for this whole body, the launch vouches for every address in `p`. What peers wrote was
        // acquired by the count that ran before in this stream, and stays until this rank's combine
        // signal. The handle belongs to this stream.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Dispatch).is_some() {
            // SAFETY: see above; the condition is that of the loop which this runs in.
            unsafe {
                leave_empty(&p.handle, p.geometry.local_experts);
                set_condition(p.condition, false);
            }
            return;
        }
        // SAFETY: see above.
        unsafe { advance(p, &waiter) };
    }
}

/// Makes of the handle one that received nothing: whatever the caller runs behind a dispatch that was given
/// up finds no rows, and not those of a dispatch before, for which there may be no memory any more.
///
/// # Safety
///
/// The handle is one of `local` experts, and belongs to the stream of this operation.
pub(super) unsafe fn leave_empty(handle: &HandleParams, local: u32) {
    let local = local as usize;
    // SAFETY: this function's contract; the tables do not overlap.
    unsafe {
        table_mut::<i32>(handle.expert_offsets, local + 1).fill(0);
        table_mut::<i32>(handle.tokens_per_expert, local).fill(0);
        store(handle.total, 0_i32);
    }
}

/// Takes the next window and lays it out.
///
/// # Safety
///
/// As for [`Window`].
pub(super) unsafe fn advance(p: &WindowParams, waiter: &HostWaiter) {
    let g = &p.geometry;
    let local = g.local_experts as usize;
    // SAFETY: this function's contract; the tables do not overlap.
    let (mut window, capacity, taken, tokens_per_expert, offsets) = unsafe {
        (
            load::<WindowState>(p.handle.window),
            load::<u32>(p.capacity).min(p.row_limit),
            table_mut::<u32>(p.handle.taken, g.slots as usize),
            table_mut::<i32>(p.handle.tokens_per_expert, local),
            table_mut::<i32>(p.handle.expert_offsets, local + 1),
        )
    };
    for (taken, before) in taken.iter_mut().zip(tokens_per_expert.iter()) {
        *taken += before.cast_unsigned();
    }
    window.begin = window.end;
    window.pair_begin += window.window_pairs;
    window.window_pairs = 0;
    window.capacity = capacity;
    let mut counts = vec![0u32; g.slots as usize];
    if window.silent == 0 {
        // SAFETY: as above.
        unsafe { take(p, &mut window, &mut counts) };
        window.windows += 1;
    }
    let mut offset = 0;
    for (expert, count) in counts[..local].iter().enumerate() {
        tokens_per_expert[expert] = count.cast_signed();
        offsets[expert] = offset;
        if g.flat == 0 {
            offset += count.next_multiple_of(g.alignment).cast_signed();
        }
    }
    if g.flat != 0 {
        offset = (window.end - window.begin).cast_signed();
    }
    offsets[local] = offset;
    // SAFETY: as above.
    let step = unsafe {
        store(p.handle.total, offset);
        store(p.handle.window, window);
        StepView::new(p.state)
    };
    step.note_window(window.windows, capacity);
    step.add_delivered(u64::from(window.window_pairs));
    let left = window.silent == 0 && window.end < window.items;
    if p.condition != 0 && left && window.end == window.begin {
        waiter.fail(Fault {
            phase: Phase::Dispatch,
            culprit: Rank(g.rank),
            kind: FaultKind::NoProgress,
        });
    }
    // SAFETY: the condition is that of the loop which this runs in.
    unsafe { set_condition(p.condition, left && window.end > window.begin) };
    if p.last != 0 {
        step.add_dropped(u64::from(window.pairs - window.pair_begin - window.window_pairs));
    }
}

/// Moves the window's end over the items that fit, counting the pairs of each expert.
///
/// # Safety
///
/// As for the kernel.
unsafe fn take(p: &WindowParams, window: &mut WindowState, counts: &mut [u32]) {
    let g = &p.geometry;
    let world = g.world as usize;
    // SAFETY: the kernel's contract; read only.
    let (lists, source_items) = unsafe {
        let blocks = LaneBlocks::new(&p.lane, g);
        (ReceivedLists::new(g, blocks), table::<u32>(p.handle.source_items, world + 1))
    };
    let mut rows = 0u32;
    for source in 0..world {
        let first = window.end.max(source_items[source]);
        for item in first..source_items[source + 1] {
            // SAFETY: the sender's list is that long.
            let (_, pairs) = unsafe { lists.item(source, item - source_items[source]) };
            if g.flat != 0 {
                let items = u64::from(window.end - window.begin + 1);
                if items.next_multiple_of(g.alignment.into()) > u64::from(window.capacity) {
                    return;
                }
                for pair in pairs {
                    counts[pair.slot as usize] += 1;
                }
                window.window_pairs += pairs.len() as u32;
                window.end += 1;
                continue;
            }
            // An expert's count needs a new block of rows whenever it stands at a multiple of the
            // alignment; an item names each expert at most once.
            let blocks_needed = pairs
                .iter()
                .filter(|pair| counts[pair.slot as usize].is_multiple_of(g.alignment))
                .count() as u32;
            let needed = u64::from(rows) + u64::from(blocks_needed) * u64::from(g.alignment);
            if needed > u64::from(window.capacity) {
                return;
            }
            rows = needed as u32;
            for pair in pairs {
                counts[pair.slot as usize] += 1;
            }
            window.window_pairs += pairs.len() as u32;
            window.end += 1;
        }
    }
}

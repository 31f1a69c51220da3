//! The receiver waits for every sender and learns how many rows it would take.

use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Kernel, KernelSource, Phase, Rank};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, StepView, load, set_condition, store, table, table_mut};
use super::source;
use crate::params::{CountParams, DispatchHeader, LaneState, TRANSFER_PULL, WindowState};

/// Acquires the signal of every rank, adds up what each has for this one, and folds the rows that
/// all of it requires into the counters of the step.
#[derive(Debug)]
pub(crate) struct Count;

impl Kernel for Count {
    type Params = CountParams;
    const NAME: &'static str = "count";
    const SOURCE: Option<KernelSource> = Some(source(device::COUNT));

    unsafe fn run_on_host(p: &CountParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Headers and counts
        // are read after their writers' signals were acquired, and written again only after this
        // rank's combine signal of the epoch. The handle belongs to this stream.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Dispatch).is_some() {
            return;
        }
        // SAFETY: see above.
        let (blocks, step, lane) = unsafe {
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), load::<LaneState>(p.lane.state))
        };
        let words = blocks.own(g.lane.dispatch_words);
        // SAFETY: the words of every rank in this rank's own block, signalled by peers.
        if unsafe { waiter.wait_all(Phase::Dispatch, words, lane.epoch) }.is_err() {
            return;
        }
        // SAFETY: see above.
        unsafe { take_stock(p, &blocks, &waiter, step, TRANSFER_PULL) };
    }
}

/// Adds up what every rank has for this one and folds what that requires into the counters of the step;
/// whether all ranks are where this one is, with rows that travel as `transfer` says.
///
/// # Safety
///
/// As for [`Count`]; the signal of every rank was acquired.
pub(super) unsafe fn take_stock(
    p: &CountParams,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    step: StepView,
    transfer: u32,
) -> bool {
    let g = &p.geometry;
    let (world, slots) = (g.world as usize, g.slots as usize);
    // SAFETY: this function's contract; the tables do not overlap.
    let (headers, counts, source_items, source_pairs, bases, taken, tokens_per_expert) = unsafe {
        (
            table::<DispatchHeader>(blocks.own(g.lane.dispatch_headers), world),
            table::<u32>(blocks.own(g.lane.counts), world * slots),
            table_mut::<u32>(p.handle.source_items, world + 1),
            table_mut::<u32>(p.handle.source_pairs, world + 1),
            table_mut::<u32>(p.handle.bases, world * slots),
            table_mut::<u32>(p.handle.taken, slots),
            table_mut::<i32>(p.handle.tokens_per_expert, g.local_experts as usize),
        )
    };
    let here = (step.step(), p.ordinal, transfer);
    if let Some(source) = headers.iter().position(|h| (h.step, h.ordinal, h.transfer) != here) {
        waiter.fail(Fault {
            phase: Phase::Dispatch,
            culprit: Rank::from_index(source),
            kind: FaultKind::OutOfStep,
        });
        return false;
    }
    let mut sums = [0; 2];
    let mut per_expert = vec![0; slots];
    for (source, header) in headers.iter().enumerate() {
        (source_items[source], source_pairs[source]) = (sums[0], sums[1]);
        sums = [sums[0] + header.items, sums[1] + header.pairs];
        bases[source * slots..][..slots].copy_from_slice(&per_expert);
        for (total, count) in per_expert.iter_mut().zip(&counts[source * slots..]) {
            *total += count;
        }
    }
    (source_items[world], source_pairs[world]) = (sums[0], sums[1]);
    taken.fill(0);
    tokens_per_expert.fill(0);
    let required = match g.flat {
        0 => per_expert.iter().map(|count| count.next_multiple_of(g.alignment)).sum(),
        _ => sums[0].next_multiple_of(g.alignment),
    };
    // SAFETY: as above.
    let capacity = unsafe { load::<u32>(p.capacity) }.min(p.row_limit);
    // Where routing depends on outputs a dispatch behind an over-budget one does not count. Its
    // senders had nothing for anybody then; a sender that did not know yet does not change that.
    let silent = step.is_silent(p.ordinal, p.dependent != 0);
    if !silent {
        step.note_required(required);
        if p.budgeted != 0 && required > capacity {
            step.note_over(p.ordinal);
        }
        if p.ordinal < p.max_dispatches {
            // SAFETY: the table has max_dispatches entries; each is one dispatch's own.
            unsafe { store(p.required_by_dispatch + 4 * u64::from(p.ordinal), required) };
        }
    }
    // SAFETY: the window belongs to this handle, whose operations run in this stream.
    unsafe {
        let before: WindowState = load(p.handle.window);
        store(
            p.handle.window,
            WindowState {
                items: sums[0],
                pairs: sums[1],
                required,
                silent: u32::from(silent),
                ..before
            },
        );
        set_condition(p.condition, !silent && sums[0] > 0);
    }
    true
}

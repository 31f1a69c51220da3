//! Waiting for every rank's word, and folding it into the counters of the step.

use std::sync::atomic::Ordering;

use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Kernel, KernelSource, Phase, Rank};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, StepView, atomics, load, table};
use super::source;
use crate::geometry::Geometry;
use crate::params::{AcknowledgeParams, CombineHeader, FoldParams, LaneState};

/// Waits for the partial sums of every rank.
#[derive(Debug)]
pub(crate) struct Fold;

impl Kernel for Fold {
    type Params = FoldParams;
    const NAME: &'static str = "fold";
    const SOURCE: Option<KernelSource> = Some(source(device::FOLD));

    unsafe fn run_on_host(p: &FoldParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Headers are read
        // after their writers' signals were acquired, and written again only after this rank's next
        // dispatch signal.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Combine).is_some() {
            return;
        }
        // SAFETY: see above.
        let (blocks, step, lane) = unsafe {
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), load::<LaneState>(p.lane.state))
        };
        let words = blocks.own(g.lane.combine_words);
        // SAFETY: the words of every rank in this rank's own block, signalled by peers; once they are
        // acquired the headers may be read.
        unsafe {
            if waiter.wait_all(Phase::Combine, words, lane.epoch).is_ok() {
                fold(g, &blocks, &waiter, step, p.peer_required, p.ordinal, Phase::Combine);
            }
        }
    }
}

/// Folds what every rank said into the counters at once, since its words may be overwritten later.
/// Fails if a rank is elsewhere; whether all are here.
///
/// # Safety
///
/// The signal of every rank was acquired; the addresses are as for [`Fold`].
pub(super) unsafe fn fold(
    g: &Geometry,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    step: StepView,
    peer_required: u64,
    ordinal: u32,
    phase: Phase,
) -> bool {
    let world = g.world as usize;
    // SAFETY: as this function's contract says; lanes in flight may fold at the same time, so the
    // requirements are only accessed atomically meanwhile.
    let (headers, peer_required) = unsafe {
        (
            table::<CombineHeader>(blocks.own(g.lane.combine_headers), world),
            atomics(peer_required, world),
        )
    };
    let here = (step.step(), ordinal);
    if let Some(source) = headers.iter().position(|h| (h.step, h.ordinal) != here) {
        let culprit = Rank::from_index(source);
        waiter.fail(Fault { phase, culprit, kind: FaultKind::OutOfStep });
        return false;
    }
    for (required, header) in peer_required.iter().zip(headers) {
        required.fetch_max(header.required, Ordering::Relaxed);
        step.note_over(header.first_over);
    }
    true
}

/// One more round of signals, so that a step that ends in a dispatch leaves every rank with the same
/// verdict, and its staging areas free.
#[derive(Debug)]
pub(crate) struct Acknowledge;

impl Kernel for Acknowledge {
    type Params = AcknowledgeParams;
    const NAME: &'static str = "acknowledge";
    const SOURCE: Option<KernelSource> = Some(source(device::ACKNOWLEDGE));

    unsafe fn run_on_host(p: &AcknowledgeParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Peers read their
        // headers of the last combine before they signalled the dispatch that this round closes.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Acknowledge).is_some() {
            return;
        }
        // The words of combine, with the epoch of the dispatch that is closed: whether a pair ends
        // in a combine or here, its words move on by one.
        // SAFETY: see above.
        let (blocks, step, lane) = unsafe {
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), load::<LaneState>(p.lane.state))
        };
        let epoch = lane.epoch;
        for to in blocks.peers_first() {
            let header = CombineHeader {
                step: step.step(),
                ordinal: p.ordinal,
                prefix: 0,
                required: step.required(),
                first_over: step.first_over(),
                reserved: [0; 3],
            };
            // SAFETY: see above; the word is this rank's in the peer's block.
            unsafe {
                let header = (g.lane.combine_headers, header);
                blocks.tell(&waiter, to, header, g.lane.combine_words, epoch);
            }
        }
        let words = blocks.own(g.lane.combine_words);
        // SAFETY: the words of every rank in this rank's own block, signalled by peers; once they are
        // acquired the headers may be read.
        unsafe {
            if waiter.wait_all(Phase::Acknowledge, words, epoch).is_ok() {
                fold(g, &blocks, &waiter, step, p.peer_required, p.ordinal, Phase::Acknowledge);
            }
        }
    }
}

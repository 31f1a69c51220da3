//! The owner's half of combine, and the closing round of a step that ends in a dispatch.

use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Kernel, Phase, Rank};

use super::memory::{LaneBlocks, StepView, load, store, table, table_mut};
use crate::dtype::DType;
use crate::geometry::Geometry;
use crate::params::{
    AcknowledgeParams, CombineHeader, Destination, LaneState, ReduceParams, WindowState,
};

/// Waits for every rank, folds what each said into the counters of the step, and adds the partial
/// sums of each token in the order of the ranks.
#[derive(Debug)]
pub(crate) struct Reduce;

impl Kernel for Reduce {
    type Params = ReduceParams;
    const NAME: &'static str = "reduce";

    unsafe fn run_on_host(p: &ReduceParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Headers and landing
        // slots are read after their writers' signals were acquired, and written again only after
        // this rank's next dispatch signal. Handle and output belong to this stream.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Combine).is_some() {
            return;
        }
        // SAFETY: see above.
        let (blocks, step, lane) = unsafe {
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), load::<LaneState>(p.lane.state))
        };
        let words = blocks.own(g.lane.combine_words);
        // SAFETY: the words of every rank in this rank's own block, signalled by peers.
        if unsafe { waiter.wait_all(Phase::Combine, words, lane.epoch) }.is_err() {
            return;
        }
        // SAFETY: see above.
        let Some(headers) = (unsafe {
            fold(g, &blocks, &waiter, step, p.peer_required, p.ordinal, Phase::Combine)
        }) else {
            return;
        };
        // SAFETY: see above; the route of this dispatch wrote the handle's tables.
        unsafe {
            let tokens = load::<WindowState>(p.handle.window).tokens as usize;
            if p.output != 0 {
                add_partials(p, &blocks, headers, tokens);
            }
            if p.weight_grads != 0 {
                let count = tokens * g.top_k as usize;
                table_mut::<f32>(p.weight_grads, count)
                    .copy_from_slice(table(blocks.own(g.lane.weight_grads), count));
            }
        }
    }
}

/// # Safety
///
/// As for [`Reduce`].
unsafe fn add_partials(
    p: &ReduceParams,
    blocks: &LaneBlocks<'_>,
    headers: &[CombineHeader],
    tokens: usize,
) {
    let g = &p.geometry;
    let (fanout, hidden, row_bytes) = (g.fanout as usize, g.hidden as usize, g.sum_bytes as usize);
    let dtype = DType::from_code(g.dtype).unwrap_or(DType::Fp32);
    let landing = blocks.own(g.lane.landing);
    // SAFETY: the kernel's contract.
    let (fanouts, destinations) = unsafe {
        (
            table::<u32>(p.handle.fanouts, tokens),
            table::<Destination>(p.handle.destinations, tokens * fanout),
        )
    };
    let (mut sum, mut values) = (vec![0f32; hidden], vec![0f32; hidden]);
    for (token, fanout_of_token) in fanouts.iter().enumerate() {
        sum.fill(0.0);
        for reached in 0..*fanout_of_token as usize {
            let slot = token * fanout + reached;
            let destination = destinations[slot];
            if destination.position >= headers[destination.rank as usize].prefix {
                continue;
            }
            // SAFETY: the destination wrote this slot before its signal.
            let bytes = unsafe { table::<u8>(landing + (slot * row_bytes) as u64, row_bytes) };
            dtype.decode(bytes, &mut values);
            for (sum, value) in sum.iter_mut().zip(&values) {
                *sum += value;
            }
        }
        // SAFETY: the output has a row for each token.
        let output = unsafe { table_mut::<u8>(p.output + (token * row_bytes) as u64, row_bytes) };
        dtype.encode(&sum, output);
    }
}

/// Folds what every rank said into the counters at once, since its words may be overwritten later.
/// `None`, after failing, if a rank is elsewhere.
///
/// # Safety
///
/// The signal of every rank was acquired; the addresses are as for [`Reduce`].
unsafe fn fold<'a>(
    g: &Geometry,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    step: StepView,
    peer_required: u64,
    ordinal: u32,
    phase: Phase,
) -> Option<&'a [CombineHeader]> {
    let world = g.world as usize;
    // SAFETY: as this function's contract says.
    let (headers, peer_required) = unsafe {
        (
            table::<CombineHeader>(blocks.own(g.lane.combine_headers), world),
            table_mut::<u32>(peer_required, world),
        )
    };
    let here = (step.step(), ordinal);
    if let Some(source) = headers.iter().position(|h| (h.step, h.ordinal) != here) {
        let culprit = Rank::from_index(source);
        waiter.fail(Fault { phase, culprit, kind: FaultKind::OutOfStep });
        return None;
    }
    for (required, header) in peer_required.iter_mut().zip(headers) {
        *required = header.required.max(*required);
        step.note_over(header.first_over);
    }
    Some(headers)
}

/// One more round of signals, so that a step that ends in a dispatch leaves every rank with the same
/// verdict, and its staging areas free.
#[derive(Debug)]
pub(crate) struct Acknowledge;

impl Kernel for Acknowledge {
    type Params = AcknowledgeParams;
    const NAME: &'static str = "acknowledge";

    unsafe fn run_on_host(p: &AcknowledgeParams) {
        let g = &p.geometry;
        let rank = g.rank as usize;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Peers read their
        // headers of the last combine before they signalled the dispatch that this round closes.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Acknowledge).is_some() {
            return;
        }
        // SAFETY: see above; the lane's state is touched only by operations of its own stream.
        let (blocks, step, epoch) = unsafe {
            let lane: &mut LaneState = &mut table_mut(p.lane.state, 1)[0];
            lane.acknowledge_epoch = lane.acknowledge_epoch.wrapping_add(1);
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), lane.acknowledge_epoch)
        };
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
                let headers = blocks.at(to, g.lane.combine_headers);
                store(headers + (rank * size_of::<CombineHeader>()) as u64, header);
                let words = blocks.at(to, g.lane.acknowledge_words);
                waiter.signal(
                    Rank::from_index(to),
                    words + (rank * size_of::<u32>()) as u64,
                    epoch,
                );
            }
        }
        let words = blocks.own(g.lane.acknowledge_words);
        // SAFETY: the words of every rank in this rank's own block, signalled by peers; once they are
        // acquired the headers may be read.
        unsafe {
            if waiter.wait_all(Phase::Acknowledge, words, epoch).is_ok() {
                fold(g, &blocks, &waiter, step, p.peer_required, p.ordinal, Phase::Acknowledge);
            }
        }
    }
}

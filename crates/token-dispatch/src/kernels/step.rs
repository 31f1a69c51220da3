//! The beginning and the end of a step.

use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Zeroable;
use ep_context::signal::HostWaiter;
use ep_context::{Fault, Kernel, KernelSource, Phase};
use graph_ep_kernels::dispatch as device;

use super::memory::{load, store, table, table_mut};
use super::source;
use crate::params::{
    AbandonParams, NONE, RecordHeader, ResumeParams, STALE, StepBeginParams, StepEndParams,
    StepState,
};

/// Counts the step and clears what is counted within one.
#[derive(Debug)]
pub(crate) struct StepBegin;

impl Kernel for StepBegin {
    type Params = StepBeginParams;
    const NAME: &'static str = "step_begin";
    const SOURCE: Option<KernelSource> = Some(source(device::STEP_BEGIN));

    unsafe fn run_on_host(p: &StepBeginParams) {
        // SAFETY: the launch vouches for every address; nothing else of the step runs yet.
        unsafe {
            let before: StepState = load(p.state);
            let mut fresh = StepState {
                step: before.step.wrapping_add(1),
                held: before.held,
                drained: before.held,
                first_over: NONE,
                capacity: u32::MAX,
                ..StepState::zeroed()
            };
            if let (0, Some(stale)) = (fresh.held, stale_mark(p)) {
                // It moves nothing here, and all learn of it as if the first dispatch were over budget.
                (fresh.drained, fresh.first_over, fresh.required) = (1, 0, stale);
            }
            store(p.state, fresh);
            table_mut::<u32>(p.peer_required, p.wait.world as usize).fill(0);
            table_mut::<u32>(p.required_by_dispatch, p.max_dispatches as usize).fill(0);
        }
    }
}

/// What this rank says that it required if its graph was recorded for shapes that do not hold.
///
/// # Safety
///
/// The addresses in `shapes` are valid, and nothing writes the words meanwhile.
unsafe fn stale_mark(p: &StepBeginParams) -> Option<u32> {
    p.shapes.iter().take(p.shape_count as usize).find_map(|check| {
        // SAFETY: the caller's promise.
        let now: u64 = unsafe { load(check.generation) };
        (now != check.recorded)
            .then(|| STALE | (check.recorded.min(0x7fff) as u32) << 16 | now.min(0xffff) as u32)
    })
}

/// Publishes the record of the step, and holds back later steps after an overflow.
#[derive(Debug)]
pub(crate) struct StepEnd;

impl Kernel for StepEnd {
    type Params = StepEndParams;
    const NAME: &'static str = "step_end";
    const SOURCE: Option<KernelSource> = Some(source(device::STEP_END));

    unsafe fn run_on_host(p: &StepEndParams) {
        let world = p.wait.world as usize;
        // SAFETY: for this whole body, the launch vouches for every address; the rest of the step ran
        // before. The host reads a record only while its sequence is the one it waits for.
        let fault = unsafe { HostWaiter::from_params(&p.wait) }.fault(Phase::Record);
        // SAFETY: see above.
        unsafe {
            let state: &mut StepState = &mut table_mut(p.state, 1)[0];
            // A rank that drained by itself, its graph being stale, is held back as its peers are.
            let counts = state.drained == 0 || state.required & STALE != 0;
            if p.hold != 0 && state.first_over != NONE && counts {
                state.held = 1;
            }
            let kept = state.dispatches.min(p.max_dispatches);
            let record = p.ring + u64::from(state.step % p.records) * u64::from(p.stride);
            let sequence =
                AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(record as usize));
            // A reader that still looks at the record that was here before sees that it is going.
            sequence.store(0, Ordering::SeqCst);
            let header = RecordHeader {
                sequence: 0,
                step: state.step,
                drained: state.drained,
                first_over: state.first_over,
                required: state.required,
                dispatches: state.dispatches,
                windows: state.windows,
                capacity: state.capacity,
                reserved: 0,
                fault: fault.map_or(0, |fault: Fault| fault.to_word()),
                dropped: state.dropped,
                delivered: state.delivered,
                invalid_ids: state.invalid_ids,
                repeated_ids: state.repeated_ids,
            };
            let after_sequence = size_of::<u64>();
            table_mut::<u8>(
                record + after_sequence as u64,
                size_of::<RecordHeader>() - after_sequence,
            )
            .copy_from_slice(&bytemuck::bytes_of(&header)[after_sequence..]);
            let peers = record + size_of::<RecordHeader>() as u64;
            table_mut::<u32>(peers, world).copy_from_slice(table(p.peer_required, world));
            let dispatches = peers + (world * size_of::<u32>()) as u64;
            table_mut::<u32>(dispatches, kept as usize)
                .copy_from_slice(table(p.required_by_dispatch, kept as usize));
            sequence.store(RecordHeader::sequence_of(state.step), Ordering::Release);
        }
    }
}

/// Lets the steps behind an over-budget one run again.
#[derive(Debug)]
pub(crate) struct Resume;

impl Kernel for Resume {
    type Params = ResumeParams;
    const NAME: &'static str = "resume";
    const SOURCE: Option<KernelSource> = Some(source(device::RESUME));

    unsafe fn run_on_host(p: &ResumeParams) {
        // SAFETY: the launch vouches for the address; no step runs meanwhile in this stream.
        unsafe {
            let state: &mut StepState = &mut table_mut(p.state, 1)[0];
            state.held = 0;
        }
    }
}

/// Gives the group up in the name of this rank: its host found that it cannot go on.
#[derive(Debug)]
pub(crate) struct Abandon;

impl Kernel for Abandon {
    type Params = AbandonParams;
    const NAME: &'static str = "abandon";
    const SOURCE: Option<KernelSource> = Some(source(device::ABANDON));

    unsafe fn run_on_host(p: &AbandonParams) {
        // SAFETY: the launch vouches for every address.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if let (None, Some(fault)) = (waiter.fault(Phase::Record), Fault::from_word(p.fault)) {
            waiter.fail(fault);
        }
    }
}

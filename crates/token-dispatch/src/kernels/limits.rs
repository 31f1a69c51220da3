//! That no gradient of a weight is read beyond the memory for them.
//!
//! In a backward pass the sums of rows, which are queued behind these gradients with the same limit, would raise
//! the same fault, and nobody reads the gradients after it: which of the two looked shows here only.

use std::sync::atomic::AtomicU64;

use bytemuck::Zeroable;
use ep_context::signal::{AttentionBlock, ControlBlock, HostWaiter, WaitParams};
use ep_context::{Fault, FaultKind, Kernel, Phase, Rank};

use super::PushWeightGrads;
use crate::geometry::Geometry;
use crate::params::{
    HandleParams, LaneParams, PushWeightGradsParams, RowRef, WindowItem, WindowState,
};

/// The row of the only pair, which is the last.
const ROW: u32 = 3;
const UNTOUCHED: f32 = -1.0;

/// The address of what `values` points to, for a kernel.
fn address<T>(values: *const T) -> u64 {
    values.expose_provenance() as u64
}

/// What the owner of the token gets where there is memory for `row_limit` gradients, and the fault.
fn returned(row_limit: u32) -> (f32, Option<Fault>) {
    let words = |bytes: usize| (0..bytes / 8).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let control = words(size_of::<ControlBlock>());
    let attention = words(size_of::<AttentionBlock>());
    let attentions = [address(attention.as_ptr())];
    let mut gradients = [UNTOUCHED];
    let blocks = [address(gradients.as_mut_ptr())];
    let (window, total) = (WindowState { end: 1, window_pairs: 1, ..Zeroable::zeroed() }, ROW + 1);
    let items = [WindowItem { rows: 1, ..Zeroable::zeroed() }];
    let pairs = [RowRef { row: ROW, ..Zeroable::zeroed() }];
    let row_grads = [0.0_f32, 1.0, 2.0, 3.0];
    let params = PushWeightGradsParams {
        geometry: Geometry { world: 1, top_k: 1, fanout: 1, ..Zeroable::zeroed() },
        wait: WaitParams {
            control: address(control.as_ptr()),
            attention: address(attentions.as_ptr()),
            own: attentions[0],
            rank: 0,
            world: 1,
        },
        lane: LaneParams { blocks: address(blocks.as_ptr()), ..Zeroable::zeroed() },
        handle: HandleParams {
            window: address(&raw const window),
            total: address(&raw const total),
            items: address(items.as_ptr()),
            pairs: address(pairs.as_ptr()),
            ..Zeroable::zeroed()
        },
        row_grads: address(row_grads.as_ptr()),
        row_limit,
        reserved: 0,
    };
    // SAFETY: every address that the body uses is that of a local of the right type, the words for faults are
    // atomics, and nothing else runs.
    let fault = unsafe {
        PushWeightGrads::run_on_host(&params);
        HostWaiter::from_params(&params.wait).fault(Phase::Combine)
    };
    // SAFETY: the address is that of `gradients`, which nothing uses at the same time.
    (unsafe { super::memory::load(blocks[0]) }, fault)
}

#[test]
fn gradients_of_weights_are_read_up_to_the_limit() {
    assert_eq!(returned(ROW + 1), (3.0, None));
}

#[test]
fn gradients_of_weights_beyond_the_limit_are_a_fault() {
    let fault = Fault { phase: Phase::Combine, culprit: Rank(0), kind: FaultKind::TooManyTokens };
    assert_eq!(returned(ROW), (UNTOUCHED, Some(fault)));
}

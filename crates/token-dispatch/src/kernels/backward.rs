//! Gradients along the routes of a kept handle.
//!
//! The backward pass of combine is a dispatch, that of dispatch a combine. Routes are not built
//! again: owners stage gradients where their tokens were, and the expert ranks know from the handle
//! which row each came to. The way back is [`ReducePush`](super::ReducePush) and
//! [`Reduce`](super::Reduce) without weights.

use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Kernel, KernelSource, Phase, Rank};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, StepView, load, raise, row_address, store, table, table_mut};
use super::source;
use crate::dtype::DType;
use crate::geometry::Geometry;
use crate::params::{
    AcquireParams, DispatchHeader, HandleParams, LaneState, PushWeightGradsParams, RegatherParams,
    RestageParams, RowRef, TRANSFER_PULL, WindowItem, WindowState,
};

/// Stages the gradients of a rank's outputs and signals; clears where gradients of weights arrive.
#[derive(Debug)]
pub(crate) struct Restage;

impl Kernel for Restage {
    type Params = RestageParams;
    const NAME: &'static str = "restage";
    const SOURCE: Option<KernelSource> = Some(source(device::RESTAGE));

    unsafe fn run_on_host(p: &RestageParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Staging and
        // gradient areas belong to this rank: peers touch them only between this signal and their
        // combine signal of the same epoch, which this rank acquired before it came here again.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Dispatch).is_some() {
            return;
        }
        // SAFETY: see above.
        let tokens = unsafe { load::<WindowState>(p.handle.window) }.tokens;
        if tokens > p.num_tokens {
            return raise(&waiter, g, Phase::Dispatch, FaultKind::TooManyTokens);
        }
        // SAFETY: see above; the lane's state is touched only by operations of its own stream.
        let (blocks, step, epoch) = unsafe {
            let lane: &mut LaneState = &mut table_mut(p.lane.state, 1)[0];
            lane.epoch = lane.epoch.wrapping_add(1);
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), lane.epoch)
        };
        step.note_dispatch(p.ordinal);
        let tokens = tokens as usize;
        let bytes = tokens * g.sum_bytes as usize;
        let staging = blocks.own(g.lane.staging);
        // SAFETY: see above.
        unsafe {
            if p.rows != staging {
                table_mut::<u8>(staging, bytes).copy_from_slice(table(p.rows, bytes));
            }
            table_mut::<f32>(blocks.own(g.lane.weight_grads), tokens * g.top_k as usize).fill(0.0);
        }
        for to in blocks.peers_first() {
            let header = DispatchHeader {
                step: step.step(),
                ordinal: p.ordinal,
                items: 0,
                item_base: 0,
                pairs: 0,
                pair_base: 0,
                transfer: TRANSFER_PULL,
                reserved: 0,
            };
            // SAFETY: this rank's header and word in the peer's block, as for a dispatch.
            unsafe {
                let header = (g.lane.dispatch_headers, header);
                blocks.tell(&waiter, to, header, g.lane.dispatch_words, epoch);
            }
        }
    }
}

/// Waits for the gradients of every rank.
#[derive(Debug)]
pub(crate) struct Acquire;

impl Kernel for Acquire {
    type Params = AcquireParams;
    const NAME: &'static str = "acquire";
    const SOURCE: Option<KernelSource> = Some(source(device::ACQUIRE));

    unsafe fn run_on_host(p: &AcquireParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`; headers are read
        // after their writers' signals were acquired.
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
        // SAFETY: every signal was acquired.
        let headers = unsafe {
            table::<DispatchHeader>(blocks.own(g.lane.dispatch_headers), g.world as usize)
        };
        let here = (step.step(), p.ordinal);
        if let Some(source) = headers.iter().position(|h| (h.step, h.ordinal) != here) {
            waiter.fail(Fault {
                phase: Phase::Dispatch,
                culprit: Rank::from_index(source),
                kind: FaultKind::OutOfStep,
            });
        }
    }
}

/// Brings each gradient to the rows of its token, times their weights, and returns the gradients of
/// the weights: the products of gradient and expert output.
#[derive(Debug)]
pub(crate) struct Regather;

impl Kernel for Regather {
    type Params = RegatherParams;
    const NAME: &'static str = "regather";
    const SOURCE: Option<KernelSource> = Some(source(device::REGATHER));

    unsafe fn run_on_host(p: &RegatherParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. What peers
        // staged was acquired before, and stays until this rank's combine signal. The gradients of a
        // token's weights are written by the ranks of its experts alone.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Dispatch).is_some() {
            return;
        }
        // SAFETY: see above.
        let (window, total) = unsafe {
            (load::<WindowState>(p.handle.window), load::<i32>(p.handle.total).cast_unsigned())
        };
        // What the handle holds shows only here: which dispatch filled it last, replays decide.
        if total > p.row_limit {
            return raise(&waiter, g, Phase::Dispatch, FaultKind::TooManyTokens);
        }
        if p.whole != 0 && window.begin != 0 {
            return raise(&waiter, g, Phase::Dispatch, FaultKind::OutOfStep);
        }
        // SAFETY: see above.
        let blocks = unsafe { LaneBlocks::new(&p.lane, g) };
        let dtype = DType::from_code(g.dtype).unwrap_or(DType::Fp32);
        let (hidden, row_bytes) = (g.hidden as usize, g.sum_bytes as usize);
        let address = |base, row: u32| row_address(base, row as usize, g.sum_bytes);
        let (mut gradient, mut values) = (vec![0f32; hidden], vec![0f32; hidden]);
        // SAFETY: see above; the gather of the same window filled the lists.
        let (items, pairs) = unsafe { lists(&p.handle) };
        for item in items {
            let (source, token) = (item.source as usize, item.slot / g.fanout);
            let staging = blocks.at(source, g.lane.staging);
            // SAFETY: `token` is below the number of tokens that `source` staged.
            let row = unsafe { table::<u8>(address(staging, token), row_bytes) };
            dtype.decode(row, &mut gradient);
            let pairs = &pairs[item.begin as usize..][..item.rows as usize];
            let rows = if g.flat == 0 { pairs } else { &pairs[..1] };
            for pair in rows {
                for (value, gradient) in values.iter_mut().zip(&gradient) {
                    *value = if g.weighted != 0 { pair.weight * gradient } else { *gradient };
                }
                // SAFETY: the row is one of the window's.
                let to = unsafe { table_mut::<u8>(address(p.rows, pair.row), row_bytes) };
                dtype.encode(&values, to);
                if p.expert_rows == 0 {
                    continue;
                }
                let from = address(p.expert_rows, pair.row);
                // SAFETY: the row is one of the window's.
                dtype.decode(unsafe { table::<u8>(from, row_bytes) }, &mut values);
                let product = gradient.iter().zip(&values).map(|(g, v)| g * v).sum::<f32>();
                // SAFETY: see above.
                unsafe { store(weight_grad(g, &blocks, item, pair.choice), product) };
            }
        }
        if g.flat == 0 {
            // SAFETY: see above.
            unsafe { clear_padding(p) };
        }
    }
}

/// Returns gradients of weights that the caller computed, one for each row or choice.
#[derive(Debug)]
pub(crate) struct PushWeightGrads;

impl Kernel for PushWeightGrads {
    type Params = PushWeightGradsParams;
    const NAME: &'static str = "push_weight_grads";
    const SOURCE: Option<KernelSource> = Some(source(device::PUSH_WEIGHT_GRADS));

    unsafe fn run_on_host(p: &PushWeightGradsParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, as for `Regather`; the owner cleared the area before it
        // signalled the dispatch that this belongs to.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Combine).is_some() {
            return;
        }
        // SAFETY: see above.
        if unsafe { load::<i32>(p.handle.total) }.cast_unsigned() > p.row_limit {
            return raise(&waiter, g, Phase::Combine, FaultKind::TooManyTokens);
        }
        // SAFETY: see above.
        let (blocks, (items, pairs)) = unsafe { (LaneBlocks::new(&p.lane, g), lists(&p.handle)) };
        for item in items {
            let pairs = &pairs[item.begin as usize..][..item.rows as usize];
            for (place, pair) in pairs.iter().enumerate() {
                let row = pair.row as usize;
                let at = if g.flat == 0 { row } else { row * g.flat_width as usize + place };
                // SAFETY: see above; the caller's list has an entry for each row or choice.
                unsafe {
                    let grad: f32 = load(p.row_grads + (at * size_of::<f32>()) as u64);
                    store(weight_grad(g, &blocks, item, pair.choice), grad);
                }
            }
        }
    }
}

/// The items of a handle's window and their pairs.
///
/// # Safety
///
/// The handle was filled by operations before, of the same stream.
unsafe fn lists<'a>(handle: &HandleParams) -> (&'a [WindowItem], &'a [RowRef]) {
    // SAFETY: as this function's contract says.
    unsafe {
        let window: WindowState = load(handle.window);
        let items = table(handle.items, (window.end - window.begin) as usize);
        (items, table(handle.pairs, window.window_pairs as usize))
    }
}

/// Where the owner of `item` takes the gradient of the weight of one of its choices.
fn weight_grad(g: &Geometry, blocks: &LaneBlocks<'_>, item: &WindowItem, choice: u32) -> u64 {
    let token = item.slot / g.fanout;
    let at = (token * g.top_k + choice) as usize * size_of::<f32>();
    blocks.at(item.source as usize, g.lane.weight_grads) + at as u64
}

/// Zeroes the padding rows.
///
/// # Safety
///
/// As for [`Regather`].
unsafe fn clear_padding(p: &RegatherParams) {
    let g = &p.geometry;
    let (local, row_bytes) = (g.local_experts as usize, g.sum_bytes as usize);
    // SAFETY: the kernel's contract; the window laid these out.
    let (offsets, counts) = unsafe {
        (
            table::<i32>(p.handle.expert_offsets, local + 1),
            table::<i32>(p.handle.tokens_per_expert, local),
        )
    };
    for expert in 0..local {
        for row in offsets[expert] + counts[expert]..offsets[expert + 1] {
            let at = row_address(p.rows, row as usize, g.sum_bytes);
            // SAFETY: padding rows lie below the end of the window's rows.
            unsafe { table_mut::<u8>(at, row_bytes) }.fill(0);
        }
    }
}

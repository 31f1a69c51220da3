//! Dispatch and combine whose rows are pushed: each a single operation, of both halves.
//!
//! On a device, sending and receiving go on at the same time, and flags behind each piece of a row carry
//! what is ready from one to the other. One thread does one after the other; the memory, the flags and
//! the order of every sum are the same.

use ep_context::signal::HostWaiter;
use ep_context::{FaultKind, Kernel, KernelSource, Phase, Rank};
use graph_ep_kernels::dispatch as device;

use super::count::take_stock;
use super::fold::fold;
use super::gather::receive;
use super::memory::{
    LaneBlocks, StepView, entry_address, load, raise, row_address, store, table, table_mut,
};
use super::received::{pair_width, pushed_lists};
use super::route::{Lists, announce, build_lists, given_tokens};
use super::window::{advance, leave_empty};
use super::{reduce, reduce_push, source};
use crate::geometry::Geometry;
use crate::params::{
    CountParams, DispatchHeader, ExpertHomeEntry, GatherParams, HALF_RECEIVE, HALF_SEND, Item,
    LaneState, Pair, PushCombineParams, PushDispatchParams, ReduceParams, ReducePushParams,
    RouteParams, TRANSFER_PUSH, WindowParams, WindowState,
};

/// Every token once to each rank of its experts, and from there to their rows.
#[derive(Debug)]
pub(crate) struct PushDispatch;

impl Kernel for PushDispatch {
    type Params = PushDispatchParams;
    const NAME: &'static str = "push_dispatch";
    const SOURCE: Option<KernelSource> = Some(source(device::PUSH_DISPATCH));

    unsafe fn run_on_host(p: &PushDispatchParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. What is written
        // into a peer's block lies in the regions of this rank, which the peer read for the last time
        // before its combine signal of the epoch before, and that was acquired before this
        // operation. What peers write into this rank's block is read behind their signals and flags.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        // SAFETY: see above.
        let give_up = || unsafe { leave_empty(&p.handle, g.local_experts) };
        if waiter.fault(Phase::Dispatch).is_some() {
            return give_up();
        }
        let route = routing(p);
        // SAFETY: see above.
        let Some(given) = (unsafe { given_tokens(&route, &waiter) }) else { return give_up() };
        // SAFETY: see above; the lane's state is touched only by operations of its own stream.
        let (blocks, step, epoch, turn) = unsafe {
            let lane: &mut LaneState = &mut table_mut(p.lane.state, 1)[0];
            let (epoch, turn) = (lane.epoch.wrapping_add(1), lane.turn + 1);
            if p.halves & HALF_RECEIVE != 0 {
                (lane.epoch, lane.turn) = (epoch, turn);
            }
            (LaneBlocks::new(&p.lane, g), StepView::new(p.state), epoch, turn)
        };
        // SAFETY: see above.
        unsafe {
            if p.halves & HALF_SEND != 0 {
                send(p, &route, &blocks, &waiter, step, given as usize, (epoch, turn));
            }
            if p.halves & HALF_RECEIVE == 0 {
                return;
            }
            let words = blocks.own(g.lane.dispatch_words);
            if waiter.wait_all(Phase::Dispatch, words, epoch).is_err()
                || !take_stock(&counting(p), &blocks, &waiter, step, TRANSFER_PUSH)
            {
                return give_up();
            }
            advance(&windowing(p), &waiter);
            receive(&gathering(p), &blocks, |source, token| {
                if source == g.rank as usize {
                    let scales = row_address(p.scales, token, g.scale_bytes);
                    return Some((row_address(p.tokens, token, g.row_bytes), scales));
                }
                for piece in 0..g.row_pieces as usize {
                    let flag = arrived(g, &blocks, g.rank as usize, source, token, piece);
                    let culprit = Rank::from_index(source);
                    waiter.wait_flag(Phase::Dispatch, culprit, flag, turn).ok()?;
                }
                Some(pushed_row(g, &blocks, g.rank as usize, source, token))
            });
        }
    }
}

/// Lists, rows, flags, and last the signal.
///
/// # Safety
///
/// As for the kernel.
unsafe fn send(
    p: &PushDispatchParams,
    route: &RouteParams,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    step: StepView,
    tokens: usize,
    (epoch, turn): (u32, u64),
) {
    let g = &p.geometry;
    step.note_dispatch(p.ordinal);
    // SAFETY: this function's contract; the tables do not overlap.
    unsafe {
        let window = WindowState { tokens: tokens as u32, ..bytemuck::Zeroable::zeroed() };
        store(p.handle.window, window);
        if step.is_silent(p.ordinal, p.dependent != 0) {
            table_mut::<u32>(p.handle.fanouts, tokens).fill(0);
            table_mut::<u32>(p.rank_counts, 2 * g.world as usize).fill(0);
            table_mut::<u32>(p.expert_counts, (g.world * g.slots) as usize).fill(0);
        } else {
            build_lists(route, step, tokens, PeerLists { geometry: g, blocks });
            for token in 0..tokens {
                send_row(p, blocks, waiter, token, turn);
            }
        }
        announce(route, blocks, waiter, epoch, |[items, pairs], _| DispatchHeader {
            step: step.step(),
            ordinal: p.ordinal,
            items,
            item_base: 0,
            pairs,
            pair_base: 0,
            transfer: TRANSFER_PUSH,
            reserved: 0,
        });
    }
}

/// The lists of a dispatch, each in the block of the rank that it is for.
struct PeerLists<'a> {
    geometry: &'a Geometry,
    blocks: &'a LaneBlocks<'a>,
}

impl Lists for PeerLists<'_> {
    fn begin(&mut self, _per_rank: &[[u32; 2]]) {}

    fn item(&self, rank: usize, position: u32) -> u64 {
        let own = self.geometry.rank as usize;
        entry_address::<Item>(pushed_lists(self.geometry, self.blocks, rank, own).0, position)
    }

    fn pair(&self, rank: usize, position: u32, place: u32, _number: u32) -> u64 {
        let own = self.geometry.rank as usize;
        let pairs = pushed_lists(self.geometry, self.blocks, rank, own).1;
        entry_address::<Pair>(pairs, position * pair_width(self.geometry) + place)
    }
}

/// A token's row and scales to every other rank of its experts, with the flags behind them.
///
/// # Safety
///
/// As for the kernel.
unsafe fn send_row(
    p: &PushDispatchParams,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    token: usize,
    turn: u64,
) {
    let g = &p.geometry;
    let (rank, top_k) = (g.rank as usize, g.top_k as usize);
    // SAFETY: this function's contract.
    let homes = unsafe { table::<ExpertHomeEntry>(p.homes, g.experts as usize) };
    let mut reached = [false; MOST_RANKS];
    for choice in token * top_k..(token + 1) * top_k {
        // SAFETY: the table has top_k ids for each token.
        let id = unsafe {
            match p.id_bytes {
                8 => load::<i64>(p.topk_ids + 8 * choice as u64),
                _ => i64::from(load::<i32>(p.topk_ids + 4 * choice as u64)),
            }
        };
        if let Some(home) = usize::try_from(id).ok().and_then(|id| homes.get(id)) {
            reached[home.rank as usize] = true;
        }
    }
    for to in blocks.peers_first().filter(|to| *to != rank && reached[*to]) {
        let (row, scales) = pushed_row(g, blocks, to, rank, token);
        for (target, from, bytes) in [
            (row, row_address(p.tokens, token, g.row_bytes), g.row_bytes as usize),
            (scales, row_address(p.scales, token, g.scale_bytes), g.scale_bytes as usize),
        ] {
            if bytes > 0 {
                // SAFETY: the caller's row, and the place of this token in the peer's block.
                unsafe { table_mut::<u8>(target, bytes).copy_from_slice(table(from, bytes)) };
            }
        }
        for piece in 0..g.row_pieces as usize {
            // SAFETY: a flag of this rank in the peer's block.
            unsafe {
                let flag = arrived(g, blocks, to, rank, token, piece);
                waiter.raise(Rank::from_index(to), flag, turn);
            }
        }
    }
}

/// Lanes of a warp: the choices of a token whose rows are pushed have one each.
pub(crate) const WARP_LANES: usize = 32;

/// The most ranks of a group that pushes: those of a token have a lane each.
pub(crate) const MOST_RANKS: usize = WARP_LANES;

/// Tokens of a rank whose rows are pushed: entries of its lists have so many bits for a number among them.
pub(crate) const MOST_TOKENS: usize = 1 << 20;

/// Where the row of a token of `source`, and its row of scales, are pushed in the block of `to`, another
/// rank.
fn pushed_row(
    g: &Geometry,
    blocks: &LaneBlocks<'_>,
    to: usize,
    source: usize,
    token: usize,
) -> (u64, u64) {
    let place = (source - usize::from(source > to)) * g.max_tokens as usize + token;
    (
        row_address(blocks.at(to, g.lane.pushed_rows), place, g.row_bytes),
        row_address(blocks.at(to, g.lane.pushed_scales), place, g.scale_bytes),
    )
}

/// The flag in the block of `to` for a piece of a token of `source`.
fn arrived(
    g: &Geometry,
    blocks: &LaneBlocks<'_>,
    to: usize,
    source: usize,
    token: usize,
    piece: usize,
) -> u64 {
    let flag = (source * g.max_tokens as usize + token) * g.row_pieces as usize + piece;
    row_address(blocks.at(to, g.lane.arrived), flag, size_of::<u64>() as u32)
}

/// The flag in the block of `owner` for a piece of the partial sum in a landing slot.
fn returned(g: &Geometry, blocks: &LaneBlocks<'_>, owner: usize, slot: usize, piece: usize) -> u64 {
    let flag = slot * g.sum_pieces as usize + piece;
    row_address(blocks.at(owner, g.lane.returned), flag, size_of::<u64>() as u32)
}

/// Partial sums to the tokens' owners, and there to their outputs.
#[derive(Debug)]
pub(crate) struct PushCombine;

impl Kernel for PushCombine {
    type Params = PushCombineParams;
    const NAME: &'static str = "push_combine";
    const SOURCE: Option<KernelSource> = Some(source(device::PUSH_COMBINE));

    unsafe fn run_on_host(p: &PushCombineParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. The handle and the
        // expert rows belong to this stream. A landing slot is written by the one rank that its item
        // was sent to, between the owner's dispatch signal and the flag.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Combine).is_some() {
            return;
        }
        let (sending, adding) = (summing(p), adding(p));
        // SAFETY: see above.
        unsafe {
            let (blocks, step) = (LaneBlocks::new(&p.lane, g), StepView::new(p.state));
            let lane: LaneState = load(p.lane.state);
            let window: WindowState = load(p.handle.window);
            let rows = load::<i32>(p.handle.total).cast_unsigned();
            if window.tokens > p.num_tokens || rows > p.row_limit {
                return raise(&waiter, g, Phase::Combine, FaultKind::TooManyTokens);
            }
            if p.halves & HALF_SEND != 0 {
                reduce_push::release(&sending, &blocks, &waiter, &window);
                reduce_push::push(&sending, &blocks, &window, |item| {
                    for piece in 0..g.sum_pieces as usize {
                        let owner = item.source as usize;
                        let flag = returned(g, &blocks, owner, item.slot as usize, piece);
                        waiter.raise(Rank(item.source), flag, lane.turn);
                    }
                });
            }
            if p.halves & HALF_RECEIVE == 0 {
                return;
            }
            let words = blocks.own(g.lane.combine_words);
            if waiter.wait_all(Phase::Combine, words, lane.epoch).is_err()
                || !fold(g, &blocks, &waiter, step, p.peer_required, p.ordinal, Phase::Combine)
            {
                return;
            }
            reduce::add_partials(&adding, &blocks, window.tokens as usize, |rank, slot| {
                (0..g.sum_pieces as usize).all(|piece| {
                    let flag = returned(g, &blocks, g.rank as usize, slot, piece);
                    waiter.wait_flag(Phase::Combine, Rank(rank), flag, lane.turn).is_ok()
                })
            });
        }
    }
}

// The parts of the two operations, as the operations that do them one by one take them.

fn routing(p: &PushDispatchParams) -> RouteParams {
    RouteParams {
        geometry: p.geometry,
        wait: p.wait,
        lane: p.lane,
        handle: p.handle,
        state: p.state,
        homes: p.homes,
        topk_ids: p.topk_ids,
        topk_weights: p.topk_weights,
        tokens: p.tokens,
        scales: p.scales,
        num_tokens_word: p.num_tokens_word,
        expert_counts: p.expert_counts,
        rank_counts: p.rank_counts,
        num_tokens: p.num_tokens,
        id_bytes: p.id_bytes,
        ordinal: p.ordinal,
        dependent: p.dependent,
    }
}

fn counting(p: &PushDispatchParams) -> CountParams {
    CountParams {
        geometry: p.geometry,
        wait: p.wait,
        lane: p.lane,
        handle: p.handle,
        state: p.state,
        required_by_dispatch: p.required_by_dispatch,
        capacity: p.capacity,
        row_limit: p.row_limit,
        max_dispatches: p.max_dispatches,
        ordinal: p.ordinal,
        budgeted: p.budgeted,
        dependent: p.dependent,
        reserved: 0,
        condition: p.condition,
    }
}

fn windowing(p: &PushDispatchParams) -> WindowParams {
    WindowParams {
        geometry: p.geometry,
        wait: p.wait,
        lane: p.lane,
        handle: p.handle,
        state: p.state,
        capacity: p.capacity,
        row_limit: p.row_limit,
        last: p.last,
        condition: p.condition,
    }
}

fn gathering(p: &PushDispatchParams) -> GatherParams {
    GatherParams {
        geometry: p.geometry,
        wait: p.wait,
        lane: p.lane,
        handle: p.handle,
        rows: p.rows,
        scales: p.received_scales,
    }
}

fn summing(p: &PushCombineParams) -> ReducePushParams {
    ReducePushParams {
        geometry: p.geometry,
        wait: p.wait,
        lane: p.lane,
        handle: p.handle,
        state: p.state,
        expert_rows: p.expert_rows,
        ordinal: p.ordinal,
        push: 1,
        release: 1,
        weighted: p.weighted,
        row_limit: p.row_limit,
        reserved: 0,
    }
}

fn adding(p: &PushCombineParams) -> ReduceParams {
    ReduceParams {
        geometry: p.geometry,
        wait: p.wait,
        lane: p.lane,
        handle: p.handle,
        output: p.output,
        weight_grads: 0,
        num_tokens: p.num_tokens,
        reserved: 0,
    }
}

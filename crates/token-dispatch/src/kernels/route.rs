//! The sender's half of a dispatch that is pulled: lists for each destination, staged tokens, the signal.

use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Kernel, KernelSource, Phase, Rank};
use graph_ep_kernels::dispatch as device;
use smallvec::SmallVec;

use super::memory::{
    LaneBlocks, StepView, entry_address, load, row_address, store, table, table_mut,
};
use super::source;
use crate::config::MAX_TOP_K;
use crate::dtype::DType;
use crate::fp8;
use crate::params::{
    Destination, DispatchHeader, ExpertHomeEntry, Item, LaneState, NONE, Pair, RouteParams,
    TRANSFER_PULL, WindowState,
};

/// From expert ids to a list for each destination: one item a token, its pairs in ascending order of
/// the expert's id, every pair numbered among those of this sender for the same expert.
#[derive(Debug)]
pub(crate) struct Route;

/// One choice of a token.
#[derive(Clone, Copy)]
struct Choice {
    expert: u32,
    home: ExpertHomeEntry,
    weight: f32,
    choice: u32,
}

type Choices = SmallVec<[Choice; MAX_TOP_K]>;

impl Kernel for Route {
    type Params = RouteParams;
    const NAME: &'static str = "route";
    const SOURCE: Option<KernelSource> = Some(source(device::ROUTE));

    unsafe fn run_on_host(p: &RouteParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. The lists, staging
        // area and scratch belong to this rank: peers read them only between this operation's signal
        // and their combine signal of the same epoch, which this rank acquired before it came here
        // again. What is written into a peer's block lies in the region of this rank.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Dispatch).is_some() {
            return;
        }
        // SAFETY: see above.
        let Some(given) = (unsafe { given_tokens(p, &waiter) }) else { return };
        // SAFETY: see above.
        let (blocks, step) = unsafe { (LaneBlocks::new(&p.lane, g), StepView::new(p.state)) };
        // SAFETY: the lane's state is touched only by operations of its own stream.
        let epoch = unsafe {
            let lane: &mut LaneState = &mut table_mut(p.lane.state, 1)[0];
            lane.epoch = lane.epoch.wrapping_add(1);
            lane.epoch
        };
        step.note_dispatch(p.ordinal);
        let silent = step.is_silent(p.ordinal, p.dependent != 0);
        let tokens = given as usize;
        // SAFETY: see above; the tables do not overlap.
        unsafe {
            store(p.handle.window, WindowState { tokens: given, ..bytemuck::Zeroable::zeroed() });
            if silent {
                table_mut::<u32>(p.handle.fanouts, tokens).fill(0);
                table_mut::<u32>(p.rank_counts, 2 * g.world as usize).fill(0);
                table_mut::<u32>(p.expert_counts, (g.world * g.slots) as usize).fill(0);
            } else {
                build_lists(p, step, tokens, OwnLists::new(p, &blocks));
                stage(p, &blocks, tokens);
            }
            announce(p, &blocks, &waiter, epoch, |[items, pairs], [item_base, pair_base]| {
                DispatchHeader {
                    step: step.step(),
                    ordinal: p.ordinal,
                    items,
                    item_base,
                    pairs,
                    pair_base,
                    transfer: TRANSFER_PULL,
                    reserved: 0,
                }
            });
        }
    }
}

/// How many tokens the dispatch sends; `None`, and a fault of this rank, if they are more than it may.
///
/// # Safety
///
/// The word that holds their number, if there is one, may be read.
pub(super) unsafe fn given_tokens(p: &RouteParams, waiter: &HostWaiter) -> Option<u32> {
    let given = match p.num_tokens_word {
        0 => p.num_tokens,
        // SAFETY: this function's contract.
        word => unsafe { load::<u32>(word) },
    };
    if given <= p.num_tokens {
        return Some(given);
    }
    waiter.fail(Fault {
        phase: Phase::Dispatch,
        culprit: Rank(p.geometry.rank),
        kind: FaultKind::TooManyTokens,
    });
    None
}

/// The valid choices of a token, by destination and slot, and how many were not: outside the model,
/// and repeated.
///
/// # Safety
///
/// As for the kernel.
unsafe fn choices(p: &RouteParams, homes: &[ExpertHomeEntry], token: usize) -> (Choices, u64, u64) {
    let top_k = p.geometry.top_k as usize;
    let (mut valid, mut invalid, mut repeated) = (Choices::new(), 0, 0);
    for choice in 0..top_k {
        let at = token * top_k + choice;
        // SAFETY: `at` is below tokens · top_k, the length of both tables.
        let (id, weight) = unsafe {
            let id = match p.id_bytes {
                8 => load::<i64>(p.topk_ids + 8 * at as u64),
                _ => i64::from(load::<i32>(p.topk_ids + 4 * at as u64)),
            };
            let weight = match p.topk_weights {
                0 => 1.0,
                weights => load::<f32>(weights + 4 * at as u64),
            };
            (id, weight)
        };
        match u32::try_from(id).ok().filter(|expert| (*expert as usize) < homes.len()) {
            None => invalid += u64::from(id != -1),
            Some(expert) if valid.iter().any(|c: &Choice| c.expert == expert) => repeated += 1,
            Some(expert) => {
                let home = homes[expert as usize];
                valid.push(Choice { expert, home, weight, choice: choice as u32 });
            }
        }
    }
    // By expert and not by slot: the order of the sum is the model's, wherever its experts lie.
    valid.sort_unstable_by_key(|c| (c.home.rank, c.expert));
    (valid, invalid, repeated)
}

/// Where the lists for each rank are written.
pub(super) trait Lists {
    /// Learns how many items and pairs there are for each rank, before any is placed.
    fn begin(&mut self, per_rank: &[[u32; 2]]);
    /// The address of an item for `rank`.
    fn item(&self, rank: usize, position: u32) -> u64;
    /// The address of a pair of the item at `position` for `rank`: the `place`-th of the item, and the
    /// `number`-th for the rank.
    fn pair(&self, rank: usize, position: u32, place: u32, number: u32) -> u64;
}

/// The lists of this rank's own block: those of one rank behind those of another.
struct OwnLists {
    items: u64,
    pairs: u64,
    bases: SmallVec<[[u32; 2]; 16]>,
}

impl OwnLists {
    fn new(p: &RouteParams, blocks: &LaneBlocks<'_>) -> Self {
        let lane = &p.geometry.lane;
        Self {
            items: blocks.own(lane.items),
            pairs: blocks.own(lane.pairs),
            bases: SmallVec::new(),
        }
    }
}

impl Lists for OwnLists {
    fn begin(&mut self, per_rank: &[[u32; 2]]) {
        self.bases = exclusive_sums(per_rank);
    }

    fn item(&self, rank: usize, position: u32) -> u64 {
        entry_address::<Item>(self.items, self.bases[rank][0] + position)
    }

    fn pair(&self, rank: usize, _position: u32, _place: u32, number: u32) -> u64 {
        entry_address::<Pair>(self.pairs, self.bases[rank][1] + number)
    }
}

/// # Safety
///
/// As for the kernel; `lists` places every entry in memory that this rank alone writes now.
pub(super) unsafe fn build_lists(
    p: &RouteParams,
    step: StepView,
    tokens: usize,
    mut lists: impl Lists,
) {
    let g = &p.geometry;
    let (world, fanout) = (g.world as usize, g.fanout as usize);
    // SAFETY: the kernel's contract; the tables do not overlap.
    let (homes, per_expert, per_rank, fanouts, destinations) = unsafe {
        (
            table::<ExpertHomeEntry>(p.homes, g.experts as usize),
            table_mut::<u32>(p.expert_counts, world * g.slots as usize),
            table_mut::<[u32; 2]>(p.rank_counts, world),
            table_mut::<u32>(p.handle.fanouts, tokens),
            table_mut::<Destination>(p.handle.destinations, tokens * fanout),
        )
    };
    per_expert.fill(0);
    per_rank.fill([0; 2]);
    let (mut invalid, mut repeated) = (0, 0);
    for token in 0..tokens {
        // SAFETY: `token` is below the number of tokens.
        let (valid, bad, twice) = unsafe { choices(p, homes, token) };
        (invalid, repeated) = (invalid + bad, repeated + twice);
        for group in valid.chunk_by(|a, b| a.home.rank == b.home.rank) {
            let [items, pairs] = &mut per_rank[group[0].home.rank as usize];
            *items += 1;
            *pairs += group.len() as u32;
        }
    }
    step.add_bad_ids(invalid, repeated);
    lists.begin(per_rank);
    // Counted again from zero while the lists are filled, so that they end as they were.
    per_rank.fill([0; 2]);
    for token in 0..tokens {
        // SAFETY: as above.
        let (valid, ..) = unsafe { choices(p, homes, token) };
        let mut reached = 0;
        for group in valid.chunk_by(|a, b| a.home.rank == b.home.rank) {
            let rank = group[0].home.rank as usize;
            let [position, pair_begin] = per_rank[rank];
            let item = Item {
                token: token as u32,
                slot: (token * fanout + reached) as u32,
                pair_begin,
                pairs: group.len() as u32,
            };
            // SAFETY: this function's contract.
            unsafe { store(lists.item(rank, position), item) };
            destinations[token * fanout + reached] = Destination { rank: rank as u32, position };
            for (place, choice) in (0..).zip(group) {
                let index = &mut per_expert[rank * g.slots as usize + choice.home.slot as usize];
                let entry = Pair {
                    slot: choice.home.slot,
                    index: *index,
                    weight: choice.weight,
                    choice: choice.choice,
                };
                // SAFETY: as above.
                unsafe { store(lists.pair(rank, position, place, pair_begin + place), entry) };
                *index += 1;
            }
            per_rank[rank] = [position + 1, pair_begin + group.len() as u32];
            reached += 1;
        }
        fanouts[token] = reached as u32;
        destinations[token * fanout + reached..(token + 1) * fanout]
            .fill(Destination { rank: NONE, position: NONE });
    }
}

fn exclusive_sums(counts: &[[u32; 2]]) -> SmallVec<[[u32; 2]; 16]> {
    let mut sum = [0; 2];
    counts
        .iter()
        .map(|[items, pairs]| {
            let before = sum;
            sum = [sum[0] + items, sum[1] + pairs];
            before
        })
        .collect()
}

/// Copies the tokens to where peers read them, quantised where that is asked for, unless the caller
/// wrote them there.
///
/// # Safety
///
/// As for the kernel.
unsafe fn stage(p: &RouteParams, blocks: &LaneBlocks<'_>, tokens: usize) {
    let g = &p.geometry;
    let (staging, scales) = (blocks.own(g.lane.staging), blocks.own(g.lane.scales));
    let (row_bytes, scale_bytes) = (g.row_bytes as usize, g.scale_bytes as usize);
    if g.quantize != 0 {
        let dtype = DType::from_code(g.dtype).unwrap_or(DType::Fp32);
        let mut scratch = vec![0f32; g.hidden as usize];
        for token in 0..tokens {
            // SAFETY: row `token` of the caller's tokens and of two areas of this rank's block.
            let (row, bytes, row_scales) = unsafe {
                (
                    table::<u8>(
                        row_address(p.tokens, token, g.token_bytes),
                        g.token_bytes as usize,
                    ),
                    table_mut::<u8>(row_address(staging, token, g.row_bytes), row_bytes),
                    table_mut::<u8>(row_address(scales, token, g.scale_bytes), scale_bytes),
                )
            };
            fp8::quantize(dtype, row, &mut scratch, bytes, row_scales);
        }
        return;
    }
    for (to, from, bytes) in
        [(staging, p.tokens, tokens * row_bytes), (scales, p.scales, tokens * scale_bytes)]
    {
        if from != to && bytes > 0 {
            // SAFETY: two areas of at least `bytes` bytes; the caller's lie outside the block.
            unsafe { table_mut::<u8>(to, bytes).copy_from_slice(table(from, bytes)) };
        }
    }
}

/// Tells every rank, this one included, what is for it: each by the header that `header` makes of how
/// many items and pairs there are, and of the first of them.
///
/// # Safety
///
/// As for the kernel.
pub(super) unsafe fn announce(
    p: &RouteParams,
    blocks: &LaneBlocks<'_>,
    waiter: &HostWaiter,
    epoch: u32,
    header: impl Fn([u32; 2], [u32; 2]) -> DispatchHeader,
) {
    let g = &p.geometry;
    let (world, slots, rank) = (g.world as usize, g.slots as usize, g.rank as usize);
    // SAFETY: written by `build_lists` on this thread.
    let (per_rank, per_expert) = unsafe {
        (table::<[u32; 2]>(p.rank_counts, world), table::<u32>(p.expert_counts, world * slots))
    };
    let bases = exclusive_sums(per_rank);
    for to in blocks.peers_first() {
        let header = header(per_rank[to], bases[to]);
        // SAFETY: the header and the counts of this rank in the peer's block are read by the peer
        // between this signal and its combine signal of the same epoch; it is past the last one.
        unsafe {
            let counts = blocks.at(to, g.lane.counts) + (rank * slots * size_of::<u32>()) as u64;
            table_mut::<u32>(counts, slots).copy_from_slice(&per_expert[to * slots..][..slots]);
            let header = (g.lane.dispatch_headers, header);
            blocks.tell(waiter, to, header, g.lane.dispatch_words, epoch);
        }
    }
}

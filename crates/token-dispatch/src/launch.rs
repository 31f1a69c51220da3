//! The shapes of launches.
//!
//! A shape is fixed when an operation is recorded, and does not depend on routing: every kernel strides
//! over its work with whatever grid it has. Shapes depend on what the work may be at most, so that a
//! small configuration does not start blocks that find nothing to do.

use ep_context::LaunchShape;

use crate::geometry::Geometry;
use crate::params::{HALF_RECEIVE, HALF_SEND};

/// The most blocks of a kernel that moves rows. Two such blocks fit on a multiprocessor, so this leaves
/// half of a large device to other work, and so many are enough to fill the links between devices.
const ROW_BLOCKS: u32 = 128;

const WARP: u32 = 32;

/// Threads of a block that moves rows: their registers hold what is in flight.
const ROW_THREADS: u32 = 256;

/// Bytes of a row that one warp has in flight; see `rows.cuh`.
const PIECE_BYTES: u32 = 4096;

/// Threads of a kernel whose first block builds lists.
const LIST_THREADS: u32 = 512;

/// Bytes of shared memory for counts in which lists are built. Where they do not hold the counts of a
/// single warp, lists are built more slowly.
const LIST_BYTES: u64 = 64 << 10;

/// Threads of the kernels that push: one block a multiprocessor.
const PUSH_THREADS: u32 = 512;

/// Tokens of a block that builds lists beside others: as many as its warps keep at hand, at top-8.
const LISTED_TOKENS: u32 = 128;

/// The most blocks that build lists. Each adds up what all of them counted.
pub(crate) const MOST_LISTERS: u32 = 32;

/// The most counts of a warp with which lists are built beside others: three warps and the totals have
/// room.
pub(crate) const MOST_PUSH_COLUMNS: usize = LIST_BYTES as usize / 4 / 4;

/// The fewest blocks of a dispatch that pushes: one that builds lists, one that keeps the books, one that
/// sends.
pub(crate) const LEAST_BLOCKS: u32 = 3;

/// Warps that clear a row of padding; see `items.cuh`.
const PADDING_PARTS: u64 = 4;

/// Bytes of shared memory in which a block of a combine that pushes has rows on their way.
const FEED_BYTES: u32 = 192 << 10;

/// Shared memory that every block has besides.
const STATIC_BYTES: u32 = 1 << 10;

/// The most blocks of a combine whose limit is what its multiprocessors execute, and not memory or links.
const FEW_BLOCKS: u32 = 64;

/// Units of work for each warp from which on larger ones would not leave any warp with much more to do than
/// others.
const ENOUGH_UNITS: u64 = 8;

/// The most pieces of a sum that a warp takes together, as a power of two: a note of their flags says how many
/// they are in three bits; see `combine_units.cuh`.
const MOST_SPAN: u32 = 3;

/// Where the blocks of a dispatch that pushes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PushShape {
    pub(crate) launch: LaunchShape,
    /// Blocks that build lists, from the first.
    pub(crate) listers: u32,
    /// Blocks behind these, and behind the one that keeps the books, that send before they receive.
    pub(crate) senders: u32,
}

impl PushShape {
    /// The shape of so many of the halves of a dispatch.
    pub(crate) fn of_dispatch(self, halves: u32) -> Self {
        match (halves & HALF_SEND != 0, halves & HALF_RECEIVE != 0) {
            (true, false) => self.with_blocks(self.listers + 1 + self.senders),
            (false, true) => Self { listers: 0, senders: 0, ..self },
            _ => self,
        }
    }

    fn with_blocks(self, blocks: u32) -> Self {
        Self { launch: LaunchShape { blocks, ..self.launch }, ..self }
    }
}

/// Where the blocks of a combine that pushes are, and how much a warp takes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CombineShape {
    pub(crate) launch: LaunchShape,
    /// Blocks, from the first, that push before they add up.
    pub(crate) senders: u32,
    /// Pieces of a partial sum that a warp pushes together, as a power of two.
    pub(crate) push_span: u32,
    /// Pieces of a token's sum that a warp adds up together, as a power of two.
    pub(crate) sum_span: u32,
}

impl CombineShape {
    /// The shape of so many of the halves.
    pub(crate) fn of_halves(self, halves: u32) -> Self {
        match (halves & HALF_SEND != 0, halves & HALF_RECEIVE != 0) {
            (true, false) => {
                let launch = LaunchShape { blocks: self.senders.max(1), ..self.launch };
                Self { launch, ..self }
            }
            (false, true) => Self { senders: 0, ..self },
            _ => self,
        }
    }
}

/// A dispatch of at most `tokens` tokens that pushes, within `budget` blocks.
pub(crate) fn push_dispatch(g: &Geometry, tokens: u32, budget: u32) -> PushShape {
    let warps = PUSH_THREADS / WARP;
    // The counts of each warp, and the totals.
    let columns = g.world * g.slots + 2 * g.world;
    let words = columns * (warps + 1).min(LIST_BYTES as u32 / 4 / columns);
    let budget = budget.max(LEAST_BLOCKS);
    let listers = tokens.div_ceil(LISTED_TOKENS).clamp(1, MOST_LISTERS).min(budget.div_ceil(4));
    // A few blocks keep the links busy; all others receive meanwhile.
    let small = g.stamped != 0;
    let sent = u64::from(tokens) * u64::from(g.row_pieces);
    let senders = match g.world {
        1 => 0,
        _ if small => 0,
        _ => sent.div_ceil(warps.into()).clamp(1, (budget / 4).max(1).into()) as u32,
    };
    // Every rank may send as much as any. Several warps clear a row of padding.
    let received = u64::from(g.max_tokens) * u64::from(g.world) * u64::from(g.row_pieces);
    let units = received + most_padding(g) * PADDING_PARTS;
    let blocks = units.div_ceil(warps.into()).min(budget.into()) as u32;
    // One more, which keeps the books.
    let blocks = (blocks + listers + 1 + senders).min(budget);
    // Of few tokens all of these send first.
    let senders = if small && g.world > 1 { blocks - listers - 1 } else { senders };
    PushShape {
        launch: LaunchShape { blocks, threads: PUSH_THREADS, shared_bytes: words * 4 },
        listers,
        senders,
    }
}

/// A combine after such a dispatch, on a device whose blocks have at most `most_shared` bytes of shared
/// memory.
pub(crate) fn push_combine(
    g: &Geometry,
    tokens: u32,
    budget: u32,
    most_shared: u32,
) -> CombineShape {
    let warps = PUSH_THREADS / WARP;
    let sums = u64::from(g.max_tokens) * u64::from(g.sum_pieces);
    let units = sums * u64::from(g.world);
    let small = g.stamped != 0;
    // Where pieces carry their turn one block more, which keeps the books.
    let blocks = units.div_ceil((warps / 2).into()) + u64::from(small);
    let blocks = blocks.clamp(1, budget.max(1).into()) as u32;
    // Where there is a piece for every warp to push before it adds up, that is the shortest way.
    let pushed = sums * u64::from(g.fanout.min(g.world - 1));
    let senders = match g.world {
        1 => 0,
        _ if small || pushed <= u64::from(blocks) * u64::from(warps) => blocks,
        // Between two ranks the partial sums of a peer's tokens are as many as those of a rank's own. With
        // more it was not measured.
        _ if blocks <= FEW_BLOCKS => blocks.div_ceil(2),
        // As many as keep the link busy; what they push are sums of several rows each.
        _ => (blocks * 5).div_ceil(12),
    };
    // Rows of stamped sums go through registers instead.
    let feed = if small { 0 } else { FEED_BYTES };
    let shared_bytes = feed.min(most_shared.saturating_sub(STATIC_BYTES));
    let launch = LaunchShape { blocks, threads: PUSH_THREADS, shared_bytes };
    // Of as many as there are tokens of this one; of how many others have, all that is known is the most.
    let together = |most: u64, busy: u32| {
        if small || busy == 0 || blocks > FEW_BLOCKS {
            return 0;
        }
        let units = most / u64::from(g.max_tokens.max(1)) * u64::from(tokens);
        span(g.sum_pieces, units, u64::from(busy) * u64::from(warps))
    };
    let (push_span, sum_span) = (together(pushed, senders), together(sums, blocks));
    CombineShape { launch, senders, push_span, sum_span }
}

/// How many of the `pieces` of a sum a warp takes together, as a power of two, while all warps stay busy to the
/// end. What it has to find out for each unit is as much for a small one as for a large one; where memory and
/// links are the limit that costs nothing, and small units keep them busier.
fn span(pieces: u32, units: u64, warps: u64) -> u32 {
    let enough = |&span: &u32| units >> span >= ENOUGH_UNITS * warps && pieces > 1 << (span - 1);
    (1..=MOST_SPAN).take_while(enough).last().unwrap_or(0)
}

/// One block whose threads each see to a rank: for kernels that wait, so that ranks which share a device
/// cannot keep each other from being scheduled, and for those that only count.
pub(crate) fn peers(g: &Geometry) -> LaunchShape {
    LaunchShape::new(1, g.world.next_multiple_of(WARP).min(ROW_THREADS))
}

/// The same for the end of a step, with a warp more: it looks across the bus while another warp waits.
pub(crate) fn step_end(g: &Geometry) -> LaunchShape {
    LaunchShape::new(1, peers(g).threads.max(2 * WARP))
}

/// One block that also sees to every expert slot.
pub(crate) fn slots(g: &Geometry) -> LaunchShape {
    LaunchShape::new(1, g.world.max(g.slots).next_multiple_of(WARP).min(LIST_THREADS))
}

/// One block that may have to go through all items.
pub(crate) fn window() -> LaunchShape {
    LaunchShape::new(1, 1024)
}

/// Rows of `row_bytes` bytes, at most `rows` of them, within `budget` blocks.
pub(crate) fn rows(rows: u64, row_bytes: u32, budget: u32) -> LaunchShape {
    let pieces = rows * u64::from(row_bytes.div_ceil(PIECE_BYTES).max(1));
    LaunchShape::new(blocks(pieces, ROW_THREADS, budget), ROW_THREADS)
}

/// The items that all ranks together may have for this one.
pub(crate) fn items(g: &Geometry, row_bytes: u32, budget: u32) -> LaunchShape {
    rows(u64::from(g.world) * u64::from(g.max_tokens), row_bytes, budget)
}

/// The same, where warps also see to every row of padding that there may be: with few tokens most rows are
/// padding.
pub(crate) fn items_and_padding(g: &Geometry, row_bytes: u32, budget: u32) -> LaunchShape {
    let items = u64::from(g.world) * u64::from(g.max_tokens);
    let pieces = items * u64::from(row_bytes.div_ceil(PIECE_BYTES).max(1));
    LaunchShape::new(blocks(pieces + most_padding(g), ROW_THREADS, budget), ROW_THREADS)
}

/// The most rows of padding that have to be cleared: every pair may bring an expert all rows of a group but
/// one. In the flat layout no expert has rows of its own.
fn most_padding(g: &Geometry) -> u64 {
    if g.clear_padding == 0 || g.flat != 0 {
        return 0;
    }
    let pairs = u64::from(g.world) * u64::from(g.max_tokens) * u64::from(g.top_k);
    pairs.min(g.local_experts.into()) * u64::from(g.alignment - 1)
}

/// Tokens to be staged beside lists that one block builds.
pub(crate) fn route(g: &Geometry, budget: u32) -> LaunchShape {
    let warps = u64::from(LIST_THREADS / WARP);
    let ranks = 2 * u64::from(g.world);
    let counts = u64::from(g.world) * u64::from(g.slots) + ranks;
    let words = ranks + counts * warps.min((LIST_BYTES / 4).saturating_sub(ranks) / counts);
    LaunchShape { shared_bytes: words as u32 * 4, ..stage(g, budget) }
}

/// Tokens to be staged. One block more than they need, which is the one that may do something else.
pub(crate) fn stage(g: &Geometry, budget: u32) -> LaunchShape {
    let pieces = u64::from(g.max_tokens) * u64::from(g.token_bytes.div_ceil(PIECE_BYTES).max(1));
    let most = budget.clamp(2, ROW_BLOCKS);
    let blocks = blocks(pieces, LIST_THREADS, budget).min(most - 1) + 1;
    LaunchShape::new(blocks, LIST_THREADS)
}

/// Blocks whose warps have a unit of work each, within the budget.
fn blocks(units: u64, threads: u32, budget: u32) -> u32 {
    let warps = u64::from(threads / WARP);
    units.div_ceil(warps).clamp(1, u64::from(budget.clamp(1, ROW_BLOCKS))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DispatchConfig, ExpertMap};

    fn geometry(experts: usize, ranks: usize, tokens: usize) -> Geometry {
        let map = ExpertMap::contiguous(experts, ranks).unwrap();
        let config = DispatchConfig::builder(7168, 8, tokens, map).build().unwrap();
        Geometry::new(&config, ep_context::Rank(0), ranks)
    }

    #[test]
    fn small_work_starts_few_blocks_and_large_work_stays_in_the_budget() {
        let small = geometry(8, 2, 1);
        assert_eq!(rows(0, 512, 132), LaunchShape::new(1, 256));
        assert_eq!(items(&small, small.row_bytes, 132).blocks, 1);
        assert_eq!(route(&small, 132).blocks, 2);
        // Two items with eight experts each, sixteen rows to a group but one.
        let few = Geometry { alignment: 16, ..geometry(256, 2, 1) };
        assert_eq!(items(&few, few.row_bytes, 132).blocks, 1);
        assert_eq!(items_and_padding(&few, few.row_bytes, 132).blocks, (2 * 4 + 16 * 15) / 8);
        assert_eq!(items_and_padding(&few, few.row_bytes, 16).blocks, 16);
        let flat = Geometry { flat: 1, ..few };
        assert_eq!(items_and_padding(&flat, few.row_bytes, 132), items(&flat, few.row_bytes, 132));
        let large = geometry(256, 8, 4096);
        assert_eq!(items(&large, large.row_bytes, 132).blocks, ROW_BLOCKS);
        assert_eq!(route(&large, 132).blocks, ROW_BLOCKS);
        assert_eq!(items(&large, large.row_bytes, 24).blocks, 24);
        assert_eq!(route(&large, 24).blocks, 24);
        assert_eq!(peers(&large), LaunchShape::new(1, 32));
        assert_eq!(step_end(&large), LaunchShape::new(1, 64));
    }

    #[test]
    fn a_push_stays_in_its_budget_and_has_blocks_of_every_kind() {
        for (ranks, tokens, budget) in [(1, 1, 4), (2, 128, 132), (2, 4096, 24), (8, 4096, 132)] {
            let g = geometry(256, ranks, tokens);
            let shape = push_dispatch(&g, tokens as u32, budget);
            assert!(shape.listers + 1 + shape.senders <= shape.launch.blocks, "{shape:?}");
            assert!(shape.launch.blocks <= budget, "{shape:?}");
            assert_eq!(shape.senders == 0, ranks == 1, "{shape:?}");
            let (sends, receives) = (shape.of_dispatch(HALF_SEND), shape.of_dispatch(HALF_RECEIVE));
            assert!(sends.launch.blocks <= shape.launch.blocks && sends.senders == shape.senders);
            assert_eq!((receives.listers, receives.senders), (0, 0));
            assert!(receives.launch.blocks >= 2, "one for the books, one for rows");
            let columns = g.world * (g.slots + 2);
            assert!(shape.launch.shared_bytes >= 2 * 4 * columns, "a warp and the totals");
            let places = g.world * g.slots + 2 * g.slots + 1;
            assert!(shape.launch.shared_bytes >= 4 * places, "where rows belong");
            assert!(u64::from(shape.launch.shared_bytes) <= LIST_BYTES);
            let shape = push_combine(&g, tokens as u32, budget, 100 << 10);
            assert!(shape.launch.shared_bytes < 100 << 10, "{shape:?}");
            // Two parts of 2 KiB for each warp, or none.
            let least = PUSH_THREADS / WARP * 2 * 2048;
            assert!(shape.launch.shared_bytes == 0 || shape.launch.shared_bytes >= least);
            assert!(shape.senders <= shape.launch.blocks, "{shape:?}");
            assert!(shape.launch.blocks <= budget, "{shape:?}");
        }
    }

    #[test]
    fn warps_take_more_of_a_sum_where_they_have_enough_to_do() {
        // Four pieces to a sum.
        let large = geometry(256, 2, 4096);
        assert_eq!(large.sum_pieces, 4);
        let few = push_combine(&large, 4096, 24, 200 << 10);
        assert_eq!((few.push_span, few.sum_span), (2, 2), "a whole sum: {few:?}");
        let all = push_combine(&large, 4096, 132, 200 << 10);
        assert_eq!((all.push_span, all.sum_span), (0, 0), "{all:?}");
        let fewer = push_combine(&large, 64, 24, 200 << 10);
        assert_eq!((fewer.push_span, fewer.sum_span), (0, 0), "a piece for most warps: {fewer:?}");
        let half = push_combine(&large, 4096, 48, 200 << 10);
        assert_eq!((half.push_span, half.sum_span), (2, 1), "{half:?}");
        // Three pieces, which the last unit does not fill.
        let spans = |ranks: usize, sms| {
            let map = ExpertMap::contiguous(2 * ranks, ranks).unwrap();
            let config = DispatchConfig::builder(2056, 2, 768, map).build().unwrap();
            let odd = Geometry::new(&config, ep_context::Rank(0), ranks);
            assert_eq!(odd.sum_pieces, 3);
            let shape = push_combine(&odd, 768, sms, 200 << 10);
            (shape.push_span, shape.sum_span)
        };
        assert_eq!([4, 9, 24].map(|sms| spans(3, sms)), [(2, 2), (2, 1), (1, 0)]);
        assert_eq!([9, 24].map(|sms| spans(2, sms)), [(1, 1), (0, 0)]);
        let small = push_combine(&geometry(256, 2, 128), 128, 24, 200 << 10);
        assert_eq!((small.push_span, small.sum_span), (0, 0), "{small:?}");
        assert_eq!(span(20, 1 << 20, 1), MOST_SPAN, "as many as a note can say");
        assert_eq!(span(5, 1 << 20, 1), 3, "the whole of it");
        assert_eq!(span(4, 1 << 20, 1), 2, "no more than there are");
        assert_eq!(span(1, 1 << 20, 1), 0);
    }

    #[test]
    fn padding_that_is_left_or_not_there_starts_no_blocks() {
        let cleared = geometry(256, 2, 1);
        let left = Geometry { clear_padding: 0, ..cleared };
        let flat = Geometry { flat: 1, ..cleared };
        for without in [left, flat] {
            let pulled = items_and_padding(&without, without.row_bytes, 132);
            assert_eq!(pulled, items(&without, without.row_bytes, 132));
            let [with, without] = [cleared, without].map(|g| push_dispatch(&g, 1, 132));
            assert_eq!(with.listers, without.listers);
            // 16 pairs bring 15 rows of padding each, which four warps clear: at 16 warps, 60 blocks.
            assert_eq!(with.launch.blocks - without.launch.blocks, 60);
            // Of few tokens all that do not list or keep the books send.
            assert_eq!(with.senders, with.launch.blocks - 2);
        }
    }

    #[test]
    fn the_counts_of_lists_fit_or_leave_room_for_the_bases() {
        let bytes =
            |experts, ranks| u64::from(route(&geometry(experts, ranks, 128), 132).shared_bytes);
        // 16 warps with 256 experts and two words for each of 8 ranks, and the bases.
        assert_eq!(bytes(256, 8), 4 * (16 + 16 * (256 + 16)));
        assert!(bytes(4096, 64) <= LIST_BYTES);
        assert_eq!(bytes(65536, 64), 4 * 2 * 64);
    }
}

//! The sizes of a dispatcher and the layout of what a lane shares with its peers.
//!
//! A lane's shared block depends on `max_tokens` and never on routing:
//!
//! | region | element | count | written by |
//! |---|---|---|---|
//! | dispatch words, combine words | u32 | ranks each | the peer of that index |
//! | dispatch headers | [`DispatchHeader`] | ranks | the peer of that index |
//! | combine headers | [`CombineHeader`] | ranks | the peer of that index |
//! | counts | u32 | ranks × expert slots | the peer of that index |
//! | items | [`Item`] | tokens × fan-out | this rank |
//! | pairs | [`Pair`] | tokens × top-k | this rank |
//! | staging | row | tokens | this rank |
//! | scales | row of scales | tokens | this rank |
//! | landing | row | tokens × fan-out | the rank that a slot was addressed to |
//! | gradients of weights | f32 | tokens × top-k | the rank of the expert |
//!
//! and, where rows are pushed,
//!
//! | region | element | count | written by |
//! |---|---|---|---|
//! | tallies | u64 | ranks × (expert slots + 4) | the peer of that index; by devices only |
//! | prefixes | 16 bytes | ranks | the peer of that index; by devices only |
//! | pushed items | [`Item`] | ranks × tokens | the peer of that index |
//! | pushed pairs | [`Pair`] | ranks × tokens × pair width | the peer of that index |
//! | arrived | u64 | ranks × tokens × pieces of a row | the peer of that index |
//! | returned | u64; if rows are stamped, a piece | tokens × fan-out × pieces of a sum | the rank that a slot was addressed to |
//! | pushed rows | row, if stamped in pieces | (ranks − 1) × tokens | the peer of that index, itself left out |
//! | pushed scales | row of scales, if stamped in pieces | (ranks − 1) × tokens | the same |
//!
//! *Fan-out* is the most ranks that a token can be sent to: min(top-k, ranks). *Pair width* is the most
//! experts of one rank that a token can name: min(top-k, expert slots).
//!
//! Up to [`MOST_STAMPED`] tokens rows are *stamped*: devices send each piece with its turn in it. The host sends
//! rows as they are, into the same regions, and raises flags.

use bytemuck::{Pod, Zeroable};

use crate::config::{DispatchConfig, Layout, Payload, Weighting};
use crate::params::{CombineHeader, DispatchHeader, Item, Pair};

/// The sizes that every kernel works with; the same on all ranks, but for `rank` and `local_experts`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Geometry {
    /// Ranks.
    pub world: u32,
    /// This rank.
    pub rank: u32,
    /// Experts of the model.
    pub experts: u32,
    /// The most expert slots that any rank has.
    pub slots: u32,
    /// Expert slots that this rank has.
    pub local_experts: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// The most ranks that a token is sent to.
    pub fanout: u32,
    /// The most tokens of a rank.
    pub max_tokens: u32,
    /// Rows of an expert are padded to a multiple of this power of two.
    pub alignment: u32,
    /// Values in a row.
    pub hidden: u32,
    /// Bytes of a received row.
    pub row_bytes: u32,
    /// Bytes of a received row of scales; zero if there are none.
    pub scale_bytes: u32,
    /// Bytes of a token's row as the caller gives it.
    pub token_bytes: u32,
    /// Bytes of a row of expert outputs, of a partial sum, of an output.
    pub sum_bytes: u32,
    /// Code of the number format; see [`DType`](crate::DType).
    pub dtype: u32,
    /// Nonzero: rows are quantised where they are staged.
    pub quantize: u32,
    /// Nonzero: one row for each item, with its experts beside it.
    pub flat: u32,
    /// Experts beside each row of the flat layout.
    pub flat_width: u32,
    /// Nonzero: combine multiplies by the weights.
    pub weighted: u32,
    /// Nonzero: lanes have room for rows that are pushed.
    pub push: u32,
    /// Into how many pieces a row is cut that is pushed, each with a flag of its own.
    pub row_pieces: u32,
    /// The same for a partial sum.
    pub sum_pieces: u32,
    /// Nonzero: a dispatch clears the rows with which those of an expert are padded.
    pub clear_padding: u32,
    /// Nonzero: between devices pieces carry their turn, in place of a flag; see `stamped_rows.cuh`.
    pub stamped: u32,
    /// Where the regions of a lane's shared block start.
    pub lane: LaneLayout,
}

/// Where the regions of a lane's shared block start, in bytes from its first.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct LaneLayout {
    /// Signal words of dispatch.
    pub dispatch_words: u64,
    /// Signal words of combine, and of the closing round of a step that ends in a dispatch.
    pub combine_words: u64,
    /// Headers of dispatch.
    pub dispatch_headers: u64,
    /// Headers of combine, and of the closing round.
    pub combine_headers: u64,
    /// Pairs that each peer sends to each expert slot of this rank.
    pub counts: u64,
    /// Where rows are pushed: what each peer has for this rank, known before its lists.
    pub tallies: u64,
    /// How many of this rank's items each peer processes.
    pub prefixes: u64,
    /// Tokens for each destination, one destination after the other.
    pub items: u64,
    /// The experts of each item.
    pub pairs: u64,
    /// Token rows.
    pub staging: u64,
    /// Rows of scales.
    pub scales: u64,
    /// Partial sums that peers return.
    pub landing: u64,
    /// Gradients of the weights that peers return.
    pub weight_grads: u64,
    /// Where rows are pushed: the items that each peer has for this rank.
    pub pushed_items: u64,
    /// The experts of each of them.
    pub pushed_pairs: u64,
    /// A flag for each piece of each peer's tokens.
    pub arrived: u64,
    /// A flag for each piece of each landing slot; or the piece, stamped.
    pub returned: u64,
    /// Token rows of every other rank.
    pub pushed_rows: u64,
    /// Their rows of scales.
    pub pushed_scales: u64,
    /// The length of the whole.
    pub bytes: u64,
}

/// Pieces of a row of so many bytes, with `accesses` of each lane of a warp in one.
fn pieces(row_bytes: usize, accesses: usize) -> u32 {
    row_bytes.div_ceil(accesses * 32 * 16).max(1) as u32
}

/// The most tokens of a rank of which rows carry their turn. They take a third more of the link then and wait for it
/// less often; with more tokens it is bytes that count.
const MOST_STAMPED: usize = 256;

/// Whether a dispatcher's rows are stamped.
pub(crate) fn stamps_rows(config: &DispatchConfig) -> bool {
    config.can_push() && config.max_tokens <= MOST_STAMPED
}

/// Accesses of a lane in one piece of a stamped row, and the bytes of the piece on its way: a fourth access has
/// what the turn has taken the place of. As in `stamped_rows.cuh`.
const STAMPED_ACCESSES: usize = 3;
const STAMPED_PIECE_BYTES: usize = (STAMPED_ACCESSES + 1) * 32 * 16;

/// Accesses of a lane in one piece of a row and in one piece of a partial sum. Where there are few rows
/// each is cut into small pieces, so that enough warps have one; where there are many, fewer flags cost
/// less. A sum has several rows in flight for each access.
fn accesses(max_tokens: usize) -> (usize, usize) {
    match max_tokens {
        ..=MOST_STAMPED => (STAMPED_ACCESSES, STAMPED_ACCESSES),
        257..=1024 => (7, 4),
        _ => (14, 7),
    }
}

/// What a rank tells another beside its pairs for each expert slot; see `push_context.cuh`.
const TALLIED: usize = 4;

/// Bytes of a row of so many where it lands.
fn landed(max_tokens: usize, row_bytes: usize) -> usize {
    match max_tokens {
        ..=MOST_STAMPED if row_bytes != 0 => {
            pieces(row_bytes, STAMPED_ACCESSES) as usize * STAMPED_PIECE_BYTES
        }
        _ => row_bytes,
    }
}

/// Regions start at a multiple of this many bytes, so that peers never share a cache line of another
/// region.
const REGION_ALIGNMENT: u64 = 256;

impl Geometry {
    /// The sizes for `rank` of a configuration over `world` ranks.
    pub(crate) fn new(config: &DispatchConfig, rank: ep_context::Rank, world: usize) -> Self {
        let push = config.can_push();
        let fanout = config.top_k.min(world);
        let slots = config.most_slots() as usize;
        Self {
            world: world as u32,
            rank: rank.0,
            experts: config.experts.experts() as u32,
            slots: slots as u32,
            local_experts: config.slots_of(rank),
            top_k: config.top_k as u32,
            fanout: fanout as u32,
            max_tokens: config.max_tokens as u32,
            alignment: config.alignment,
            hidden: config.hidden as u32,
            row_bytes: config.row_bytes() as u32,
            scale_bytes: config.scale_bytes() as u32,
            token_bytes: config.token_bytes() as u32,
            sum_bytes: config.sum_bytes() as u32,
            dtype: config.dtype as u32,
            quantize: u32::from(config.payload == Payload::Fp8),
            flat: u32::from(config.layout == Layout::Flat),
            flat_width: config.flat_width(config.slots_of(rank) as usize) as u32,
            weighted: u32::from(config.weighting == Weighting::Combine),
            push: u32::from(push),
            row_pieces: pieces(config.row_bytes(), accesses(config.max_tokens).0),
            sum_pieces: pieces(config.sum_bytes(), accesses(config.max_tokens).1),
            clear_padding: u32::from(config.clear_padding),
            stamped: u32::from(stamps_rows(config)),
            lane: LaneLayout::new(world, slots, config, fanout, push),
        }
    }
}

impl LaneLayout {
    fn new(world: usize, slots: usize, config: &DispatchConfig, fanout: usize, push: bool) -> Self {
        let mut end = 0u64;
        let mut region = |element: usize, count: usize| {
            let start = end;
            end = (start + (element * count) as u64).next_multiple_of(REGION_ALIGNMENT);
            start
        };
        let (tokens, top_k) = (config.max_tokens, config.top_k);
        let grads = if config.backward { tokens * top_k } else { 0 };
        let pushed = if push { tokens } else { 0 };
        let (in_row, in_sum) = accesses(tokens);
        let row_pieces = pieces(config.row_bytes(), in_row) as usize;
        let sum_pieces = pieces(config.sum_bytes(), in_sum) as usize;
        let returned = if tokens <= MOST_STAMPED { STAMPED_PIECE_BYTES } else { size_of::<u64>() };
        let layout = Self {
            dispatch_words: region(size_of::<u32>(), world),
            combine_words: region(size_of::<u32>(), world),
            dispatch_headers: region(size_of::<DispatchHeader>(), world),
            combine_headers: region(size_of::<CombineHeader>(), world),
            counts: region(size_of::<u32>(), world * slots),
            tallies: region(size_of::<u64>(), if push { world * (slots + TALLIED) } else { 0 }),
            prefixes: region(size_of::<[u64; 2]>(), if push { world } else { 0 }),
            items: region(size_of::<Item>(), tokens * fanout),
            pairs: region(size_of::<Pair>(), tokens * top_k),
            staging: region(config.row_bytes(), tokens),
            scales: region(config.scale_bytes(), tokens),
            landing: region(config.sum_bytes(), tokens * fanout),
            weight_grads: region(size_of::<f32>(), grads),
            pushed_items: region(size_of::<Item>(), world * pushed),
            pushed_pairs: region(size_of::<Pair>(), world * pushed * top_k.min(slots)),
            arrived: region(size_of::<u64>(), world * pushed * row_pieces),
            returned: region(returned, pushed * fanout * sum_pieces),
            pushed_rows: region(landed(tokens, config.row_bytes()), (world - 1) * pushed),
            pushed_scales: region(landed(tokens, config.scale_bytes()), (world - 1) * pushed),
            bytes: 0,
        };
        Self { bytes: end, ..layout }
    }
}

/// The most rows that routing can send to a rank that holds `local_experts` experts, when all ranks
/// together have `tokens` tokens: M = tokens · min(top_k, local_experts) pairs, each of min(experts, M)
/// experts padded by up to alignment − 1 rows, rounded down to the alignment.
pub fn worst_case_rows(tokens: usize, top_k: usize, local_experts: usize, alignment: u32) -> u32 {
    let rows = count_worst_case(tokens, top_k, local_experts, alignment);
    u32::try_from(rows).unwrap_or(u32::MAX)
}

/// The same where it is more than rows are counted by.
pub(crate) fn count_worst_case(
    tokens: usize,
    top_k: usize,
    local_experts: usize,
    alignment: u32,
) -> u128 {
    let pairs = tokens as u128 * top_k.min(local_experts) as u128;
    let padding = (local_experts as u128).min(pairs) * u128::from(alignment - 1);
    (pairs + padding) / u128::from(alignment) * u128::from(alignment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ExpertMap;

    #[test]
    fn regions_follow_each_other_without_overlap() {
        let config = DispatchConfig::builder(256, 8, 100, ExpertMap::contiguous(64, 8).unwrap())
            .build()
            .unwrap();
        let lane = Geometry::new(&config, ep_context::Rank(3), 8).lane;
        assert_eq!(lane.combine_words - lane.dispatch_words, 256);
        assert!(lane.pairs - lane.items >= 100 * 8 * 16);
        assert!(lane.staging - lane.pairs >= 100 * 8 * 16);
        assert!(lane.landing - lane.staging >= 100 * 512);
        assert!(lane.bytes - lane.landing >= 800 * 512);
        assert!(lane.landing.is_multiple_of(256));
    }

    #[test]
    fn rows_of_few_tokens_land_with_room_for_their_turn() {
        let lane = |tokens: usize| {
            let map = ExpertMap::contiguous(16, 2).unwrap();
            let config = DispatchConfig::builder(7168, 8, tokens, map).build().unwrap();
            let geometry = Geometry::new(&config, ep_context::Rank(0), 2);
            (geometry.stamped, geometry.row_pieces, geometry.sum_pieces, geometry.lane)
        };
        // 14 336 bytes are 896 accesses of 16: ten pieces of at most three for each lane.
        let (stamped, in_row, in_sum, few) = lane(MOST_STAMPED);
        assert_eq!((stamped, in_row, in_sum), (1, 10, 10));
        let landed = MOST_STAMPED as u64 * 10 * 2048;
        assert_eq!(few.pushed_rows - few.returned, 2 * landed);
        assert_eq!(few.pushed_scales - few.pushed_rows, landed);
        // The host raises a flag for each piece, in the same place.
        assert!(few.pushed_rows - few.returned >= MOST_STAMPED as u64 * 2 * 10 * 8);
        let (stamped, in_row, _, many) = lane(MOST_STAMPED + 1);
        assert_eq!((stamped, in_row), (0, 4));
        assert_eq!(many.pushed_scales - many.pushed_rows, 257 * 14_336);
    }

    #[test]
    fn worst_case_pads_each_expert_once() {
        assert_eq!(worst_case_rows(2048, 8, 8, 16), (2048 * 8 + 8 * 15) / 16 * 16);
        assert_eq!(worst_case_rows(1, 8, 4, 16), 4 * 16);
        assert_eq!(worst_case_rows(0, 8, 4, 16), 0);
        assert_eq!(worst_case_rows(10, 2, 8, 1), 20);
    }
}

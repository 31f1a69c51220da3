//! What several operations share: what ranks tell each other, lists, counters, addresses.

use bytemuck::{Pod, Zeroable};

/// What a sender tells each rank in a dispatch. Written before the signal word is released.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct DispatchHeader {
    /// The sender's step.
    pub step: u32,
    /// The place of this dispatch among those of the step.
    pub ordinal: u32,
    /// Items for this receiver.
    pub items: u32,
    /// The first of them in the sender's list.
    pub item_base: u32,
    /// Pairs for this receiver.
    pub pairs: u32,
    /// The first of them in the sender's list.
    pub pair_base: u32,
    /// How rows travel: [`TRANSFER_PULL`] or [`TRANSFER_PUSH`].
    pub transfer: u32,
    /// Zero.
    pub reserved: u32,
}

/// The receiver reads rows from the sender's staging area, and lists from the sender's block.
pub(crate) const TRANSFER_PULL: u32 = 0;

/// The sender writes lists and rows into the receiver's block, and a flag behind each piece of a row.
pub(crate) const TRANSFER_PUSH: u32 = 1;

/// An operation that pushes does the sender's half.
pub(crate) const HALF_SEND: u32 = 1;
/// It does the receiver's half.
pub(crate) const HALF_RECEIVE: u32 = 2;

/// What a rank tells each rank in a combine, or in the closing round of a step.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct CombineHeader {
    /// The sender's step.
    pub step: u32,
    /// The place of the dispatch that is combined among those of the step.
    pub ordinal: u32,
    /// How many of the receiver's items, from the first, the sender processed.
    pub prefix: u32,
    /// The most rows that a dispatch of this step required of the sender so far.
    pub required: u32,
    /// The first dispatch of this step that the sender knows to be over budget; [`NONE`] if none.
    pub first_over: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// No dispatch, no rank, no position.
pub(crate) const NONE: u32 = u32::MAX;

/// One token for one destination.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Item {
    /// The token: its row in the sender's staging area.
    pub token: u32,
    /// The landing slot of the sender that takes the partial sum.
    pub slot: u32,
    /// Its first pair, counted from the destination's first.
    pub pair_begin: u32,
    /// How many pairs it has.
    pub pairs: u32,
}

/// One token for one expert.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Pair {
    /// The expert's slot on its rank.
    pub slot: u32,
    /// How many pairs of the same sender for the same expert come before.
    pub index: u32,
    /// The routing weight.
    pub weight: f32,
    /// Which of the token's top-k choices this is.
    pub choice: u32,
}

/// Where one partial sum of a token comes from.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Destination {
    /// The rank.
    pub rank: u32,
    /// The item's place among the items for that rank.
    pub position: u32,
}

/// An item inside the window, as its receiver keeps it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WindowItem {
    /// The rank it came from.
    pub source: u32,
    /// The landing slot at that rank.
    pub slot: u32,
    /// Its first entry in the list of row references.
    pub begin: u32,
    /// How many entries it has.
    pub rows: u32,
}

/// One pair of an item: its row, and the weight with which it counts.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RowRef {
    /// The row in the receive buffer.
    pub row: u32,
    /// The routing weight.
    pub weight: f32,
    /// Which of the token's top-k choices this is.
    pub choice: u32,
    /// The expert's slot.
    pub slot: u32,
}

/// A rank and slot for each expert id.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ExpertHomeEntry {
    /// The rank that holds the expert.
    pub rank: u32,
    /// Its slot there.
    pub slot: u32,
}

/// A lane's words in private device memory.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct LaneState {
    /// Counts dispatches on this lane, modulo 2³².
    pub epoch: u32,
    /// Blocks of the running operation that have done their part; zero between operations. Only a
    /// device with more than one block counts.
    pub arrivals: u32,
    /// Pushed dispatches on this lane. It is what flags hold, and wide enough never to come round, so
    /// that a flag which nobody has used for long cannot be taken for one of now.
    pub turn: u64,
    /// Those of even turns and of odd ones: while one turn counts, the counters of the next are cleared.
    pub counters: [TurnCounters; 2],
    /// The last turn whose rows did not all fit, once it is known which of them do.
    pub placed: u64,
    /// Nonzero: the running dispatch sends nothing.
    pub silent: u32,
    /// Blocks of the running dispatch that have begun; zero between operations.
    pub begun: u32,
}

/// What the blocks of a device count in one turn of a lane.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct TurnCounters {
    /// Blocks that have counted their tokens.
    pub counted: u32,
    /// Blocks that have written their part of the lists.
    pub listed: u32,
    /// Pieces of rows to be sent that somebody sees to.
    pub sent: u32,
    /// The same of received rows.
    pub taken: u32,
    /// The same of partial sums to be pushed.
    pub pushed: u32,
    /// The same of sums.
    pub reduced: u32,
}

/// What a rank counts over one step. In private device memory; reset when a step begins.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct StepState {
    /// Steps begun, modulo 2³².
    pub step: u32,
    /// Nonzero: an over-budget step was published and not yet acknowledged by the host.
    pub held: u32,
    /// Nonzero: this step is behind such a step and moves nothing.
    pub drained: u32,
    /// The first dispatch known to be over budget, on any rank; [`NONE`] if none.
    pub first_over: u32,
    /// The most rows that a counted dispatch required here.
    pub required: u32,
    /// Dispatches so far.
    pub dispatches: u32,
    /// The most windows that a dispatch took.
    pub windows: u32,
    /// The fewest rows that a window could hold: the smallest of capacity and row limit.
    pub capacity: u32,
    /// Pairs that no window took.
    pub dropped: u64,
    /// Pairs that a window took.
    pub delivered: u64,
    /// Expert ids outside the model; −1 does not count.
    pub invalid_ids: u64,
    /// Expert ids that a token named more than once.
    pub repeated_ids: u64,
}

/// The window of a dispatch that its receiver works on. In private device memory.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WindowState {
    /// Tokens that this rank sent.
    pub tokens: u32,
    /// Items for this rank, over all sources.
    pub items: u32,
    /// Pairs for this rank, over all sources.
    pub pairs: u32,
    /// Rows that all of them need at once, padding included.
    pub required: u32,
    /// Items that earlier windows took.
    pub begin: u32,
    /// Items that this window and earlier ones took.
    pub end: u32,
    /// Pairs that earlier windows took.
    pub pair_begin: u32,
    /// Pairs of this window.
    pub window_pairs: u32,
    /// The capacity when the window was taken.
    pub capacity: u32,
    /// Windows taken.
    pub windows: u32,
    /// Nonzero: this dispatch moves no rows.
    pub silent: u32,
    /// Zero.
    pub reserved: u32,
}

/// The addresses of a lane.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct LaneParams {
    /// A table of the lane's shared block on every rank, as mapped here.
    pub blocks: u64,
    /// The lane's [`LaneState`].
    pub state: u64,
}

/// The addresses of a handle: the private memory of one dispatch.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct HandleParams {
    /// For each own token, how many ranks it went to: `[max_tokens]` u32.
    pub fanouts: u64,
    /// For each own token, these ranks in ascending order: `[max_tokens, fanout]` [`Destination`].
    pub destinations: u64,
    /// The [`WindowState`].
    pub window: u64,
    /// First row of each local expert, and the end: `[local_experts + 1]` i32.
    pub expert_offsets: u64,
    /// Rows of each local expert, without padding: `[local_experts]` i32.
    pub tokens_per_expert: u64,
    /// The end of the last expert's rows: i32.
    pub total: u64,
    /// First item of each source: `[ranks + 1]` u32.
    pub source_items: u64,
    /// First pair of each source: `[ranks + 1]` u32.
    pub source_pairs: u64,
    /// Rows of each expert that come from earlier sources: `[ranks, slots]` u32.
    pub bases: u64,
    /// Rows of each expert that earlier windows took: `[slots]` u32.
    pub taken: u64,
    /// The items of the window: `[rows]` [`WindowItem`].
    pub items: u64,
    /// Their pairs: `[rows]` [`RowRef`], in the flat layout `[rows, flat_width]`.
    pub pairs: u64,
    /// The weight of each row, if the caller multiplies: `[rows]` f32, in the flat layout
    /// `[rows, flat_width]`.
    pub row_weights: u64,
    /// The experts of each row in the flat layout: `[rows, flat_width]` i32 slots, −1 for none.
    pub row_experts: u64,
}

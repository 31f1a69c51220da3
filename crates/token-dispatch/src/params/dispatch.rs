//! Parameters of dispatch.

use bytemuck::{Pod, Zeroable};
use ep_context::signal::params::WaitParams;

use super::shared::{HandleParams, LaneParams};
use crate::geometry::Geometry;
use crate::kernels::MOST_RANKS;

/// Parameters of the sender's half of dispatch.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RouteParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to wait and signal.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// `[experts]` [`ExpertHomeEntry`](super::ExpertHomeEntry).
    pub homes: u64,
    /// `[tokens, top_k]` expert ids.
    pub topk_ids: u64,
    /// `[tokens, top_k]` f32 weights; zero: every weight is 1.
    pub topk_weights: u64,
    /// `[tokens]` rows.
    pub tokens: u64,
    /// `[tokens]` rows of scales; zero if there are none or they are made here.
    pub scales: u64,
    /// A u32 with the number of tokens; zero: `num_tokens` holds.
    pub num_tokens_word: u64,
    /// Scratch: `[ranks, slots]` u32.
    pub expert_counts: u64,
    /// Scratch: `[ranks, 2]` u32.
    pub rank_counts: u64,
    /// The number of tokens, or the most that the word may hold.
    pub num_tokens: u32,
    /// Bytes of an expert id: 4 or 8.
    pub id_bytes: u32,
    /// The place of this dispatch among those of the step.
    pub ordinal: u32,
    /// Nonzero: nothing behind an over-budget dispatch of the step moves rows.
    pub dependent: u32,
}

/// Parameters of a dispatch that pushes: of both halves, since one kernel does them, together or each by
/// itself.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PushDispatchParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to wait and signal.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The shared blocks of all ranks, for as many as push: at hand, where the table of the lane is a trip to memory.
    pub blocks: [u64; MOST_RANKS],
    /// The handle.
    pub handle: HandleParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// `[experts]` [`ExpertHomeEntry`](super::ExpertHomeEntry).
    pub homes: u64,
    /// `[tokens, top_k]` expert ids.
    pub topk_ids: u64,
    /// `[tokens, top_k]` f32 weights; zero: every weight is 1.
    pub topk_weights: u64,
    /// `[tokens]` rows.
    pub tokens: u64,
    /// `[tokens]` rows of scales; zero if there are none.
    pub scales: u64,
    /// A u32 with the number of tokens; zero: `num_tokens` holds.
    pub num_tokens_word: u64,
    /// Scratch: `[ranks, slots]` u32.
    pub expert_counts: u64,
    /// Scratch: `[ranks, 2]` u32.
    pub rank_counts: u64,
    /// Scratch: for each block that lists, `[ranks, slots]` and `[ranks, 2]` u32.
    pub block_counts: u64,
    /// A u32 for each dispatch: what it required here.
    pub required_by_dispatch: u64,
    /// The capacity in rows: u32.
    pub capacity: u64,
    /// The receive buffer: `[capacity]` rows.
    pub rows: u64,
    /// The receive buffer of scales: `[capacity]` rows of them; zero if there are none.
    pub received_scales: u64,
    /// The condition of a loop: zero, since there is none.
    pub condition: u64,
    /// The number of tokens, or the most that the word may hold.
    pub num_tokens: u32,
    /// Bytes of an expert id: 4 or 8.
    pub id_bytes: u32,
    /// The place of this dispatch among those of the step.
    pub ordinal: u32,
    /// Nonzero: nothing behind an over-budget dispatch of the step moves rows.
    pub dependent: u32,
    /// The most rows that what is behind this dispatch was shaped for.
    pub row_limit: u32,
    /// How many requirements are kept.
    pub max_dispatches: u32,
    /// Nonzero: requiring more than the capacity is an overflow.
    pub budgeted: u32,
    /// Nonzero: what the window leaves is dropped.
    pub last: u32,
    /// Blocks that build lists, from the first.
    pub listers: u32,
    /// Blocks behind the next one that send before they receive.
    pub senders: u32,
    /// [`HALF_SEND`](super::HALF_SEND), [`HALF_RECEIVE`](super::HALF_RECEIVE), or both.
    pub halves: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of the kernel that waits for the tokens of all ranks and counts them.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct CountParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to wait.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// A u32 for each dispatch: what it required here.
    pub required_by_dispatch: u64,
    /// The capacity in rows: u32.
    pub capacity: u64,
    /// The most rows that what is behind this dispatch was shaped for.
    pub row_limit: u32,
    /// How many requirements are kept.
    pub max_dispatches: u32,
    /// The place of this dispatch among those of the step.
    pub ordinal: u32,
    /// Nonzero: requiring more than the capacity is an overflow.
    pub budgeted: u32,
    /// Nonzero: nothing behind an over-budget dispatch of the step counts.
    pub dependent: u32,
    /// Zero.
    pub reserved: u32,
    /// The condition of the loop over windows; zero if there is none.
    pub condition: u64,
}

/// Parameters of the kernel that takes the next window and lays it out.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WindowParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to see that the group has failed.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// The capacity in rows: u32.
    pub capacity: u64,
    /// The most rows that what is behind this dispatch was shaped for.
    pub row_limit: u32,
    /// Nonzero: what this window leaves is dropped.
    pub last: u32,
    /// The condition of the loop over windows; zero if there is none.
    pub condition: u64,
}

/// Parameters of the kernel that brings the rows of the window.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct GatherParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to see that the group has failed.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// The receive buffer: `[capacity]` rows.
    pub rows: u64,
    /// The receive buffer of scales: `[capacity]` rows of them; zero if there are none.
    pub scales: u64,
}

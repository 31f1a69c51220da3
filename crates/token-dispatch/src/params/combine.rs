//! Parameters of combine.

use bytemuck::{Pod, Zeroable};
use ep_context::signal::params::WaitParams;

use super::shared::{HandleParams, LaneParams};
use crate::geometry::Geometry;
use crate::kernels::MOST_RANKS;

/// Parameters of a combine after such a dispatch: of both halves.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PushCombineParams {
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
    /// A u32 for each rank: what it said that it required.
    pub peer_required: u64,
    /// Expert outputs: `[capacity]` rows.
    pub expert_rows: u64,
    /// `[tokens]` rows.
    pub output: u64,
    /// The place of the dispatch among those of the step.
    pub ordinal: u32,
    /// Nonzero: multiply by the weights.
    pub weighted: u32,
    /// Blocks that push before they add up, from the first.
    pub senders: u32,
    /// [`HALF_SEND`](super::HALF_SEND), [`HALF_RECEIVE`](super::HALF_RECEIVE), or both.
    pub halves: u32,
    /// Pieces of a partial sum that a warp pushes together, as a power of two.
    pub push_span: u32,
    /// Pieces of a token's sum that a warp adds up together, as a power of two.
    pub sum_span: u32,
    /// Rows that the output has; more tokens are a fault.
    pub num_tokens: u32,
    /// Rows that the expert outputs have; more are a fault.
    pub row_limit: u32,
}

/// Parameters of the expert rank's half of combine.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ReducePushParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to signal.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// Expert outputs: `[capacity]` rows.
    pub expert_rows: u64,
    /// The place of the dispatch among those of the step.
    pub ordinal: u32,
    /// Nonzero: sum the rows of the window.
    pub push: u32,
    /// Nonzero: that was the last window, so tell every rank.
    pub release: u32,
    /// Nonzero: multiply by the weights.
    pub weighted: u32,
    /// The most rows that there are expert outputs of.
    pub row_limit: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of the kernel that waits for the partial sums of all ranks.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct FoldParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to wait.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// A u32 for each rank: what it said that it required.
    pub peer_required: u64,
    /// The place of the dispatch among those of the step.
    pub ordinal: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of the owner's half of combine.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ReduceParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to see that the group has failed.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// `[tokens]` rows; zero: nothing is added up.
    pub output: u64,
    /// `[tokens, top_k]` f32: the gradients of the weights; zero if they are not wanted.
    pub weight_grads: u64,
    /// The most tokens that there is memory for.
    pub num_tokens: u32,
    /// Zero.
    pub reserved: u32,
}

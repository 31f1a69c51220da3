//! Parameters of backward passes.

use bytemuck::{Pod, Zeroable};
use ep_context::signal::params::WaitParams;

use super::shared::{HandleParams, LaneParams};
use crate::geometry::Geometry;

/// Parameters of the sender's half of a dispatch along the routes of a kept handle.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RestageParams {
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
    /// `[tokens]` rows of gradients.
    pub rows: u64,
    /// The place of this dispatch among those of the step.
    pub ordinal: u32,
    /// The most tokens that there are gradients of.
    pub num_tokens: u32,
}

/// Parameters of the kernel that waits for the gradients of all ranks.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AcquireParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to wait.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// The place of this dispatch among those of the step.
    pub ordinal: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of the receiver's half of such a dispatch.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RegatherParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to wait.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// `[capacity]` rows for the gradients of the expert outputs.
    pub rows: u64,
    /// `[capacity]` rows of expert outputs, for the gradients of the weights; zero if those are not
    /// wanted, or the caller's own.
    pub expert_rows: u64,
    /// The most rows that there is memory for.
    pub row_limit: u32,
    /// Nonzero: the handle has to hold all that its dispatch received, and not a later window of it.
    pub whole: u32,
}

/// Parameters of the kernel that returns gradients of weights which the caller computed.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PushWeightGradsParams {
    /// The sizes.
    pub geometry: Geometry,
    /// How to see that the group has failed.
    pub wait: WaitParams,
    /// The lane.
    pub lane: LaneParams,
    /// The handle.
    pub handle: HandleParams,
    /// `[capacity]` f32, in the flat layout `[capacity, flat_width]`.
    pub row_grads: u64,
    /// Rows that the gradients have; more are a fault.
    pub row_limit: u32,
    /// Zero.
    pub reserved: u32,
}

//! Parameters of what begins and ends a step, and of what the host asks for between steps; the record.

use bytemuck::{Pod, Zeroable};
use ep_context::signal::params::WaitParams;

use super::shared::LaneParams;
use crate::geometry::Geometry;

/// Parameters of the kernel that begins a step.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct StepBeginParams {
    /// How to wait.
    pub wait: WaitParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// A u32 for each rank: what it said that it required.
    pub peer_required: u64,
    /// A u32 for each dispatch: what it required here.
    pub required_by_dispatch: u64,
    /// How many of them.
    pub max_dispatches: u32,
    /// Entries of `shapes` that count.
    pub shape_count: u32,
    /// The shapes for which the step was recorded, where the host does not look at them before each
    /// replay.
    pub shapes: [ShapeCheck; MAX_CHECKED_SETS],
}

/// The most row sets whose shape a step checks by itself.
pub const MAX_CHECKED_SETS: usize = 4;

/// The generation of a row set for which a step was recorded.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ShapeCheck {
    /// The u64 that holds the generation of now.
    pub generation: u64,
    /// The one for which the step was recorded.
    pub recorded: u64,
}

/// Set in what a rank says that it required where it ran a stale graph. Below it are the generation for
/// which that was recorded, 15 bits, and the one that holds, 16 bits, each the largest number of so many
/// bits if it is larger. Everything that says what ranks required carries the largest number that there
/// was, and no rank ever requires so many rows: so every rank learns of it by the signals of the step.
pub(crate) const STALE: u32 = 1 << 31;

/// Parameters of the closing round of a step that ends in a dispatch.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AcknowledgeParams {
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
    /// The number of dispatches in the step.
    pub ordinal: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of the kernel that ends a step and publishes its record.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct StepEndParams {
    /// How to see that the group has failed.
    pub wait: WaitParams,
    /// The [`StepState`](super::StepState).
    pub state: u64,
    /// A u32 for each rank: what it said that it required.
    pub peer_required: u64,
    /// A u32 for each dispatch: what it required here.
    pub required_by_dispatch: u64,
    /// The ring of records, in host-mapped memory.
    pub ring: u64,
    /// Bytes from one record to the next.
    pub stride: u32,
    /// Records in the ring.
    pub records: u32,
    /// How many requirements are kept.
    pub max_dispatches: u32,
    /// Nonzero: steps behind an over-budget one drain until the host acknowledges it.
    pub hold: u32,
}

/// The fixed part of a published record. After it come a u32 for each rank (what it required) and a
/// u32 for each dispatch (what it required here).
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RecordHeader {
    /// The step plus one, released last; zero while the record is written, which no step has since numbers
    /// of steps have half of the bits.
    pub sequence: u64,
    /// The step.
    pub step: u32,
    /// Nonzero: the step moved nothing, being behind an unacknowledged over-budget step.
    pub drained: u32,
    /// The first over-budget dispatch of the step; [`NONE`](super::NONE) if none.
    pub first_over: u32,
    /// The most rows that a counted dispatch required here.
    pub required: u32,
    /// Dispatches.
    pub dispatches: u32,
    /// The most windows that a dispatch took.
    pub windows: u32,
    /// The fewest rows that a window could hold.
    pub capacity: u32,
    /// Zero.
    pub reserved: u32,
    /// The fault that this rank holds, as a word; zero if none.
    pub fault: u64,
    /// Pairs that no window took.
    pub dropped: u64,
    /// Pairs that a window took.
    pub delivered: u64,
    /// Expert ids outside the model.
    pub invalid_ids: u64,
    /// Expert ids named twice.
    pub repeated_ids: u64,
}

impl RecordHeader {
    /// What the record of `step` says as its sequence.
    pub(crate) fn sequence_of(step: u32) -> u64 {
        u64::from(step) + 1
    }

    /// The step whose record says `sequence`, which is not zero.
    pub(crate) fn step_of(sequence: u64) -> u32 {
        sequence.wrapping_sub(1) as u32
    }
}

/// Parameters of the kernel by which the host acknowledges an over-budget step.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ResumeParams {
    /// The [`StepState`](super::StepState).
    pub state: u64,
}

/// Parameters of the kernel by which the host gives the group up.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AbandonParams {
    /// Whom to tell.
    pub wait: WaitParams,
    /// The fault, as a word.
    pub fault: u64,
}

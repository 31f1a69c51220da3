//! Structs that ranks and kernels share, byte for byte.
//!
//! Each has a twin of the same name in the kernels' headers. Addresses are `u64`, counts `u32`, and
//! every field stands at a multiple of its size, so that there is no hidden padding.

mod backward;
mod combine;
mod dispatch;
mod shared;
mod step;

pub(crate) use backward::{AcquireParams, PushWeightGradsParams, RegatherParams, RestageParams};
pub(crate) use combine::{FoldParams, PushCombineParams, ReduceParams, ReducePushParams};
pub(crate) use dispatch::{
    CountParams, GatherParams, PushDispatchParams, RouteParams, WindowParams,
};
#[cfg(test)]
pub(crate) use shared::TurnCounters;
pub(crate) use shared::{
    CombineHeader, Destination, DispatchHeader, ExpertHomeEntry, HALF_RECEIVE, HALF_SEND,
    HandleParams, Item, LaneParams, LaneState, NONE, Pair, RowRef, StepState, TRANSFER_PULL,
    TRANSFER_PUSH, WindowItem, WindowState,
};
pub use step::MAX_CHECKED_SETS;
pub(crate) use step::{
    AbandonParams, AcknowledgeParams, RecordHeader, ResumeParams, STALE, ShapeCheck,
    StepBeginParams, StepEndParams,
};

//! MoE expert parallelism inside CUDA graphs: capture, replay, and recovery when routing overflows.
//!
//! [`ExpertParallel`] is one rank's part in an expert-parallel group, with everything that a captured
//! MoE layer needs. Below it lie the crates that it is made of, re-exported here: [`ep_context`],
//! [`token_dispatch`], [`graph_capture`] and [`overflow`]. Every type that is in a signature of what is
//! at the root here is at the root too, but for what only a new [`Backend`] is made of.

mod builder;
mod error;
mod layer;
pub mod report;
pub mod synthetic;

pub use builder::{ExpertParallelBuilder, initial_capacity_rows};
pub use error::Error;
pub use layer::{ExpertParallel, MoeLayer, Received};
pub use report::{MemoryEntry, MemoryReport};

pub use ep_context::account::Charge;
pub use ep_context::backend::Update;
pub use ep_context::context::Suspended;
pub use ep_context::host::{HostOptions, LoadedKernel};
pub use ep_context::rendezvous::{
    Gone, Rendezvous, RendezvousError, ThreadGroup, ThreadRendezvous,
};
pub use ep_context::signal::WaitParams;
pub use ep_context::symmetric::SymmetricError;
pub use ep_context::{
    Backend, BackendError, Buffer, ContextError, Deadlines, DeviceSlice, EpContext,
    EpContextBuilder, Fault, FaultKind, HostBackend, Kernel, KernelSource, LaunchShape,
    MemoryAccount, Phase, PlannedGrowth, Queue, Rank, Retained, RowBuffer, RowSet, RowShape,
    Specialization, SymmetricBlock,
};
pub use graph_capture::{
    BodyError, CaptureError, EmbedOptions, EmbeddedStep, StepGraph, StepPieces,
};
pub use overflow::{
    Adjustments, EngineGraph, GrowthError, GrowthPolicy, GrowthRefusal, Launched, NoHooks, Outcome,
    OverflowError, OverflowPolicy, RecoveryHooks, RecoverySettings, Refusal, StepBody, StepReport,
    StepRunner, StepSpec, StepTimes,
};
pub use token_dispatch::{
    Combine, CombineBackward, Counts, DType, Dispatch, DispatchBackward, DispatchConfig,
    DispatchConfigBuilder, DispatchError, ExpertHome, ExpertMap, Follower, Handle, Lane,
    LaunchOrder, Layout, Payload, Place, Records, RoundsBackward, RoutingDependence, RowShaping,
    Step, StepMode, StepOptions, StepRecord, StepSummary, TokenCount, TokenDispatcher, TopKIds,
    Transfer, Weighting,
};

pub use {ep_context, graph_capture, overflow, token_dispatch};

//! MoE expert parallelism inside CUDA graphs: capture, replay, and recovery when routing overflows.
//!
//! [`ExpertParallel`] is one rank's part in an expert-parallel group, with everything that a captured
//! MoE layer needs. Below it lie the crates that it is made of, re-exported here: [`ep_context`],
//! [`token_dispatch`], [`graph_capture`] and [`overflow`].

mod builder;
mod error;
mod layer;
pub mod report;
pub mod synthetic;

pub use builder::{ExpertParallelBuilder, initial_capacity_rows};
pub use error::Error;
pub use layer::{ExpertParallel, MoeLayer, Received};
pub use report::{MemoryEntry, MemoryReport};

pub use ep_context::rendezvous::{Rendezvous, ThreadGroup};
pub use ep_context::{
    Backend, BackendError, Buffer, Deadlines, DeviceSlice, EpContext, Fault, HostBackend, Kernel,
    LaunchShape, Phase, Queue, Rank, RowBuffer, RowSet,
};
pub use graph_capture::{
    BodyError, CaptureError, EmbedOptions, EmbeddedStep, StepGraph, StepPieces,
};
pub use overflow::{
    Adjustments, EngineGraph, GrowthPolicy, Launched, NoHooks, Outcome, OverflowError,
    OverflowPolicy, RecoveryHooks, RecoverySettings, StepReport, StepRunner, StepSpec,
};
pub use token_dispatch::{
    Combine, Counts, DType, Dispatch, DispatchConfig, DispatchError, ExpertMap, Handle, Lane,
    Layout, Payload, RoutingDependence, RowShaping, Step, StepMode, StepOptions, StepRecord,
    TokenCount, TokenDispatcher, TopKIds, Transfer, Weighting,
};

pub use {ep_context, graph_capture, overflow, token_dispatch};

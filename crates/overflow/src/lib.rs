//! What happens when routing overflows the receive budget.
//!
//! [`StepRunner`] replays a recorded step and reads its record. If some rank was sent more rows than
//! it had room for, every rank knows it when the step ends, and under [`OverflowPolicy::Recover`] all
//! of them map memory, let the engine restore its state, record again, say so to each other, and
//! replay. The rows that are missing from the discarded run are in the one that is kept. An engine that
//! captures and launches graphs itself takes part as an [`EngineGraph`].

mod agreement;
mod engine;
mod error;
mod gather;
mod growth;
mod hooks;
mod policy;
mod report;
mod runner;
mod source;

pub use agreement::Refusal;
pub use engine::{EngineGraph, StepSpec};
pub use error::OverflowError;
pub use growth::{
    Adjustments, FirstRows, GrowthError, GrowthPolicy, GrowthRefusal, Simulation, SimulationOutcome,
};
pub use hooks::{NoHooks, RecoveryHooks};
pub use policy::{OverflowPolicy, RecoverySettings};
pub use report::{Outcome, StepReport, StepTimes};
pub use runner::{Launched, StepBody, StepRunner};

//! The errors of running and recovering steps.

use ep_context::{BackendError, ContextError, Rank};
use graph_capture::{BodyError, CaptureError};
use token_dispatch::DispatchError;

use crate::agreement::Refusal;
use crate::growth::GrowthError;
use crate::report::StepReport;

/// What a step can fail with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OverflowError {
    /// Routing overflowed, and the policy is to fail. On every rank; the group goes on.
    #[error(
        "step {} overflowed: up to {} rows were required of a rank; this rank has {}",
        report.record.step, report.record.peak(), report.capacity_before
    )]
    Overflow {
        /// What the step did. Its outputs lack the rows that did not fit.
        report: Box<StepReport>,
    },
    /// A rank could not grow. The same reason on every rank; nothing has changed, and the group goes
    /// on.
    #[error(
        "{rank} cannot recover the step: {}; it requires {} rows, has {}, and may have {}",
        refusal.reason, refusal.required, refusal.budget, refusal.limit
    )]
    Refused {
        /// The rank.
        rank: Rank,
        /// Its reason and numbers.
        refusal: Refusal,
        /// What the step did on the rank that reports. Its outputs lack the rows that did not fit.
        report: Box<StepReport>,
    },
    /// The step's body failed when it ran eagerly, with an error of its own. That ends the group.
    #[error("{rank}: the body of the step failed")]
    Body {
        /// The rank.
        rank: Rank,
        /// What the body returned.
        source: BodyError,
    },
    /// A growth setting is out of range.
    #[error(transparent)]
    Growth(#[from] GrowthError),
    /// The step could not be recorded or replayed.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// An operation of the step failed.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The group failed.
    #[error(transparent)]
    Context(#[from] ContextError),
}

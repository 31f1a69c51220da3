//! Why an operation could not be measured.

use graph_ep::ep_context::ContextError;
use graph_ep::ep_context::rendezvous::RendezvousError;
use graph_ep::token_dispatch::reference::ReferenceError;
use graph_ep::{BackendError, CaptureError, DispatchError, OverflowError};

use crate::bench::limits::LimitsError;
use crate::bench::nccl::NcclError;

/// Why a rank stopped before everything was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The group could not be built, or a tensor not be written.
    #[error(transparent)]
    Engine(#[from] graph_ep::Error),
    /// The group failed.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// The ranks did not come together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// An operation was refused, or failed on the device.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// A step could not be recorded or replayed.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A step could not be run to its end.
    #[error(transparent)]
    Overflow(#[from] OverflowError),
    /// The limits could not be measured.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// NCCL could not be compared with.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// The reference refused what ranks were given.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The body of a step that is not recorded failed.
    #[error("{rank}: the body of the step failed")]
    Body {
        /// The rank.
        rank: graph_ep::Rank,
        /// What it returned.
        source: graph_ep::BodyError,
    },
    /// A step that has to be another kind of step was measured.
    #[error("rank {rank}: {operation}: a step was {found} where it had to be {expected}")]
    Step {
        /// The rank.
        rank: usize,
        /// What was being measured.
        operation: &'static str,
        /// How the step ended.
        found: String,
        /// How it had to end.
        expected: &'static str,
    },
    /// A rank sent other samples than all took.
    #[error("{purpose}: rank {rank} sent {got} bytes of samples instead of {expected}")]
    Samples {
        /// What they are of.
        purpose: String,
        /// The rank.
        rank: usize,
        /// Bytes that it sent.
        got: usize,
        /// Bytes of as many samples as were taken.
        expected: usize,
    },
    /// No time could be taken.
    #[error("{operation}: no sample was taken that is a time")]
    NoTime {
        /// What was being measured.
        operation: &'static str,
    },
    /// The device of this rank could not be used, or another part of setting up failed.
    #[error("{0}")]
    Setup(String),
}

impl OpError {
    /// Whether this says no more than that another rank has stopped: its own error says why.
    pub fn is_echo(&self) -> bool {
        let rendezvous = match self {
            Self::Rendezvous(error)
            | Self::Context(ContextError::Rendezvous(error))
            | Self::Engine(graph_ep::Error::Context(ContextError::Rendezvous(error)))
            | Self::Limits(LimitsError::Rendezvous(error)) => error,
            Self::Dispatch(DispatchError::Fault(_))
            | Self::Overflow(OverflowError::Dispatch(DispatchError::Fault(_))) => return true,
            _ => return false,
        };
        matches!(
            rendezvous,
            RendezvousError::Left { .. }
                | RendezvousError::Aborted { .. }
                | RendezvousError::Peer { .. }
                | RendezvousError::Deadline { .. }
        )
    }
}

//! The errors of recording and replaying.

use std::error::Error;

use ep_context::{BackendError, Rank, RowShape};
use token_dispatch::DispatchError;

/// What the body of a recorded step may fail with.
pub type BodyError = Box<dyn Error + Send + Sync + 'static>;

/// What can go wrong in recording a step and replaying it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The closure that records the step failed. Nothing of it was kept.
    #[error("{rank}: the body of the step could not be recorded")]
    Body {
        /// The rank that recorded.
        rank: Rank,
        /// What the closure returned.
        source: BodyError,
    },
    /// The graph's shapes are those of a receive capacity that no longer holds.
    #[error(
        "{rank}: stale graph: recorded for {} rows (generation {}), now there are {} (generation {}); \
         record it again",
        recorded.rows, recorded.generation, now.rows, now.generation
    )]
    Stale {
        /// The rank that was to replay it.
        rank: Rank,
        /// The capacity that it was recorded for.
        recorded: RowShape,
        /// The capacity that holds.
        now: RowShape,
    },
    /// The engine could not launch its graph.
    #[error("{rank}: the graph of the step could not be launched")]
    Launch {
        /// The rank.
        rank: Rank,
        /// What the engine said.
        source: BodyError,
    },
    /// An operation of the step could not be queued.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

//! One error for whoever uses the facade.

use ep_context::{BackendError, ContextError};
use graph_capture::CaptureError;
use overflow::OverflowError;
use token_dispatch::DispatchError;

/// Any error of the crates beneath.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The group could not be built, or failed.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A configuration or an operation was refused.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// A step could not be recorded or replayed.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A step overflowed and could not be recovered.
    #[error(transparent)]
    Overflow(#[from] OverflowError),
    /// The receive budget is more than this rank may hold.
    #[error(
        "{capacity_rows} receive rows need {needed} bytes on a rank, but its memory limit is {limit}"
    )]
    MemoryLimit {
        /// Rows.
        capacity_rows: u32,
        /// Bytes of everything in the memory report at that budget.
        needed: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The capacity factor is not a positive number.
    #[error(
        "the capacity factor is {0}, but must be finite and above 0, and the capacity below 2³¹ rows"
    )]
    CapacityFactor(f64),
}

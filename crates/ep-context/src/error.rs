//! The errors of building and using a context.

use std::error::Error;

use crate::backend::BackendError;
use crate::fault::Fault;
use crate::rendezvous::RendezvousError;
use crate::symmetric::SymmetricError;

/// A failure of the group or of this rank's part in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContextError {
    /// The device or the operating system of this rank refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The ranks could not meet, or do not agree.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// Memory could not be shared between the ranks.
    #[error(transparent)]
    Symmetric(#[from] SymmetricError),
    /// A step failed on the device of some rank.
    #[error("the group has failed: {0}")]
    Fault(#[from] Fault),
}

/// An error and its causes in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let text = next.to_string();
        // A transparent wrapper repeats the text of what it wraps.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = next.source();
    }
    line
}

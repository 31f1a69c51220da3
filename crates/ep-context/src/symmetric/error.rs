//! Why memory could not be shared.

use std::io;
use std::time::Duration;

use crate::Rank;
use crate::backend::BackendError;
use crate::rendezvous::{Ranks, RendezvousError};

/// Why memory could not be shared between the ranks of a group.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SymmetricError {
    /// The ranks did not come together, or ask for different sizes.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A call to exchange descriptors failed on this rank.
    #[error("{purpose}: {call} failed")]
    Os {
        /// What the descriptors are for.
        purpose: String,
        /// The system call.
        call: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A rank stopped listening before it had this rank's descriptor.
    #[error("{purpose}: {rank} has given up")]
    Gone {
        /// What the descriptors are for.
        purpose: String,
        /// The rank that gave up.
        rank: Rank,
    },
    /// Peers did not send their descriptor, or did not take this rank's, in time.
    #[error(
        "{purpose}: not done within {deadline:?}; descriptors missing from: {}; not taken by: {}",
        Ranks(missing),
        Ranks(unreached)
    )]
    Deadline {
        /// What the descriptors are for.
        purpose: String,
        /// The deadline.
        deadline: Duration,
        /// Every rank whose descriptor has not come, in order.
        missing: Vec<Rank>,
        /// Every rank that had no room for this rank's descriptor, in order.
        unreached: Vec<Rank>,
    },
}

//! What can go wrong with NCCL.

use std::ffi::c_int;
use std::time::Duration;

use graph_ep::ep_context::rendezvous::RendezvousError;
use graph_ep::{BackendError, Rank};

use super::MULTICAST;

/// Why NCCL did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library, or the driver, is not there or too old.
    #[error("NCCL cannot be loaded: {reason}")]
    Unavailable {
        /// Where it was looked for, or what it lacks.
        reason: String,
    },
    /// NVLink multicast is not known to be off.
    #[error("NCCL is not used unless {MULTICAST}=0 is set: NVLink multicast must stay off")]
    Multicast,
    /// NCCL needs a GPU for each rank.
    #[error("NCCL cannot be compared with: {first} and {second} share GPU {gpu}")]
    SharedGpu {
        /// A rank.
        first: Rank,
        /// Another.
        second: Rank,
        /// The GPU of both, as the driver counts.
        gpu: u32,
    },
    /// A call failed.
    #[error("{call} failed with {reason} ({code})")]
    Call {
        /// The call.
        call: &'static str,
        /// What the library says about it.
        reason: String,
        /// The number of the error.
        code: c_int,
    },
    /// A call of the driver's failed.
    #[error("{call} failed with error {code} of the CUDA driver")]
    Driver {
        /// The call.
        call: &'static str,
        /// The number of the error.
        code: c_int,
    },
    /// What a call began did not end in time.
    #[error("{call} did not end within {deadline:?}")]
    Late {
        /// The call.
        call: &'static str,
        /// How long it was given.
        deadline: Duration,
    },
    /// There is no such rank.
    #[error("NCCL was to exchange with {peer}, in a group of {world} ranks")]
    Peer {
        /// The rank asked for.
        peer: Rank,
        /// How many there are.
        world: usize,
    },
    /// The ranks did not come together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

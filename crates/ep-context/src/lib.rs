//! Who takes part in an expert-parallel group and what its ranks share.
//!
//! - [`rendezvous`]: how the hosts of all ranks meet, exchange bytes and compare configurations.
//! - [`backend`]: what the protocol asks of a device; [`host`] is the backend that needs no GPU,
//!   `cuda` the one on NVIDIA GPUs.
//! - [`symmetric`]: memory that every rank allocates and every rank maps.
//! - [`signal`]: the words by which ranks wait for each other, deadlines, abort and poison.
//! - [`rows`]: private buffers that grow in place, because routing decides how many rows they hold.
//! - [`context`]: one rank's membership of a group, which ties these together.
//!
//! Nothing here knows what a token is.

pub mod account;
pub mod backend;
pub mod buffer;
pub mod context;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod deadline;
pub mod error;
pub mod fault;
pub mod host;
mod keepsake;
pub mod kernel;
pub mod queue;
pub mod rank;
mod recording;
pub mod rendezvous;
pub mod rows;
pub mod signal;
pub mod symmetric;
mod sync;

pub use account::MemoryAccount;
pub use backend::{Backend, BackendError, LaunchShape, Processors, Retained, Specialization};
pub use buffer::{Buffer, DeviceSlice};
pub use context::{EpContext, EpContextBuilder};
#[cfg(feature = "cuda")]
pub use cuda::{CudaBackend, CudaOptions};
pub use deadline::Deadlines;
pub use error::ContextError;
pub use fault::{Fault, FaultKind, Phase};
pub use host::HostBackend;
pub use keepsake::reclaim;
pub use kernel::{Kernel, KernelSource};
pub use queue::{Queue, QueueScope};
pub use rank::Rank;
pub use rows::{PlannedGrowth, Reshaped, RowBuffer, RowSet, RowShape};
pub use symmetric::SymmetricBlock;

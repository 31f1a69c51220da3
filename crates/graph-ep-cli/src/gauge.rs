//! How much memory a device has left.

use graph_ep::ep_context::{CudaBackend, MemoryAccount};
use graph_ep::{Backend, BackendError, HostBackend};

/// Where the memory of a device can be asked after.
pub trait Gauge: Backend {
    /// Counts the device memory of this rank.
    fn account(&self) -> &MemoryAccount;

    /// Bytes that are free, once all that was dropped is given back, which this does: it may wait for the
    /// device. None on the host, whose memory is everybody's.
    ///
    /// # Errors
    ///
    /// What the driver reports.
    fn free_bytes(&self) -> Result<Option<u64>, BackendError>;
}

impl Gauge for HostBackend {
    fn account(&self) -> &MemoryAccount {
        Self::account(self)
    }

    fn free_bytes(&self) -> Result<Option<u64>, BackendError> {
        Ok(None)
    }
}

impl Gauge for CudaBackend {
    fn account(&self) -> &MemoryAccount {
        Self::account(self)
    }

    fn free_bytes(&self) -> Result<Option<u64>, BackendError> {
        self.collect()?;
        Ok(Some(self.free_memory()?.0))
    }
}

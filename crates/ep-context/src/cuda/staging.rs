//! Page-locked memory through which uploads go.
//!
//! A copy from ordinary host memory may wait for the stream before it, and with it for a peer. A copy
//! from page-locked memory never does; it goes back to the pool when the copy has run.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use super::device::Device;
use super::driver::Handle;
use super::graveyard::Grave;
use super::memory::allocate_host;
use crate::backend::BackendError;
use crate::sync::lock;

/// The most bytes that lie idle in the pool; what comes back beyond is given back to the driver.
const IDLE_LIMIT: usize = 64 << 20;
/// Pieces of the smallest size that are made in advance, so that a rank which uploads its tables while
/// a kernel runs allocates nothing.
const IN_ADVANCE: usize = 16;
/// The smallest piece: most uploads are tables of a few hundred bytes.
const SMALLEST: usize = 64 << 10;

#[derive(Debug, Default)]
pub(super) struct StagingPool {
    idle: Mutex<Vec<Pinned>>,
}

#[derive(Debug)]
struct Pinned {
    start: Handle<c_void>,
    bytes: usize,
}

/// A piece of page-locked memory with a copy of what is uploaded.
#[derive(Debug)]
pub(super) struct Staging {
    device: Arc<Device>,
    pinned: Option<Pinned>,
    start: Handle<c_void>,
}

impl Staging {
    /// A copy of `data`. Allocates if no idle piece is large enough, which may wait for the device.
    pub(super) fn of(device: &Arc<Device>, data: &[u8]) -> Result<Self, BackendError> {
        let pinned = match device.staging.take(data.len()) {
            Some(pinned) => pinned,
            None => {
                let bytes = data.len().next_power_of_two().max(SMALLEST);
                Pinned { start: allocate_host(device, "staging of an upload", bytes)?, bytes }
            }
        };
        let start = pinned.start;
        // SAFETY: the piece has at least this length and belongs to this value alone: no copy that
        // reads it is queued, since those that were held it until they had run.
        unsafe { start.0.cast::<u8>().copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Ok(Self { device: device.clone(), pinned: Some(pinned), start })
    }

    pub(super) fn start(&self) -> *const c_void {
        self.start.0
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take()
            && let Some(pinned) = self.device.staging.put(pinned)
        {
            self.device.graveyard.bury(Grave::HostMemory(pinned.start));
        }
    }
}

impl StagingPool {
    /// Makes pieces in advance.
    pub(super) fn fill(&self, device: &Device) -> Result<(), BackendError> {
        for _ in 0..IN_ADVANCE {
            let start = allocate_host(device, "staging of uploads", SMALLEST)?;
            lock(&self.idle).push(Pinned { start, bytes: SMALLEST });
        }
        Ok(())
    }

    /// The smallest idle piece that holds `bytes`.
    fn take(&self, bytes: usize) -> Option<Pinned> {
        let mut idle = lock(&self.idle);
        let fitting = idle.iter().enumerate().filter(|(_, pinned)| pinned.bytes >= bytes);
        let (at, _) = fitting.min_by_key(|(_, pinned)| pinned.bytes)?;
        Some(idle.swap_remove(at))
    }

    /// Keeps a piece, or returns it if enough lie idle.
    fn put(&self, pinned: Pinned) -> Option<Pinned> {
        let mut idle = lock(&self.idle);
        let held: usize = idle.iter().map(|pinned| pinned.bytes).sum();
        if held + pinned.bytes > IDLE_LIMIT {
            return Some(pinned);
        }
        idle.push(pinned);
        None
    }
}

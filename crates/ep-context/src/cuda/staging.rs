//! Page-locked memory through which uploads go.
//!
//! A copy from ordinary host memory may wait for the stream before it, and with it for a peer. A copy
//! from page-locked memory never does. But to free such memory waits for the device, and to allocate it
//! may, while another rank on it waits for this one. So every rank has its own, from the beginning, and an
//! upload that finds none left waits for what this rank has queued, not for what others have.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use super::device::Device;
use super::driver::Handle;
use super::graveyard::Grave;
use super::memory::allocate_host;
use crate::backend::BackendError;
use crate::sync::lock;

/// What one copy takes at most. Most uploads are tables of a few hundred bytes.
pub(super) const PIECE: usize = 64 << 10;
/// How many copies of a rank may be on their way: several for each buffer of a layer.
const PIECES: usize = 64;

/// The page-locked memory of one rank.
#[derive(Debug)]
pub(super) struct StagingArea {
    device: Arc<Device>,
    start: Handle<c_void>,
    /// Pieces that no copy reads.
    idle: Mutex<Vec<usize>>,
}

/// A piece of page-locked memory with a copy of what is uploaded.
#[derive(Debug)]
pub(super) struct Staging {
    area: Arc<StagingArea>,
    start: Handle<c_void>,
    /// Its number in the area; `None` if it has been allocated for this.
    piece: Option<usize>,
}

impl StagingArea {
    /// Allocates, which may wait for the device.
    pub(super) fn new(device: &Arc<Device>) -> Result<Arc<Self>, BackendError> {
        let start = allocate_host(device, "staging of uploads", PIECES * PIECE)?;
        let idle = Mutex::new((0..PIECES).collect());
        Ok(Arc::new(Self { device: device.clone(), start, idle }))
    }

    /// A copy of `data`, of at most [`PIECE`] bytes, if there is a piece for it.
    pub(super) fn stage(self: &Arc<Self>, data: &[u8]) -> Option<Staging> {
        let piece = lock(&self.idle).pop()?;
        // SAFETY: numbers in `idle` are below PIECES, so the offset is within the area's allocation, which has
        // so many pieces and is far shorter than isize::MAX.
        let start = Handle(unsafe { self.start.0.byte_add(piece * PIECE) });
        let staging = Staging { area: self.clone(), start, piece: Some(piece) };
        staging.fill(data);
        Some(staging)
    }

    /// A copy of `data`, of at most [`PIECE`] bytes, in memory that is allocated for it: may wait for the
    /// device.
    pub(super) fn stage_apart(self: &Arc<Self>, data: &[u8]) -> Result<Staging, BackendError> {
        let start = allocate_host(&self.device, "staging of an upload", PIECE)?;
        let staging = Staging { area: self.clone(), start, piece: None };
        staging.fill(data);
        Ok(staging)
    }
}

impl Drop for StagingArea {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::HostMemory(self.start));
    }
}

impl Staging {
    fn fill(&self, data: &[u8]) {
        assert!(data.len() <= PIECE, "uploads go by pieces");
        // SAFETY: a piece has at least this length and is this value's alone: no copy that reads it is
        // queued, since each holds the value of its piece until it has run.
        unsafe { self.start.0.cast::<u8>().copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }

    pub(super) fn start(&self) -> *const c_void {
        self.start.0
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        match self.piece {
            Some(piece) => lock(&self.area.idle).push(piece),
            None => self.area.device.graveyard.bury(Grave::HostMemory(self.start)),
        }
    }
}

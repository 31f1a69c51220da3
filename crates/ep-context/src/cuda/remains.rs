//! Streams that were dropped, until their work has run.

use super::device::Device;
use super::driver::{Driver, NOT_READY, StreamHandle};
use super::recorder::Recorder;
use super::stream::State;

/// What is left of a stream that was dropped.
#[derive(Debug)]
pub(super) struct Remains {
    handle: StreamHandle,
    borrowed: bool,
    state: State,
}

impl Remains {
    pub(super) fn new(handle: StreamHandle, borrowed: bool, state: State) -> Self {
        Self { handle, borrowed, state }
    }

    /// A stream without work, to be destroyed.
    pub(super) fn of_idle(handle: StreamHandle) -> Self {
        Self { handle, borrowed: false, state: State::default() }
    }

    /// Whether the stream still records.
    pub(super) fn is_recording(&self) -> bool {
        self.state.part.recording().is_some()
    }

    /// Ends the recording that the stream was dropped with, if it is one of this thread.
    pub(super) fn end_recording(&self, driver: &Driver) {
        if let Some(recorder) = self.state.part.take_own(Recorder::is_of_this_thread) {
            recorder.abandon(driver);
        }
    }

    /// Destroys the stream and releases what its work used, or returns itself if that still runs. The
    /// context is current and the thread does not record.
    pub(super) fn settle(mut self, device: &Device, driver: &Driver) -> Option<Self> {
        if self.is_recording() {
            // Only its thread can end it, and only on the stream that began it.
            return Some(self);
        }
        if self.borrowed {
            drop(self.state.in_flight.reap(device, driver));
            return (!self.state.in_flight.is_empty()).then_some(self);
        }
        // SAFETY: the stream is destroyed below, not before, and does not record.
        match unsafe { driver.cuStreamQuery(self.handle.0) } {
            Err(error) if error.code == NOT_READY || !error.is_fatal() => return Some(self),
            _ => {}
        }
        drop(self.state.in_flight.take_all(device));
        // SAFETY: no handle of the stream is left.
        let _ = unsafe { driver.cuStreamDestroy_v2(self.handle.0) };
        None
    }
}

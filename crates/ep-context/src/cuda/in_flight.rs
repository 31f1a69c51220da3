//! What work that was queued directly still uses.
//!
//! A launch retains buffers, and nobody is told when it has run. So they are held in batches, each
//! behind an event, and released when the event has passed: looked at when a batch is closed and at
//! the points where the backend collects, never waited for.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use super::device::{Device, beside_recordings, thread_records};
use super::driver::{Driver, EventHandle, NOT_READY, StreamHandle};
use crate::backend::Retained;

/// Objects in a batch. A stream that replays one graph again and again holds that graph once and
/// records no event for it.
const BATCH: usize = 32;

#[derive(Debug, Default)]
pub(super) struct InFlight {
    open: Vec<Retained>,
    closed: VecDeque<Batch>,
}

#[derive(Debug)]
struct Batch {
    event: EventHandle,
    held: Vec<Retained>,
}

/// What nobody uses any more. It is dropped where no lock is held: a destructor may use the stream.
pub(super) type Released = Vec<Retained>;

impl InFlight {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.closed.is_empty()
    }

    /// Holds what work that was just queued on `stream` uses. Where others may destroy the stream, or
    /// have it record, at any time, it is not asked later, and every batch is closed at once. The context
    /// is current.
    pub(super) fn hold(
        &mut self,
        device: &Device,
        driver: &Driver,
        stream: StreamHandle,
        at_once: bool,
        retained: &[Retained],
    ) -> Released {
        for object in retained {
            let address = Arc::as_ptr(object).cast::<()>();
            if !self.open.iter().any(|held| Arc::as_ptr(held).cast::<()>() == address) {
                self.open.push(object.clone());
            }
        }
        if self.open.is_empty() || (self.open.len() < BATCH && !at_once) {
            return Vec::new();
        }
        // On a failure the batch stays open, and is released when the stream is waited for.
        if let Ok(event) = device.take_event(driver) {
            // SAFETY: both handles are valid, and the stream does not record.
            if unsafe { driver.cuEventRecord(event.0, stream.0) }.is_ok() {
                self.closed.push_back(Batch { event, held: mem::take(&mut self.open) });
            } else {
                device.return_event(event);
            }
        }
        self.reap(device, driver)
    }

    /// Takes out what passed events stood for. Looks at nothing on a thread that records, which the
    /// driver forbids.
    pub(super) fn reap(&mut self, device: &Device, driver: &Driver) -> Released {
        if self.closed.is_empty() || thread_records() {
            return Vec::new();
        }
        beside_recordings(driver, || self.take_passed(device, driver)).unwrap_or_default()
    }

    fn take_passed(&mut self, device: &Device, driver: &Driver) -> Released {
        let mut released = Vec::new();
        while let Some(batch) = self.closed.front() {
            // SAFETY: the event is one of the device's.
            match unsafe { driver.cuEventQuery(batch.event.0) } {
                Err(error) if error.code == NOT_READY || !error.is_fatal() => break,
                // Passed; or the device has failed for good and runs nothing any more.
                _ => {}
            }
            if let Some(batch) = self.closed.pop_front() {
                device.return_event(batch.event);
                released.extend(batch.held);
            }
        }
        released
    }

    /// Takes out everything, for work that is known to have run or to be about to be waited for.
    pub(super) fn take_all(&mut self, device: &Device) -> Released {
        let mut released = mem::take(&mut self.open);
        for batch in self.closed.drain(..) {
            device.return_event(batch.event);
            released.extend(batch.held);
        }
        released
    }

    /// Holds again what [`InFlight::take_all`] took, for want of an end to the wait.
    pub(super) fn restore(&mut self, released: Released) {
        self.open.extend(released);
    }
}

//! Marks: events that keep the time at which a stream came to them.

use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{EventHandle, INVALID_HANDLE, NOT_READY, ask, ask_handle};
use super::graveyard::Grave;
use super::stream::CudaStream;
use crate::backend::{BackendError, Retained};
use crate::recording::refused;

/// A place in a stream's work, and when the stream came there last. A clone is the same place.
#[derive(Clone, Debug)]
pub struct CudaMark {
    event: Arc<Event>,
}

#[derive(Debug)]
struct Event {
    device: Arc<Device>,
    handle: EventHandle,
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::Event(self.handle));
    }
}

impl CudaMark {
    /// A mark of its own event: those that the device lends take no times, and mean something else
    /// when they are lent again.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, BackendError> {
        let handle = device.enter_beside_recordings(|driver| {
            let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
            // SAFETY: the place is valid.
            Ok(ask_handle(|event| unsafe { driver.cuEventCreate(event, flags) })?)
        })?;
        Ok(Self { event: Arc::new(Event { device: device.clone(), handle }) })
    }

    /// Queues or records the event.
    pub(super) fn reach(&self, stream: &CudaStream) -> Result<(), BackendError> {
        const NAME: &str = "reach";
        self.refuse_other(&stream.inner.device)?;
        if stream.body.is_some() {
            let reason = "this is the body of a loop, and no graph of a GPU takes a time there";
            return Err(refused(NAME, reason));
        }
        let retained: [Retained; 1] = [self.event.clone()];
        stream.submit_knowing(NAME, &retained, |driver, stream, records| {
            use sys::CUevent_record_flags as F;
            // An ordinary record would be an edge of the graph and take no time; the driver refuses
            // a node of its own to a stream that does not record.
            let flags =
                if records { F::CU_EVENT_RECORD_EXTERNAL } else { F::CU_EVENT_RECORD_DEFAULT };
            // SAFETY: event and stream are of one context, and the event is held until what was
            // queued has run, by a recording for as long as its graphs live.
            unsafe { driver.cuEventRecordWithFlags(self.event.handle.0, stream, flags as u32) }
        })
    }

    fn refuse_other(&self, device: &Arc<Device>) -> Result<(), BackendError> {
        let own = &self.event.device;
        if Arc::ptr_eq(own, device) {
            return Ok(());
        }
        Err(BackendError::Invalid {
            what: "device of a mark",
            value: own.properties.ordinal.into(),
            limit: format!("device {}, where it is used", device.properties.ordinal),
        })
    }
}

/// Microseconds from one mark to another, negative where the second was reached first.
pub(super) fn microseconds(
    device: &Arc<Device>,
    from: &CudaMark,
    to: &CudaMark,
) -> Result<f64, BackendError> {
    from.refuse_other(device)?;
    to.refuse_other(device)?;
    let unreached = |reason: &str| BackendError::Unreached { reason: reason.to_owned() };
    device.enter_beside_recordings(|driver| {
        let (from, to) = (from.event.handle, to.event.handle);
        // SAFETY: the place is valid, and both events are alive and keep times.
        let elapsed = ask(|ms| unsafe { driver.cuEventElapsedTime(ms, from.0, to.0) });
        elapsed.map(|milliseconds| f64::from(milliseconds) * 1e3).map_err(|error| {
            match error.code {
                INVALID_HANDLE => unreached("nothing has reached one of them yet"),
                NOT_READY => unreached("work that is to reach one of them has not run"),
                _ => error.into(),
            }
        })
    })
}

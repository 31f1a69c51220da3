//! One stream behind another: by an event, which the driver turns into an edge of the graph where
//! both record.

use std::sync::Arc;

use super::device::Device;
use super::driver::{Driver, EventHandle};
use super::part::Part;
use super::stream::CudaStream;
use crate::backend::BackendError;
use crate::recording::{Change, Link, Role, link, refused};
use crate::sync::lock_both;

const NAME: &str = "order";

/// Orders what is queued on `after` from now on behind what is queued on `before` so far.
pub(super) fn order(before: &CudaStream, after: &CudaStream) -> Result<(), BackendError> {
    if before == after {
        return Ok(());
    }
    let (one, other) = (&*before.inner, &*after.inner);
    if before.body.is_some() || after.body.is_some() {
        return Err(refused(NAME, "the body of a loop has no branches"));
    }
    if !Arc::ptr_eq(&one.device, &other.device) {
        return Err(refused(NAME, "the streams belong to two devices"));
    }
    let (mut of_before, mut of_after) = lock_both(&one.state, &other.state);
    let device = &one.device;
    match link((&of_before.part, &one.name), (&of_after.part, &other.name))? {
        Link::Event => device.enter(|driver| {
            one.refuse_foreign_capture(driver, NAME)?;
            other.refuse_foreign_capture(driver, NAME)?;
            pass_event(driver, before, after)
        })?,
        Link::Branch(recording) => {
            let mut recorder = recording.lock();
            let recorder = recorder.as_mut().ok_or_else(ending)?;
            recorder.check_order()?;
            device.enter(|driver| {
                other.refuse_foreign_capture(driver, NAME)?;
                recorder.check_capture(driver, one.handle, NAME)?;
                if recorder.is_foreign() {
                    // It records for the owner until that ends the recording, joined or not.
                    other.watch();
                }
                pass_edge(driver, before, after)
            })?;
            let role = Role::Branch(recorder.fork(&other.name));
            of_after.part = Part::of(recording.clone(), role);
        }
        Link::Within(recording, change) => {
            let mut recorder = recording.lock();
            let recorder = recorder.as_mut().ok_or_else(ending)?;
            recorder.check_order()?;
            device.enter(|driver| pass_edge(driver, before, after))?;
            match change {
                Change::Join(id) => {
                    recorder.join(id);
                    of_before.part = Part::of(recording.clone(), Role::Joined);
                }
                Change::Branch => {
                    let role = Role::Branch(recorder.fork(&other.name));
                    of_after.part = Part::of(recording.clone(), role);
                }
                Change::Nothing => {}
            }
        }
    }
    Ok(())
}

fn ending() -> BackendError {
    refused(NAME, "the recording is being ended")
}

/// Lets `after` wait for what is on `before` now. The context is current, and neither records.
fn pass_event(
    driver: &Driver,
    before: &CudaStream,
    after: &CudaStream,
) -> Result<(), BackendError> {
    let device = &before.inner.device;
    let event = device.take_event(driver)?;
    let passed = pass(driver, event, before, after);
    // The wait is for what the event stands for now; recorded anew, it stands for something else.
    device.return_event(event);
    passed
}

/// As [`pass_event`], of streams of one recording, or of which `after` becomes one.
///
/// The event is of this edge alone. The driver keeps one on a list of the capture that it was recorded in,
/// and to record it elsewhere takes it off that list, whatever the thread does that captures there: lent
/// from one recording to another, events have crashed the driver.
fn pass_edge(driver: &Driver, before: &CudaStream, after: &CudaStream) -> Result<(), BackendError> {
    let event = Device::create_event(driver)?;
    let passed = pass(driver, event, before, after);
    // SAFETY: created above, and nobody else's. The caller holds the lock of the recording, so that the
    // capture does not end meanwhile.
    if let Err(error) = unsafe { driver.cuEventDestroy_v2(event.0) } {
        // That of earlier work, which the next call reports as well: the edge is there.
        let error = before.inner.failed(NAME, error);
        tracing::debug!(%error, "the event of an edge was not destroyed");
    }
    passed
}

fn pass(
    driver: &Driver,
    event: EventHandle,
    before: &CudaStream,
    after: &CudaStream,
) -> Result<(), BackendError> {
    let (one, other) = (&*before.inner, &*after.inner);
    // SAFETY: the event is the caller's own, and the streams are valid. Where one of them records, both
    // are streams of one recording, or `after` becomes one.
    unsafe {
        driver
            .cuEventRecord(event.0, one.handle.0)
            .map_err(|error| one.failed(NAME, error))
            .and_then(|()| {
                driver
                    .cuStreamWaitEvent(other.handle.0, event.0, 0)
                    .map_err(|error| other.failed(NAME, error))
            })
    }
}

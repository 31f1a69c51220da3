//! One stream behind another: by an event, which the driver turns into an edge of the graph where
//! both record.

use std::sync::Arc;

use super::driver::Driver;
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
                pass_event(driver, before, after)
            })?;
            let role = Role::Branch(recorder.fork(&other.name));
            of_after.part = Part::of(recording.clone(), role);
        }
        Link::Within(recording, change) => {
            let mut recorder = recording.lock();
            let recorder = recorder.as_mut().ok_or_else(ending)?;
            recorder.check_order()?;
            device.enter(|driver| pass_event(driver, before, after))?;
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

/// Lets `after` wait for what is on `before` now. The context is current.
fn pass_event(
    driver: &Driver,
    before: &CudaStream,
    after: &CudaStream,
) -> Result<(), BackendError> {
    let (one, other) = (&*before.inner, &*after.inner);
    let event = one.device.take_event(driver)?;
    // SAFETY: the event is this call's own, and the streams are valid. Where one of them records,
    // both are streams of one recording, or `after` becomes one.
    let passed = unsafe {
        driver
            .cuEventRecord(event.0, one.handle.0)
            .map_err(|error| one.failed(NAME, error))
            .and_then(|()| {
                driver
                    .cuStreamWaitEvent(other.handle.0, event.0, 0)
                    .map_err(|error| other.failed(NAME, error))
            })
    };
    // The wait is for what the event stands for now; recorded anew, it stands for something else.
    one.device.return_event(event);
    passed
}

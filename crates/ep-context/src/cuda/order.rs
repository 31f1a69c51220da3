//! One stream behind another: by an event, which the driver turns into an edge of the graph where
//! both record.

use std::sync::{Arc, MutexGuard};

use super::driver::Driver;
use super::part::{Part, Role};
use super::recorder::refused;
use super::stream::{CudaStream, State};
use crate::backend::BackendError;
use crate::sync::lock;

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
    let (mut of_before, mut of_after) = lock_both(before, after);
    let device = &one.device;
    match (of_before.part.recording(), of_after.part.recording()) {
        (None, None) => device.enter(|driver| {
            one.refuse_foreign_capture(driver, NAME)?;
            other.refuse_foreign_capture(driver, NAME)?;
            pass_event(driver, before, after)
        }),
        // The driver would end the recording over it.
        (None, Some(_)) => Err(refused(
            NAME,
            &format!(
                "stream {} records, and no replay would wait for stream {}, which does not",
                other.name, one.name
            ),
        )),
        (Some((recording, _)), None) => {
            let mut recorder = recording.lock();
            let recorder =
                recorder.as_mut().ok_or_else(|| refused(NAME, "the recording is being ended"))?;
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
            Ok(())
        }
        (Some((a, _)), Some((b, _))) if !Arc::ptr_eq(&a, &b) => Err(refused(
            NAME,
            &format!("streams {} and {} record two graphs", one.name, other.name),
        )),
        (Some((recording, of)), Some((_, behind))) => {
            let mut recorder = recording.lock();
            let recorder =
                recorder.as_mut().ok_or_else(|| refused(NAME, "the recording is being ended"))?;
            recorder.check_order()?;
            device.enter(|driver| pass_event(driver, before, after))?;
            match (of, behind) {
                (Role::Branch(id), Role::Origin) => {
                    recorder.join(id);
                    of_before.part = Part::of(recording.clone(), Role::Joined);
                }
                (_, Role::Joined) => {
                    let role = Role::Branch(recorder.fork(&other.name));
                    of_after.part = Part::of(recording.clone(), role);
                }
                (_, Role::Origin | Role::Branch(_)) => {}
            }
            Ok(())
        }
    }
}

/// Locks the states of two streams, in an order that does not depend on which comes first: two
/// threads may order the same two streams in both directions.
fn lock_both<'s>(
    before: &'s CudaStream,
    after: &'s CudaStream,
) -> (MutexGuard<'s, State>, MutexGuard<'s, State>) {
    if Arc::as_ptr(&before.inner) < Arc::as_ptr(&after.inner) {
        let of_before = lock(&before.inner.state);
        (of_before, lock(&after.inner.state))
    } else {
        let of_after = lock(&after.inner.state);
        (lock(&before.inner.state), of_after)
    }
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

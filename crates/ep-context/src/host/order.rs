//! One stream behind another: by an event where both run, by a branch where one records.

use std::sync::{Arc, MutexGuard};

use super::event::event;
use super::lock;
use super::operation::Operation;
use super::part::{Part, Role};
use super::recorder::refused;
use super::stream::HostStream;
use crate::backend::BackendError;

const NAME: &str = "order";

/// Orders what is queued on `after` from now on behind what is queued on `before` so far.
pub(super) fn order(before: &HostStream, after: &HostStream) -> Result<(), BackendError> {
    if before == after {
        return Ok(());
    }
    if before.body.is_some() || after.body.is_some() {
        return Err(refused(NAME, "the body of a loop has no branches"));
    }
    let (mut of_before, mut of_after) = lock_both(before, after);
    match (of_before.recording(), of_after.recording()) {
        (None, None) => queue_event(before, after),
        (None, Some(_)) => Err(refused(
            NAME,
            &format!(
                "stream {} records, and no replay would wait for stream {}, which does not",
                after.inner.name, before.inner.name
            ),
        )),
        (Some((recording, _)), None) => {
            after.check()?;
            let id = lock(&recording).fork(&after.inner.name)?;
            *of_after = Part::of(recording, Role::Branch(id));
            Ok(())
        }
        (Some((one, _)), Some((other, _))) if !Arc::ptr_eq(&one, &other) => Err(refused(
            NAME,
            &format!("streams {} and {} record two graphs", before.inner.name, after.inner.name),
        )),
        (Some((recording, of)), Some((_, behind))) => {
            let mut recorder = lock(&recording);
            recorder.check_order()?;
            match (of, behind) {
                (Role::Branch(id), Role::Origin) => {
                    recorder.join(id);
                    *of_before = Part::of(recording.clone(), Role::Joined);
                }
                (_, Role::Joined) => {
                    let id = recorder.fork(&after.inner.name)?;
                    *of_after = Part::of(recording.clone(), Role::Branch(id));
                }
                // What is recorded later is replayed later.
                (_, Role::Origin | Role::Branch(_)) => {}
            }
            Ok(())
        }
    }
}

/// Locks the parts of two streams, in an order that does not depend on which comes first: two threads
/// may order the same two streams in both directions.
fn lock_both<'s>(
    before: &'s HostStream,
    after: &'s HostStream,
) -> (MutexGuard<'s, Part>, MutexGuard<'s, Part>) {
    if Arc::as_ptr(&before.inner) < Arc::as_ptr(&after.inner) {
        let of_before = lock(&before.inner.part);
        (of_before, lock(&after.inner.part))
    } else {
        let of_after = lock(&after.inner.part);
        (lock(&before.inner.part), of_after)
    }
}

fn queue_event(before: &HostStream, after: &HostStream) -> Result<(), BackendError> {
    let (signal, moment) = event(&before.inner.name);
    for (stream, end) in [(before, Operation::Signal(signal)), (after, Operation::Await(moment))] {
        // SAFETY: neither end of an event touches memory of a device.
        unsafe { stream.inner.worker.push(end, &[]) }
            .map_err(|failure| failure.on(&stream.inner.name))?;
    }
    Ok(())
}

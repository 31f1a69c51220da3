//! Taking part in a recording that somebody else began.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys;

use super::Recorder;
use super::position::position;
use crate::backend::{BackendError, Retained};
use crate::cuda::device::{Device, recording_begins, recording_ends};
use crate::cuda::driver::{Driver, DriverError, GraphHandle, StreamHandle, ask_handle};
use crate::keepsake::{Keeper, Keepsake};
use crate::recording::refused;

/// What somebody else's recording keeps for this backend.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) keepsake: Arc<Keepsake>,
    /// Branches and conditions that there were when it came.
    branches: usize,
    conditions: usize,
}

/// Whose capture a recorder records into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capture {
    /// Its own, which it ends.
    Own,
    /// One of this number that was begun by other means, and is ended so.
    Foreign(u64),
}

impl Recorder {
    /// Takes part in a capture that was begun on `stream` by other means. The context is current.
    pub(in crate::cuda) fn join_capture(
        device: &Arc<Device>,
        driver: &Driver,
        stream: StreamHandle,
    ) -> Result<Self, BackendError> {
        let at = position(driver, stream)?;
        let keepsake = Keepsake::new();
        keep_for(driver, at.graph, &keepsake)?;
        recording_begins();
        let mut recorder = Self::of(device, stream, Capture::Foreign(at.capture));
        recorder.guest = Some(Guest { keepsake, branches: 0, conditions: 0 });
        Ok(recorder)
    }

    pub(in crate::cuda) fn is_foreign(&self) -> bool {
        self.capture != Capture::Own
    }

    /// Lets what is recorded from here on be kept apart, in a recording of this backend's.
    pub(in crate::cuda) fn enter(&mut self) -> Result<(), BackendError> {
        const NAME: &str = "enter_recording";
        if self.guest.is_some() {
            return Err(refused(NAME, "somebody takes part in the recording already"));
        }
        if !self.bodies.is_empty() {
            return Err(refused(NAME, "the body of a loop is being recorded"));
        }
        let keepsake = Keepsake::new();
        self.held.keep(&[keeper(&keepsake)]);
        let (branches, conditions) = (self.branches.len(), self.conditions.len());
        self.guest = Some(Guest { keepsake, branches, conditions });
        Ok(())
    }

    /// Ends what `enter` or `join_capture` began. The context is current.
    pub(in crate::cuda) fn leave(&mut self, driver: &Driver) -> Result<(), BackendError> {
        const NAME: &str = "leave_recording";
        let Some(guest) = self.guest.take() else {
            return Err(refused(NAME, "nobody takes part in the recording"));
        };
        let unused = || self.conditions[guest.conditions..].iter().any(|condition| !condition.used);
        let reason = if let Some(reason) = &self.broken {
            reason.clone()
        } else if !self.bodies.is_empty() {
            "a loop has no end".to_owned()
        } else if let Some((_, name)) = self.branches.get(guest.branches) {
            format!("stream {name}, a branch of it, was not joined")
        } else if unused() {
            "a condition has no loop, which the driver does not take".to_owned()
        } else {
            let left = self.check_capture(driver, self.stream, NAME);
            self.step_out();
            return left;
        };
        self.spoil(driver, &reason);
        Err(refused(NAME, &reason))
    }

    /// Sees to it that no graph comes of the recording. The context is current.
    pub(in crate::cuda) fn spoil(&mut self, driver: &Driver, reason: &str) {
        self.guest = None;
        while !self.bodies.is_empty() {
            // Nobody uses the graph, whatever comes of its bodies.
            let _ = self.end_innermost(driver);
        }
        self.broken.get_or_insert_with(|| reason.to_owned());
        if self.is_foreign() && self.check_capture(driver, self.stream, "spoil_recording").is_ok() {
            // A stream that records must not be asked how far it is; one that is asked all the same
            // has its capture given up, and whoever ends it is told.
            // SAFETY: the handle is valid.
            let _ = unsafe { driver.cuStreamQuery(self.stream.0) };
        }
        self.step_out();
    }

    /// Takes no further part in a capture of others.
    pub(super) fn step_out(&mut self) {
        if self.is_foreign() && !self.over.swap(true, Ordering::AcqRel) {
            recording_ends();
        }
    }

    /// Whether somebody takes part.
    pub(in crate::cuda) fn has_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Fails where the owner of a capture has ended it meanwhile: what is queued then would run, or
    /// become part of another that was begun in its place. `stream` is the one that the operation is for.
    pub(in crate::cuda) fn check_capture(
        &self,
        driver: &Driver,
        stream: StreamHandle,
        operation: &'static str,
    ) -> Result<(), BackendError> {
        let Capture::Foreign(capture) = self.capture else { return Ok(()) };
        // Bodies are captures of their own, whose graphs belong to that of the stream that began it.
        let stream = if self.bodies.is_empty() { stream } else { self.stream };
        match position(driver, stream) {
            Ok(at) if at.capture == capture => Ok(()),
            Ok(_) => Err(refused(operation, "the recording that it belongs to has ended")),
            Err(error) => Err(error),
        }
    }
}

/// Lets `graph` keep a keepsake, and every graph that is made of it. The context is current.
fn keep_for(
    driver: &Driver,
    graph: GraphHandle,
    keepsake: &Arc<Keepsake>,
) -> Result<(), DriverError> {
    let held = Arc::into_raw(keepsake.clone()).cast_mut().cast::<c_void>();
    // The driver promises no order between the destructor and its own calls, and is told that nobody
    // waits for one.
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    let created = ask_handle(|object| {
        // SAFETY: the place is valid; the destructor takes what is given here, once.
        unsafe { driver.cuUserObjectCreate(object, held, Some(let_go), 1, flags) }
    });
    let object = match created {
        Ok(object) => object,
        Err(error) => {
            // SAFETY: the reference was made above, and the driver has not taken it.
            drop(unsafe { Arc::from_raw(held.cast::<Keepsake>().cast_const()) });
            return Err(error);
        }
    };
    let moved = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: both are valid; the reference of this call becomes the graph's.
    let retained = unsafe { driver.cuGraphRetainUserObject(graph.0, object.0, 1, moved) };
    if retained.is_err() {
        // SAFETY: the reference is still this call's, and the last: the destructor runs.
        let _ = unsafe { driver.cuUserObjectRelease(object.0, 1) };
    }
    retained
}

/// The destructor of the user object. It runs on a thread of the driver's, which must not be called
/// from here.
unsafe extern "C" fn let_go(held: *mut c_void) {
    // SAFETY: the driver gives the pointer that it was given, which is a reference's, once.
    unsafe { Keepsake::let_go(held.cast::<Keepsake>().cast_const()) };
}

/// Holds a keepsake for a recording of this backend's own.
fn keeper(keepsake: &Arc<Keepsake>) -> Retained {
    Arc::new(Keeper { keepsake: keepsake.clone() })
}

//! A stream's part in a recording.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::driver::StreamHandle;
use super::recorder::Recorder;
use crate::backend::BackendError;
use crate::recording::{self, Ends, Role, ScopeId, refused};
use crate::sync::lock;

/// A recording in which several streams may take part.
#[derive(Debug)]
pub(super) struct Recording {
    /// Taken out to be ended.
    recorder: Mutex<Option<Recorder>>,
    /// Whether the driver has ended the capture, on all streams at once. Before that, a branch must
    /// not be asked about its work.
    over: Arc<AtomicBool>,
}

impl Recording {
    pub(super) fn of(recorder: Recorder) -> Arc<Self> {
        let over = recorder.over();
        Arc::new(Self { recorder: Mutex::new(Some(recorder)), over })
    }

    /// The recorder, unless the recording is being ended.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Recorder>> {
        lock(&self.recorder)
    }
}

impl Ends for Recording {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
}

/// As long as a stream takes part in a recording, the driver may have it record.
pub(super) type Part = recording::Part<Recording>;

impl Part {
    /// The part of the stream that begins a recording.
    pub(super) fn beginning(recording: Arc<Recording>) -> Self {
        Self::of(recording, Role::Origin)
    }

    /// Where the stream's operations are recorded; `None` if it runs them.
    pub(super) fn open(&self, operation: &'static str) -> Result<Option<Open<'_>>, BackendError> {
        let Some((recording, role)) = &self.taken else { return Ok(None) };
        if recording.is_over() {
            return Ok(None);
        }
        role.check(operation)?;
        Ok(Some(Open { recorder: recording.lock(), role: *role }))
    }

    /// Takes out the recorder of the recording that the stream began, if `condition` holds for it.
    /// The recording goes on in the driver until the recorder has ended it.
    pub(super) fn take_own(&self, condition: impl FnOnce(&Recorder) -> bool) -> Option<Recorder> {
        match &self.taken {
            Some((recording, Role::Origin)) => {
                recording.lock().take_if(|recorder| condition(recorder))
            }
            _ => None,
        }
    }
}

/// A recording that takes a stream's operations.
pub(super) struct Open<'p> {
    recorder: MutexGuard<'p, Option<Recorder>>,
    role: Role,
}

impl Open<'_> {
    /// Whether the stream is a branch.
    pub(super) fn is_branch(&self) -> bool {
        self.role != Role::Origin
    }

    pub(super) fn recorder(
        &mut self,
        operation: &'static str,
    ) -> Result<&mut Recorder, BackendError> {
        self.recorder.as_mut().ok_or_else(|| refused(operation, "the recording is being ended"))
    }

    /// The recorder, and the stream on which the driver records operations of `body`, or of the
    /// stream itself, whose handle is `own`.
    pub(super) fn target(
        &mut self,
        own: StreamHandle,
        body: Option<ScopeId>,
        operation: &'static str,
    ) -> Result<(&mut Recorder, StreamHandle), BackendError> {
        let is_branch = self.is_branch();
        let recorder = self.recorder(operation)?;
        // A branch takes operations where the recording itself does.
        let target = recorder.target(body, operation)?;
        Ok((recorder, if is_branch { own } else { target }))
    }
}

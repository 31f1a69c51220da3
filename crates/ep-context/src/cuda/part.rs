//! A stream's part in a recording.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::driver::StreamHandle;
use super::recorder::{Recorder, ScopeId, refused};
use crate::backend::BackendError;
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
    /// The recorder, unless the recording is being ended.
    pub(super) fn lock(&self) -> MutexGuard<'_, Option<Recorder>> {
        lock(&self.recorder)
    }
}

/// What a stream records, if it does.
///
/// A recording that has ended is nobody's part any more: the streams that took part in it are not
/// told, but find it over when they next look.
#[derive(Debug, Default)]
pub(super) struct Part {
    taken: Option<(Arc<Recording>, Role)>,
}

/// As what a stream takes part in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It began the recording, and ends it.
    Origin,
    /// It is a branch.
    Branch(ScopeId),
    /// It was a branch and has been joined. The driver has it record until the recording ends.
    Joined,
}

impl Part {
    /// The part of the stream that begins a recording.
    pub(super) fn beginning(recorder: Recorder) -> Self {
        let over = recorder.over();
        let recorder = Mutex::new(Some(recorder));
        Self::of(Arc::new(Recording { recorder, over }), Role::Origin)
    }

    pub(super) fn of(recording: Arc<Recording>, role: Role) -> Self {
        Self { taken: Some((recording, role)) }
    }

    /// The recording that the stream takes part in, and as what. As long as there is one, the driver
    /// may have the stream record.
    pub(super) fn recording(&self) -> Option<(Arc<Recording>, Role)> {
        self.taken.clone().filter(|(recording, _)| !recording.over.load(Ordering::Acquire))
    }

    /// Where the stream's operations are recorded; `None` if it runs them.
    pub(super) fn open(&self, operation: &'static str) -> Result<Option<Open<'_>>, BackendError> {
        match &self.taken {
            Some((recording, role)) if !recording.over.load(Ordering::Acquire) => match role {
                Role::Joined => Err(refused(
                    operation,
                    "the stream was a branch of a recording that goes on, and has been joined",
                )),
                Role::Origin | Role::Branch(_) => {
                    Ok(Some(Open { recorder: recording.lock(), role: *role }))
                }
            },
            _ => Ok(None),
        }
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

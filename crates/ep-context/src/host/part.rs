//! A stream's part in a recording.

use std::sync::{Arc, Mutex, MutexGuard};

use super::recorder::{Recorder, ScopeId, refused};
use crate::backend::BackendError;
use crate::sync::lock;

/// What a stream records, if it does.
///
/// A recording that has ended is nobody's part any more: the streams that took part in it are not
/// told, but find it over when they next look.
#[derive(Debug, Default)]
pub(super) struct Part {
    taken: Option<(Arc<Mutex<Recorder>>, Role)>,
}

/// As what a stream takes part in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It began the recording, and ends it.
    Origin,
    /// It is a branch.
    Branch(ScopeId),
    /// It was a branch and has been joined.
    Joined,
}

impl Part {
    /// The part of a stream that begins a recording.
    pub(super) fn beginning() -> Self {
        Self::of(Arc::new(Mutex::new(Recorder::new())), Role::Origin)
    }

    pub(super) fn of(recording: Arc<Mutex<Recorder>>, role: Role) -> Self {
        Self { taken: Some((recording, role)) }
    }

    /// The recording that the stream takes part in, and as what.
    pub(super) fn recording(&self) -> Option<(Arc<Mutex<Recorder>>, Role)> {
        self.taken.clone().filter(|(recording, _)| !lock(recording).is_over())
    }

    /// The recorder that takes the stream's operations; `None` if the stream runs them.
    pub(super) fn recorder(
        &self,
        operation: &'static str,
    ) -> Result<Option<MutexGuard<'_, Recorder>>, BackendError> {
        let Some((recording, role)) = &self.taken else { return Ok(None) };
        let recorder = lock(recording);
        match role {
            _ if recorder.is_over() => Ok(None),
            Role::Joined => Err(refused(
                operation,
                "the stream was a branch of a recording that goes on, and has been joined",
            )),
            Role::Origin | Role::Branch(_) => Ok(Some(recorder)),
        }
    }

    /// Whether the stream takes part in a recording that another stream began.
    pub(super) fn is_branch(&self) -> bool {
        self.recording().is_some_and(|(_, role)| role != Role::Origin)
    }

    /// Ends the recording that the stream began, for all who take part in it, and returns what was
    /// recorded.
    pub(super) fn take_own(&mut self) -> Option<Recorder> {
        let (recording, _) = self.taken.take_if(|(_, role)| *role == Role::Origin)?;
        let mut recorder = lock(&recording);
        (!recorder.is_over()).then(|| recorder.take())
    }
}

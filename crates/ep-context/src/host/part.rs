//! A stream's part in a recording.

use std::sync::{Mutex, MutexGuard};

use super::recorder::Recorder;
use crate::backend::BackendError;
use crate::recording::{self, Ends, Role};
use crate::sync::lock;

pub(super) type Part = recording::Part<Mutex<Recorder>>;

impl Ends for Mutex<Recorder> {
    fn is_over(&self) -> bool {
        lock(self).is_over()
    }
}

impl Part {
    /// The recorder that takes the stream's operations; `None` if the stream runs them.
    pub(super) fn recorder(
        &self,
        operation: &'static str,
    ) -> Result<Option<MutexGuard<'_, Recorder>>, BackendError> {
        let Some((recording, role)) = &self.taken else { return Ok(None) };
        let recorder = lock(recording);
        if recorder.is_over() {
            return Ok(None);
        }
        role.check(operation)?;
        Ok(Some(recorder))
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

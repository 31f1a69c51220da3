//! How long the queues of a recording take anything.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::backend::BackendError;
use crate::recording::refused;

/// While this lives, queues [of a recording](super::Queue::recording) that were made with it take operations; those
/// refuse everything once it is dropped. Whoever ends the recording drops it before, so that nothing which its
/// body has kept, or exchanged for what another body was given, queues on a stream that runs again.
#[derive(Debug)]
pub struct QueueScope {
    open: Arc<RwLock<bool>>,
}

impl QueueScope {
    /// A scope that is open.
    pub fn new() -> Self {
        Self { open: Arc::new(RwLock::new(true)) }
    }

    pub(super) fn within(&self) -> Within {
        Within(Arc::clone(&self.open))
    }
}

impl Default for QueueScope {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for QueueScope {
    /// Waits for an operation that another thread is queueing at this moment.
    fn drop(&mut self) {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// What a queue knows of its scope.
#[derive(Clone, Debug)]
pub(super) struct Within(Arc<RwLock<bool>>);

impl Within {
    /// Keeps the scope open while an operation is queued.
    pub(super) fn enter(
        &self,
        operation: &'static str,
    ) -> Result<RwLockReadGuard<'_, bool>, BackendError> {
        let open = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match *open {
            true => Ok(open),
            false => Err(refused(operation, "the recording that the queue is one of has ended")),
        }
    }
}

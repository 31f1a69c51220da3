//! The time between two marks on a stream.

use graph_ep::{Backend, BackendError, Queue};

/// Two marks, and what is timed between them.
#[derive(Clone, Debug)]
pub(super) struct Interval<B: Backend> {
    pub(super) from: B::Mark,
    pub(super) to: B::Mark,
}

impl<B: Backend> Interval<B> {
    pub(super) fn new(backend: &B) -> Result<Self, BackendError> {
        Ok(Self { from: backend.mark()?, to: backend.mark()? })
    }

    /// Queues or records `work` between the marks.
    pub(super) fn around(
        &self,
        queue: &Queue<'static, B>,
        work: impl FnOnce(&Queue<'static, B>) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        queue.reach(&self.from)?;
        work(queue)?;
        queue.reach(&self.to)
    }

    /// The microseconds between them, once the work was waited for.
    pub(super) fn microseconds(&self, backend: &B) -> Result<f64, BackendError> {
        backend.microseconds(&self.from, &self.to)
    }
}

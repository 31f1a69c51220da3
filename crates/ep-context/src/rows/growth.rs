//! A change of capacity between its two halves.

use std::fmt;

use super::buffer::shrink;
use super::{RowSet, RowShape};
use crate::backend::{Backend, BackendError};
use crate::queue::Queue;
use crate::sync::lock;

/// Memory that is mapped for a capacity that does not hold yet.
///
/// Settle it with [`commit`](Self::commit) or [`cancel`](Self::cancel). Merely dropped, the memory
/// stays mapped for a later growth and the capacity stays as it was.
#[must_use = "commit or cancel it"]
pub struct PlannedGrowth<B: Backend> {
    pub(super) set: RowSet<B>,
    pub(super) shape: RowShape,
    pub(super) mapped_before: u32,
    pub(super) settled: bool,
}

impl<B: Backend> PlannedGrowth<B> {
    /// The capacity and generation once committed.
    pub fn shape(&self) -> RowShape {
        self.shape
    }

    /// Makes the planned capacity hold: for the host at once, for the device in the order of `queue`. Waits
    /// while another thread [queues work for the capacity that it has](RowSet::while_shaped).
    ///
    /// # Errors
    ///
    /// What the backend reports; the capacity then stays as it was and the memory mapped.
    ///
    /// # Safety
    ///
    /// Work that reads the capacity or the generation on the device is ordered with `queue`, before this
    /// or behind it: it runs on the same stream, or on one that [`Backend::order`] or the host has ordered
    /// with it. That is every step which receives into the set, and every replay of one. Work at the
    /// same time may read either capacity, and with the larger one touch rows that a trim has unmapped.
    pub unsafe fn commit(mut self, queue: &Queue<'static, B>) -> Result<(), BackendError> {
        let set = self.set.clone();
        let _changing = lock(&set.inner.changing);
        // SAFETY: the caller's promise.
        unsafe { set.publish(queue, self.shape) }?;
        let mut state = self.set.lock();
        state.capacity = self.shape.rows;
        state.generation = self.shape.generation;
        self.set.settle(&mut state);
        drop(state);
        self.settled = true;
        Ok(())
    }

    /// Gives the memory back. What was recorded for the planned shape is stale for ever.
    pub fn cancel(mut self) {
        let mut state = self.set.lock();
        state.planned = None;
        state.mapped = self.mapped_before;
        for column in &state.columns {
            // SAFETY: the rows behind those that had memory before were neither published nor settled,
            // so that no work touches them and no slice holds them.
            unsafe { shrink(column, self.mapped_before) };
        }
        drop(state);
        self.settled = true;
    }
}

impl<B: Backend> Drop for PlannedGrowth<B> {
    fn drop(&mut self) {
        if !self.settled {
            self.set.settle(&mut self.set.lock());
        }
    }
}

impl<B: Backend> fmt::Debug for PlannedGrowth<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlannedGrowth").field("set", &self.set).field("shape", &self.shape).finish()
    }
}

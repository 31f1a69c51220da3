//! Work that is queued while no capacity changes.

use std::sync::MutexGuard;

use smallvec::SmallVec;

use super::{RowSet, RowShape};
use crate::backend::Backend;
use crate::sync::lock;

/// A set has another shape than it was to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reshaped {
    /// The shape that it was to have.
    pub wanted: RowShape,
    /// The shape that it has.
    pub now: RowShape,
}

impl<B: Backend> RowSet<B> {
    /// Calls `queue` if every set has the generation beside it, and lets none of them change its capacity
    /// before that has returned. So what `queue` queues on the stream in whose order capacities change finds
    /// these shapes on the device, whatever other threads commit meanwhile: they wait.
    ///
    /// `queue` is to be short. It commits no growth of these sets and waits for no thread that does: it would
    /// wait for itself.
    ///
    /// # Errors
    ///
    /// [`Reshaped`] with the first set that has another generation; `queue` was not called then.
    pub fn while_shaped<R>(
        shapes: &[(Self, RowShape)],
        queue: impl FnOnce() -> R,
    ) -> Result<R, Reshaped> {
        // By number, and each once: two threads may want the same sets in two orders.
        let mut sets: SmallVec<[&Self; 4]> = shapes.iter().map(|(set, _)| set).collect();
        sets.sort_unstable_by_key(|set| set.id());
        sets.dedup_by_key(|set| set.id());
        let _steady: SmallVec<[MutexGuard<'_, ()>; 4]> =
            sets.iter().map(|set| lock(&set.inner.changing)).collect();
        for (set, wanted) in shapes {
            let now = set.shape();
            if now.generation != wanted.generation {
                return Err(Reshaped { wanted: *wanted, now });
            }
        }
        Ok(queue())
    }
}

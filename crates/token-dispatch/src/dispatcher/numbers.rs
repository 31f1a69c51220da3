//! The numbers of steps. The device numbers those that it runs, and the host counts along: it has to count a
//! launch as what it is on the stream, so launches of a dispatcher and their counts come one after the other.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ep_context::Backend;

use super::TokenDispatcher;
use crate::error::DispatchError;

/// How many steps were counted, and who launches one.
#[derive(Debug)]
pub(super) struct StepNumbers {
    counted: AtomicU32,
    launching: Mutex<()>,
    /// The thread that has locked `launching`; zero if none has.
    launcher: AtomicUsize,
}

/// Nobody else launches while this lives.
struct Launching<'n> {
    numbers: &'n StepNumbers,
    _alone: MutexGuard<'n, ()>,
}

impl Drop for Launching<'_> {
    fn drop(&mut self) {
        self.numbers.launcher.store(0, Ordering::Relaxed);
    }
}

/// Tells this thread from all others that run; never zero.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| ptr::from_ref(place).addr())
}

impl StepNumbers {
    pub(super) fn after(step: u32) -> Self {
        Self {
            counted: AtomicU32::new(step),
            launching: Mutex::new(()),
            launcher: AtomicUsize::new(0),
        }
    }

    /// Waits until nobody else launches; `None` if this thread does.
    fn begin(&self) -> Option<Launching<'_>> {
        let this = this_thread();
        // No thread but this one stores or removes its own mark, so the order of memory is no matter.
        if self.launcher.load(Ordering::Relaxed) == this {
            return None;
        }
        let alone = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
        self.launcher.store(this, Ordering::Relaxed);
        Some(Launching { numbers: self, _alone: alone })
    }
}

impl<B: Backend> TokenDispatcher<B> {
    /// Calls `launch`, which launches one step, and returns the number of the step, by which its record is
    /// found. Counts what others launched before it, as by [`TokenDispatcher::catch_up`]. Threads that do so
    /// at the same time wait for each other, so that each gets the number that the device gives its step.
    ///
    /// [`Step`](crate::Step) does this for steps that are not recorded, and so do graphs that are replayed
    /// through this library. `launch` waits neither for the step nor for a thread that launches another.
    ///
    /// # Errors
    ///
    /// What `launch` returns, which means that nothing was launched; [`DispatchError::Order`] within the
    /// `launch` of another step of the dispatcher. Nothing is counted then.
    pub fn launch_step<E: From<DispatchError>>(
        &self,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<u32, E> {
        let Some(_launching) = self.inner.numbers.begin() else {
            let (rank, reason) =
                (self.rank(), "this thread is launching another step of the dispatcher".to_owned());
            return Err(DispatchError::Order { operation: "launch", rank, reason }.into());
        };
        self.catch_up_alone();
        launch()?;
        Ok(self.count_step())
    }

    /// Counts one launch of a step and returns its number, by which its record is found. Whoever
    /// launches a recorded step by other means than this library calls this once a launch, after
    /// [`TokenDispatcher::catch_up`] before it, while no other thread launches a step of the dispatcher;
    /// [`TokenDispatcher::launch_step`] sees to all of that.
    pub fn count_step(&self) -> u32 {
        self.inner.numbers.counted.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Counts the steps that somebody launched and nobody counted, as far as their records are
    /// published: so that the next step gets the number that the device gives it. To be called before
    /// a launch, not between a launch and its [`TokenDispatcher::count_step`]. Waits while another thread is
    /// within [`TokenDispatcher::launch_step`], for its launch and not for the device.
    pub fn catch_up(&self) {
        // Within a launch that was done before it.
        if let Some(_launching) = self.inner.numbers.begin() {
            self.catch_up_alone();
        }
    }

    fn catch_up_alone(&self) {
        let mut counted = self.counted_steps();
        while self.records().is_published(counted.wrapping_add(1)) {
            counted = counted.wrapping_add(1);
            self.inner.numbers.counted.store(counted, Ordering::Relaxed);
        }
    }

    /// The number of the step that was counted last.
    pub(crate) fn counted_steps(&self) -> u32 {
        self.inner.numbers.counted.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_launches_one_step_at_a_time() {
        let numbers = StepNumbers::after(7);
        for _ in 0..2 {
            let launching = numbers.begin();
            assert!(launching.is_some());
            assert!(numbers.begin().is_none(), "it would wait for itself");
            drop(launching);
        }
        let panicked = std::panic::catch_unwind(|| {
            let _launching = numbers.begin();
            std::panic::resume_unwind(Box::new("a panic of the launch"));
        });
        assert!(panicked.is_err() && numbers.begin().is_some(), "a panic ends the launch");
    }
}

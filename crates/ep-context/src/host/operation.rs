//! What a stream runs: one operation, queued once or recorded and replayed.

use std::any::Any;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::event::{Await, Signal};
use super::graph::Replay;
use super::mark::HostMark;
use crate::backend::BackendError;
use crate::kernel::Kernel;

/// One operation, with everything it needs held by value.
pub(super) enum Operation {
    Launch(Box<dyn Launch>),
    Copy { to: u64, from: u64, bytes: usize },
    Fill { to: u64, value: u8, bytes: usize },
    Upload { to: u64, data: Box<[u8]> },
    While { condition: Arc<AtomicU32>, body: Vec<Operation> },
    Replay(Replay),
    Reach(HostMark),
    Signal(Signal),
    Await(Await),
}

impl Operation {
    pub(super) fn launch<K: Kernel>(params: &K::Params) -> Self {
        Self::Launch(Box::new(LaunchOf::<K> { params: *params }))
    }

    /// The operation in errors: the name of the kernel where there is one.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Launch(launch) => launch.name(),
            Self::Copy { .. } => "copy",
            Self::Fill { .. } => "fill",
            Self::Upload { .. } => "upload",
            Self::While { .. } => "loop",
            Self::Replay(_) => "replay",
            Self::Reach(_) => "reach",
            Self::Signal(_) | Self::Await(_) => "order",
        }
    }

    /// This operation and those inside it.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::While { body, .. } => 1 + body.iter().map(Self::count).sum::<usize>(),
            Self::Replay(replay) => 1 + replay.count(),
            _ => 1,
        }
    }

    /// Runs the operation on this thread. Never unwinds.
    ///
    /// # Safety
    ///
    /// What [`crate::Backend::launch`] asks for when the operation is queued or recorded still holds.
    pub(super) unsafe fn run(&self) -> Result<(), Failure> {
        match self {
            Self::Launch(launch) => {
                // A kernel that panicked leaves its output half written, and nobody reads it: the
                // stream fails and says so.
                // SAFETY: the caller's promise covers the addresses in the parameters.
                catch_unwind(AssertUnwindSafe(|| unsafe { launch.run() })).map_err(|payload| {
                    Failure { operation: launch.name().to_owned(), reason: panic_message(payload) }
                })?;
            }
            Self::Copy { to, from, bytes } => {
                // SAFETY: by the contract of `Backend::copy` the ranges are valid and disjoint, and
                // nothing else writes them now.
                unsafe { copy(pointer(*to), pointer(*from), *bytes) };
            }
            Self::Fill { to, value, bytes } => {
                if *bytes > 0 {
                    // SAFETY: by the contract of `Backend::fill` the range is valid for writes.
                    unsafe { ptr::write_bytes(pointer::<u8>(*to), *value, *bytes) };
                }
            }
            Self::Upload { to, data } => {
                // SAFETY: by the contract of `Backend::upload` the target is valid for writes; the
                // source is a private copy.
                unsafe { copy(pointer(*to), data.as_ptr(), data.len()) };
            }
            Self::While { condition, body } => {
                // The word is set by kernels on this thread, or not at all.
                while condition.load(Ordering::Relaxed) != 0 {
                    for operation in body {
                        // SAFETY: recorded under the same promise as the loop.
                        unsafe { operation.run()? };
                    }
                }
            }
            // SAFETY: recorded under the promise that every replay may rely on it.
            Self::Replay(replay) => unsafe { replay.run()? },
            Self::Reach(mark) => mark.reach(),
            Self::Signal(signal) => signal.pass(),
            Self::Await(moment) => moment.wait()?,
        }
        Ok(())
    }

    /// Takes note that the operation will not run, `failure` being why.
    pub(super) fn skip(&self, failure: &Failure) {
        if let Self::Signal(signal) = self {
            signal.fail(failure);
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A launch of a kernel whose type is forgotten.
pub(super) trait Launch: Send + Sync {
    fn name(&self) -> &'static str;

    /// # Safety
    ///
    /// As for [`Kernel::run_on_host`] with the parameters held.
    unsafe fn run(&self);
}

struct LaunchOf<K: Kernel> {
    params: K::Params,
}

impl<K: Kernel> Launch for LaunchOf<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    unsafe fn run(&self) {
        // SAFETY: the caller's promise is that of `run_on_host`.
        unsafe { K::run_on_host(&self.params) }
    }
}

/// An operation that failed, and how. A stream keeps the first one for good.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) operation: String,
    pub(super) reason: String,
}

impl Failure {
    pub(super) fn on(&self, stream: &str) -> BackendError {
        BackendError::Failed {
            stream: stream.to_owned(),
            operation: self.operation.clone(),
            reason: self.reason.clone(),
        }
    }
}

/// A device address of the host backend as a pointer of this process, which it is.
pub fn pointer<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Copies, and takes any pointers where there is nothing to copy.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `bytes` bytes; they do not overlap.
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise; bytes have no alignment.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
    }
}

/// What a panic said.
pub(super) fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let message = if let Some(text) = payload.downcast_ref::<&'static str>() {
        format!("panicked: {text}")
    } else if let Some(text) = payload.downcast_ref::<String>() {
        format!("panicked: {text}")
    } else {
        "panicked with a value that is no text".to_owned()
    };
    // A payload may have a destructor that panics in turn, which must not end the worker.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(again);
    }
    message
}

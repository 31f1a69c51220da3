//! NCCL works on the device whose context is the calling thread's.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;

use super::error::NcclError;
use super::library::{DriverCalls, DriverContext, SUCCESS, Stream};

/// Makes a context current as long as it lives, and what was before afterwards.
pub(super) struct Current {
    driver: &'static DriverCalls,
    /// What is current is a matter of the thread.
    thread: PhantomData<*const ()>,
}

impl Current {
    /// Makes `context` current, a primary context that lasts as long as the process.
    pub(super) fn push(
        driver: &'static DriverCalls,
        context: DriverContext,
    ) -> Result<Self, NcclError> {
        // SAFETY: the context is a valid one.
        outcome("cuCtxPushCurrent", unsafe { (driver.cuCtxPushCurrent_v2)(context) })?;
        Ok(Self { driver, thread: PhantomData })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: the place is valid. The context on top is the one that was pushed, or one of the same
        // device that the library has put in its place.
        let _ = unsafe { (self.driver.cuCtxPopCurrent_v2)(&raw mut popped) };
    }
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Current").finish_non_exhaustive()
    }
}

/// The context of a stream.
pub(super) fn context_of(driver: &DriverCalls, stream: Stream) -> Result<DriverContext, NcclError> {
    let mut context = ptr::null_mut();
    // SAFETY: the place is valid, and the caller's stream is one of the driver's.
    outcome("cuStreamGetCtx", unsafe { (driver.cuStreamGetCtx)(stream, &raw mut context) })?;
    Ok(context)
}

fn outcome(call: &'static str, code: c_int) -> Result<(), NcclError> {
    if code == SUCCESS { Ok(()) } else { Err(NcclError::Driver { call, code }) }
}

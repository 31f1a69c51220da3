//! The CUDA driver: found, checked and called.
//!
//! Nothing here panics where there is no driver, and an error says everything it has to say by
//! itself: the driver is asked for its words when a call fails, never when they are printed.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::calls::Table;
use crate::backend::BackendError;

/// The oldest driver that has every call used here, as `cuDriverGetVersion` reports it: CUDA 12.4.
const MINIMUM_VERSION: i32 = 12040;

/// What a call of the driver may do to its caller and to other work.
#[derive(Clone, Copy, Debug)]
pub(super) enum Class {
    /// Reads or sets state on the host.
    Query,
    /// Queues or records work.
    Queue,
    /// Waits for the device.
    Wait,
    /// Allocates, frees, maps or loads; may wait for the device.
    Allocate,
}

/// How often one thread has called the driver, by what the calls may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverCalls {
    /// Calls that read or set state on the host.
    pub query: u64,
    /// Calls that queue or record work.
    pub queue: u64,
    /// Calls that wait for the device.
    pub wait: u64,
    /// Calls that allocate, free, map, instantiate or load, and may wait for the device.
    pub allocate: u64,
}

thread_local! {
    static CALLS: Cell<DriverCalls> = const {
        Cell::new(DriverCalls { query: 0, queue: 0, wait: 0, allocate: 0 })
    };
}

impl DriverCalls {
    /// The calls that the backend has made on the calling thread so far.
    pub fn of_this_thread() -> Self {
        CALLS.try_with(Cell::get).unwrap_or_default()
    }
}

pub(super) fn count(class: Class) {
    // Failing only while the thread is torn down, when nobody asks any more.
    let _ = CALLS.try_with(|calls| {
        let mut counted = calls.get();
        let counter = match class {
            Class::Query => &mut counted.query,
            Class::Queue => &mut counted.queue,
            Class::Wait => &mut counted.wait,
            Class::Allocate => &mut counted.allocate,
        };
        *counter += 1;
        calls.set(counted);
    });
}

/// A handle of the driver: an address that means nothing here.
#[derive(Debug)]
pub(super) struct Handle<T>(pub(super) *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: the driver lets any thread use its handles, and nothing here looks behind one. Calls that
// must not overlap on one handle are kept apart where the handle is owned.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as for `Send`.
unsafe impl<T> Sync for Handle<T> {}

pub(super) type StreamHandle = Handle<sys::CUstream_st>;
pub(super) type EventHandle = Handle<sys::CUevent_st>;
pub(super) type GraphHandle = Handle<sys::CUgraph_st>;
pub(super) type ExecHandle = Handle<sys::CUgraphExec_st>;

/// A failed call. Names and descriptions are the driver's constants, looked up when it failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriverError {
    pub(super) call: &'static str,
    pub(super) code: u32,
    name: &'static str,
    description: &'static str,
}

pub(super) const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
pub(super) const INVALID_VALUE: u32 = sys::CUresult::CUDA_ERROR_INVALID_VALUE as u32;
pub(super) const NOT_SUPPORTED: u32 = sys::CUresult::CUDA_ERROR_NOT_SUPPORTED as u32;
pub(super) const INVALID_HANDLE: u32 = sys::CUresult::CUDA_ERROR_INVALID_HANDLE as u32;
pub(super) const NOT_READY: u32 = sys::CUresult::CUDA_ERROR_NOT_READY as u32;
pub(super) const UPDATE_FAILURE: u32 = sys::CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE as u32;

impl DriverError {
    /// Whether the device has failed for good: work that ran before left the context unusable.
    pub(super) fn is_fatal(&self) -> bool {
        use sys::CUresult as R;
        const FATAL: [R; 14] = [
            R::CUDA_ERROR_ECC_UNCORRECTABLE,
            R::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            R::CUDA_ERROR_CONTAINED,
            R::CUDA_ERROR_ILLEGAL_ADDRESS,
            R::CUDA_ERROR_LAUNCH_TIMEOUT,
            R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            R::CUDA_ERROR_ASSERT,
            R::CUDA_ERROR_HARDWARE_STACK_ERROR,
            R::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            R::CUDA_ERROR_MISALIGNED_ADDRESS,
            R::CUDA_ERROR_INVALID_ADDRESS_SPACE,
            R::CUDA_ERROR_INVALID_PC,
            R::CUDA_ERROR_LAUNCH_FAILED,
            R::CUDA_ERROR_EXTERNAL_DEVICE,
        ];
        FATAL.iter().any(|fatal| *fatal as u32 == self.code)
    }

    /// The driver's words for it.
    pub(super) fn text(&self) -> String {
        format!("{} ({}): {}", self.name, self.code, self.description)
    }

    /// The error for memory that was asked for: running out is told apart from everything else.
    pub(super) fn allocating(self, what: &str, bytes: usize) -> BackendError {
        if self.code == OUT_OF_MEMORY {
            BackendError::OutOfMemory { what: what.to_owned(), requested: bytes, limit: None }
        } else {
            self.into()
        }
    }
}

impl From<DriverError> for BackendError {
    fn from(error: DriverError) -> Self {
        let DriverError { call, code, name, description } = error;
        BackendError::Driver { call, code, name, description }
    }
}

/// The driver of this process.
pub(super) struct Driver {
    pub(super) table: Table,
    error_name: ErrorText,
    error_string: ErrorText,
    version: i32,
}

/// `cuGetErrorName` and `cuGetErrorString`, which take whatever number they are given.
type ErrorText = unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint;

static DRIVER: OnceLock<Result<Driver, Missing>> = OnceLock::new();

/// Why there is no driver to call.
#[derive(Clone)]
struct Missing {
    what: String,
    reason: String,
}

impl From<Missing> for BackendError {
    fn from(missing: Missing) -> Self {
        BackendError::Unavailable { what: missing.what, reason: missing.reason }
    }
}

/// The error for a driver without the call of this name.
pub(super) fn lacks(call: &str) -> BackendError {
    BackendError::Unavailable {
        what: "the CUDA driver".to_owned(),
        reason: format!("libcuda has no {call}; {}", minimum()),
    }
}

fn minimum() -> String {
    format!("a driver for CUDA {} or later is needed", spelled(MINIMUM_VERSION))
}

/// A version of CUDA as people write it.
fn spelled(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

impl Driver {
    /// The driver, loaded, checked and initialised by the first call. Later calls give the same
    /// answer.
    pub(super) fn find() -> Result<&'static Self, BackendError> {
        DRIVER
            .get_or_init(|| {
                Self::load().map_err(|error| match error {
                    BackendError::Unavailable { what, reason } => Missing { what, reason },
                    other => {
                        Missing { what: "the CUDA driver".to_owned(), reason: other.to_string() }
                    }
                })
            })
            .as_ref()
            .map_err(|missing| missing.clone().into())
    }

    fn load() -> Result<Self, BackendError> {
        // SAFETY: loading libcuda runs its initialisers, which every user of CUDA relies on.
        if !unsafe { sys::is_culib_present() } {
            return Err(BackendError::Unavailable {
                what: "the CUDA driver".to_owned(),
                reason: "the loader finds neither libcuda.so nor libcuda.so.1 \
                         (it looks in LD_LIBRARY_PATH and in what ldconfig knows)"
                    .to_owned(),
            });
        }
        let table = Table::fill()?;
        // SAFETY: the library is there.
        let library = unsafe { sys::culib() };
        let text = |symbol: &'static str| {
            // SAFETY: both are functions of an enum, which crosses as its 32-bit number, and of a
            // place for a string; the library is never unloaded.
            unsafe { library.get::<ErrorText>(symbol.as_bytes()) }
                .map(|function| *function)
                .map_err(|_| lacks(symbol.trim_end_matches('\0')))
        };
        let mut driver = Self {
            table,
            error_name: text("cuGetErrorName\0")?,
            error_string: text("cuGetErrorString\0")?,
            version: 0,
        };
        // SAFETY: the place is valid; this call needs no initialised driver.
        let version = ask(|version| unsafe { driver.cuDriverGetVersion(version) })?;
        driver.version = version;
        if version < MINIMUM_VERSION {
            return Err(BackendError::Unavailable {
                what: "the CUDA driver".to_owned(),
                reason: format!("it is one for CUDA {}; {}", spelled(version), minimum()),
            });
        }
        // SAFETY: zero is the only value that is defined.
        unsafe { driver.cuInit(0)? };
        Ok(driver)
    }

    /// The version of CUDA that the driver is for, as `12.4`.
    pub(super) fn version(&self) -> String {
        spelled(self.version)
    }

    /// What a code says: nothing for success.
    pub(super) fn outcome(&self, call: &'static str, code: u32) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        let error = DriverError {
            call,
            code,
            name: text_of(self.error_name, code),
            description: text_of(self.error_string, code),
        };
        if code != NOT_READY {
            tracing::debug!(call, code, name = error.name, "a driver call failed");
        }
        Err(error)
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("version", &self.version).finish_non_exhaustive()
    }
}

fn text_of(function: ErrorText, code: u32) -> &'static str {
    let mut text = ptr::null();
    // SAFETY: the place is valid; an unknown code is answered with an error and a null string.
    let answered = unsafe { function(code, &raw mut text) } == 0;
    if !answered || text.is_null() {
        return "an error that this driver has no words for";
    }
    // SAFETY: the strings are constants of the library, which is never unloaded.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("an error whose words are not UTF-8")
}

/// Asks the driver for one value.
pub(super) fn ask<T: Default>(
    call: impl FnOnce(*mut T) -> Result<(), DriverError>,
) -> Result<T, DriverError> {
    let mut value = T::default();
    call(&raw mut value)?;
    Ok(value)
}

/// Asks the driver for a handle.
pub(super) fn ask_handle<T>(
    call: impl FnOnce(*mut *mut T) -> Result<(), DriverError>,
) -> Result<Handle<T>, DriverError> {
    let mut handle = ptr::null_mut();
    call(&raw mut handle)?;
    Ok(Handle(handle))
}

/// What an attribute of a device is; zero where the driver does not know the attribute.
pub(super) fn attribute(
    driver: &Driver,
    device: sys::CUdevice,
    which: sys::CUdevice_attribute,
) -> c_int {
    // SAFETY: the place is valid, and the device one that the driver has named.
    ask(|value| unsafe { driver.cuDeviceGetAttribute(value, which, device) }).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_write_them() {
        assert_eq!((spelled(12040), spelled(13000)), ("12.4".to_owned(), "13.0".to_owned()));
    }

    #[test]
    fn without_a_driver_there_is_an_error_and_no_panic() {
        match Driver::find() {
            Ok(driver) => assert!(driver.version >= MINIMUM_VERSION),
            Err(BackendError::Unavailable { what, reason }) => {
                assert!(what.contains("CUDA driver"), "{what}: {reason}");
            }
            Err(other) => panic!("expected what was looked for, not {other}"),
        }
    }

    #[test]
    fn an_error_says_everything_by_itself() {
        let error = DriverError {
            call: "cuMemAlloc_v2",
            code: OUT_OF_MEMORY,
            name: "CUDA_ERROR_OUT_OF_MEMORY",
            description: "out of memory",
        };
        assert!(!error.is_fatal());
        assert_eq!(
            BackendError::from(error).to_string(),
            "cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
        );
        let allocating = error.allocating("a buffer", 7);
        assert!(matches!(allocating, BackendError::OutOfMemory { requested: 7, .. }));
        let code = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32;
        assert!(DriverError { code, ..error }.is_fatal());
    }

    #[test]
    fn calls_are_counted_by_what_they_may_do_on_their_own_thread() {
        let before = DriverCalls::of_this_thread();
        count(Class::Queue);
        count(Class::Wait);
        std::thread::spawn(|| count(Class::Allocate)).join().expect("no panic");
        let after = DriverCalls::of_this_thread();
        assert_eq!((after.queue, after.wait), (before.queue + 1, before.wait + 1));
        assert_eq!(after.allocate, before.allocate);
    }
}

//! The libraries, loaded at run time: NCCL, and of the driver what it takes to make a context current.
//!
//! Building needs neither. Results are plain numbers: an enum that came from outside with a value of
//! its own would be undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::Library;

use super::error::NcclError;
use super::search;

/// A call that went well.
pub(super) const SUCCESS: c_int = 0;
/// A call whose work goes on in a thread of the library's.
pub(super) const IN_PROGRESS: c_int = 7;
/// Bytes, as a type of elements.
pub(super) const UINT8: c_int = 1;

/// `ncclComm_t`: points to what only the library knows.
pub(super) type Comm = *mut c_void;
/// `cudaStream_t` and `CUstream`, which are the same.
pub(super) type Stream = *mut c_void;
/// `CUcontext`.
pub(super) type DriverContext = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as version 2.14 declared it. Later ones appended fields; the library goes by size and
/// version and takes its defaults for the rest.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Config {
    /// No call waits for other ranks: their end is asked for, so that there can be a deadline.
    pub(super) fn nonblocking() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 }
    }
}

/// The oldest version that knows [`Config`].
const OLDEST: c_int = 21_400;

macro_rules! calls {
    ($table:ident: $($name:ident($($arg:ident: $ty:ty),* $(,)?) -> $result:ty;)*) => {
        /// Entry points of a library that is never unloaded.
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($ty),*) -> $result,)*
        }

        impl $table {
            fn fill(library: &'static Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: a symbol of this name has, in every version of the library that
                        // has it, the type that its header declares, and so does the table, but for
                        // enums, which are 32 bits of integer here. The library is never unloaded.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($ty),*) -> $result>(symbol.as_bytes())
                        }
                        .map_err(|_| format!("it has no {}", stringify!($name)))?
                    },)*
                })
            }
        }
    };
}

calls! { Calls:
    ncclGetVersion(version: *mut c_int) -> c_int;
    ncclGetUniqueId(id: *mut UniqueId) -> c_int;
    ncclCommInitRankConfig(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> c_int;
    ncclCommGetAsyncError(comm: Comm, state: *mut c_int) -> c_int;
    ncclCommFinalize(comm: Comm) -> c_int;
    ncclCommDestroy(comm: Comm) -> c_int;
    ncclCommAbort(comm: Comm) -> c_int;
    ncclGroupStart() -> c_int;
    ncclGroupEnd() -> c_int;
    ncclSend(from: *const c_void, count: usize, kind: c_int, peer: c_int, comm: Comm, stream: Stream) -> c_int;
    ncclRecv(to: *mut c_void, count: usize, kind: c_int, peer: c_int, comm: Comm, stream: Stream) -> c_int;
    ncclGetErrorString(result: c_int) -> *const c_char;
}

calls! { DriverCalls:
    cuStreamGetCtx(stream: Stream, context: *mut DriverContext) -> c_int;
    cuCtxPushCurrent_v2(context: DriverContext) -> c_int;
    cuCtxPopCurrent_v2(context: *mut DriverContext) -> c_int;
}

/// NCCL and the driver.
pub(super) struct Libraries {
    pub(super) nccl: Calls,
    pub(super) driver: DriverCalls,
    place: String,
    version: c_int,
}

impl Libraries {
    /// The libraries, looked for by the first call. Later calls give the same answer.
    pub(super) fn find() -> Result<&'static Self, NcclError> {
        static FOUND: OnceLock<Result<Libraries, String>> = OnceLock::new();
        FOUND
            .get_or_init(|| Self::load(&search::candidates()))
            .as_ref()
            .map_err(|reason| NcclError::Unavailable { reason: reason.clone() })
    }

    fn load(candidates: &[PathBuf]) -> Result<Self, String> {
        let driver = open(Path::new("libcuda.so.1"));
        let driver =
            driver.map_err(|error| format!("there is no CUDA driver: {}", said(&error)))?;
        let (library, place) = first(candidates)?;
        let nccl = Calls::fill(library).map_err(|reason| format!("{place}: {reason}"))?;
        let driver = DriverCalls::fill(driver).map_err(|reason| format!("the driver: {reason}"))?;
        let mut version = 0;
        // SAFETY: the place is valid.
        if unsafe { (nccl.ncclGetVersion)(&raw mut version) } != SUCCESS || version < OLDEST {
            let (found, oldest) = (version_text(version), version_text(OLDEST));
            return Err(format!("{place}: it is version {found}, and {oldest} is needed"));
        }
        Ok(Self { nccl, driver, place, version })
    }

    /// Version and place, for a person.
    pub(super) fn describe(&self) -> String {
        format!("NCCL {} at {}", version_text(self.version), self.place)
    }

    /// What the result of the call `call` means.
    pub(super) fn outcome(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the function answers every number, an unknown one with a text that says so.
        let text = unsafe { (self.nccl.ncclGetErrorString)(code) };
        let reason = if text.is_null() {
            "no words for it".to_owned()
        } else {
            // SAFETY: the strings are constants of the library, which is never unloaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(NcclError::Call { call, reason, code })
    }
}

/// The first candidate that loads, with its place.
fn first(candidates: &[PathBuf]) -> Result<(&'static Library, String), String> {
    let mut tried = Vec::new();
    for candidate in candidates {
        let place = candidate.display().to_string();
        match open(candidate) {
            Ok(library) => return Ok((library, place)),
            Err(error) if candidate.is_file() => tried.push(format!("{place} ({})", said(&error))),
            Err(_) => tried.push(place),
        }
    }
    let (tried, variable) = (tried.join(", "), search::VARIABLE);
    Err(format!("it was looked for as {tried}; {variable} may name the library or its folder"))
}

/// What the loader says: libloading keeps that as the cause of an error that says less.
fn said(error: &libloading::Error) -> String {
    let cause = std::error::Error::source(error).map(ToString::to_string);
    cause.unwrap_or_else(|| error.to_string())
}

/// Never unloaded: tables point into it.
fn open(path: &Path) -> Result<&'static Library, libloading::Error> {
    // SAFETY: initialisers of NCCL and of the driver prepare these alone.
    let library = unsafe { Library::new(path) }?;
    Ok(Box::leak(Box::new(library)))
}

/// `22809` as `2.28.9`: since 2.9 the library counts so.
fn version_text(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// As the header of 2.14 lays it out; the library reads it by these offsets.
    #[test]
    fn the_configuration_is_that_of_the_header() {
        let offsets = [
            offset_of!(Config, size),
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
        ];
        assert_eq!((offsets, size_of::<Config>()), ([0, 8, 12, 16], 24));
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
        assert_eq!(Config::nonblocking().size, 24);
    }

    #[test]
    fn versions_are_read_as_they_are_written() {
        assert_eq!([21_400, 22_809, 23_100].map(version_text), ["2.14.0", "2.28.9", "2.31.0"]);
    }

    #[test]
    fn a_search_that_fails_says_where_it_looked() {
        let reason =
            |place: &Path| first(&[place.to_owned()]).map(drop).expect_err("nothing there");
        let text = reason(Path::new("/nonexistent/libnccl.so.2"));
        assert!(text.contains("/nonexistent/libnccl.so.2") && text.contains(search::VARIABLE));
        let file = tempfile::NamedTempFile::new().expect("a file");
        let text = reason(file.path());
        assert!(text.contains(&file.path().display().to_string()), "{text}");
    }
}

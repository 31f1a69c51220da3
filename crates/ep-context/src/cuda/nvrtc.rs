//! NVRTC, the compiler that is a library: found where CUDA, a Python wheel or a variable put it.
//!
//! As with the driver, cudarc's bindings give the types and are not called.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::fmt;
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys;
use libloading::Library;

use super::compile::{pointers, start};
use super::packages::python_packages;
use crate::backend::BackendError;

/// The variable that names the library, or the folder that it is in.
const VARIABLE: &str = "GRAPH_EP_NVRTC";

/// Names of the library, the newest first: a driver loads what an older compiler made.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where in a folder of Python packages NVIDIA's wheels put it.
const WHEELS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

macro_rules! nvrtc_calls {
    ($($name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        /// The library's entry points. The result is a plain number: an enum that came from outside
        /// with a value of its own would be undefined behaviour.
        #[allow(non_snake_case)]
        struct Table {
            $($name: unsafe extern "C" fn($($ty),*) -> c_uint,)*
            nvrtcGetErrorString: unsafe extern "C" fn(c_uint) -> *const c_char,
        }

        impl Table {
            fn fill(library: &'static Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: a symbol of this name is, in every version of NVRTC that has it, a
                        // function of the type that cudarc's binding declares, which the constants
                        // below compare with the type used here, but for the result, which is 32
                        // bits of integer in either. The library is never unloaded.
                        *unsafe {
                            library.get::<unsafe extern "C" fn($($ty),*) -> c_uint>(symbol.as_bytes())
                        }
                        .map_err(|_| format!("it has no {}", stringify!($name)))?
                    },)*
                    // SAFETY: as above; the argument is a 32-bit number in either declaration.
                    nvrtcGetErrorString: *unsafe {
                        library.get::<unsafe extern "C" fn(c_uint) -> *const c_char>(
                            b"nvrtcGetErrorString\0",
                        )
                    }
                    .map_err(|_| "it has no nvrtcGetErrorString".to_owned())?,
                })
            }
        }

        // The argument types above are those of cudarc's bindings, or this does not compile.
        $(const _: unsafe fn($($ty),*) -> sys::nvrtcResult = sys::$name;)*

        #[allow(non_snake_case)]
        impl Nvrtc {
            $(
                /// # Safety
                ///
                /// The contract of the library's call of this name.
                unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), Failure> {
                    // SAFETY: the caller's promise; the type of the function is right by `fill`.
                    let code = unsafe { (self.table.$name)($($arg),*) };
                    self.outcome(stringify!($name), code)
                }
            )*
        }
    };
}

nvrtc_calls! {
    nvrtcGetNumSupportedArchs(count: *mut c_int);
    nvrtcGetSupportedArchs(numbers: *mut c_int);
    nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    nvrtcCreateProgram(program: *mut sys::nvrtcProgram, text: *const c_char, name: *const c_char, count: c_int, headers: *const *const c_char, names: *const *const c_char);
    nvrtcCompileProgram(program: sys::nvrtcProgram, count: c_int, options: *const *const c_char);
    nvrtcDestroyProgram(program: *mut sys::nvrtcProgram);
    nvrtcGetProgramLogSize(program: sys::nvrtcProgram, bytes: *mut usize);
    nvrtcGetProgramLog(program: sys::nvrtcProgram, log: *mut c_char);
    nvrtcGetCUBINSize(program: sys::nvrtcProgram, bytes: *mut usize);
    nvrtcGetCUBIN(program: sys::nvrtcProgram, cubin: *mut c_char);
}

/// A call of the library that failed.
pub(super) struct Failure {
    /// The library's number for it.
    code: c_uint,
    /// The call, and what the library says.
    reason: String,
}

impl Failure {
    /// Whether it is the options or the text that the compiler does not take, rather than itself or the
    /// machine that is at fault.
    pub(super) fn is_of_input(&self) -> bool {
        [sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION, sys::nvrtcResult::NVRTC_ERROR_COMPILATION]
            .iter()
            .any(|result| *result as c_uint == self.code)
    }
}

impl From<Failure> for String {
    fn from(failure: Failure) -> Self {
        failure.reason
    }
}

/// The compiler, loaded.
pub(super) struct Nvrtc {
    table: Table,
    place: String,
    version: (i32, i32),
}

impl Nvrtc {
    /// The compiler, looked for by the first call. Later calls give the same answer.
    pub(super) fn find() -> Result<&'static Self, BackendError> {
        static NVRTC: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        NVRTC.get_or_init(|| Self::load(&candidates())).as_ref().map_err(|reason| {
            BackendError::Unavailable {
                what: "NVRTC, which compiles the kernels,".to_owned(),
                reason: reason.clone(),
            }
        })
    }

    fn load(candidates: &[PathBuf]) -> Result<Self, String> {
        let mut found = None;
        let mut tried = Vec::new();
        for candidate in candidates {
            match open(candidate) {
                Ok(library) => {
                    found = Some((library, candidate));
                    break;
                }
                Err(error) if candidate.is_file() => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    let cause = cause.unwrap_or_else(|| error.to_string());
                    tried.push(format!("{} ({cause})", candidate.display()));
                }
                Err(_) => tried.push(candidate.display().to_string()),
            }
        }
        let Some((library, candidate)) = found else {
            return Err(format!(
                "it was looked for as {}; {VARIABLE} may name the library or its folder",
                tried.join(", ")
            ));
        };
        // Never unloaded: the table points into it.
        let library: &'static Library = Box::leak(Box::new(library));
        let place = candidate.display().to_string();
        let table = Table::fill(library).map_err(|reason| format!("{place}: {reason}"))?;
        let mut nvrtc = Self { table, place, version: (0, 0) };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the places are valid.
        unsafe { nvrtc.nvrtcVersion(&raw mut major, &raw mut minor)? };
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    /// Its version, major and minor.
    pub(super) fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Where it was found.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// The compute capabilities of its architectures, ten times the major version and the minor one.
    pub(super) fn capabilities(&self) -> Result<Vec<c_int>, String> {
        let mut count = 0;
        // SAFETY: the place is valid.
        unsafe { self.nvrtcGetNumSupportedArchs(&raw mut count)? };
        let mut numbers = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the place has as many numbers as the library has just said that it writes.
        unsafe { self.nvrtcGetSupportedArchs(numbers.as_mut_ptr())? };
        Ok(numbers)
    }

    fn outcome(&self, call: &'static str, code: c_uint) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function answers every number, an unknown one with a text that says so.
        let text = unsafe { (self.table.nvrtcGetErrorString)(code) };
        let text = if text.is_null() {
            "no words for it".into()
        } else {
            // SAFETY: the strings are constants of the library, which is never unloaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Failure { code, reason: format!("{call} failed with {text} ({code})") })
    }
}

/// Where NVRTC was found and its version, major and minor.
///
/// # Errors
///
/// [`BackendError::Unavailable`] if it was not found, saying where it was looked for.
pub fn nvrtc_version() -> Result<(String, (i32, i32)), BackendError> {
    let nvrtc = Nvrtc::find()?;
    Ok((nvrtc.place().to_owned(), nvrtc.version()))
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("place", &self.place).field("version", &self.version).finish()
    }
}

/// Opens the library. It looks for a second one when it compiles, by name only, so that this must be
/// loaded already where both lie in a folder that the loader does not know.
fn open(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: loading NVRTC runs its initialisers, which do nothing but prepare the compiler.
    let library = unsafe { Library::new(path) }?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    for entry in folder.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten()
    {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: as above, for the compiler's own part, which has no initialisers to speak of.
            if let Ok(builtins) = unsafe { Library::new(entry.path()) } {
                // Needed as long as the compiler, which is for ever.
                mem::forget(builtins);
            }
        }
    }
    Ok(library)
}

/// Where the library may be, the most certain first.
fn candidates() -> Vec<PathBuf> {
    let in_folder = |folder: PathBuf| NAMES.map(|name| folder.join(name));
    if let Some(named) = env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        return if named.is_dir() { in_folder(named).to_vec() } else { vec![named] };
    }
    let variable = |name: &str| env::var_os(name).map(PathBuf::from);
    let mut found: Vec<PathBuf> = NAMES.map(PathBuf::from).to_vec();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        found.extend(in_folder(toolkit.join("lib64")));
    }
    for packages in python_packages(|name| env::var_os(name)) {
        for wheel in WHEELS {
            found.extend(in_folder(packages.join(wheel)));
        }
    }
    found
}

/// A program of the compiler's.
pub(super) struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: sys::nvrtcProgram,
}

impl<'a> Program<'a> {
    pub(super) fn new(
        nvrtc: &'a Nvrtc,
        text: &CStr,
        file: &CStr,
        headers: &[CString],
        names: &[CString],
    ) -> Result<Self, String> {
        let (count, headers) = pointers(headers);
        let (_, names) = pointers(names);
        let mut handle = ptr::null_mut();
        // SAFETY: the place is valid, all texts end with a zero byte, and both lists have as many
        // entries as the count says. The compiler copies what it keeps.
        unsafe {
            nvrtc.nvrtcCreateProgram(
                &raw mut handle,
                text.as_ptr(),
                file.as_ptr(),
                count,
                start(&headers),
                start(&names),
            )?;
        }
        Ok(Self { nvrtc, handle })
    }

    pub(super) fn compile(&self, options: &[CString]) -> Result<(), Failure> {
        let (count, options) = pointers(options);
        // SAFETY: the program is this value's, and the list has as many texts as the count says.
        unsafe { self.nvrtc.nvrtcCompileProgram(self.handle, count, start(&options)) }
    }

    /// What the compiler said; empty if it will not tell.
    pub(super) fn log(&self) -> String {
        let bytes = self.bytes(
            // SAFETY: the program is this value's, and the place valid.
            |bytes| unsafe { self.nvrtc.nvrtcGetProgramLogSize(self.handle, bytes) },
            // SAFETY: the place has as many bytes as the compiler has asked for.
            |place| unsafe { self.nvrtc.nvrtcGetProgramLog(self.handle, place) },
        );
        let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
        text.trim_end_matches(['\0', '\n']).to_owned()
    }

    /// The machine code of a program that was compiled.
    pub(super) fn cubin(&self) -> Result<Vec<u8>, String> {
        let cubin = self.bytes(
            // SAFETY: the program is this value's, and the place valid.
            |bytes| unsafe { self.nvrtc.nvrtcGetCUBINSize(self.handle, bytes) },
            // SAFETY: the place has as many bytes as the compiler has asked for.
            |place| unsafe { self.nvrtc.nvrtcGetCUBIN(self.handle, place) },
        )?;
        if cubin.is_empty() {
            return Err("it compiled to no machine code".to_owned());
        }
        Ok(cubin)
    }

    fn bytes(
        &self,
        size: impl FnOnce(*mut usize) -> Result<(), Failure>,
        fill: impl FnOnce(*mut c_char) -> Result<(), Failure>,
    ) -> Result<Vec<u8>, String> {
        let mut length = 0;
        size(&raw mut length)?;
        let mut bytes = vec![0_u8; length];
        if length > 0 {
            fill(bytes.as_mut_ptr().cast::<c_char>())?;
        }
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // This is memory of the compiler's; no driver is concerned.
        // SAFETY: the program is this value's and is destroyed once.
        let _ = unsafe { self.nvrtc.nvrtcDestroyProgram(&raw mut self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_fails_says_where_it_looked() {
        let nowhere = PathBuf::from("/nonexistent/libnvrtc.so.13");
        let reason = Nvrtc::load(&[nowhere]).expect_err("nothing is there");
        assert!(reason.contains("/nonexistent/libnvrtc.so.13") && reason.contains(VARIABLE));
        let file = tempfile::NamedTempFile::new().expect("a file");
        let reason = Nvrtc::load(&[file.path().to_owned()]).expect_err("no library");
        assert!(reason.contains(&file.path().display().to_string()), "{reason}");
    }
}

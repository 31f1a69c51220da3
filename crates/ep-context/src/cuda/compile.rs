//! Compiling kernels, straight to machine code for one architecture.

use std::ffi::{CString, c_char, c_int};
use std::ptr;

use sha2::{Digest, Sha256};

use super::nvrtc::{Nvrtc, Program};
use crate::backend::{BackendError, Specialization};
use crate::kernel::KernelSource;

/// Options of every kernel. Products and sums are each rounded, as on the host: the compiler must not
/// contract them. The report of registers and spills goes to the log.
const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "--ptxas-options=-v"];

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// What the compiler said: warnings, and for each function its registers and spills.
    pub log: String,
}

impl Compiled {
    /// Bytes that threads of the kernel spill from registers to memory, stores and loads together.
    pub fn spilled_bytes(&self) -> u64 {
        [" bytes spill stores", " bytes spill loads"]
            .iter()
            .flat_map(|label| self.log.match_indices(label))
            .filter_map(|(at, _)| self.log[..at].rsplit([' ', ',']).next()?.parse::<u64>().ok())
            .sum()
    }
}

/// The architecture that NVRTC is asked for, of a device of this compute capability. From 9.0 on it is
/// the one with the features of exactly that chip.
pub fn architecture((major, minor): (u32, u32)) -> String {
    let specific = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{specific}")
}

/// Compiles a kernel for `architecture`, as [`architecture`] names it. Needs NVRTC and no GPU.
///
/// # Errors
///
/// [`BackendError::Unavailable`] without NVRTC, saying where it was looked for, and for source that
/// does not compile, with the compiler's messages.
pub fn compile(
    source: &KernelSource,
    constants: &Specialization,
    architecture: &str,
) -> Result<Compiled, BackendError> {
    Job::new(source, constants, architecture).compile(Nvrtc::find()?)
}

/// Everything that decides what comes out of the compiler, but for its version.
pub(super) struct Job<'a> {
    source: &'a KernelSource,
    options: Vec<String>,
}

impl<'a> Job<'a> {
    pub(super) fn new(
        source: &'a KernelSource,
        constants: &Specialization,
        architecture: &str,
    ) -> Self {
        let mut options = vec![format!("--gpu-architecture={architecture}")];
        options.extend(OPTIONS.iter().map(|option| (*option).to_owned()));
        options.extend(constants.constants().iter().map(|(name, value)| {
            // A literal without a suffix has the first signed type that holds it.
            let suffix = if i64::try_from(*value).is_ok() { "" } else { "ull" };
            format!("-D{name}={value}{suffix}")
        }));
        Self { source, options }
    }

    /// The name of the cache's entry: a hash of everything that went in.
    pub(super) fn key(&self, version: (i32, i32)) -> String {
        let mut hash = Sha256::new();
        // Each part with its length before it, so that no two lists of parts read the same.
        let mut add = |part: &str| {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        };
        add(&format!("NVRTC {}.{}", version.0, version.1));
        add(self.source.file);
        add(self.source.text);
        for (name, text) in self.source.headers {
            add("header");
            add(name);
            add(text);
        }
        for option in &self.options {
            add("option");
            add(option);
        }
        let stem = self.source.file.rsplit('/').next().unwrap_or_default();
        let stem = stem.strip_suffix(".cu").unwrap_or(stem);
        let digest = hash.finalize();
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{stem}-{hex}.cubin")
    }

    pub(super) fn compile(&self, nvrtc: &Nvrtc) -> Result<Compiled, BackendError> {
        let file = self.source.file;
        let failed = |reason: String| BackendError::Unavailable {
            what: format!("kernel source {file} for {}", self.options[0]),
            reason,
        };
        let text = |text: &str| {
            CString::new(text).map_err(|_| failed("a text has a zero byte".to_owned()))
        };
        let texts =
            |parts: &mut dyn Iterator<Item = &str>| parts.map(text).collect::<Result<Vec<_>, _>>();
        let names = texts(&mut self.source.headers.iter().map(|(name, _)| *name))?;
        let headers = texts(&mut self.source.headers.iter().map(|(_, text)| *text))?;
        let options = texts(&mut self.options.iter().map(String::as_str))?;
        let program = Program::new(nvrtc, &text(self.source.text)?, &text(file)?, &headers, &names)
            .map_err(&failed)?;
        program
            .compile(&options)
            .map_err(|failure| failed(format!("{}\n{}", String::from(failure), program.log())))?;
        Ok(Compiled { cubin: program.cubin().map_err(&failed)?, log: program.log() })
    }
}

/// The texts as the array of pointers that NVRTC takes; valid while the texts live.
pub(super) fn pointers(texts: &[CString]) -> (c_int, Vec<*const c_char>) {
    let pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
    (c_int::try_from(pointers.len()).unwrap_or(c_int::MAX), pointers)
}

/// The start of a list, or null for an empty one.
pub(super) fn start(pointers: &[*const c_char]) -> *const *const c_char {
    if pointers.is_empty() { ptr::null() } else { pointers.as_ptr() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: KernelSource =
        KernelSource { file: "a/b.cu", text: "text", headers: &[("h", "one"), ("i", "two")] };

    fn key(source: &KernelSource, constants: &Specialization, arch: &str, minor: i32) -> String {
        Job::new(source, constants, arch).key((13, minor))
    }

    #[test]
    fn the_key_depends_on_everything_that_goes_in() {
        let none = Specialization::new();
        let first = key(&SOURCE, &none, "sm_80", 0);
        assert!(first.starts_with("b-") && first.ends_with(".cubin"), "{first}");
        assert_eq!(first, key(&SOURCE, &none, "sm_80", 0));
        let others = [
            key(&SOURCE, &none, "sm_90a", 0),
            key(&SOURCE, &none, "sm_80", 1),
            key(&SOURCE, &none.clone().with("A", 1), "sm_80", 0),
            key(&KernelSource { text: "texts", ..SOURCE }, &none, "sm_80", 0),
            key(&KernelSource { file: "c/b.cu", ..SOURCE }, &none, "sm_80", 0),
            key(&KernelSource { headers: &[("h", "one")], ..SOURCE }, &none, "sm_80", 0),
            key(
                &KernelSource { headers: &[("h", "onei"), ("", "two")], ..SOURCE },
                &none,
                "sm_80",
                0,
            ),
        ];
        for (at, other) in others.iter().enumerate() {
            assert_ne!(*other, first, "variant {at}");
        }
    }

    #[test]
    fn constants_become_macros() {
        let constants = Specialization::new().with("HIDDEN", 7168).with("MASK", u64::MAX);
        let job = Job::new(&SOURCE, &constants, "sm_90a");
        assert_eq!(job.options[0], "--gpu-architecture=sm_90a");
        assert!(job.options.contains(&"-DHIDDEN=7168".to_owned()));
        assert!(job.options.contains(&"-DMASK=18446744073709551615ull".to_owned()));
    }

    #[test]
    fn a_macro_is_defined_once_with_the_value_that_came_last() {
        let constants = Specialization::new().with("HIDDEN", 7168).with("A", 1).with("HIDDEN", 64);
        assert_eq!(constants.constants(), [("HIDDEN", 64), ("A", 1)]);
        let job = Job::new(&SOURCE, &constants, "sm_90a");
        let defined: Vec<_> =
            job.options.iter().filter(|option| option.contains("HIDDEN")).collect();
        assert_eq!(defined, ["-DHIDDEN=64"]);
    }

    #[test]
    fn chips_from_hopper_on_are_asked_for_by_their_own_features() {
        let names = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)].map(architecture);
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]);
    }

    #[test]
    fn spills_are_read_from_the_report() {
        let log = "ptxas .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n";
        let compiled = Compiled { cubin: Vec::new(), log: log.repeat(2) };
        assert_eq!(compiled.spilled_bytes(), 40);
        assert_eq!(Compiled { cubin: Vec::new(), log: String::new() }.spilled_bytes(), 0);
    }
}

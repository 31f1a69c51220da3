//! Compiled kernels on disk.
//!
//! An entry's name is a hash of everything that went into it, so that no entry is ever out of date;
//! it carries a hash of what it holds, so that a damaged one is seen and built again. An entry appears
//! whole, by a rename. A folder that cannot be read or written costs time and nothing else.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::compile::Job;
use super::nvrtc::Nvrtc;
use crate::backend::{BackendError, Specialization};
use crate::kernel::KernelSource;

/// What an entry begins with; the number changes with the format.
const MAGIC: &[u8; 8] = b"GEPCUB1\n";
const HASH: usize = 32;

/// Where compiled kernels are kept between runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFolder {
    path: Option<PathBuf>,
}

impl CacheFolder {
    /// `$GRAPH_EP_CACHE_DIR`, or else `graph-ep` in `$XDG_CACHE_HOME`, or else `~/.cache/graph-ep`.
    /// Without any of these variables, or where the first is set to nothing, nothing is kept.
    pub fn from_environment() -> Self {
        Self { path: default_path(|name| env::var_os(name).map(PathBuf::from)) }
    }

    /// This folder, which is made when something is to be kept in it.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()) }
    }

    /// Keeps nothing.
    pub fn none() -> Self {
        Self { path: None }
    }

    /// The folder, if there is one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Compiles a kernel ahead of time, for `architecture` as
    /// [`architecture`](super::architecture) names it, and keeps it here. A rank that later loads
    /// it with the same constants and the same version of NVRTC finds it compiled. Needs no GPU.
    ///
    /// # Errors
    ///
    /// [`BackendError::Unavailable`] without NVRTC, for source that does not compile, and for a folder
    /// that is not there to be written.
    pub fn prepare(
        &self,
        source: &KernelSource,
        constants: &Specialization,
        architecture: &str,
    ) -> Result<(), BackendError> {
        let job = Job::new(source, constants, architecture);
        let nvrtc = Nvrtc::find()?;
        let Some(folder) = &self.path else {
            return Err(BackendError::Unavailable {
                what: "the folder for compiled kernels".to_owned(),
                reason: "the environment names none".to_owned(),
            });
        };
        let entry = folder.join(job.key(nvrtc.version()));
        if read(&entry).is_some() {
            return Ok(());
        }
        publish(folder, &entry, &job.compile(nvrtc)?.cubin).map_err(|error| BackendError::Os {
            call: "write",
            what: entry.display().to_string(),
            source: error,
        })
    }

    /// The compiled kernel, from here or from the compiler.
    pub(super) fn get_or_compile(&self, job: &Job<'_>) -> Result<Vec<u8>, BackendError> {
        let nvrtc = Nvrtc::find()?;
        let Some(folder) = &self.path else { return Ok(job.compile(nvrtc)?.cubin) };
        let entry = folder.join(job.key(nvrtc.version()));
        if let Some(cubin) = read(&entry) {
            tracing::debug!(entry = %entry.display(), "a compiled kernel was found");
            return Ok(cubin);
        }
        let cubin = job.compile(nvrtc)?.cubin;
        if let Err(error) = publish(folder, &entry, &cubin) {
            tracing::debug!(%error, entry = %entry.display(), "a compiled kernel was not kept");
        }
        Ok(cubin)
    }
}

fn default_path(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    if let Some(path) = variable("GRAPH_EP_CACHE_DIR") {
        return (!path.as_os_str().is_empty()).then_some(path);
    }
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    let base = variable("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| Some(variable("HOME").and_then(absolute)?.join(".cache")))?;
    Some(base.join("graph-ep"))
}

/// What a whole and undamaged entry holds.
fn read(entry: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(entry).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let (hash, cubin) = rest.split_at_checked(HASH)?;
    if *hash != *Sha256::digest(cubin) {
        tracing::warn!(entry = %entry.display(), "a compiled kernel is damaged; it is built again");
        return None;
    }
    Some(cubin.to_vec())
}

fn publish(folder: &Path, entry: &Path, cubin: &[u8]) -> io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(folder)?;
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut name = entry.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.{unique}.new", process::id()));
    let unfinished = folder.join(name);
    let bytes = [MAGIC, Sha256::digest(cubin).as_slice(), cubin].concat();
    let written = fs::write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, entry));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_is_where_the_variables_say() {
        let with = |set: &[(&str, &str)]| {
            default_path(|name| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| PathBuf::from(value))
            })
        };
        assert_eq!(with(&[("GRAPH_EP_CACHE_DIR", "/c"), ("HOME", "/h")]), Some("/c".into()));
        assert_eq!(with(&[("GRAPH_EP_CACHE_DIR", ""), ("HOME", "/h")]), None);
        assert_eq!(with(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), Some("/x/graph-ep".into()));
        // The specification has a relative path ignored.
        assert_eq!(
            with(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")]),
            Some("/h/.cache/graph-ep".into())
        );
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn a_damaged_entry_is_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("made when needed");
        let entry = folder.join("entry");
        assert_eq!(read(&entry), None);
        publish(&folder, &entry, b"machine code").expect("published");
        assert_eq!(read(&entry).as_deref(), Some(&b"machine code"[..]));
        let whole = fs::read(&entry).expect("readable");
        for length in 0..whole.len() {
            fs::write(&entry, &whole[..length]).expect("written");
            assert_eq!(read(&entry), None, "cut to {length} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&entry, damaged).expect("written");
            assert_eq!(read(&entry), None, "a flipped bit in byte {at}");
        }
        publish(&folder, &entry, b"machine code").expect("published over the damaged one");
        assert!(read(&entry).is_some());
        assert_eq!(fs::read_dir(&folder).expect("readable").count(), 1, "nothing is left over");
    }
}

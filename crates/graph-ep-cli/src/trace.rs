//! Router decisions recorded from a real model, read from a safetensors file.
//!
//! The file holds
//!
//! - `topk_idx` (U8, U16 or I32) `[steps, layers, tokens, top_k]`: expert ids. In U8 and U16 every
//!   value is an id; −1, for a choice not made, exists in I32 only;
//! - `topk_weights` (F32) of the same shape, optional;
//! - `step` and `domain` (I32 or I64) `[steps]`, optional: what the recording calls each step, and
//!   what kind of text it was;
//! - in its metadata, `experts`: the number of experts, as a decimal string; and optionally
//!   `origin`: where the decisions come from, in words.
//!
//! Other tensors and other metadata are ignored. Values are little-endian and may start at any
//! byte, so they are decoded, never cast.

mod container;
mod decode;
mod error;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use error::TraceError;

use crate::routing::{Ownership, Routing, RoutingParts};
use container::Container;

/// Name of the built-in trace, as reports show it.
pub const BUILT_IN_NAME: &str = "byte-lm-64e-top8-512";

/// The built-in trace; `assets/README.md` says what it is.
static BUILT_IN: &[u8] = include_bytes!("../assets/byte-lm-64e-top8-512.safetensors");

/// Reads the trace at `path`. Blocks on the file system; holds the file and its decoded ids in
/// memory for a moment, afterwards only the ids, 4 bytes each.
///
/// # Errors
///
/// [`TraceError`] says what is wrong with the file.
pub fn load(path: &Path) -> Result<Routing, TraceError> {
    let file = path.display().to_string();
    let reader =
        File::open(path).map_err(|source| TraceError::Read { file: file.clone(), source })?;
    let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    read(reader, name, file)
}

/// The trace compiled into the program.
///
/// # Errors
///
/// None in a program whose tests passed: the trace is checked like any other.
pub fn built_in() -> Result<Routing, TraceError> {
    read(BUILT_IN, BUILT_IN_NAME.into(), "the built-in trace".into())
}

/// Reads a trace from `reader`. `name` is what reports call it, `file` what errors call it.
///
/// Never reads more than the header promises, and allocates only for bytes that really come.
///
/// # Errors
///
/// [`TraceError`] says what is wrong with the bytes.
pub fn read(reader: impl Read, name: String, file: String) -> Result<Routing, TraceError> {
    let container = Container::read(reader, &file)?;
    let experts = experts(&container, &file)?;
    let ids = decode::ids(&container, &file)?;
    let [steps, layers, tokens, top_k] = ids.shape;
    let parts = RoutingParts {
        name,
        origin: container.text("origin").map(str::to_owned),
        experts,
        top_k,
        steps,
        layers,
        tokens,
        weights: decode::weights(&container, &ids.shape, &file)?,
        step_labels: decode::labels(&container, "step", steps, &file)?,
        domains: decode::labels(&container, "domain", steps, &file)?,
        ids: ids.values,
        ownership: Ownership::Even,
    };
    Routing::new(parts).map_err(|source| TraceError::Routing { file, source })
}

/// The number of experts that the metadata states.
fn experts(container: &Container, file: &str) -> Result<usize, TraceError> {
    let Some(value) = container.text("experts") else {
        return Err(TraceError::NoExperts { file: file.to_owned() });
    };
    // `parse` alone would let a sign through.
    let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    match value.parse() {
        Ok(experts) if digits => Ok(experts),
        _ => Err(TraceError::Experts { file: file.to_owned(), value: value.to_owned() }),
    }
}

#[cfg(test)]
mod tests;

//! What can be wrong with a trace.

use std::io;

use crate::routing::RoutingError;

/// Why a trace was not read. Every variant names the file; the rest of the story may be in its
/// `source`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be opened or read.
    #[error("{file}: cannot be read")]
    Read {
        /// The file.
        file: String,
        /// What the system said.
        source: io::Error,
    },
    /// The bytes are no safetensors file.
    #[error("{file}: not a safetensors file: {reason}")]
    NotSafetensors {
        /// The file.
        file: String,
        /// What about it is not.
        reason: String,
    },
    /// The file ends before its header or its data do.
    #[error("{file}: truncated: its {part} should be {expected} bytes long, but {found} are there")]
    Truncated {
        /// The file.
        file: String,
        /// `header` or `data`.
        part: &'static str,
        /// Length that the file states.
        expected: u64,
        /// Length that it has.
        found: u64,
    },
    /// There are no expert ids.
    #[error("{file}: there is no tensor `topk_idx`, only {}", listed(found))]
    NoIds {
        /// The file.
        file: String,
        /// Names of the tensors that it has.
        found: Vec<String>,
    },
    /// A tensor has elements of a type that it may not have.
    #[error("{file}: the elements of `{tensor}` are {found}; they should be {allowed}")]
    ElementType {
        /// The file.
        file: String,
        /// The tensor.
        tensor: &'static str,
        /// The type it has.
        found: String,
        /// The types it may have.
        allowed: &'static str,
    },
    /// A tensor has another shape than it should.
    #[error("{file}: the shape of `{tensor}` is {found:?}; it should be {expected}")]
    Shape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: &'static str,
        /// The shape it has.
        found: Vec<usize>,
        /// The shape it should have.
        expected: String,
    },
    /// The metadata does not say how many experts there are.
    #[error("{file}: its metadata does not state the number of `experts`")]
    NoExperts {
        /// The file.
        file: String,
    },
    /// What the metadata gives as the number of experts is no number.
    #[error("{file}: its metadata states {value:?} `experts`; this should be a decimal number")]
    Experts {
        /// The file.
        file: String,
        /// What the metadata says.
        value: String,
    },
    /// The decisions themselves are wrong.
    #[error("{file}: its router decisions are invalid")]
    Routing {
        /// The file.
        file: String,
        /// What is wrong, and where.
        source: RoutingError,
    },
}

/// The first few names of a list that a file decides the length of.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names {
        [] => "an empty list of tensors".to_owned(),
        [shown @ .., _] if names.len() > SHOWN => {
            format!("{} and {} more", shown[..SHOWN].join(", "), names.len() - SHOWN)
        }
        _ => names.join(", "),
    }
}

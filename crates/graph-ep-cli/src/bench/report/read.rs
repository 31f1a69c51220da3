//! Reading a report back.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::Deserialize;
use serde_json::Value;

use super::super::growth::named;
use super::{Op, Report, SCHEMA};

/// Why a file is not taken as a report of a benchmark.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// It cannot be read.
    #[error("{}: cannot be read", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is no JSON.
    #[error("{}: is no JSON", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where it stops being.
        source: serde_json::Error,
    },
    /// It is JSON of another kind, such as the report of `graph-ep run`.
    #[error(
        "{}: is no report of graph-ep bench: it has no \"schema\" that says \"{SCHEMA}\"",
        path.display()
    )]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// It was written by another version.
    #[error("{}: has schema \"{found}\", and this program reads \"{SCHEMA}\"", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// Its schema.
        found: String,
    },
    /// It claims to be a report, and is not.
    #[error("{}: is a damaged report of graph-ep bench", path.display())]
    Fields {
        /// The file.
        path: PathBuf,
        /// What is missing or wrong.
        source: serde_json::Error,
    },
}

pub(super) fn read(path: &Path) -> Result<Report, ReadError> {
    let path = || path.to_owned();
    let text = fs::read(path()).map_err(|source| ReadError::File { path: path(), source })?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|source| ReadError::Json { path: path(), source })?;
    match value.get("schema").and_then(Value::as_str) {
        Some(SCHEMA) => {}
        Some(found) => {
            return Err(ReadError::Schema { path: path(), found: found.to_owned() });
        }
        None => return Err(ReadError::Kind { path: path() }),
    }
    let mut report =
        Report::deserialize(value).map_err(|source| ReadError::Fields { path: path(), source })?;
    for case in report.results.iter_mut().map(|entry| &mut entry.case) {
        if let Some(named) = (case.op == Op::Grow).then(|| named(&case.variant)).flatten() {
            case.variant = named;
        }
    }
    Ok(report)
}

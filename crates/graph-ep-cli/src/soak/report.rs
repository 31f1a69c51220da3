//! What a soak has to say, as data.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cycles::Held;
use crate::output::{OutputError, write_json};

/// The schema of a report.
pub const SCHEMA: &str = "graph-ep soak report, 1";

/// Everything that a soak found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// When it ended, in UTC.
    pub date: String,
    /// The commit, as far as it was told.
    pub commit: String,
    /// The command line.
    pub command: String,
    /// What it ran on.
    pub hardware: Vec<String>,
    /// Ranks.
    pub ranks: usize,
    /// Whether all was as it has to be.
    pub verified: bool,
    /// One entry a group, or one for all of them where they are alike.
    pub results: Vec<Entry>,
    /// What the process held, where groups came and went.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub held: Option<HeldReport>,
}

/// What was held before groups came and went, and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeldReport {
    /// Groups that came and went.
    pub cycles: usize,
    /// Before.
    pub before: Held,
    /// After.
    pub after: Held,
}

/// What a group did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What it was.
    pub name: String,
    /// How it met overflows, in the order of its episodes.
    pub mode: String,
    /// Sizes and settings, in words.
    pub settings: String,
    /// Whether the device compared all outputs that there were, and all were right.
    pub verified: bool,
    /// Steps whose outputs were kept.
    pub steps: u64,
    /// Steps that required more rows than there were.
    pub overflowed: u64,
    /// Steps launched again, once each attempt.
    pub replays: u64,
    /// Steps that were run eagerly at last.
    pub eager_runs: u64,
    /// Growths, summed over ranks.
    pub growths: u64,
    /// Recordings, summed over ranks.
    pub recordings: u64,
    /// The most windows that a dispatch took.
    pub most_windows: u64,
    /// Pairs of token and expert that reached their expert in steps that were kept.
    pub delivered: u64,
    /// Pairs that did not, as receivers counted them.
    pub dropped: u64,
    /// Pairs that outputs lack, as they were compared.
    pub missing: u64,
    /// Outputs of tokens that were compared on the device.
    pub compared: u64,
    /// Outputs of tokens that there were.
    pub expected: u64,
    /// Outputs that differ.
    pub mismatches: u64,
    /// Where the first of them is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub first_mismatch: Option<String>,
    /// Seconds, on the host's clock, of all steps.
    pub seconds: f64,
    /// The median time from the launch of a step that did not overflow to its record, on the clock of
    /// rank 0's host, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub clean_step_us: Option<f64>,
}

impl Report {
    /// Writes it as JSON to `path`, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`OutputError`], if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), OutputError> {
        write_json(path, self)
    }
}

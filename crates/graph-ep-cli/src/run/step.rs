//! What a rank tells of one step, in a form that also crosses between processes.

use std::time::Duration;

use graph_ep::{Outcome, StepReport};
use serde::{Deserialize, Serialize};

use super::verify::Tally;

/// What one rank reports of one step. Rows are padded unless said otherwise.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StepDone {
    pub(super) rank: usize,
    pub(super) step: usize,
    /// Rows that the first run required of each rank.
    pub(super) required: Vec<u32>,
    pub(super) capacity_before: u32,
    pub(super) capacity_after: u32,
    pub(super) replays: u32,
    pub(super) growths: u32,
    pub(super) recordings: u32,
    /// Unpadded rows missing from the run that was kept.
    pub(super) dropped: u64,
    /// Unpadded rows missing in runs that were discarded.
    pub(super) recovered: u64,
    pub(super) windows: u32,
    /// Blocking calls of a step that was not run again.
    pub(super) clean_syncs: u64,
    pub(super) times: Times,
    pub(super) tally: Tally,
}

/// How long the parts of a step took on one rank.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Times {
    pub(super) first_run: Duration,
    pub(super) total: Duration,
    pub(super) recording: Duration,
    pub(super) growing: Duration,
}

impl Times {
    /// Each part on the rank that took longest.
    pub(super) fn longest(self, other: Self) -> Self {
        Self {
            first_run: self.first_run.max(other.first_run),
            total: self.total.max(other.total),
            recording: self.recording.max(other.recording),
            growing: self.growing.max(other.growing),
        }
    }
}

impl StepDone {
    pub(super) fn new(rank: usize, step: usize, report: &StepReport, tally: Tally) -> Self {
        let first = report.discarded.as_ref().unwrap_or(&report.record);
        let failed = report.outcome == Outcome::Failed;
        let clean = matches!(report.outcome, Outcome::Clean | Outcome::Eager);
        Self {
            rank,
            step,
            required: first.required.to_vec(),
            capacity_before: report.capacity_before,
            capacity_after: report.capacity_after,
            replays: match report.outcome {
                Outcome::Recovered { replays, .. } => replays,
                _ => 0,
            },
            // In eager mode there is no budget that could be too small: buffers follow what is
            // required.
            growths: if report.outcome == Outcome::Eager { 0 } else { report.growths },
            recordings: report.recordings,
            dropped: if failed { 0 } else { report.record.dropped },
            recovered: report.recovered_rows + if failed { report.record.dropped } else { 0 },
            windows: report.record.windows,
            clean_syncs: if clean { report.blocking_calls } else { 0 },
            times: Times {
                first_run: report.times.first_run,
                total: report.times.total,
                recording: report.times.recording,
                growing: report.times.growing,
            },
            tally,
        }
    }
}

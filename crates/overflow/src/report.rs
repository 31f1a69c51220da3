//! What became of a step.

use std::time::Duration;

use token_dispatch::StepRecord;

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It fitted at once.
    Clean,
    /// It overflowed and was run again until it fitted.
    Recovered {
        /// Replays launched.
        replays: u32,
        /// Whether the last run was eager.
        eager: bool,
    },
    /// It overflowed, and what did not fit was left out.
    Dropped,
    /// It overflowed, and its outputs are not to be used.
    Failed,
    /// It ran eagerly from the start.
    Eager,
}

/// What became of one step on this rank.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// How it ended.
    pub outcome: Outcome,
    /// The record of the run that was kept.
    pub record: StepRecord,
    /// The record of the first run, if that was discarded.
    pub discarded: Option<StepRecord>,
    /// This rank's capacity when the step began, in rows.
    pub capacity_before: u32,
    /// This rank's capacity now, in rows.
    pub capacity_after: u32,
    /// How often this rank's capacity grew.
    pub growths: u32,
    /// How often this rank recorded the step.
    pub recordings: u32,
    /// Pairs missing on this rank in runs that were discarded.
    pub recovered_rows: u64,
    /// Blocking calls of this rank between the launch of the first run and its record.
    pub blocking_calls: u64,
    /// How long things took.
    pub times: StepTimes,
}

/// How long the parts of a step took, on the host's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// From the launch of the first run to its record.
    pub first_run: Duration,
    /// From the launch of the first run to the record of the last.
    pub total: Duration,
    /// Recording, instantiating and updating graphs.
    pub recording: Duration,
    /// Mapping memory.
    pub growing: Duration,
}

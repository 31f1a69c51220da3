//! What one rank saw of one step, as plain data.

use graph_ep::{Outcome, StepRecord, StepReport};
use serde::{Deserialize, Serialize};

/// What one rank saw of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRun {
    /// One entry a layer.
    pub layers: Vec<LayerRun>,
    /// The record of the step.
    pub record: Record,
}

impl RankRun {
    /// The outputs of all layers, bit by bit.
    pub fn outputs(&self) -> Vec<&[u32]> {
        self.layers.iter().map(|layer| layer.output.as_slice()).collect()
    }

    /// The same run as that of the step with another number.
    #[must_use]
    pub fn renumbered(mut self, step: u32) -> Self {
        self.record.step = step;
        self
    }
}

/// What one rank saw of one layer. Numbers are given as the bits of f32 ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRun {
    /// `[tokens, hidden]`; empty for a layer that was not combined.
    pub output: Vec<u32>,
    /// `[local experts + 1]`.
    pub expert_offsets: Vec<i32>,
    /// `[local experts]`.
    pub tokens_per_expert: Vec<i32>,
    /// Rows, padding included.
    pub total: i32,
    /// `[total]` rows.
    pub rows: Vec<u8>,
    /// `[total]` rows of scales.
    pub scales: Vec<u8>,
    /// `[total, width]`, where the caller multiplies by the weights.
    pub row_weights: Vec<u32>,
    /// `[total, width]`, in the flat layout.
    pub row_experts: Vec<i32>,
}

/// The record of a step: the fields of [`StepRecord`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is documented at the field of the same name")]
pub struct Record {
    pub step: u32,
    pub drained: bool,
    pub first_over: Option<u32>,
    pub required: Vec<u32>,
    pub required_by_dispatch: Vec<u32>,
    pub capacity: u32,
    pub windows: u32,
    pub delivered: u64,
    pub dropped: u64,
    pub invalid_ids: u64,
    pub repeated_ids: u64,
}

impl From<&StepRecord> for Record {
    fn from(record: &StepRecord) -> Self {
        Self {
            step: record.step,
            drained: record.drained,
            first_over: record.first_over,
            required: record.required.to_vec(),
            required_by_dispatch: record.required_by_dispatch.to_vec(),
            capacity: record.capacity,
            windows: record.windows,
            delivered: record.delivered,
            dropped: record.dropped,
            invalid_ids: record.invalid_ids,
            repeated_ids: record.repeated_ids,
        }
    }
}

/// What became of one step of a runner: the fields of [`StepReport`], and what this rank saw.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is documented at the field of the same name")]
pub struct Ran {
    pub run: RankRun,
    pub ended: Ended,
    pub discarded: Option<Record>,
    pub capacity_before: u32,
    pub capacity_after: u32,
    pub growths: u32,
    pub recordings: u32,
    pub recovered_rows: u64,
    pub blocking_calls: u64,
}

impl Ran {
    /// The report of a step that left `run`.
    pub fn new(run: RankRun, report: &StepReport) -> Self {
        Self {
            run,
            ended: match report.outcome {
                Outcome::Clean => Ended::Clean,
                Outcome::Recovered { replays, eager } => Ended::Recovered { replays, eager },
                Outcome::Dropped => Ended::Dropped,
                Outcome::Failed => Ended::Failed,
                Outcome::Eager => Ended::Eager,
            },
            discarded: report.discarded.as_ref().map(Record::from),
            capacity_before: report.capacity_before,
            capacity_after: report.capacity_after,
            growths: report.growths,
            recordings: report.recordings,
            recovered_rows: report.recovered_rows,
            blocking_calls: report.blocking_calls,
        }
    }
}

/// How a step ended: [`Outcome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is documented at the variant of the same name")]
pub enum Ended {
    Clean,
    Recovered { replays: u32, eager: bool },
    Dropped,
    Failed,
    Eager,
}

/// From what each rank saw of all steps to what all ranks saw of each step.
///
/// # Panics
///
/// If ranks saw different numbers of steps.
pub fn by_step<R: Clone>(by_rank: &[Vec<R>]) -> Vec<Vec<R>> {
    let steps = by_rank.first().map_or(0, Vec::len);
    assert!(by_rank.iter().all(|rank| rank.len() == steps), "ranks ran different numbers of steps");
    (0..steps).map(|step| by_rank.iter().map(|rank| rank[step].clone()).collect()).collect()
}

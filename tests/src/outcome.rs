//! What one rank saw of one step, as plain data.

use graph_ep::StepRecord;
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
}

/// What one rank saw of one layer. Rows are given as the bits of f32 numbers.
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
    /// `[total, hidden]`.
    pub rows: Vec<u32>,
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
            required: record.required.clone(),
            required_by_dispatch: record.required_by_dispatch.clone(),
            capacity: record.capacity,
            windows: record.windows,
            delivered: record.delivered,
            dropped: record.dropped,
            invalid_ids: record.invalid_ids,
            repeated_ids: record.repeated_ids,
        }
    }
}

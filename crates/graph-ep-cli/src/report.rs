//! Everything that a run has to say, as one value.
//!
//! The closing table and the plot are drawn from a [`Report`] alone, and it is what `--report`
//! writes, as JSON. Names and meanings of fields are an interface: they change only together with
//! [`SCHEMA_VERSION`].

mod timing;

use std::path::Path;

use serde::{Deserialize, Serialize};

pub use timing::{Timing, Timings};

use crate::args::{Dtype, GraphChoice, GrowthChoice, Mode};
use crate::output::{OutputError, json, write_json};

/// Version of the fields of [`Report`].
pub const SCHEMA_VERSION: u32 = 1;

/// How a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// All steps ran and all outputs were verified.
    Verified,
    /// All steps ran, but outputs differ from what they should be.
    Mismatch,
    /// The run ended early; [`Report::failure`] says why. Counts are those until then.
    Failed,
}

/// What a run did and found. Rows are padded rows of a receive buffer, unless said otherwise; lists
/// over ranks have one entry a rank, lists over steps one entry a step that ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// How the run ended.
    pub outcome: Outcome,
    /// Why it ended early, if it did.
    pub failure: Option<String>,

    /// Name of the trace or workload.
    pub routing: String,
    /// Where its decisions come from, in words.
    pub origin: Option<String>,
    /// What ranks ran on: `host` or `cuda`.
    pub backend: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of experts.
    pub experts: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// MoE layers of a step.
    pub layers: usize,
    /// Steps that were asked for; all ran unless the outcome is [`Outcome::Failed`].
    pub steps: usize,
    /// Tokens of a step, over all ranks.
    pub tokens: usize,
    /// The most tokens that a rank owns in a step.
    pub max_tokens_per_rank: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Element type of tokens on their way.
    pub dtype: Dtype,
    /// Seed of whatever was made up.
    pub seed: u64,

    /// What happens on overflow.
    pub mode: Mode,
    /// Whether growth invalidates a graph.
    pub graph: GraphChoice,
    /// How much to grow after an overflow.
    pub growth: GrowthChoice,
    /// Factor by which a requirement may rise before capacity is too small, growing between steps if
    /// so; none if off.
    pub look_ahead: Option<f64>,
    /// Steps that needed less, after which to shrink; none if off.
    pub shrink_after: Option<usize>,
    /// Initial capacity in multiples of the mean load.
    pub capacity_factor: f64,
    /// Rows to which each expert's rows are rounded up.
    pub alignment: usize,

    /// Rows that every rank had at the start.
    pub initial_capacity_rows: usize,
    /// Rows that each rank had at the end.
    pub final_capacity_rows: Vec<usize>,
    /// The most rows that each rank required in any step.
    pub peak_required_rows: Vec<usize>,
    /// The most rows that any routing could require of a rank.
    pub worst_case_rows: usize,
    /// Rows each rank required: `[steps][ranks]`, the maximum over the layers of a step.
    pub required_rows: Vec<Vec<usize>>,
    /// Rows each rank had when a step was first launched: `[steps][ranks]`.
    pub capacity_rows: Vec<Vec<usize>>,

    /// Positions of the steps in which some rank required more than it had, each once, ascending.
    /// Positions along the first dimension, not what the routing calls the steps.
    pub overflowed_steps: Vec<usize>,
    /// What happened in each of them, in the same order.
    pub overflows: Vec<Overflow>,
    /// Steps launched again, once a step and attempt.
    pub replays: u64,
    /// Growths, counted on each rank and summed.
    pub growths: u64,
    /// Graphs that each rank recorded.
    pub graph_recordings: Vec<u64>,
    /// The most windows that a dispatch was worked through in, over ranks and layers.
    pub rounds_per_step: u64,

    /// Rows (unpadded) missing from outputs that were kept.
    pub dropped_rows: u64,
    /// Rows (unpadded) missing in runs of a step that were discarded.
    pub recovered_rows: u64,
    /// Output values compared.
    pub verified_values: u64,
    /// Output values that differ, from the oracle by more than its tolerance or from eager mode in
    /// any bit.
    pub mismatched_values: u64,
    /// Blocking calls between launch and published record, in steps that did not overflow.
    pub host_syncs_in_clean_steps: u64,

    /// Memory of each rank.
    pub memory: Memory,
    /// How long things took.
    pub timings_us: Timings,
}

/// One step that overflowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overflow {
    /// Position of the step.
    pub step: usize,
    /// Rows required of each rank.
    pub required_rows: Vec<usize>,
    /// Rows that each rank had when the step was first launched.
    pub capacity_before: Vec<usize>,
    /// Rows that each rank had when it was last launched.
    pub capacity_after: Vec<usize>,
    /// How often the step was launched again.
    pub attempts: u32,
}

impl Overflow {
    /// Ranks that required more than they had.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        let both = self.required_rows.iter().zip(&self.capacity_before);
        both.enumerate().filter(|(_, (required, had))| required > had).map(|(rank, _)| rank)
    }
}

/// Bytes of one rank, all buffers of the memory report included: the largest over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// With the capacity at the start.
    pub initial_bytes: u64,
    /// With the capacity at the end.
    pub final_bytes: u64,
    /// With a capacity for the worst case.
    pub worst_case_bytes: u64,
    /// The limit that was set.
    pub limit_bytes: Option<u64>,
}

impl Report {
    /// The report as JSON, indented, ending in a line feed.
    pub fn to_json(&self) -> String {
        json(self)
    }

    /// Writes [`Report::to_json`] to `path`, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`OutputError`], if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), OutputError> {
        write_json(path, self)
    }
}

#[cfg(test)]
pub(crate) mod tests;

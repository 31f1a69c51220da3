//! Everything that there is to say of policies, as one value.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::costs::Costs;
use crate::output::{OutputError, write_json};

/// Name and version of the fields of [`Report`].
pub const SCHEMA: &str = "graph-ep policies, 1";

/// How policies did on routings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the program that wrote it.
    pub schema: String,
    /// Times that policies were judged with.
    pub costs: Costs,
    /// Initial capacity in multiples of the mean load.
    pub capacity_factor: f64,
    /// Rows to which each expert's rows are rounded up.
    pub alignment: usize,
    /// Seeds over which a workload is added up.
    pub seeds: Vec<u64>,
    /// A routing over a number of ranks, each.
    pub scenes: Vec<SceneScores>,
}

/// How each policy did on one routing over one number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SceneScores {
    /// Trace or workload.
    pub routing: String,
    /// Ranks.
    pub ranks: usize,
    /// Rows of every rank at the start.
    pub initial_rows: u32,
    /// The most that any routing could require of a rank.
    pub worst_case_rows: u32,
    /// One for each policy, in the same order in every scene.
    pub scores: Vec<Score>,
}

/// How one policy did. Rows are summed over ranks and seeds, times over seeds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The policy, in words.
    pub policy: String,
    /// Steps.
    pub steps: usize,
    /// Steps that were run again.
    pub replays: usize,
    /// Steps after which some capacity was changed.
    pub adjusted_steps: usize,
    /// Growths, counted on each rank.
    pub growths: usize,
    /// How often a rank shrank.
    pub shrinks: usize,
    /// Microseconds lost to replays, recording and mapping.
    pub lost_us: f64,
    /// Microseconds of the same steps if none overflowed.
    pub clean_us: f64,
    /// The most rows that were reserved at any time.
    pub reserved_rows: u64,
    /// What each rank required at most, which a clairvoyant reserves.
    pub peak_rows: u64,
    /// Rows held, times steps for which they were.
    pub row_steps: u64,
    /// The same of a clairvoyant.
    pub peak_row_steps: u64,
}

impl Score {
    /// Rows reserved beyond what ranks required at most; negative for one that never does.
    pub fn rows_beyond(&self) -> i64 {
        self.reserved_rows.cast_signed() - self.peak_rows.cast_signed()
    }

    /// Time lost over the time of the same steps if none overflowed.
    pub fn lost_share(&self) -> f64 {
        ratio(self.lost_us, self.clean_us)
    }

    /// Rows reserved over those that a clairvoyant reserves.
    pub fn reserved_ratio(&self) -> f64 {
        ratio(self.reserved_rows as f64, self.peak_rows as f64)
    }

    /// Rows held on average over those that a clairvoyant holds.
    pub fn held_ratio(&self) -> f64 {
        ratio(self.row_steps as f64, self.peak_row_steps as f64)
    }
}

/// Of nothing, nothing was lost and nothing too much.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// A policy over all scenes, each counting alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The policy, in words.
    pub policy: String,
    /// Steps replayed, over all scenes.
    pub replays: usize,
    /// Mean share of time lost.
    pub lost: f64,
    /// The largest, and the scene where it is.
    pub worst_lost: (f64, usize),
    /// Geometric mean of rows reserved over a clairvoyant's.
    pub reserved: f64,
    /// The largest, and the scene where it is.
    pub worst_reserved: (f64, usize),
    /// Geometric mean of rows held over a clairvoyant's.
    pub held: f64,
}

impl Report {
    /// How each policy did over all scenes, in the order in which they are.
    pub fn summaries(&self) -> Vec<Summary> {
        let policies = self.scenes.first().map_or(0, |scene| scene.scores.len());
        (0..policies).filter_map(|place| self.summary(place)).collect()
    }

    fn summary(&self, place: usize) -> Option<Summary> {
        let scores: Vec<&Score> =
            self.scenes.iter().filter_map(|scene| scene.scores.get(place)).collect();
        let policy = scores.first()?.policy.clone();
        let count = scores.len() as f64;
        let worst = |of: fn(&Score) -> f64| {
            let all = scores.iter().enumerate().map(|(scene, score)| (of(score), scene));
            all.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 0))
        };
        let mean = |of: fn(&Score) -> f64| {
            (scores.iter().map(|score| of(score).ln()).sum::<f64>() / count).exp()
        };
        Some(Summary {
            policy,
            replays: scores.iter().map(|score| score.replays).sum(),
            lost: scores.iter().map(|score| score.lost_share()).sum::<f64>() / count,
            worst_lost: worst(Score::lost_share),
            reserved: mean(Score::reserved_ratio),
            worst_reserved: worst(Score::reserved_ratio),
            held: mean(Score::held_ratio),
        })
    }

    /// Writes the report as JSON to `path`, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`OutputError`], if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), OutputError> {
        write_json(path, self)
    }
}

//! What to do about a step that overflowed, and within which limits.

use std::fmt;

use token_dispatch::RowShaping;

use crate::growth::{Adjustments, GrowthPolicy};

/// What to do when routing sends a rank more rows than it has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OverflowPolicy {
    /// Grow, record again and replay the step; after [`RecoverySettings::with_max_replays`] run it
    /// eagerly. No row is lost.
    #[default]
    Recover,
    /// Work through all rows with the capacity that there is, in as many windows as it takes, looped
    /// on the device. No row is lost and nothing replayed. With
    /// [`Adjustments::look_ahead`](crate::Adjustments) capacity grows between steps.
    Rounds,
    /// Keep what fitted, and report what did not.
    Drop,
    /// Report an error. The group goes on: the next step may be run. With
    /// [`Adjustments::look_ahead`](crate::Adjustments) capacity grows before it.
    Fail,
}

impl fmt::Display for OverflowPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OverflowPolicy::Recover => "recover",
            OverflowPolicy::Rounds => "rounds",
            OverflowPolicy::Drop => "drop",
            OverflowPolicy::Fail => "fail",
        })
    }
}

/// How a [`StepRunner`](crate::StepRunner) runs steps and recovers them.
#[derive(Clone, Copy, Debug)]
pub struct RecoverySettings {
    pub(crate) overflow: OverflowPolicy,
    pub(crate) growth: GrowthPolicy,
    pub(crate) adjustments: Adjustments,
    pub(crate) shaping: RowShaping,
    pub(crate) max_replays: u32,
    pub(crate) max_rows: Option<u32>,
    pub(crate) eager_max_rows: Option<u32>,
}

impl RecoverySettings {
    /// Recover with the default growth, in graphs shaped by capacity, replaying at most twice.
    pub fn new() -> Self {
        Self {
            overflow: OverflowPolicy::Recover,
            growth: GrowthPolicy::default(),
            adjustments: Adjustments::default(),
            shaping: RowShaping::Capacity,
            max_replays: 2,
            max_rows: None,
            eager_max_rows: None,
        }
    }

    /// What to do about an overflow.
    #[must_use]
    pub fn with_overflow(mut self, policy: OverflowPolicy) -> Self {
        self.overflow = policy;
        self
    }

    /// How much to grow.
    #[must_use]
    pub fn with_growth(mut self, policy: GrowthPolicy) -> Self {
        self.growth = policy;
        self
    }

    /// Growing ahead and shrinking between steps; by default what the growth policy does by itself, and
    /// that only under [`OverflowPolicy::Recover`].
    #[must_use]
    pub fn with_adjustments(mut self, adjustments: Adjustments) -> Self {
        self.adjustments = adjustments;
        self
    }

    /// Whether growth makes the recorded graph stale.
    #[must_use]
    pub fn with_shaping(mut self, shaping: RowShaping) -> Self {
        self.shaping = shaping;
        self
    }

    /// How often one step is replayed before it runs eagerly (default 2).
    #[must_use]
    pub fn with_max_replays(mut self, replays: u32) -> Self {
        self.max_replays = replays;
        self
    }

    /// The most rows that growth may reach (default: what the row set reserves).
    #[must_use]
    pub fn with_max_rows(mut self, rows: u32) -> Self {
        self.max_rows = Some(rows);
        self
    }

    /// The most rows that an eager run may reach (default: what the row set reserves). A step that is known
    /// to need more is refused rather than run eagerly.
    #[must_use]
    pub fn with_eager_max_rows(mut self, rows: u32) -> Self {
        self.eager_max_rows = Some(rows);
        self
    }

    /// What must be equal on all ranks, in words. Limits may differ, as memory does.
    pub(crate) fn fields(&self) -> Vec<(&'static str, String)> {
        vec![
            ("overflow", self.overflow.to_string()),
            ("growth", self.growth.to_string()),
            ("look_ahead", format!("{:?}", self.adjustments.look_ahead)),
            ("shrink_after", format!("{:?}", self.adjustments.shrink_after)),
            ("max_replays", self.max_replays.to_string()),
        ]
    }
}

impl Default for RecoverySettings {
    fn default() -> Self {
        Self::new()
    }
}

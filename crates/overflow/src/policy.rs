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
    overflow: OverflowPolicy,
    growth: GrowthPolicy,
    adjustments: Adjustments,
    shaping: RowShaping,
    max_replays: u32,
    max_rows: Option<u32>,
    eager_max_rows: Option<u32>,
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

    /// What to do about an overflow.
    pub fn overflow(&self) -> OverflowPolicy {
        self.overflow
    }

    /// How much to grow.
    pub fn growth(&self) -> GrowthPolicy {
        self.growth
    }

    /// Growing ahead and shrinking between steps, as far as it was asked for.
    pub fn adjustments(&self) -> Adjustments {
        self.adjustments
    }

    /// Whether growth makes the recorded graph stale.
    pub fn shaping(&self) -> RowShaping {
        self.shaping
    }

    /// How often one step is replayed before it runs eagerly.
    pub fn max_replays(&self) -> u32 {
        self.max_replays
    }

    /// The most rows that growth may reach; `None`: what the row set reserves.
    pub fn max_rows(&self) -> Option<u32> {
        self.max_rows
    }

    /// The most rows that an eager run may reach; `None`: what the row set reserves.
    pub fn eager_max_rows(&self) -> Option<u32> {
        self.eager_max_rows
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_were_set() {
        let plain = RecoverySettings::new();
        assert_eq!(
            (plain.overflow(), plain.growth()),
            (OverflowPolicy::Recover, GrowthPolicy::default())
        );
        assert_eq!(
            (plain.adjustments(), plain.shaping()),
            (Adjustments::default(), RowShaping::Capacity)
        );
        assert_eq!(
            (plain.max_replays(), plain.max_rows(), plain.eager_max_rows()),
            (2, None, None)
        );

        let ahead = Adjustments { look_ahead: Some(1.5), ..Adjustments::default() };
        let set = plain
            .with_overflow(OverflowPolicy::Rounds)
            .with_growth(GrowthPolicy::Exact)
            .with_adjustments(ahead)
            .with_shaping(RowShaping::DeviceCounted)
            .with_max_replays(7)
            .with_max_rows(64)
            .with_eager_max_rows(128);
        assert_eq!((set.overflow(), set.growth()), (OverflowPolicy::Rounds, GrowthPolicy::Exact));
        assert_eq!((set.adjustments(), set.shaping()), (ahead, RowShaping::DeviceCounted));
        assert_eq!(
            (set.max_replays(), set.max_rows(), set.eager_max_rows()),
            (7, Some(64), Some(128))
        );
    }
}

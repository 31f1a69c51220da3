//! The policies that are judged.

use std::fmt;
use std::num::NonZeroU32;

use graph_ep::{Adjustments, GrowthPolicy};

/// A way to choose capacities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Candidate {
    /// Knows beforehand what each rank will require at most, and reserves that.
    Clairvoyant,
    /// Knows beforehand what each step will require, and holds that.
    ClairvoyantEachStep,
    /// Reserves the worst case.
    WorstCase,
    /// Grows when a step overflows, and maybe between steps.
    Growing(GrowthPolicy, Adjustments),
}

/// What a candidate is like: those of a kind are marked alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Reference,
    Exact,
    Geometric,
    Headroom,
    Adaptive,
}

impl Candidate {
    /// All that are judged, references first.
    pub(super) fn all() -> Vec<Self> {
        let plain = |policy| Self::Growing(policy, Adjustments::default());
        let with = |policy, look_ahead, shrink_after| {
            let shrink_after = NonZeroU32::new(shrink_after);
            Self::Growing(policy, Adjustments { look_ahead, shrink_after, min_rows: 0 })
        };
        let headroom = |factor| GrowthPolicy::Headroom { factor };
        let geometric = |factor| GrowthPolicy::Geometric { factor };
        let adaptive = |factor| GrowthPolicy::Adaptive { factor };
        vec![
            Self::Clairvoyant,
            Self::ClairvoyantEachStep,
            Self::WorstCase,
            plain(GrowthPolicy::Exact),
            with(GrowthPolicy::Exact, Some(1.05), 0),
            with(GrowthPolicy::Exact, Some(1.25), 0),
            plain(geometric(1.25)),
            plain(geometric(1.5)),
            plain(geometric(2.0)),
            with(geometric(1.5), Some(1.1), 0),
            plain(headroom(1.0)),
            plain(headroom(1.1)),
            plain(headroom(1.2)),
            plain(headroom(1.5)),
            with(headroom(1.2), Some(1.05), 0),
            with(headroom(1.2), None, 4),
            with(headroom(1.2), None, 32),
            plain(adaptive(1.1)),
            plain(adaptive(1.2)),
            plain(adaptive(1.3)),
            with(adaptive(1.2), Some(1.0), 0),
            with(adaptive(1.2), Some(1.1), 0),
            with(adaptive(1.2), None, 4),
            with(adaptive(1.2), None, 32),
        ]
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Growing(GrowthPolicy::Exact, _) => Kind::Exact,
            Self::Growing(GrowthPolicy::Geometric { .. }, _) => Kind::Geometric,
            Self::Growing(GrowthPolicy::Headroom { .. }, _) => Kind::Headroom,
            Self::Growing(..) => Kind::Adaptive,
            _ => Kind::Reference,
        }
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = match self {
            Self::Clairvoyant => "clairvoyant".to_owned(),
            Self::ClairvoyantEachStep => "clairvoyant, each step".to_owned(),
            Self::WorstCase => "worst case".to_owned(),
            Self::Growing(policy, _) => policy.to_string(),
        };
        if let Self::Growing(_, adjustments) = self {
            if let Some(factor) = adjustments.look_ahead {
                text.push_str(&format!(", ahead × {factor}"));
            }
            if let Some(steps) = adjustments.shrink_after {
                text.push_str(&format!(", shrink {steps}"));
            }
        }
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn candidates_differ_in_name_and_the_default_is_among_them() {
        let all = Candidate::all();
        let names: HashSet<String> = all.iter().map(Candidate::to_string).collect();
        assert_eq!(names.len(), all.len());
        let default = Candidate::Growing(GrowthPolicy::default(), Adjustments::default());
        assert!(all.contains(&default));
        assert!(names.contains("headroom × 1.2, ahead × 1.05") && names.contains("worst case"));
    }

    #[test]
    fn every_setting_is_one_that_a_step_runner_takes() {
        for candidate in Candidate::all() {
            if let Candidate::Growing(policy, adjustments) = candidate {
                policy.validate().unwrap();
                adjustments.validate().unwrap();
            }
        }
    }
}

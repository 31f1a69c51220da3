//! What a rank's capacity becomes between two steps, when none of them overflowed or after that was
//! put right: growing ahead of need, and shrinking.

use std::num::NonZeroU32;

use super::peaks::Peaks;
use super::policy::{GrowthInput, GrowthPolicy};
use super::{GrowthError, clamp, round_up, scaled};

/// What may change a capacity between steps. The default is nothing, but for what the growth policy
/// does by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Adjustments {
    /// Grow ahead when `requirement · factor > capacity`; the factor is at least 1.
    ///
    /// The requirement is that of the step just ended: the rank's own, or under headroom growth that
    /// of the most loaded rank, since there all ranks have the same capacity for the same reason, but for
    /// one that can never be sent so much.
    /// Under adaptive growth it is that of the most loaded rank too, but of one that exceeds all others by
    /// far only as much as [`GrowthPolicy::OUTLIER`](super::GrowthPolicy::OUTLIER) times the largest of those;
    /// and none means [`GrowthPolicy::AHEAD`](super::GrowthPolicy::AHEAD) there.
    /// Capacity then covers `ceil(requirement · factor)` and whatever the growth policy would take.
    /// An earlier step needs no remembering: had it come as near, it would have grown capacity then.
    pub look_ahead: Option<f64>,
    /// Shrink after this many steps in a row whose greatest requirement on any rank, times
    /// [`Adjustments::SHRINK_HEADROOM`], was below capacity.
    ///
    /// Under adaptive growth the requirement that counts is what those steps make the rank
    /// [expect](super::GrowthPolicy::Adaptive), so that a rank shrinks though another, far above it, has more
    /// rows and needs them.
    ///
    /// Capacity then becomes that headroom over the peak of those steps. A step that overflowed, or
    /// after which capacity grew, begins the count again, and so does a shrink. A shrink has the next step
    /// recorded again, whatever it is [shaped by](token_dispatch::RowShaping), since its graph holds the rows
    /// that are given up.
    pub shrink_after: Option<NonZeroU32>,
    /// Shrinking never goes below this many rows, and under
    /// [`OverflowPolicy::Rounds`](crate::OverflowPolicy::Rounds) not below what one token may need.
    pub min_rows: u32,
}

impl Adjustments {
    /// What shrinking leaves over the peak it has seen.
    pub const SHRINK_HEADROOM: f64 = 1.2;

    /// The adjustments themselves, if the factor makes any.
    ///
    /// # Errors
    /// [`GrowthError::Factor`].
    pub fn validate(self) -> Result<Self, GrowthError> {
        match self.look_ahead {
            Some(factor) if !factor.is_finite() || factor < 1.0 => {
                Err(GrowthError::Factor { setting: "look-ahead", factor, least: 1.0 })
            }
            _ => Ok(self),
        }
    }

    /// Whether any is asked for.
    pub(crate) fn any(&self) -> bool {
        self.look_ahead.is_some() || self.shrink_after.is_some()
    }
}

/// One step, as one rank sees it when it has ended and any overflow has been recovered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndedStep<'r> {
    /// The capacity that this rank has now.
    pub(crate) own_capacity: u32,
    /// What the step required of each rank.
    pub(crate) required: &'r [u32],
    /// Whether the step overflowed on any rank before it was recovered.
    pub(crate) overflowed: bool,
    /// The alignment of an expert's rows, a power of two; zero counts as one.
    pub(crate) alignment: u32,
    /// The most rows that this rank may have.
    pub(crate) limit_rows: u32,
}

/// What one rank remembers of the steps so far: fed one step after another, it says what to expect,
/// and what [`Adjustments`] make of the capacity for the next.
#[derive(Debug, Clone)]
pub(crate) struct BetweenSteps {
    policy: GrowthPolicy,
    adjustments: Adjustments,
    look_ahead: Option<f64>,
    rank: usize,
    /// Since the beginning, or since the rank shrank.
    peaks: Peaks,
    /// Steps in a row that were well below capacity.
    below: u32,
    /// The peaks of those.
    below_peaks: Peaks,
}

impl BetweenSteps {
    /// That of `rank`, before the first step.
    ///
    /// # Errors
    /// [`GrowthError::Factor`] if policy or adjustments do not validate.
    pub(crate) fn new(
        policy: GrowthPolicy,
        adjustments: Adjustments,
        rank: usize,
    ) -> Result<Self, GrowthError> {
        let (policy, adjustments) = (policy.validate()?, adjustments.validate()?);
        let by_itself = matches!(policy, GrowthPolicy::Adaptive { .. });
        Ok(Self {
            policy,
            adjustments,
            look_ahead: adjustments.look_ahead.or(by_itself.then_some(GrowthPolicy::AHEAD)),
            rank,
            peaks: Peaks::default(),
            below: 0,
            below_peaks: Peaks::default(),
        })
    }

    /// The same without what the policy does by itself between steps: for steps that are not replayed
    /// when they overflow.
    #[must_use]
    pub(crate) fn only_as_asked(self) -> Self {
        Self { look_ahead: self.adjustments.look_ahead, ..self }
    }

    /// Notes what a run of a step required of each rank, before capacity grows for it.
    pub(crate) fn note(&mut self, required: &[u32]) {
        self.peaks.note(required);
    }

    /// What the rank has to [expect](Peaks::expected) by what was noted.
    pub(crate) fn expected(&self) -> u32 {
        self.peaks.expected(self.rank)
    }

    /// The capacity for the next step: what the rank has, unless an adjustment changes it.
    ///
    /// Never less than the step required. Growing ahead goes as far as the limit, rounded down to the
    /// alignment, lets it; nothing refuses, since nothing has overflowed.
    pub(crate) fn after_step(&mut self, step: EndedStep<'_>) -> u32 {
        self.note(step.required);
        let ahead = self.grown_ahead(step);
        if ahead > step.own_capacity {
            self.below = 0;
            return ahead;
        }
        self.shrunk(step)
    }

    fn grown_ahead(&self, step: EndedStep<'_>) -> u32 {
        let Some(factor) = self.look_ahead else {
            return step.own_capacity;
        };
        let own = step.required.get(self.rank).copied().unwrap_or(0);
        let peak = step.required.iter().copied().max().unwrap_or(0);
        let judged = match self.policy {
            GrowthPolicy::Headroom { .. } => peak,
            GrowthPolicy::Adaptive { .. } => own.max(peak.min(self.peaks.level())),
            GrowthPolicy::Exact | GrowthPolicy::Geometric { .. } => own,
        };
        if factor * f64::from(judged) <= f64::from(step.own_capacity) {
            return step.own_capacity;
        }
        // As if the step had required that much.
        let input = GrowthInput {
            own_capacity: step.own_capacity,
            own_required: clamp(scaled(factor, judged), 0, u32::MAX),
            global_peak_required: peak,
            expected: self.expected(),
            over: true,
            alignment: step.alignment,
            limit_rows: step.limit_rows,
        };
        clamp(self.policy.wish(input), step.own_capacity, input.most())
    }

    fn shrunk(&mut self, step: EndedStep<'_>) -> u32 {
        let Some(after) = self.adjustments.shrink_after else {
            return step.own_capacity;
        };
        if self.below == 0 {
            self.below_peaks.clear();
        }
        self.below_peaks.note(step.required);
        let peak = match self.policy {
            GrowthPolicy::Adaptive { .. } => self.below_peaks.expected(self.rank),
            _ => self.below_peaks.largest(),
        };
        let roomy = Adjustments::SHRINK_HEADROOM * f64::from(peak) < f64::from(step.own_capacity);
        if step.overflowed || !roomy {
            self.below = 0;
            return step.own_capacity;
        }
        self.below += 1;
        if self.below < after.get() {
            return step.own_capacity;
        }
        self.below = 0;
        // What was before is not expected any more.
        self.peaks.copy(&self.below_peaks);
        // Not below what looking ahead would at once grow back to.
        let factor = Adjustments::SHRINK_HEADROOM.max(self.look_ahead.unwrap_or(1.0));
        let rows = scaled(factor, peak).max(u64::from(self.adjustments.min_rows));
        clamp(round_up(rows, step.alignment), 0, step.own_capacity)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A step that did not overflow, and no limit that matters.
    fn step(own_capacity: u32, required: &[u32]) -> EndedStep<'_> {
        EndedStep { own_capacity, required, overflowed: false, alignment: 16, limit_rows: 100_000 }
    }

    fn look_ahead(policy: GrowthPolicy, factor: f64) -> BetweenSteps {
        let adjustments = Adjustments { look_ahead: Some(factor), ..Adjustments::default() };
        BetweenSteps::new(policy, adjustments, 0).unwrap()
    }

    fn shrink_after(steps: u32, min_rows: u32) -> BetweenSteps {
        let shrink_after = NonZeroU32::new(steps);
        let adjustments = Adjustments { shrink_after, min_rows, ..Adjustments::default() };
        BetweenSteps::new(GrowthPolicy::headroom(), adjustments, 0).unwrap()
    }

    #[test]
    fn nothing_happens_unless_asked_for() {
        for policy in [GrowthPolicy::Exact, GrowthPolicy::geometric(), GrowthPolicy::headroom()] {
            let mut between = BetweenSteps::new(policy, Adjustments::default(), 0).unwrap();
            for required in [0, 999, 1000] {
                assert_eq!(between.after_step(step(1000, &[required])), 1000);
            }
        }
    }

    #[test]
    fn looking_ahead_grows_when_the_requirement_comes_near() {
        let mut exact = look_ahead(GrowthPolicy::Exact, 1.25);
        // 1.25 · 800 = 1000: not above.
        assert_eq!(exact.after_step(step(1000, &[800])), 1000);
        // 1.25 · 816 = 1020, 1024 after the alignment.
        assert_eq!(exact.after_step(step(1000, &[816])), 1024);
        let mut geometric = look_ahead(GrowthPolicy::geometric(), 1.25);
        assert_eq!(geometric.after_step(step(1000, &[816])), 2000);
        // Headroom takes the larger of the two factors over the global peak: 1.25 · 816, 1.2 · 816.
        let mut headroom = look_ahead(GrowthPolicy::headroom(), 1.25);
        assert_eq!(headroom.after_step(step(1000, &[816])), 1024);
        let mut headroom = look_ahead(GrowthPolicy::headroom(), 1.1);
        assert_eq!(headroom.after_step(step(1000, &[912])), 1104);
    }

    #[test]
    fn headroom_looks_ahead_at_the_most_loaded_rank_and_the_others_at_themselves() {
        let idle = step(1000, &[16, 912]);
        assert_eq!(look_ahead(GrowthPolicy::headroom(), 1.1).after_step(idle), 1104);
        assert_eq!(look_ahead(GrowthPolicy::Exact, 1.1).after_step(idle), 1000);
        assert_eq!(look_ahead(GrowthPolicy::geometric(), 1.1).after_step(idle), 1000);
    }

    #[test]
    fn adaptive_growth_looks_ahead_by_itself_unless_steps_are_not_replayed() {
        let nothing = Adjustments::default();
        let of = |rank| BetweenSteps::new(GrowthPolicy::adaptive(), nothing, rank).unwrap();
        // 1.05 · 952 = 999.6: not above. 1.05 · 960 = 1008, and everybody takes 1.2 · 960 = 1152.
        for rank in [0, 1] {
            assert_eq!(of(rank).after_step(step(1000, &[800, 952])), 1000);
            assert_eq!(of(rank).after_step(step(1000, &[800, 960])), 1152);
            let mut asked = of(rank).only_as_asked();
            assert_eq!(asked.after_step(step(1000, &[800, 960])), 1000);
        }
        // An outlier grows alone; when it has moved, the other follows.
        let required: [&[u32]; 2] = [&[160, 960], &[960, 160]];
        let mut first = of(0);
        assert_eq!(first.after_step(step(1000, required[0])), 1000);
        assert_eq!(first.after_step(step(1000, required[1])), 1152);
        assert_eq!(of(1).after_step(step(1000, required[0])), 1152);
    }

    #[test]
    fn adaptive_growth_forgets_what_was_before_it_shrank() {
        let adjustments =
            Adjustments { shrink_after: NonZeroU32::new(2), ..Adjustments::default() };
        let mut between = BetweenSteps::new(GrowthPolicy::adaptive(), adjustments, 0).unwrap();
        between.note(&[1600, 1600]);
        assert_eq!(between.expected(), 1600);
        assert_eq!(between.after_step(step(1920, &[160, 1200])), 1920);
        assert_eq!(between.after_step(step(1920, &[320, 1200])), 480);
        assert_eq!(between.expected(), 400);
    }

    #[test]
    fn looking_ahead_stops_at_the_limit() {
        let limited = EndedStep { limit_rows: 1015, ..step(1000, &[992]) };
        assert_eq!(look_ahead(GrowthPolicy::Exact, 1.25).after_step(limited), 1008);
        let limited = EndedStep { limit_rows: 500, ..step(1000, &[992]) };
        assert_eq!(look_ahead(GrowthPolicy::Exact, 1.25).after_step(limited), 1000);
    }

    #[test]
    fn shrinking_waits_for_enough_steps_in_a_row() {
        let mut between = shrink_after(3, 0);
        // 1.2 · 800 = 960 < 1000, 1.2 · 848 = 1017.6 is not.
        assert_eq!(between.after_step(step(1000, &[800])), 1000);
        assert_eq!(between.after_step(step(1000, &[400])), 1000);
        assert_eq!(between.after_step(step(1000, &[848])), 1000);
        assert_eq!(between.after_step(step(1000, &[400])), 1000);
        assert_eq!(between.after_step(step(1000, &[416])), 1000);
        // The peak of the last three is 416: 499.2, 500 rows, 512 after the alignment.
        assert_eq!(between.after_step(step(1000, &[320])), 512);
        // The count begins again.
        assert_eq!(between.after_step(step(512, &[16])), 512);
        assert_eq!(between.after_step(step(512, &[16])), 512);
        assert_eq!(between.after_step(step(512, &[16])), 32);
    }

    #[test]
    fn an_overflowed_step_begins_the_count_again() {
        let mut between = shrink_after(2, 0);
        assert_eq!(between.after_step(step(1000, &[400])), 1000);
        let recovered = EndedStep { overflowed: true, ..step(1000, &[400]) };
        assert_eq!(between.after_step(recovered), 1000);
        assert_eq!(between.after_step(step(1000, &[400])), 1000);
        assert_eq!(between.after_step(step(1000, &[400])), 480);
    }

    #[test]
    fn shrinking_stops_at_its_floor_and_never_grows() {
        assert_eq!(shrink_after(1, 128).after_step(step(1000, &[0])), 128);
        assert_eq!(shrink_after(1, 2000).after_step(step(1000, &[0])), 1000);
        // 1.2 · 832 = 998.4 < 1000, but 1008 after the alignment.
        assert_eq!(shrink_after(1, 0).after_step(step(1000, &[832])), 1000);
    }

    #[test]
    fn shrinking_leaves_what_looking_ahead_would_take_back() {
        let adjustments = Adjustments {
            look_ahead: Some(1.5),
            shrink_after: NonZeroU32::new(1),
            ..Adjustments::default()
        };
        let mut between = BetweenSteps::new(GrowthPolicy::headroom(), adjustments, 0).unwrap();
        assert_eq!(between.after_step(step(1000, &[320])), 480);
        assert_eq!(between.after_step(step(480, &[320])), 480);
    }

    #[test]
    fn growing_ahead_begins_the_count_of_shrinking_again() {
        let adjustments = Adjustments {
            look_ahead: Some(2.0),
            shrink_after: NonZeroU32::new(2),
            ..Adjustments::default()
        };
        let mut between = BetweenSteps::new(GrowthPolicy::headroom(), adjustments, 0).unwrap();
        assert_eq!(between.after_step(step(1000, &[400])), 1000);
        assert_eq!(between.after_step(step(1000, &[600])), 1200);
        assert_eq!(between.after_step(step(1200, &[400])), 1200);
        assert_eq!(between.after_step(step(1200, &[400])), 800);
    }

    #[test]
    fn a_look_ahead_below_one_is_refused() {
        for factor in [0.9, f64::INFINITY, -2.0] {
            let adjustments = Adjustments { look_ahead: Some(factor), ..Adjustments::default() };
            assert_eq!(
                adjustments.validate(),
                Err(GrowthError::Factor { setting: "look-ahead", factor, least: 1.0 })
            );
        }
        let adjustments = Adjustments { look_ahead: Some(f64::NAN), ..Adjustments::default() };
        assert!(BetweenSteps::new(GrowthPolicy::Exact, adjustments, 0).is_err());
    }

    proptest! {
        #[test]
        fn the_next_capacity_covers_the_step_and_keeps_to_the_limit(
            peaks in prop::collection::vec(0_u32..4000, 1..40),
            policy in prop::sample::select(vec![
                GrowthPolicy::Exact, GrowthPolicy::geometric(), GrowthPolicy::headroom(),
                GrowthPolicy::adaptive(),
            ]),
            look_ahead in prop::option::of(1.0_f64..2.0),
            after in prop::option::of(1_u32..5),
            limit_rows in 4000_u32..9000,
        ) {
            let shrink_after = after.and_then(NonZeroU32::new);
            let adjustments = Adjustments { look_ahead, shrink_after, min_rows: 16 };
            let mut between = BetweenSteps::new(policy, adjustments, 0).unwrap();
            let mut capacity = 4000;
            for required in peaks {
                let overflowed = required > capacity;
                capacity = capacity.max(required);
                let required_of = [required];
                let step = EndedStep { overflowed, limit_rows, ..step(capacity, &required_of) };
                let next = between.after_step(step);
                prop_assert!(next >= required && next <= limit_rows);
                prop_assert!(next == capacity || next.is_multiple_of(16));
                if let Some(factor) = look_ahead {
                    let most = f64::from(limit_rows - limit_rows % 16);
                    prop_assert!(f64::from(next) >= (factor * f64::from(required)).min(most));
                }
                capacity = next;
            }
        }
    }
}

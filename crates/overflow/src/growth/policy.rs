//! What capacity a rank takes when a step overflowed.

use std::fmt;

use super::{GrowthError, clamp, round_down, round_up, scaled};

/// How capacities grow when a step overflowed on any rank.
///
/// All give a capacity that is rounded up to the alignment and to nothing else: capacity is a
/// logical number, and whatever a mapped page has beyond it is not capacity. Which is best depends
/// on how routing drifts. Exact reserves least and, where requirements creep up, overflows again and
/// again. Headroom reserves more on every rank and overflows a few times in all, because the load
/// that is on one rank today is on another tomorrow; where it stays on one, that is waste. Adaptive
/// waits until it has seen which of the two it is.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum GrowthPolicy {
    /// Each overflowing rank to its own requirement in that step; the others keep what they have.
    Exact,
    /// Each overflowing rank multiplies its capacity by `factor` until that covers its requirement;
    /// the others keep what they have.
    Geometric {
        /// At least [`GrowthPolicy::LEAST_GEOMETRIC`].
        factor: f64,
    },
    /// **All** ranks to `ceil(factor · peak)`, where the peak is the greatest requirement of any rank
    /// in that step; a rank that has more keeps it.
    Headroom {
        /// At least 1.
        factor: f64,
    },
    /// **All** ranks to `ceil(factor · expected)`, where a rank expects what it has been asked for itself
    /// so far, and what two ranks have: one that exceeds all others by more than [`GrowthPolicy::OUTLIER`]
    /// grows alone.
    ///
    /// It looks ahead by itself: between steps it grows in the same way once a requirement times
    /// [`GrowthPolicy::AHEAD`] exceeds the capacity, unless another factor was asked for.
    Adaptive {
        /// At least 1.
        factor: f64,
    },
}

impl GrowthPolicy {
    /// The factor of headroom growth and of adaptive growth unless another is given.
    pub const HEADROOM: f64 = 1.2;
    /// The factor by which adaptive growth looks ahead.
    pub const AHEAD: f64 = 1.05;
    /// In adaptive growth the largest peak counts for all ranks unless it exceeds the second largest by more
    /// than this factor. Then its rank is an outlier, and may stay the only one.
    pub const OUTLIER: f64 = 1.25;
    /// The factor of geometric growth unless another is given.
    pub const GEOMETRIC: f64 = 2.0;
    /// The least factor of geometric growth. It bounds the multiplications that a requirement can
    /// take: 2³² is fewer than 2300 of them away.
    pub const LEAST_GEOMETRIC: f64 = 1.01;

    /// Headroom growth by [`GrowthPolicy::HEADROOM`].
    pub const fn headroom() -> Self {
        Self::Headroom { factor: Self::HEADROOM }
    }

    /// Adaptive growth by [`GrowthPolicy::HEADROOM`].
    pub const fn adaptive() -> Self {
        Self::Adaptive { factor: Self::HEADROOM }
    }

    /// Geometric growth by [`GrowthPolicy::GEOMETRIC`].
    pub const fn geometric() -> Self {
        Self::Geometric { factor: Self::GEOMETRIC }
    }

    /// The policy itself, if its factor makes one.
    ///
    /// # Errors
    /// [`GrowthError::Factor`].
    pub fn validate(self) -> Result<Self, GrowthError> {
        let (setting, factor, least) = match self {
            Self::Exact => return Ok(self),
            Self::Geometric { factor } => ("geometric growth", factor, Self::LEAST_GEOMETRIC),
            Self::Headroom { factor } => ("headroom growth", factor, 1.0),
            Self::Adaptive { factor } => ("adaptive growth", factor, 1.0),
        };
        if factor.is_finite() && factor >= least {
            Ok(self)
        } else {
            Err(GrowthError::Factor { setting, factor, least })
        }
    }

    /// The capacity that a rank takes before an overflowed step is replayed.
    ///
    /// Let `most` be the limit rounded down to the alignment. The result is
    ///
    /// - *monotone*: never less than the rank has;
    /// - *sufficient*: at least what an overflowing rank required;
    /// - *bounded*: no more than `most`, to which a wish beyond it is clamped, unless the rank already
    ///   has more, which it keeps.
    ///
    /// This holds for any factor: one that [`validate`](Self::validate) would refuse wishes for no
    /// more than the requirement.
    ///
    /// # Errors
    /// [`GrowthRefusal`] if the rank overflowed and its requirement itself exceeds `most`. A rank that
    /// did not overflow never refuses.
    pub(crate) fn next_capacity(&self, input: GrowthInput) -> Result<u32, GrowthRefusal> {
        if input.over && input.own_required > input.most() {
            return Err(GrowthRefusal {
                required: input.own_required,
                budget: input.own_capacity,
                limit: input.limit_rows,
            });
        }
        Ok(clamp(self.wish(input), input.own_capacity, input.most()))
    }

    /// The capacity that the policy would take if there were no limit; zero for "no more than now".
    pub(super) fn wish(&self, input: GrowthInput) -> u64 {
        let required = if input.over { u64::from(input.own_required) } else { 0 };
        let wished = match *self {
            Self::Exact => required,
            Self::Geometric { factor } => multiplied(input.own_capacity, factor, required),
            Self::Headroom { factor } => scaled(factor, input.global_peak_required),
            Self::Adaptive { factor } => scaled(factor, input.expected),
        };
        round_up(wished.max(required), input.alignment)
    }
}

impl Default for GrowthPolicy {
    fn default() -> Self {
        Self::adaptive()
    }
}

impl fmt::Display for GrowthPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => write!(f, "exact"),
            Self::Geometric { factor } => write!(f, "geometric × {factor}"),
            Self::Headroom { factor } => write!(f, "headroom × {factor}"),
            Self::Adaptive { factor } => write!(f, "adaptive × {factor}"),
        }
    }
}

/// The first of `capacity · factor`, `capacity · factor²`, … that covers `required`, rounded up to
/// whole rows once at the end.
fn multiplied(capacity: u32, factor: f64, required: u64) -> u64 {
    let grows = capacity > 0 && factor >= GrowthPolicy::LEAST_GEOMETRIC;
    if required <= u64::from(capacity) || !grows {
        // Multiplying is not called for, or would not get there.
        return required;
    }
    let mut rows = f64::from(capacity);
    while rows < required as f64 {
        rows *= factor;
    }
    rows.ceil() as u64
}

/// What one rank knows when a step overflowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GrowthInput {
    /// The capacity that the step ran with on this rank.
    pub(crate) own_capacity: u32,
    /// What the step required of this rank.
    pub(crate) own_required: u32,
    /// The most that the step required of any rank.
    pub(crate) global_peak_required: u32,
    /// What this rank has to [expect](super::Peaks::expected) by the peaks of all ranks so far, those
    /// of the step included. Only adaptive growth asks.
    pub(crate) expected: u32,
    /// Whether this rank overflowed.
    pub(crate) over: bool,
    /// The alignment of an expert's rows, a power of two; zero counts as one.
    pub(crate) alignment: u32,
    /// The most rows that this rank may have.
    pub(crate) limit_rows: u32,
}

impl GrowthInput {
    /// The most that the rank can have: the limit rounded down, or what it has if that is more.
    pub(super) fn most(&self) -> u32 {
        round_down(self.limit_rows, self.alignment).max(self.own_capacity)
    }
}

/// A rank cannot grow as far as it has to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("requires {required} receive rows, has {budget}, may have {limit}")]
pub struct GrowthRefusal {
    /// Rows that the step required of the rank.
    pub required: u32,
    /// Rows that it has.
    pub budget: u32,
    /// Rows that it may have.
    pub limit: u32,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OVER: GrowthInput = GrowthInput {
        own_capacity: 640,
        own_required: 1008,
        global_peak_required: 1520,
        expected: 1260,
        over: true,
        alignment: 16,
        limit_rows: 4208,
    };
    const UNDER: GrowthInput = GrowthInput { own_required: 600, over: false, ..OVER };

    #[test]
    fn exact_grows_only_who_overflowed_and_only_so_far() {
        assert_eq!(GrowthPolicy::Exact.next_capacity(OVER), Ok(1008));
        assert_eq!(GrowthPolicy::Exact.next_capacity(UNDER), Ok(640));
        // 1001 is no multiple of 16: 1008.
        assert_eq!(
            GrowthPolicy::Exact.next_capacity(GrowthInput { own_required: 1001, ..OVER }),
            Ok(1008)
        );
    }

    #[test]
    fn geometric_multiplies_until_it_covers() {
        let doubled = GrowthPolicy::geometric();
        assert_eq!(doubled.next_capacity(OVER), Ok(1280));
        assert_eq!(doubled.next_capacity(GrowthInput { own_required: 1280, ..OVER }), Ok(1280));
        assert_eq!(doubled.next_capacity(GrowthInput { own_required: 1296, ..OVER }), Ok(2560));
        assert_eq!(doubled.next_capacity(UNDER), Ok(640));
        // 640 · 1.1⁵ = 1030.7…, 1031 rows, 1040 after the alignment; 1.1⁴ gives 937.
        let slow = GrowthPolicy::Geometric { factor: 1.1 };
        assert_eq!(slow.next_capacity(OVER), Ok(1040));
        // Nothing multiplied stays nothing.
        assert_eq!(doubled.next_capacity(GrowthInput { own_capacity: 0, ..OVER }), Ok(1008));
        // An odd capacity that suffices is left odd.
        let odd = GrowthInput { own_capacity: 641, ..UNDER };
        assert_eq!(doubled.next_capacity(odd), Ok(641));
    }

    #[test]
    fn headroom_grows_everybody_to_the_global_peak_and_more() {
        let headroom = GrowthPolicy::headroom();
        // 1.2 · 1520 = 1824, a multiple of 16.
        assert_eq!(headroom.next_capacity(OVER), Ok(1824));
        assert_eq!(headroom.next_capacity(UNDER), Ok(1824));
        // 1.2 · 1504 = 1804.8, 1805 rows, 1808 after the alignment.
        assert_eq!(
            headroom.next_capacity(GrowthInput { global_peak_required: 1504, ..OVER }),
            Ok(1808)
        );
        // Who has more keeps it.
        let rich = GrowthInput { own_capacity: 2000, ..UNDER };
        assert_eq!(headroom.next_capacity(rich), Ok(2000));
    }

    #[test]
    fn adaptive_grows_everybody_to_what_it_expects() {
        let adaptive = GrowthPolicy::default();
        // 1.2 · 1260 = 1512, 1520 after the alignment; the peak of another rank counts for nothing.
        assert_eq!(adaptive.next_capacity(OVER), Ok(1520));
        assert_eq!(adaptive.next_capacity(UNDER), Ok(1520));
        let modest = GrowthInput { expected: 500, ..UNDER };
        assert_eq!(adaptive.next_capacity(modest), Ok(640));
        // Who overflowed gets what it required, whatever was expected.
        assert_eq!(adaptive.next_capacity(GrowthInput { expected: 500, ..OVER }), Ok(1008));
    }

    #[test]
    fn a_wish_is_clamped_to_the_limit_and_a_requirement_is_not() {
        let headroom = GrowthPolicy::headroom();
        // 1610 rounded down to 16 is 1600: less than the wish of 1824, more than the requirement.
        let limited = GrowthInput { limit_rows: 1610, ..OVER };
        assert_eq!(headroom.next_capacity(limited), Ok(1600));
        assert_eq!(GrowthPolicy::geometric().next_capacity(limited), Ok(1280));
        // 1010 rounds down to 1008, which just fits; 1007 rounds down to 992, which does not.
        assert_eq!(headroom.next_capacity(GrowthInput { limit_rows: 1010, ..OVER }), Ok(1008));
        let refusal = GrowthRefusal { required: 1008, budget: 640, limit: 1007 };
        for policy in all() {
            let limited = GrowthInput { limit_rows: 1007, ..OVER };
            assert_eq!(policy.next_capacity(limited), Err(refusal));
        }
        assert_eq!(refusal.to_string(), "requires 1008 receive rows, has 640, may have 1007");
        // A rank that did not overflow takes what it can get.
        assert_eq!(headroom.next_capacity(GrowthInput { limit_rows: 1007, ..UNDER }), Ok(992));
        // A limit below what the rank has takes nothing away.
        assert_eq!(headroom.next_capacity(GrowthInput { limit_rows: 100, ..UNDER }), Ok(640));
    }

    #[test]
    fn the_largest_numbers_do_not_wrap() {
        let huge = GrowthInput {
            own_capacity: u32::MAX - 31,
            own_required: u32::MAX - 15,
            global_peak_required: u32::MAX - 15,
            expected: u32::MAX - 15,
            limit_rows: u32::MAX,
            ..OVER
        };
        for policy in all() {
            assert_eq!(policy.next_capacity(huge), Ok(u32::MAX - 15));
            // One row more could only be had unaligned.
            let more = GrowthInput { own_required: u32::MAX, ..huge };
            assert!(policy.next_capacity(more).is_err());
        }
    }

    #[test]
    fn factors_are_validated_by_name_and_value() {
        assert!(GrowthPolicy::Exact.validate().is_ok());
        assert!(GrowthPolicy::Headroom { factor: 1.0 }.validate().is_ok());
        assert!(GrowthPolicy::Geometric { factor: 1.01 }.validate().is_ok());
        for factor in [0.99, -1.0, f64::INFINITY] {
            assert_eq!(
                GrowthPolicy::Headroom { factor }.validate(),
                Err(GrowthError::Factor { setting: "headroom growth", factor, least: 1.0 })
            );
        }
        assert!(GrowthPolicy::Headroom { factor: f64::NAN }.validate().is_err());
        let error = GrowthPolicy::Geometric { factor: 1.0 }.validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "geometric growth factor is 1, must be finite and at least 1.01"
        );
    }

    fn all() -> [GrowthPolicy; 4] {
        let (geometric, headroom) = (GrowthPolicy::geometric(), GrowthPolicy::headroom());
        [GrowthPolicy::Exact, geometric, headroom, GrowthPolicy::adaptive()]
    }

    fn policies() -> impl Strategy<Value = GrowthPolicy> {
        let factor = prop_oneof![4 => 1.01_f64..4.0, 1 => any::<f64>()];
        prop_oneof![
            Just(GrowthPolicy::Exact),
            factor.clone().prop_map(|factor| GrowthPolicy::Geometric { factor }),
            factor.clone().prop_map(|factor| GrowthPolicy::Headroom { factor }),
            factor.prop_map(|factor| GrowthPolicy::Adaptive { factor }),
        ]
    }

    fn rows() -> impl Strategy<Value = u32> {
        prop_oneof![4 => 0_u32..5000, 1 => any::<u32>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn growth_is_monotone_sufficient_bounded_and_aligned(
            policy in policies(),
            own_capacity in rows(),
            own_required in rows(),
            others in rows(),
            expected in rows(),
            limit_rows in rows(),
            alignment in prop::sample::select(vec![0_u32, 1, 2, 16, 128]),
        ) {
            let over = own_required > own_capacity;
            let global_peak_required = others.max(own_required);
            let input = GrowthInput {
                own_capacity,
                own_required,
                global_peak_required,
                expected: expected.max(own_required),
                over,
                alignment,
                limit_rows,
            };
            let usable = limit_rows - limit_rows % alignment.max(1);
            match policy.next_capacity(input) {
                Ok(next) => {
                    prop_assert!(next >= own_capacity);
                    prop_assert!(next <= usable || next == own_capacity);
                    prop_assert!(next.is_multiple_of(alignment.max(1)) || next == own_capacity);
                    if over {
                        prop_assert!(next >= own_required);
                    } else if matches!(policy, GrowthPolicy::Exact | GrowthPolicy::Geometric { .. }) {
                        prop_assert_eq!(next, own_capacity);
                    }
                }
                Err(refusal) => {
                    prop_assert!(over && own_required > usable);
                    let (required, budget, limit) = (own_required, own_capacity, limit_rows);
                    prop_assert_eq!(refusal, GrowthRefusal { required, budget, limit });
                }
            }
        }

        #[test]
        fn a_second_run_of_the_same_step_does_not_grow_again(
            policy in policies(), own_capacity in 1_u32..3000, own_required in 1_u32..9000,
        ) {
            let input = GrowthInput {
                own_capacity,
                own_required,
                global_peak_required: own_required,
                expected: own_required,
                over: own_required > own_capacity,
                alignment: 16,
                limit_rows: 1 << 20,
            };
            let grown = policy.next_capacity(input).unwrap();
            let again = GrowthInput { own_capacity: grown, over: own_required > grown, ..input };
            prop_assert!(!again.over);
            prop_assert_eq!(policy.next_capacity(again), Ok(grown));
        }
    }
}

//! What ranks have been asked for so far, and what a rank has to expect from that.

use super::policy::GrowthPolicy;
use super::scaled;

/// The most that each rank has been asked for, over the steps that were noted.
///
/// All ranks hold the requirements of all ranks when a step has ended, so all of them have the same
/// peaks, and expect the same, without asking each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Peaks {
    of_ranks: Vec<u32>,
}

impl Peaks {
    /// Notes what a run of a step required of each rank. Allocates when it sees a rank for the first
    /// time. To note a step twice makes no difference.
    pub(super) fn note(&mut self, required: &[u32]) {
        if self.of_ranks.len() < required.len() {
            self.of_ranks.resize(required.len(), 0);
        }
        for (peak, &required) in self.of_ranks.iter_mut().zip(required) {
            *peak = required.max(*peak);
        }
    }

    /// Forgets everything but how many ranks there are.
    pub(super) fn clear(&mut self) {
        self.of_ranks.fill(0);
    }

    /// Takes over what `other` knows, in place of everything known so far.
    pub(super) fn copy(&mut self, other: &Self) {
        self.of_ranks.clone_from(&other.of_ranks);
    }

    /// The peak of a rank; zero if nothing was noted of it.
    pub(super) fn of(&self, rank: usize) -> u32 {
        self.of_ranks.get(rank).copied().unwrap_or(0)
    }

    /// The largest of all.
    pub(super) fn largest(&self) -> u32 {
        self.of_ranks.iter().copied().max().unwrap_or(0)
    }

    /// What any rank may come to need: the largest peak, or
    /// [`OUTLIER`](GrowthPolicy::OUTLIER) times the second largest if that is less.
    ///
    /// Load that has been on two ranks will be on a third; load that has been on one alone may be
    /// there to stay, as where one rank holds the experts that everybody likes.
    pub(super) fn level(&self) -> u32 {
        let (first, second) = self.of_ranks.iter().fold((0, 0), |(first, second), &peak| {
            if peak > first { (peak, first) } else { (first, second.max(peak)) }
        });
        if self.of_ranks.len() < 2 {
            return first;
        }
        u32::try_from(scaled(GrowthPolicy::OUTLIER, second)).unwrap_or(u32::MAX).min(first)
    }

    /// What `rank` has to expect: its own peak, or the level if that is more.
    pub(super) fn expected(&self, rank: usize) -> u32 {
        self.of(rank).max(self.level())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peaks(required: &[&[u32]]) -> Peaks {
        let mut peaks = Peaks::default();
        required.iter().for_each(|required| peaks.note(required));
        peaks
    }

    #[test]
    fn an_outlier_counts_for_itself_until_a_second_rank_follows() {
        let mut peaks = peaks(&[&[160, 1600, 320, 16]]);
        assert_eq!((peaks.largest(), peaks.level()), (1600, 400));
        assert_eq!([0, 1, 2, 3].map(|rank| peaks.expected(rank)), [400, 1600, 400, 400]);
        peaks.note(&[1400, 16, 16, 16]);
        assert_eq!(peaks.level(), 1600);
        assert_eq!([0, 1, 2, 3].map(|rank| peaks.expected(rank)), [1600; 4]);
    }

    #[test]
    fn ranks_that_differ_little_share_one_level() {
        assert_eq!(peaks(&[&[768, 992, 800]]).level(), 992);
        // 1.25 · 801 = 1001.25, rounded up; 1.25 · 800 is exactly the peak.
        assert_eq!(peaks(&[&[801, 1002]]).level(), 1002);
        assert_eq!(peaks(&[&[800, 1001]]).level(), 1000);
    }

    #[test]
    fn a_single_rank_and_none_have_a_level_too() {
        assert_eq!(peaks(&[&[48], &[32]]).expected(0), 48);
        assert_eq!((peaks(&[]).expected(3), peaks(&[]).largest()), (0, 0));
        assert_eq!(peaks(&[&[u32::MAX, u32::MAX]]).level(), u32::MAX);
    }

    proptest! {
        #[test]
        fn what_is_expected_lies_between_the_own_peak_and_the_largest(
            steps in (1_usize..6).prop_flat_map(|ranks| {
                prop::collection::vec(prop::collection::vec(any::<u32>(), ranks), 1..5)
            }),
        ) {
            let mut peaks = Peaks::default();
            for required in &steps {
                let before = peaks.clone();
                peaks.note(required);
                for (rank, required) in required.iter().enumerate() {
                    let expected = peaks.expected(rank);
                    prop_assert!(expected >= *required && expected <= peaks.largest());
                    // It never falls, whatever comes.
                    prop_assert!(expected >= before.expected(rank));
                }
            }
            let noted = peaks.clone();
            steps.iter().for_each(|required| peaks.note(required));
            prop_assert_eq!(noted, peaks);
        }
    }
}

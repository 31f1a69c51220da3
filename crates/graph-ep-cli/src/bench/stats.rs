//! Samples of a time, summed up so that a few slow ones change nothing.

use serde::{Deserialize, Serialize};

/// Quantiles of samples, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// Half of the samples are below.
    pub median_us: f64,
    /// A tenth of the samples are below.
    pub p10_us: f64,
    /// A tenth of the samples are above.
    pub p90_us: f64,
    /// How many samples there are.
    pub samples: usize,
}

impl Quantiles {
    /// Of samples in any order, in microseconds, to the nanosecond. A quantile between two samples
    /// lies between them in proportion. `None` if there are no samples, or one is no finite number.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        if sorted.is_empty() || sorted.iter().any(|us| !us.is_finite()) {
            return None;
        }
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            median_us: quantile(&sorted, 0.5),
            p10_us: quantile(&sorted, 0.1),
            p90_us: quantile(&sorted, 0.9),
            samples: sorted.len(),
        })
    }

    /// Each time multiplied by `factor`: for a sample that holds several operations.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Self {
        let Self { median_us, p10_us, p90_us, samples } = self;
        Self {
            median_us: thousandths(median_us * factor),
            p10_us: thousandths(p10_us * factor),
            p90_us: thousandths(p90_us * factor),
            samples,
        }
    }
}

/// The slowest rank of each sample: `ranks` has a list of samples for each rank, and a sample that
/// some rank lacks is left out.
pub fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let samples = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let of_all = |sample: usize| ranks.iter().map(move |rank| rank[sample]);
    // A maximum of floats would pass over what is no number.
    (0..samples)
        .map(|sample| {
            let later = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
            of_all(sample).fold(f64::NEG_INFINITY, later)
        })
        .collect()
}

/// The value below which the share `at` of `sorted` lies. `sorted` is not empty.
fn quantile(sorted: &[f64], at: f64) -> f64 {
    let place = at * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    thousandths(below + (above - below) * place.fract())
}

/// Rounds to three places: what lies beyond is below what any clock here can tell, and a number that
/// is short in a file is read back as it was.
pub(super) fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantiles_lie_where_they_should() {
        let quantiles = Quantiles::of((0..=10).rev().map(f64::from)).unwrap();
        assert_eq!(quantiles, Quantiles { median_us: 5.0, p10_us: 1.0, p90_us: 9.0, samples: 11 });
        let even = Quantiles::of([4.0, 1.0]).unwrap();
        assert_eq!((even.p10_us, even.median_us, even.p90_us), (1.3, 2.5, 3.7));
        assert_eq!(Quantiles::of([]), None);
        let one = Quantiles::of([7.0]).unwrap();
        assert_eq!((one.p10_us, one.median_us, one.p90_us), (7.0, 7.0, 7.0));
        assert_eq!(one.scaled(0.5).median_us, 3.5);
    }

    #[test]
    fn the_median_does_not_depend_on_outliers_and_nonsense_is_no_time() {
        let of = |last| Quantiles::of([1.0, 2.0, 3.0, 4.0, last]).map(|of| of.median_us);
        assert_eq!([of(5.0), of(1e9)], [Some(3.0); 2]);
        assert_eq!([of(f64::NAN), of(f64::INFINITY)], [None; 2]);
    }

    #[test]
    fn the_slowest_rank_counts_in_each_sample() {
        assert_eq!(slowest(&[vec![1.0, 5.0, 2.0], vec![3.0, 4.0]]), [3.0, 5.0]);
        assert!(slowest(&[vec![f64::NAN], vec![4.0]])[0].is_nan());
        assert!(slowest(&[vec![4.0], vec![f64::NAN]])[0].is_nan());
        assert!(slowest(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn quantiles_are_ordered_and_among_the_samples(samples in prop::collection::vec(0.0..1e9_f64, 1..60)) {
            let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
            let most = samples.iter().copied().fold(0.0, f64::max);
            let q = Quantiles::of(samples).unwrap();
            // Up to rounding.
            prop_assert!(least <= q.p10_us + 1e-3 && q.p10_us <= q.median_us);
            prop_assert!(q.median_us <= q.p90_us && q.p90_us <= most + 1e-3);
        }
    }
}

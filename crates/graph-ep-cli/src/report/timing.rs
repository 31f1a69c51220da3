//! How long things took.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Durations of the parts of a run, each on the rank that took longest. What did not happen is
/// absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// A step that did not overflow, from its launch to its published record.
    pub clean_step: Option<Timing>,
    /// A step that overflowed, from its first launch to the published record of its last. What that
    /// takes depends on the mode: in `recover` growth, recording and every replay; in `rounds` all
    /// trips of its loops, and in `drop` one launch that left rows out; in `static` the launch that
    /// ended the run. In `eager` no step overflows.
    pub recovered_step: Option<Timing>,
    /// Recording a graph.
    pub recording: Option<Timing>,
    /// Growing the receive buffer of a rank.
    pub growing: Option<Timing>,
}

/// Durations of one kind, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// How many were measured.
    pub count: usize,
    /// The shortest.
    pub min: f64,
    /// The median: of an even number, the mean of the middle two.
    pub median: f64,
    /// The longest.
    pub max: f64,
}

impl Timing {
    /// Sums up `durations`, in any order. `None` if there are none.
    pub fn of(durations: impl IntoIterator<Item = Duration>) -> Option<Self> {
        let mut sorted: Vec<Duration> = durations.into_iter().collect();
        sorted.sort_unstable();
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let count = sorted.len();
        let us = |duration: Duration| duration.as_secs_f64() * 1e6;
        let median = (us(sorted[(count - 1) / 2]) + us(sorted[count / 2])) / 2.0;
        Some(Self { count, min: us(min), median, max: us(max) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(us: &[u64]) -> Option<Timing> {
        Timing::of(us.iter().map(|&us| Duration::from_micros(us)))
    }

    #[test]
    fn the_median_does_not_depend_on_order_or_outliers() {
        let close = |timing: Timing, median: f64| (timing.median - median).abs() < 1e-9;
        assert!(close(of(&[9, 1, 1000]).unwrap(), 9.0));
        assert!(close(of(&[1000, 1, 9, 3]).unwrap(), 6.0));
        let one = of(&[7]).unwrap();
        assert!(one.count == 1 && one.min == one.max && close(one, 7.0));
        assert_eq!(of(&[]), None);
    }
}

//! What is drawn, before it is drawn.

use std::collections::BTreeSet;

use crate::report::Report;

/// One rank over the steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankSeries {
    pub(super) rank: usize,
    /// Rows required, one entry a step.
    pub(super) required: Vec<usize>,
    /// Rows there when the step was first launched, one entry a step.
    pub(super) capacity: Vec<usize>,
    /// Steps that required more than was there, with what they required.
    pub(super) overflows: Vec<Mark>,
    /// Steps after which there were more rows, with how many.
    pub(super) growths: Vec<Mark>,
    /// Steps after which there were fewer rows, with how many.
    pub(super) shrinks: Vec<Mark>,
}

/// A step, and the rows at which something of it is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) step: usize,
    pub(super) rows: usize,
}

impl RankSeries {
    /// The series of every rank. Of a list that is too short, what is missing is not drawn.
    pub(super) fn of(report: &Report) -> Vec<Self> {
        (0..report.ranks).map(|rank| Self::of_rank(report, rank)).collect()
    }

    fn of_rank(report: &Report, rank: usize) -> Self {
        let column = |rows: &[Vec<usize>]| -> Vec<usize> {
            rows.iter().map_while(|ranks| ranks.get(rank).copied()).collect()
        };
        let mut series = Self {
            rank,
            required: column(&report.required_rows),
            capacity: column(&report.capacity_rows),
            ..Self::default()
        };
        for overflow in &report.overflows {
            if overflow.ranks().any(|r| r == rank) {
                let rows = overflow.required_rows[rank];
                series.overflows.push(Mark { step: overflow.step, rows });
            }
        }
        // What came after a step is what the next one, or the end, found.
        let next = series.capacity.iter().skip(1).chain(report.final_capacity_rows.get(rank));
        for (step, (&rows, &next)) in series.capacity.iter().zip(next).enumerate() {
            let mark = Mark { step, rows: next };
            match next.cmp(&rows) {
                std::cmp::Ordering::Greater => series.growths.push(mark),
                std::cmp::Ordering::Less => series.shrinks.push(mark),
                std::cmp::Ordering::Equal => {}
            }
        }
        series
    }

    /// The most rows of anything drawn.
    pub(super) fn most(&self) -> usize {
        let marks = [&self.overflows, &self.growths, &self.shrinks].into_iter().flatten();
        let rows = self.required.iter().chain(&self.capacity).copied();
        rows.chain(marks.map(|mark| mark.rows)).max().unwrap_or(0)
    }
}

/// All ranks in one, for when there are too many to tell apart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Overlay {
    /// The largest requirement and the largest capacity of each step. Marks stand above everything
    /// else, one for each step in which the thing happened on any rank.
    pub(super) series: [RankSeries; 1],
    /// The smallest capacity of each step.
    pub(super) least_capacity: Vec<usize>,
}

/// Lays all `ranks` over each other.
pub(super) fn overlay(ranks: &[RankSeries]) -> Overlay {
    let steps = ranks.iter().map(|rank| rank.required.len()).max().unwrap_or(0);
    let over_ranks = |of: fn(&RankSeries) -> &[usize], pick: fn(usize, usize) -> usize| {
        let at =
            |step: usize| ranks.iter().filter_map(|rank| of(rank).get(step).copied()).reduce(pick);
        (0..steps).map_while(at).collect::<Vec<_>>()
    };
    let most = ranks.iter().map(RankSeries::most).max().unwrap_or(0);
    // One line of marks above the other, in twentieths of the height.
    let line = |of: fn(&RankSeries) -> &[Mark], twentieths: usize| {
        let marks = ranks.iter().flat_map(of).map(|mark| mark.step).collect::<BTreeSet<_>>();
        let rows = most + most / 20 * twentieths;
        marks.into_iter().map(|step| Mark { step, rows }).collect::<Vec<_>>()
    };
    let series = RankSeries {
        rank: 0,
        required: over_ranks(|rank| &rank.required, usize::max),
        capacity: over_ranks(|rank| &rank.capacity, usize::max),
        overflows: line(|rank| &rank.overflows, 3),
        growths: line(|rank| &rank.growths, 2),
        shrinks: line(|rank| &rank.shrinks, 1),
    };
    Overlay { series: [series], least_capacity: over_ranks(|rank| &rank.capacity, usize::min) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Overflow;
    use crate::report::tests::built_in_sample;

    /// Two ranks over three steps: rank 1 overflows in step 0 and grows, rank 0 shrinks at the end.
    fn report() -> Report {
        Report {
            ranks: 2,
            required_rows: vec![vec![10, 30], vec![12, 30], vec![9, 2]],
            capacity_rows: vec![vec![20, 20], vec![20, 32], vec![20, 32]],
            final_capacity_rows: vec![16, 32],
            overflows: vec![Overflow {
                step: 0,
                required_rows: vec![10, 30],
                capacity_before: vec![20, 20],
                capacity_after: vec![20, 32],
                attempts: 1,
            }],
            ..built_in_sample()
        }
    }

    #[test]
    fn events_are_found_on_their_rank() {
        let ranks = RankSeries::of(&report());
        assert_eq!(ranks[0].required, [10, 12, 9]);
        assert_eq!(ranks[0].shrinks, [Mark { step: 2, rows: 16 }]);
        assert!(ranks[0].overflows.is_empty() && ranks[0].growths.is_empty());
        assert_eq!(ranks[1].overflows, [Mark { step: 0, rows: 30 }]);
        assert_eq!(ranks[1].growths, [Mark { step: 0, rows: 32 }]);
        assert_eq!((ranks[0].most(), ranks[1].most()), (20, 32));
    }

    #[test]
    fn the_overlay_takes_extremes_and_marks_every_step_once_above_them() {
        let ranks = RankSeries::of(&report());
        let overlay = overlay(&[&ranks[..], &ranks[..]].concat());
        let [all] = &overlay.series;
        assert_eq!(all.required, [30, 30, 9]);
        assert_eq!(all.capacity, [20, 32, 32]);
        assert_eq!(overlay.least_capacity, [20, 20, 20]);
        assert_eq!(all.overflows, [Mark { step: 0, rows: 35 }]);
        assert_eq!(all.growths, [Mark { step: 0, rows: 34 }]);
        assert_eq!(all.shrinks, [Mark { step: 2, rows: 33 }]);
    }

    #[test]
    fn short_lists_are_drawn_as_far_as_they_go() {
        let mut report = report();
        report.required_rows[1].pop();
        report.capacity_rows.clear();
        report.final_capacity_rows.clear();
        let ranks = RankSeries::of(&report);
        assert_eq!(ranks[1].required, [30]);
        assert!(ranks[1].capacity.is_empty() && ranks[1].growths.is_empty());
    }
}

//! What is drawn, before it is drawn.

use super::super::report::shape::{Shapes, operation};
use super::super::report::{Axis, Case, Entry, Op};
use crate::plot::mark::MARKS;

/// Results that differ in nothing but their size.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) name: String,
    /// In the order of sizes.
    pub(super) points: Vec<Point>,
}

/// One result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) size: f64,
    pub(super) median: f64,
    pub(super) p10: f64,
    pub(super) p90: f64,
    /// Microseconds at the limit, if there is one.
    pub(super) limit: Option<f64>,
    /// Of the limit, that was reached.
    pub(super) share: Option<f64>,
}

/// Series of one operation, as many as there are marks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) op: Op,
    pub(super) series: Vec<Series>,
}

/// The rows of a figure, in the order in which operations occur.
pub(super) fn rows(entries: &[Entry], axis: Axis, shapes: &Shapes) -> Vec<Row> {
    let mut ops: Vec<(Op, Vec<(Case, Series)>)> = Vec::new();
    for entry in entries {
        let op = entry.case.op;
        let place = ops.iter().position(|(other, _)| *other == op).unwrap_or_else(|| {
            ops.push((op, Vec::new()));
            ops.len() - 1
        });
        let all = &mut ops[place].1;
        let key = axis.erased(&entry.case);
        let place = all.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
            let name = [operation(&key), shapes.name(&key)];
            let name = name.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>();
            all.push((key, Series { name: name.join(", "), points: Vec::new() }));
            all.len() - 1
        });
        all[place].1.points.extend(Point::of(entry, axis));
    }
    let mut rows = Vec::new();
    for (op, all) in ops {
        let mut series: Vec<Series> = all.into_iter().map(|(_, series)| series).collect();
        for series in &mut series {
            series.points.sort_by(|a, b| a.size.total_cmp(&b.size));
        }
        let chunks = series.chunks(MARKS);
        rows.extend(chunks.map(|chunk| Row { op, series: chunk.to_vec() }));
    }
    rows
}

impl Point {
    /// None for what a logarithmic axis has no place for.
    fn of(entry: &Entry, axis: Axis) -> Option<Self> {
        let positive = |value: f64| (value > 0.0 && value.is_finite()).then_some(value);
        let median = positive(entry.time.median_us)?;
        Some(Self {
            size: positive(axis.value(&entry.case) as f64)?,
            median,
            p10: positive(entry.time.p10_us).unwrap_or(median),
            p90: positive(entry.time.p90_us).unwrap_or(median),
            limit: entry.limit_us.and_then(positive),
            share: entry.limit_share.filter(|share| share.is_finite() && *share >= 0.0),
        })
    }
}

impl Row {
    fn points(&self) -> impl Iterator<Item = &Point> {
        self.series.iter().flat_map(|series| &series.points)
    }

    /// From the least size to the largest.
    pub(super) fn sizes(&self) -> (f64, f64) {
        extent(self.points().map(|point| point.size))
    }

    /// From the shortest time to the longest, limits included.
    pub(super) fn times(&self) -> (f64, f64) {
        let of = |point: &Point| [Some(point.p10), Some(point.p90), point.limit];
        extent(self.points().flat_map(of).flatten())
    }

    /// Whether there is a share to show.
    pub(super) fn has_shares(&self) -> bool {
        self.points().any(|point| point.share.is_some())
    }

    /// The largest share, and 1 at least: the limit itself.
    pub(super) fn most_share(&self) -> f64 {
        self.points().filter_map(|point| point.share).fold(1.0, f64::max)
    }

    /// Limits as lines, each once: results by others, or with other parameters, often share one.
    pub(super) fn limits(&self) -> Vec<Vec<(f64, f64)>> {
        let mut lines: Vec<Vec<(f64, f64)>> = Vec::new();
        for series in &self.series {
            let of = |point: &Point| point.limit.map(|limit| (point.size, limit));
            let line: Vec<_> = series.points.iter().filter_map(of).collect();
            if !line.is_empty() && !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines
    }
}

/// The least and the most; from 1 to 1 if there is nothing.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let all = values.fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), value| {
        (least.min(value), most.max(value))
    });
    if all.0 <= all.1 { all } else { (1.0, 1.0) }
}

#[cfg(test)]
mod tests {
    use super::super::super::report::tests::{case, entry, sample};
    use super::*;

    fn shapes(entries: &[Entry]) -> Shapes {
        let erased: Vec<Case> =
            entries.iter().map(|entry| Axis::Tokens.erased(&entry.case)).collect();
        Shapes::of(&erased)
    }

    #[test]
    fn results_that_differ_in_tokens_are_one_line() {
        let results = sample().results;
        let rows = rows(&results, Axis::Tokens, &shapes(&results));
        let ops: Vec<Op> = rows.iter().map(|row| row.op).collect();
        assert_eq!(ops, [Op::Dispatch, Op::Combine, Op::Grow]);
        let names: Vec<&str> = rows[0].series.iter().map(|series| &*series.name).collect();
        assert_eq!(names, ["dispatch, captured", "dispatch (nccl), captured"]);
        let tokens: Vec<f64> = rows[0].series[0].points.iter().map(|point| point.size).collect();
        assert_eq!(tokens, [1.0, 128.0, 4096.0]);
        assert_eq!(rows[0].sizes(), (1.0, 4096.0));
        assert_eq!(rows[0].limits().len(), 2);
        assert!(rows[2].limits().is_empty());
        assert_eq!([&rows[0], &rows[2]].map(Row::has_shares), [true, false]);
    }

    #[test]
    fn limits_that_are_the_same_are_drawn_once_and_points_are_in_order() {
        let first = entry(case(Op::Pair, 8), 10.0);
        let mut second = entry(Case { sms: 24, ..case(Op::Pair, 8) }, 10.0);
        second.time.median_us = 40.0;
        let results = [entry(case(Op::Pair, 64), 20.0), first, second];
        let rows = rows(&results, Axis::Tokens, &shapes(&results));
        assert_eq!(rows[0].series[0].points[0].size, 8.0);
        assert_eq!(rows[0].limits(), [vec![(8.0, 5.0), (64.0, 10.0)], vec![(8.0, 5.0)]]);
    }

    #[test]
    fn too_many_series_take_several_rows_and_nothing_is_lost() {
        let of = |sms| entry(Case { sms, ..case(Op::Pair, 8) }, 10.0);
        let results: Vec<Entry> = (0..MARKS as u32 + 1).map(of).collect();
        let rows = rows(&results, Axis::Tokens, &shapes(&results));
        let lengths: Vec<usize> = rows.iter().map(|row| row.series.len()).collect();
        assert_eq!(lengths, [MARKS, 1]);
        assert_eq!(rows[0].limits().len(), 1);
    }

    #[test]
    fn what_has_no_place_on_the_axes_is_left_out() {
        let mut results = vec![entry(case(Op::Pair, 8), 0.0), entry(case(Op::Pair, 0), 5.0)];
        let mut odd = entry(case(Op::Pair, 4), 5.0);
        odd.time.p10_us = -1.0;
        odd.limit_us = Some(0.0);
        results.push(odd);
        let rows = rows(&results, Axis::Tokens, &shapes(&results));
        let [point] = rows[0].series[0].points[..] else { panic!("one point") };
        assert_eq!((point.size, point.p10, point.limit), (4.0, 5.0, None));
    }
}

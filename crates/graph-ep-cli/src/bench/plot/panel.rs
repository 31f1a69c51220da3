//! One panel: lines with marks over a size.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::series::{Point, Row};
use crate::bench::report::Axis;
use crate::plot::mark::Mark;

/// Shades, from the page to the ink, far enough apart to survive a bad printer.
const GRID: RGBColor = RGBColor(228, 228, 228);
const EDGE: RGBColor = RGBColor(125, 125, 125);

/// Pixels of a dash and a gap.
const DASH: (u32, u32) = (5, 4);

/// What a vertical axis shows.
struct Scale {
    caption: &'static str,
    unit: &'static str,
    range: Range<f64>,
    /// How many numbers are named, about.
    labels: usize,
    /// What a number of the axis is in words; empty if it is not to be named.
    label: fn(f64) -> String,
}

/// Draws median times, tenth and ninetieth percentiles, and limits; both axes in powers of two.
pub(super) fn times<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    row: &Row,
    size: Axis,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let range = powers(row.times());
    let axis = Scale {
        caption: "median time, p10 to p90; dashed: at the limit",
        unit: "microseconds",
        labels: labels(&range, 8),
        range,
        label: power,
    };
    let limits = row.limits().into_iter();
    let dashed = limits.map(|line| line.into_iter().map(|(x, y)| (x.log2(), y.log2())).collect());
    let point =
        |point: &Point| Some((point.median.log2(), Some((point.p10.log2(), point.p90.log2()))));
    draw(area, (row, size), &axis, dashed.collect(), point)
}

/// Draws how much of its limit each operation reached.
pub(super) fn shares<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    row: &Row,
    size: Axis,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let axis = Scale {
        caption: "share of the limit; dashed: the limit",
        unit: "percent",
        // A little air, so that marks at the top are whole.
        range: 0.0..row.most_share() * 1.08,
        labels: 8,
        label: |value| format!("{:.0}", value * 100.0),
    };
    let Range { start, end } = powers(row.sizes());
    draw(area, (row, size), &axis, vec![vec![(start, 1.0), (end, 1.0)]], |point| {
        point.share.map(|share| (share, None))
    })
}

/// Height, and the ends of its spread.
type Drawn = (f64, Option<(f64, f64)>);

fn draw<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    (row, size): (&Row, Axis),
    axis: &Scale,
    dashed: Vec<Vec<(f64, f64)>>,
    point: impl Fn(&Point) -> Option<Drawn>,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let across = powers(row.sizes());
    let mut chart = ChartBuilder::on(area)
        .margin_right(24)
        .margin_left(8)
        .caption(axis.caption, ("sans-serif", 15))
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(across.clone(), axis.range.clone())?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(EDGE)
        .x_labels(labels(&across, 14))
        .y_labels(axis.labels)
        .x_label_formatter(&|value| power(*value))
        .y_label_formatter(&|value| (axis.label)(*value))
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 14))
        .x_desc(size.title())
        .y_desc(axis.unit)
        .draw()?;
    let (dash, gap) = DASH;
    for line in dashed {
        chart.draw_series(DashedLineSeries::new(line, dash, gap, BLACK.stroke_width(1)))?;
    }
    for (place, series) in row.series.iter().enumerate() {
        let drawn: Vec<(f64, Drawn)> =
            series.points.iter().filter_map(|p| Some((p.size.log2(), point(p)?))).collect();
        let line: Vec<(f64, f64)> = drawn.iter().map(|&(x, (y, _))| (x, y)).collect();
        let spreads = drawn.iter().filter_map(|&(x, (_, spread))| spread.map(|s| (x, s)));
        chart.draw_series(spreads.map(|(x, (low, high))| {
            PathElement::new(vec![(x, low), (x, high)], BLACK.stroke_width(1))
        }))?;
        chart.draw_series([PathElement::new(line.clone(), BLACK.stroke_width(1))])?;
        for at in line {
            chart.plotting_area().draw(&Mark::of(place).at(at))?;
        }
    }
    Ok(())
}

/// The range of an axis in powers of two: between whole ones, with a little air at both ends.
fn powers((least, most): (f64, f64)) -> Range<f64> {
    (least.log2() - 0.25).floor()..(most.log2() + 0.25).ceil()
}

/// How many labels an axis has, `most` at most: where it spans few powers, none between them.
fn labels(range: &Range<f64>, most: usize) -> usize {
    // A cast of floats stays within the type.
    ((range.end - range.start) as usize + 1).min(most)
}

/// Two to the power of a whole number; nothing between.
fn power(exponent: f64) -> String {
    let near = exponent.round();
    if (exponent - near).abs() > 1e-6 {
        return String::new();
    }
    let value = near.exp2();
    if near < 0.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_powers_are_named() {
        assert_eq!([0.0, 7.0, 12.0, 6.5].map(power), ["1", "128", "4096", ""]);
        assert_eq!([-1.0, -0.0].map(power), ["0.50", "1"]);
    }

    #[test]
    fn an_axis_has_a_length_even_for_one_value() {
        let range = powers((8.0, 8.0));
        assert_eq!((range.start, range.end), (2.0, 4.0));
        assert_eq!([labels(&range, 14), labels(&range, 2)], [3, 2]);
    }
}

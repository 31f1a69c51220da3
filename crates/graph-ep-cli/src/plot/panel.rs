//! One panel: an area, a line, and marks.

use plotters::coord::Shift;
use plotters::prelude::*;

use super::series::RankSeries;

/// Shades, from the page to the ink, far enough apart to survive a bad printer.
pub(super) const AREA: RGBColor = RGBColor(205, 205, 205);
pub(super) const EDGE: RGBColor = RGBColor(125, 125, 125);
const GRID: RGBColor = RGBColor(228, 228, 228);

/// Pixels: strokes, and the radius of a mark.
pub(super) const CAPACITY_STROKE: u32 = 2;
pub(super) const MARK: i32 = 5;

/// What all panels of a figure share.
pub(super) struct Frame {
    /// How many steps there are.
    pub(super) steps: usize,
    /// Rows at the top.
    pub(super) rows: f64,
    /// How many steps are numbered, at most.
    pub(super) ticks: usize,
}

/// Draws `series` into `area`, with a dashed line for `least_capacity`, which may be empty.
///
/// `named` says whether this panel names the vertical and the horizontal axis for its neighbours.
pub(super) fn draw<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    frame: &Frame,
    title: &str,
    series: &RankSeries,
    least_capacity: &[usize],
    named: (bool, bool),
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    // Nothing to show still is a panel: axes of one step and one row.
    let (steps, rows) = (frame.steps.max(1) as f64, frame.rows.max(1.0));
    let mut chart = ChartBuilder::on(area)
        .margin_right(24)
        .margin_left(8)
        .caption(title, ("sans-serif", 16))
        .x_label_area_size(if named.1 { 40 } else { 24 })
        .y_label_area_size(64)
        .build_cartesian_2d(-0.5..steps - 0.5, 0.0..rows)?;
    let whole = |value: &f64| {
        let near = value.round();
        if near >= 0.0 && (value - near).abs() < 1e-6 {
            format!("{near:.0}")
        } else {
            String::new()
        }
    };
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(EDGE)
        .x_labels(frame.ticks)
        .y_labels(6)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15));
    if named.0 {
        mesh.y_desc("rows");
    }
    if named.1 {
        mesh.x_desc("step");
    }
    mesh.draw()?;

    let required = outline(&series.required);
    if let (Some(&(first, _)), Some(&(last, _))) = (required.first(), required.last()) {
        let mut area = required.clone();
        area.extend([(last, 0.0), (first, 0.0)]);
        chart.draw_series([Polygon::new(area, AREA.filled())])?;
    }
    chart.draw_series([PathElement::new(required, EDGE.stroke_width(1))])?;
    let (dash, gap) = LEAST_DASH;
    let least = outline(least_capacity);
    chart.draw_series(DashedLineSeries::new(least, dash, gap, least_style()))?;
    let capacity = outline(&series.capacity);
    chart.draw_series([PathElement::new(capacity, BLACK.stroke_width(CAPACITY_STROKE))])?;

    // Above the step, so as not to lie on the growth that answers it.
    for mark in &series.overflows {
        let at = EmptyElement::at((mark.step as f64, mark.rows as f64));
        chart.draw_series([at + Cross::new((0, -2 * MARK), MARK, overflow_style())])?;
    }
    // Between the step that asked for it and the next, where the line rises or falls.
    let after = |step: usize| step as f64 + 0.5;
    let growths = series.growths.iter();
    chart
        .draw_series(growths.map(|m| {
            TriangleMarker::new((after(m.step), m.rows as f64), MARK + 1, BLACK.filled())
        }))?;
    for mark in &series.shrinks {
        let at = EmptyElement::at((after(mark.step), mark.rows as f64));
        chart.draw_series([at + shrink_mark()])?;
    }
    Ok(())
}

/// Pixels of a dash and a gap of the line of the least capacity.
pub(super) const LEAST_DASH: (u32, u32) = (5, 4);

/// The stroke of that line.
pub(super) fn least_style() -> ShapeStyle {
    BLACK.stroke_width(1)
}

/// The stroke of an overflow's cross.
pub(super) fn overflow_style() -> ShapeStyle {
    BLACK.stroke_width(2)
}

/// The mark of shrinking: a hollow triangle on its point, in pixels around its place.
pub(super) fn shrink_mark() -> PathElement<(i32, i32)> {
    let corners = vec![(-MARK - 1, -MARK), (MARK + 1, -MARK), (0, MARK + 1), (-MARK - 1, -MARK)];
    PathElement::new(corners, BLACK.stroke_width(1))
}

/// A level stretch for each step, from half a step before it to half a step after.
fn outline(rows: &[usize]) -> Vec<(f64, f64)> {
    let mut path = Vec::with_capacity(rows.len() * 2);
    for (step, &rows) in rows.iter().enumerate() {
        let (step, rows) = (step as f64, rows as f64);
        path.extend([(step - 0.5, rows), (step + 0.5, rows)]);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outline_is_level_within_a_step() {
        assert_eq!(outline(&[3, 5]), [(-0.5, 3.0), (0.5, 3.0), (0.5, 5.0), (1.5, 5.0)]);
        assert!(outline(&[]).is_empty());
    }
}

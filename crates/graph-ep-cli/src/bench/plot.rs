//! The plot: for each operation its time over a size, with its limit, and beside it how much of the limit
//! was reached. The size is that of which there are most, unless another is asked for.
//!
//! Nothing is told by colour: lines are told apart by the shape of their marks, and a limit is dashed.
//! The file is SVG and names no font but `sans-serif`. Text is never measured, so drawing needs no
//! fonts on the machine; the viewer finds one.

mod panel;
mod series;

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::shape::Shapes;
use super::report::{Axis, Case, Report};
use crate::output::write_whole;
pub use crate::plot::PlotError;
use crate::plot::mark::Mark;
use series::Row;

/// Pixels: width of the figure, height of its title, of a row's panels and of a line of its legend.
const WIDTH: u32 = 1200;
const HEAD: u32 = 96;
const PANEL: u32 = 320;
const LINE: u32 = 20;
const MARGIN: i32 = 24;

/// Draws `report` over a size and writes the SVG to `path`, whole or not at all.
///
/// # Errors
///
/// [`PlotError`] says whether drawing or writing failed.
pub fn write(report: &Report, over: Option<Axis>, path: &Path) -> Result<(), PlotError> {
    write_whole(path, render(report, over)?.as_bytes())?;
    Ok(())
}

/// Draws `report` over a size, as SVG.
///
/// # Errors
///
/// [`PlotError::Draw`], should the drawing library refuse.
pub fn render(report: &Report, over: Option<Axis>) -> Result<String, PlotError> {
    let cases = || report.results.iter().map(|entry| &entry.case);
    let axis = over.unwrap_or_else(|| Axis::of(cases()));
    let erased: Vec<Case> = cases().map(|case| axis.erased(case)).collect();
    let shapes = Shapes::of(&erased);
    let rows = series::rows(&report.results, axis, &shapes);
    let heights: Vec<u32> =
        rows.iter().map(|row| PANEL + LINE * (row.series.len() as u32 + 1)).collect();

    let mut svg = String::new();
    {
        let size = (WIDTH, HEAD + heights.iter().sum::<u32>());
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, mut rest) = root.split_vertically(HEAD);
        heading(&head, report, &shapes)?;
        for (row, height) in rows.iter().zip(heights) {
            let (area, below) = rest.split_vertically(height);
            draw_row(&area, row, axis)?;
            rest = below;
        }
        root.present()?;
    }
    Ok(svg)
}

fn heading<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    report: &Report,
    shapes: &Shapes,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let lines = [
        (22, "Median time of an operation, and its share of the limit".to_owned()),
        (15, format!("{}; all: {}", report.hardware.join("; "), shapes.shared())),
        (15, format!("commit {}, {}: {}", report.commit, report.date, report.command)),
    ];
    let mut y = 12;
    for (size, line) in lines {
        // Names may come from a file's, and XML knows no control characters.
        let line = line.replace(|c: char| c.is_control(), "?");
        area.draw(&Text::new(line, (MARGIN, y), ("sans-serif", size).into_font()))?;
        y += size + 10;
    }
    Ok(())
}

/// A row of the figure: the legend of its series above two panels.
fn draw_row<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    row: &Row,
    size: Axis,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let (legend, panels) = area.split_vertically(LINE * (row.series.len() as u32 + 1));
    let title = ("sans-serif", 18).into_font();
    legend.draw(&Text::new(row.op.to_string(), (MARGIN, 0), title))?;
    for (place, series) in row.series.iter().enumerate() {
        let y = LINE as i32 * (place as i32 + 1) + LINE as i32 / 2;
        let line = [(MARGIN, y), (MARGIN + 48, y)];
        legend.draw(&PathElement::new(line.to_vec(), BLACK.stroke_width(1)))?;
        legend.draw(&Mark::of(place).at((MARGIN + 24, y)))?;
        let at = (MARGIN + 60, y - 8);
        let name = series.name.replace(|c: char| c.is_control(), "?");
        legend.draw(&Text::new(name, at, ("sans-serif", 14).into_font()))?;
    }
    let (left, right) = panels.split_horizontally(WIDTH / 2);
    panel::times(&left, row, size)?;
    // What has no limit has no share of one either.
    if row.has_shares() { panel::shares(&right, row, size) } else { Ok(()) }
}

#[cfg(test)]
mod tests;

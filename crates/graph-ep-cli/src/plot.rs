//! The plot: rows required against capacity, step by step, of each rank.
//!
//! Up to [`MAX_PANELS`] ranks have a panel each, all on one scale; more share a single panel, which
//! shows the extremes over ranks. Nothing is told by colour: requirement is an area, capacity a
//! heavy line, and overflow, growth and shrinking are marks of different shape.
//!
//! The file is SVG and names no font but `sans-serif`. Text is never measured, so drawing needs no
//! fonts on the machine; the viewer finds one.

mod legend;
pub(crate) mod mark;
mod panel;
mod series;

use std::io;
use std::path::Path;

use plotters::prelude::*;

use crate::output::{OutputError, write_whole};
use crate::report::Report;
use panel::Frame;
use series::{RankSeries, overlay};

/// The most ranks that have a panel each.
pub const MAX_PANELS: usize = 64;

/// Pixels: width of the figure, height of its title and legend, margin beside them.
const WIDTH: u32 = 1200;
const HEAD: u32 = 118;
const MARGIN: i32 = 24;

/// How panels are arranged.
struct Grid {
    columns: usize,
    rows: usize,
    /// Pixels of one panel.
    height: u32,
}

impl Grid {
    fn of(panels: usize) -> Self {
        let (columns, height) = match panels {
            0 | 1 => (1, 480),
            2 => (1, 300),
            3..=8 => (2, 190),
            _ => (4, 150),
        };
        Self { columns, rows: panels.div_ceil(columns).max(1), height }
    }
}

/// Why there is no plot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// It could not be drawn.
    #[error("the plot cannot be drawn")]
    Draw(#[from] DrawingAreaErrorKind<io::Error>),
    /// It could not be written.
    #[error(transparent)]
    Output(#[from] OutputError),
}

/// Draws `report` and writes the SVG to `path`, whole or not at all.
///
/// # Errors
///
/// [`PlotError`] says whether drawing or writing failed.
pub fn write(report: &Report, path: &Path) -> Result<(), PlotError> {
    write_whole(path, render(report)?.as_bytes())?;
    Ok(())
}

/// Draws `report` as SVG.
///
/// # Errors
///
/// [`PlotError::Draw`], should the drawing library refuse.
pub fn render(report: &Report) -> Result<String, PlotError> {
    let ranks = RankSeries::of(report);
    let overlaid = (ranks.len() > MAX_PANELS).then(|| overlay(&ranks));
    let grid = Grid::of(if overlaid.is_some() { 1 } else { ranks.len() });
    let height = HEAD + grid.height * grid.rows as u32;

    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, body) = root.split_vertically(HEAD);
        heading(&head, report)?;
        legend::draw(&head, (MARGIN, HEAD as i32 - 20), overlaid.is_some())?;

        let drawn = overlaid.as_ref().map_or(&ranks[..], |overlay| &overlay.series[..]);
        let most = drawn.iter().map(RankSeries::most).max().unwrap_or(0);
        // A little air, so that marks at the top are whole.
        let frame = Frame {
            steps: report.required_rows.len(),
            rows: most as f64 * 1.2,
            ticks: if grid.columns > 2 { 7 } else { 14 },
        };
        let areas = body.split_evenly((grid.rows, grid.columns));
        for (place, (area, series)) in areas.iter().zip(drawn).enumerate() {
            let title = match &overlaid {
                Some(_) => format!("all {} ranks", ranks.len()),
                None => format!("rank {}", series.rank),
            };
            let least = overlaid.as_ref().map_or(&[][..], |overlay| &overlay.least_capacity);
            // Axes are named once for neighbours: at the left, and at the foot of each column.
            let named = (place % grid.columns == 0, place + grid.columns >= drawn.len());
            panel::draw(area, &frame, &title, series, least, named)?;
        }
        root.present()?;
    }
    Ok(svg)
}

fn heading<DB: DrawingBackend>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    report: &Report,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let Report { ranks, mode, growth, graph, capacity_factor, alignment, .. } = report;
    let Report { experts, top_k, layers, tokens, backend, seed, .. } = report;
    // A name may come from a file's, and XML knows no control characters.
    let name = report.routing.replace(|c: char| c.is_control(), "?");
    let lines = [
        (
            22,
            format!(
                "Rows required against capacity: {name} on {ranks} {} ({backend})",
                if *ranks == 1 { "rank" } else { "ranks" }
            ),
        ),
        (
            15,
            format!(
                "mode {mode}, growth {growth}, graph {graph}, capacity factor {capacity_factor} \
                 ({} rows), alignment {alignment}; {experts} experts, top-{top_k}, {layers} \
                 layers, {tokens} tokens a step, seed {seed}",
                report.initial_capacity_rows,
            ),
        ),
        (
            15,
            format!(
                "{} of {} steps overflowed, {} replays, {} growths; the worst case would be {} \
                 rows on each rank",
                report.overflowed_steps.len(),
                report.required_rows.len(),
                report.replays,
                report.growths,
                report.worst_case_rows,
            ),
        ),
    ];
    let mut y = 12;
    for (size, line) in lines {
        area.draw(&Text::new(line, (MARGIN, y), ("sans-serif", size).into_font()))?;
        y += size + 10;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;

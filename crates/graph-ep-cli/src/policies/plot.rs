//! The plot: for each routing, time lost over rows held, a mark for each policy.
//!
//! The best place is the lower left. Nothing is told by colour: policies of a kind share a mark, and
//! numbers tell them apart. The file is SVG and names no font but `sans-serif`; text is never measured.

use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::candidate::{Candidate, Kind};
use super::report::{Report, SceneScores, Score};
use crate::output::write_whole;
use crate::plot::PlotError;
use crate::plot::mark::Mark;

/// Pixels: width of the figure, of its title, of a panel's height and of a line of the legend.
const WIDTH: u32 = 1200;
const HEAD: u32 = 88;
const PANEL: u32 = 340;
const LINE: u32 = 20;
const MARGIN: i32 = 24;

/// Panels beside each other, and columns of the legend.
const COLUMNS: usize = 3;

/// Shades.
const GRID: RGBColor = RGBColor(228, 228, 228);
const EDGE: RGBColor = RGBColor(125, 125, 125);

/// Percent of time lost, in powers of two, that stands for nothing at all.
const NOTHING: f64 = -4.0;

/// Draws `report` and writes the SVG to `path`, whole or not at all.
pub(super) fn write(report: &Report, path: &Path) -> Result<(), PlotError> {
    write_whole(path, render(report)?.as_bytes())?;
    Ok(())
}

/// What one mark stands for: the policies that did alike, and how.
#[derive(Clone, Debug, PartialEq)]
struct Spot {
    /// Rows held in multiples of a clairvoyant's, and percent of time lost; both in powers of two.
    at: (f64, f64),
    /// From 1.
    policies: Vec<usize>,
}

fn render(report: &Report) -> Result<String, PlotError> {
    let mut routings: Vec<&str> = Vec::new();
    for scene in &report.scenes {
        if !routings.contains(&scene.routing.as_str()) {
            routings.push(&scene.routing);
        }
    }
    let kinds: Vec<(String, Kind)> =
        Candidate::all().iter().map(|one| (one.to_string(), one.kind())).collect();
    let legend = LINE * (kinds.len().div_ceil(COLUMNS) as u32 + 1);
    let rows = routings.len().div_ceil(COLUMNS).max(1);
    let mut svg = String::new();
    {
        let size = (WIDTH, HEAD + legend + PANEL * rows as u32);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let (head, rest) = root.split_vertically(HEAD + legend);
        heading(&head, report, &kinds)?;
        let areas = rest.split_evenly((rows, COLUMNS));
        let all: Vec<Vec<Spot>> = routings
            .iter()
            .map(|routing| {
                let of = report.scenes.iter().filter(|scene| scene.routing == *routing);
                spots(&of.collect::<Vec<_>>())
            })
            .collect();
        let across = extent(all.iter().flatten().map(|spot| spot.at.0));
        let up = extent(all.iter().flatten().map(|spot| spot.at.1));
        for ((area, routing), spots) in areas.iter().zip(&routings).zip(&all) {
            panel(area, routing, spots, &kinds, (across.clone(), NOTHING - 0.6..up.end))?;
        }
        root.present()?;
    }
    Ok(svg)
}

fn heading<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    report: &Report,
    kinds: &[(String, Kind)],
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let mut ranks: Vec<usize> = report.scenes.iter().map(|scene| scene.ranks).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let lines = [
        (22, "Growth policies: time lost over rows held; the lower left is best".to_owned()),
        (
            15,
            format!(
                "means over {ranks:?} ranks; capacity factor {}, alignment {}; times of {}",
                report.capacity_factor, report.alignment, report.costs.source
            ),
        ),
    ];
    let mut y = 12;
    for (size, line) in lines {
        // Names may come from a file's, and XML knows no control characters.
        let line = line.replace(|c: char| c.is_control(), "?");
        area.draw(&Text::new(line, (MARGIN, y), ("sans-serif", size).into_font()))?;
        y += size + 10;
    }
    let height = kinds.len().div_ceil(COLUMNS);
    for (place, (name, kind)) in kinds.iter().enumerate() {
        let x = MARGIN + (place / height) as i32 * (WIDTH as i32 - MARGIN) / COLUMNS as i32;
        let y = HEAD as i32 + (place % height) as i32 * LINE as i32;
        area.draw(&mark(*kind).at((x + 8, y)))?;
        let text = format!("{} {name}", place + 1);
        area.draw(&Text::new(text, (x + 24, y - 8), ("sans-serif", 14).into_font()))?;
    }
    Ok(())
}

fn panel<DB: DrawingBackend>(
    area: &DrawingArea<DB, Shift>,
    routing: &str,
    spots: &[Spot],
    kinds: &[(String, Kind)],
    (across, up): (Range<f64>, Range<f64>),
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let title = routing.replace(|c: char| c.is_control(), "?");
    let mut chart = ChartBuilder::on(area)
        .margin_right(20)
        .margin_bottom(10)
        .margin_left(8)
        .caption(title, ("sans-serif", 16))
        .x_label_area_size(42)
        .y_label_area_size(56)
        .build_cartesian_2d(across.clone(), up.clone())?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(EDGE)
        .x_labels(labels(&across))
        .y_labels(labels(&up))
        .x_label_formatter(&|value| power(*value))
        .y_label_formatter(&|value| {
            if (*value - NOTHING).abs() < 1e-6 { "0".to_owned() } else { power(*value) }
        })
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 13))
        .x_desc("rows held, of a clairvoyant's")
        .y_desc("time lost, percent")
        .draw()?;
    for spot in spots {
        let kind = spot.policies.last().and_then(|one| kinds.get(one - 1));
        let Some((_, kind)) = kind else { continue };
        let plane = chart.plotting_area();
        plane.draw(&mark(*kind).at(spot.at))?;
        let label = Text::new(numbers(&spot.policies), (7, -14), ("sans-serif", 12).into_font());
        plane.draw(&(EmptyElement::at(spot.at) + label))?;
    }
    Ok(())
}

/// Where policies are on one routing: the mean over numbers of ranks, and those together that no eye
/// could tell apart.
fn spots(scenes: &[&SceneScores]) -> Vec<Spot> {
    let mut spots: Vec<Spot> = Vec::new();
    let policies = scenes.first().map_or(0, |scene| scene.scores.len());
    for place in 0..policies {
        let scores: Vec<&Score> =
            scenes.iter().filter_map(|scene| scene.scores.get(place)).collect();
        let count = scores.len() as f64;
        let held = scores.iter().map(|score| score.held_ratio().log2()).sum::<f64>() / count;
        let lost = scores.iter().map(|score| score.lost_share()).sum::<f64>() / count * 100.0;
        let at = (held, lost.log2().max(NOTHING));
        if !held.is_finite() {
            continue;
        }
        let near =
            |spot: &&mut Spot| (spot.at.0 - at.0).abs() < 0.1 && (spot.at.1 - at.1).abs() < 0.3;
        match spots.iter_mut().find(near) {
            Some(spot) => spot.policies.push(place + 1),
            None => spots.push(Spot { at, policies: vec![place + 1] }),
        }
    }
    spots
}

/// Ascending numbers, those behind each other as a range.
fn numbers(all: &[usize]) -> String {
    let runs = all.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        [first, second] => format!("{first},{second}"),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(",")
}

fn mark(kind: Kind) -> Mark {
    match kind {
        Kind::Reference => Mark::Ring,
        Kind::Exact => Mark::Cross,
        Kind::Geometric => Mark::Triangle,
        Kind::Headroom => Mark::Frame,
        Kind::Adaptive => Mark::Disc,
    }
}

/// A range around `values`, with a little air; some range if there are none.
fn extent(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (least, most) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| {
        (least.min(value), most.max(value))
    });
    if least <= most { least.floor()..most.ceil() + 0.5 } else { 0.0..1.0 }
}

fn labels(range: &Range<f64>) -> usize {
    // A cast of floats stays within the type.
    (range.end - range.start) as usize + 2
}

/// Two to the power of a whole number; nothing between.
fn power(exponent: f64) -> String {
    let near = exponent.round();
    if (exponent - near).abs() > 1e-6 {
        return String::new();
    }
    let value = near.exp2();
    if near < -2.0 {
        format!("{value:.3}")
    } else if near < 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::super::judged;
    use super::*;
    use crate::plot::tests::assert_well_formed;

    #[test]
    fn every_routing_has_a_panel_and_every_policy_a_name() {
        let args = parse("--workload burst,hot-rank --ranks 2,4 --steps 20 --seeds 0").unwrap();
        let mut report = judged(&args).unwrap();
        report.scenes[0].routing = "<&\u{1}".into();
        let svg = render(&report).unwrap();
        assert_well_formed(&svg);
        assert!(
            svg.contains("\nburst\n") && svg.contains("\nhot-rank\n") && !svg.contains('\u{1}')
        );
        for (place, one) in Candidate::all().iter().enumerate() {
            assert!(svg.contains(&format!("\n{} {one}\n", place + 1)), "{one}");
        }
        report.scenes.clear();
        assert_well_formed(&render(&report).unwrap());
    }

    #[test]
    fn policies_that_did_alike_share_a_mark() {
        let args = parse("--workload balanced --ranks 8 --steps 8 --seeds 0").unwrap();
        let report = judged(&args).unwrap();
        let all = Candidate::all();
        let spots = spots(&report.scenes.iter().collect::<Vec<_>>());
        assert!(spots.len() < all.len() / 2, "{spots:?}");
        let found: usize = spots.iter().map(|spot| spot.policies.len()).sum();
        assert_eq!(found, all.len());
        assert_eq!(numbers(&[1, 3, 4, 6, 7, 8, 10]), "1,3,4,6-8,10");
    }
}

//! Laws of what happens beside exchanges: growth, recovery, one more round.

use super::laws::Errors;
use super::solve;
use crate::bench::growth::{Growth, Memory};
use crate::bench::report::{By, Case, Entry, Op, Report};

/// A law of one thing: coefficients with what each multiplies, and how far it is off.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StepLaw {
    /// What takes so long.
    pub(super) what: &'static str,
    /// Microseconds of one of these; none where data do not tell it apart.
    pub(super) terms: Vec<(&'static str, Option<f64>)>,
    pub(super) fitted: Errors,
    pub(super) held_out: Errors,
}

/// One measured time and what it depends on.
struct Point {
    row: Vec<f64>,
    us: f64,
}

/// The laws of everything of which there is something.
pub(super) fn laws(reports: &[Report]) -> Vec<StepLaw> {
    let grown = ["once", "GiB of each rank"];
    let recovered = ["once", "peer", "clean step"];
    [
        law("growth, fresh", &grown, growth(reports, Memory::Fresh)),
        law("growth, given back", &grown, growth(reports, Memory::GivenBack)),
        law("recovery, capacity-shaped", &recovered, recovery(reports, "capacity-shaped")),
        law("recovery, device-counted", &recovered, recovery(reports, "device-counted")),
        law("one more round", &["once", "peer", "1000 choices"], rounds(reports)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn law(what: &'static str, names: &[&'static str], points: Vec<Point>) -> Option<StepLaw> {
    if points.is_empty() {
        return None;
    }
    let fit = |except: Option<usize>| {
        let kept = || points.iter().enumerate().filter(|(at, _)| Some(*at) != except);
        let rows: Vec<Vec<f64>> = kept().map(|(_, point)| point.row.clone()).collect();
        let times: Vec<f64> = kept().map(|(_, point)| point.us).collect();
        solve::fit(&rows, &times)
    };
    let error = |found: &[Option<f64>], point: &Point| {
        let us = point.row.iter().zip(found).map(|(x, c)| x * c.unwrap_or(0.0)).sum::<f64>();
        us / point.us - 1.0
    };
    let found = fit(None);
    let held_out = points.iter().enumerate().map(|(at, point)| error(&fit(Some(at)), point));
    // Of two points either is a guess from the other alone.
    let held_out: Vec<f64> =
        if points.len() > names.len() { held_out.collect() } else { Vec::new() };
    Some(StepLaw {
        what,
        fitted: Errors::of(points.iter().map(|point| error(&found, point))),
        held_out: Errors::of(held_out.into_iter()),
        terms: names.iter().copied().zip(found).collect(),
    })
}

fn ours(report: &Report, op: Op) -> impl Iterator<Item = &Entry> {
    report
        .results
        .iter()
        .filter(move |entry| entry.case.op == op && entry.case.by == By::GraphEp && entry.verified)
}

/// Calls of the driver in one process wait for each other: all ranks' bytes count.
fn growth(reports: &[Report], memory: Memory) -> Vec<Point> {
    let entries = reports.iter().flat_map(|report| ours(report, Op::Grow));
    let point = |entry: &Entry| {
        let grown = Growth::read(&entry.case.variant).filter(|grown| grown.memory == memory)?;
        let gib = grown.gib;
        Some(Point { row: vec![1.0, gib * entry.case.ranks as f64], us: entry.time.median_us })
    };
    entries.filter_map(point).collect()
}

/// What a step that overflowed takes beyond a clean one. Ranks that share a GPU are another matter.
fn recovery(reports: &[Report], kind: &str) -> Vec<Point> {
    let mut points = Vec::new();
    for report in reports {
        let apart = ours(report, Op::Recover).filter(|entry| entry.case.gpus >= entry.case.ranks);
        for entry in apart.filter(|entry| variant(&entry.case, kind)) {
            let mut others = ours(report, Op::Recover);
            let clean = others.find(|o| variant(&o.case, "clean") && alike(&o.case, &entry.case));
            let Some(clean) = clean.map(|clean| clean.time.median_us) else { continue };
            let us = entry.time.median_us - clean;
            if us > 0.0 {
                let peer = if entry.case.ranks > 1 { 1.0 } else { 0.0 };
                points.push(Point { row: vec![1.0, peer, clean], us });
            }
        }
    }
    points
}

/// What the same step takes for each window beyond the first.
fn rounds(reports: &[Report]) -> Vec<Point> {
    let mut points = Vec::new();
    for report in reports {
        for entry in ours(report, Op::Round).filter(|entry| entry.case.gpus >= entry.case.ranks) {
            let Case { ranks, tokens, top_k, .. } = entry.case;
            let windows = entry.case.variant.strip_prefix("W=").and_then(|words| {
                words.split(", ").next().and_then(|number| number.parse::<f64>().ok())
            });
            let mut others = ours(report, Op::Round);
            let one = others.find(|o| variant(&o.case, "W=1") && alike(&o.case, &entry.case));
            let (Some(windows), Some(one)) = (windows.filter(|w| *w > 1.0), one) else { continue };
            let us = (entry.time.median_us - one.time.median_us) / (windows - 1.0);
            if us > 0.0 {
                let peer = if ranks > 1 { 1.0 } else { 0.0 };
                points.push(Point { row: vec![1.0, peer, (tokens * top_k) as f64 / 1e3], us });
            }
        }
    }
    points
}

fn variant(case: &Case, kind: &str) -> bool {
    case.variant.split(", ").next() == Some(kind)
}

/// Whether all but the first word of the variant is the same.
fn alike(a: &Case, b: &Case) -> bool {
    let rest = |case: &Case| case.variant.split_once(", ").map(|(_, rest)| rest.to_owned());
    let bare = |case: &Case| Case { variant: String::new(), ..case.clone() };
    rest(a) == rest(b) && bare(a) == bare(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::tests::{case, entry, sample};

    fn report() -> Report {
        let of = |op, tokens, variant: &str, us| {
            entry(Case { variant: variant.into(), ..case(op, tokens) }, us)
        };
        let mut report = sample();
        report.results.clear();
        for (tokens, clean) in [(1, 200.0), (128, 400.0), (1024, 1600.0), (4096, 6400.0)] {
            report.results.push(of(Op::Recover, tokens, "clean", clean));
            report.results.push(of(
                Op::Recover,
                tokens,
                "capacity-shaped",
                clean + 100.0 + 0.5 * clean,
            ));
            report.results.push(of(Op::Round, tokens, "W=1, push", clean));
            let more = 50.0 + 0.008 * tokens as f64 * 3.0;
            report.results.push(of(Op::Round, tokens, "W=3, push", clean + 2.0 * more));
        }
        // As older reports name it, which is of memory that was given back.
        report.results.push(of(Op::Grow, 1, "by 1024.00 MiB", 2000.0));
        report.results.push(of(Op::Grow, 1, "by 1024.00 MiB, fresh", 400.0));
        report
    }

    #[test]
    fn laws_are_found_of_what_is_there() {
        let laws = laws(&[report()]);
        let names: Vec<&str> = laws.iter().map(|law| law.what).collect();
        assert_eq!(
            names,
            ["growth, fresh", "growth, given back", "recovery, capacity-shaped", "one more round"]
        );
        let near = |found: Option<f64>, value: f64| (found.unwrap() - value).abs() < 0.02 * value;
        // Two ranks of one GiB; one time does not tell what is paid once.
        assert_eq!(laws[0].terms[0].1, Some(400.0));
        assert_eq!(laws[1].terms[0].1, Some(2000.0));
        assert!(near(laws[2].terms[0].1, 100.0) && near(laws[2].terms[2].1, 0.5), "{:?}", laws[2]);
        assert!(laws[2].held_out.worst < 0.05 && laws[2].held_out.count == 4);
        assert!(near(laws[3].terms[0].1, 50.0) && near(laws[3].terms[2].1, 3.0), "{:?}", laws[3]);
        assert_eq!(laws[3].terms[1], ("peer", None));
    }
}

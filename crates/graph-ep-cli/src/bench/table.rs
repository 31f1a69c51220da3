//! The closing table: what was measured and against which limits, for a person.
//!
//! Readable without colour and in any terminal that knows box-drawing characters.

use std::fmt::Write as _;

use comfy_table::{Cell, Table};

use super::report::shape::{Shapes, operation};
use super::report::{Entry, Limit, Report};
use super::stats::Quantiles;
use crate::table::{bytes, new_table, right};

/// The closing table of `report`, ending in a line feed.
pub fn render(report: &Report) -> String {
    let shapes = Shapes::of(report.results.iter().map(|entry| &entry.case));
    let mut text = heading(report, &shapes);
    let mut add = |table: Table| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{table}");
    };
    if !report.limits.is_empty() {
        add(limits(&report.limits));
    }
    add(results(&report.results, &shapes));
    for entry in report.results.iter().filter(|entry| !entry.details.is_empty()) {
        let _ = writeln!(text, "{}", details(entry, &shapes));
    }
    text
}

/// What else was found of a result, in a line.
fn details(entry: &Entry, shapes: &Shapes) -> String {
    let named = [operation(&entry.case), shapes.name(&entry.case)];
    let named = named.iter().map(String::as_str).filter(|word| !word.is_empty());
    let said = entry.details.iter().map(|(name, value)| match name.strip_suffix(" us") {
        Some(part) => format!("{part} {} us", us(*value)),
        None => format!("{value} {name}"),
    });
    format!("{}: {}", named.collect::<Vec<_>>().join(", "), said.collect::<Vec<_>>().join("; "))
}

/// What was run on what, in a few lines, and whether its outputs are right.
fn heading(report: &Report, shapes: &Shapes) -> String {
    let mut text = format!("{} at commit {}, {}\n", report.command, report.commit, report.date);
    for line in &report.hardware {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(text, "all: {}", shapes.shared());
    let wrong = report.results.iter().filter(|entry| !entry.verified).count();
    let _ = match wrong {
        0 => writeln!(text, "VERIFIED: every output is what it should be"),
        _ => writeln!(text, "MISMATCH: the outputs of {wrong} results are wrong"),
    };
    text
}

fn limits(limits: &[Limit]) -> Table {
    let mut table = new_table();
    table.set_header(
        ["limit", "ranks", "SMs"]
            .map(Cell::new)
            .into_iter()
            .chain(["median us", "p10..p90 us", "bytes", "GB/s"].map(right)),
    );
    for limit in limits {
        let to = limit.to.map_or(String::new(), |to| format!(" -> {to}"));
        table.add_row(vec![
            Cell::new(limit.what),
            Cell::new(format!("{}{to}", limit.from)),
            Cell::new(if limit.sms == 0 { "all".to_owned() } else { limit.sms.to_string() }),
            right(us(limit.time.median_us)),
            right(spread(&limit.time)),
            right(some_bytes(limit.bytes)),
            right(limit.gbps.map_or("-".to_owned(), |gbps| format!("{gbps:.1}"))),
        ]);
    }
    table
}

fn results(entries: &[Entry], shapes: &Shapes) -> Table {
    let mut table = new_table();
    table.set_header(["op", "shape"].map(Cell::new).into_iter().chain(
        ["median us", "p10..p90 us", "wire", "GB/s", "of the limit", "verified"].map(right),
    ));
    for entry in entries {
        table.add_row(vec![
            Cell::new(operation(&entry.case)),
            Cell::new(shapes.name(&entry.case)),
            right(us(entry.time.median_us)),
            right(spread(&entry.time)),
            right(some_bytes(entry.work.wire_bytes)),
            right(match entry.work.wire_bytes {
                0 => "-".to_owned(),
                _ => format!("{:.1}", entry.wire_gbps),
            }),
            right(share(entry)),
            right(if entry.verified { "yes" } else { "NO" }),
        ]);
    }
    table
}

/// Microseconds, so that a column can be compared by eye: with a decimal, or two below ten.
pub(super) fn us(us: f64) -> String {
    if us < 10.0 { format!("{us:.2}") } else { format!("{us:.1}") }
}

fn spread(time: &Quantiles) -> String {
    format!("{}..{}", us(time.p10_us), us(time.p90_us))
}

fn some_bytes(number: u64) -> String {
    if number == 0 { "-".to_owned() } else { bytes(number) }
}

/// How much of the limit was reached, and which limit that is.
fn share(entry: &Entry) -> String {
    match (entry.limit_share, entry.limit) {
        (Some(share), Some(limit)) => format!("{:.0} % of {limit}", share * 100.0),
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::sample;
    use super::*;

    #[test]
    fn everything_asked_of_a_benchmark_is_in_the_table() {
        let text = render(&sample());
        for expected in [
            "graph-ep bench --ops dispatch,combine at commit 0123abc, 2026-11-30T14:05:09Z",
            "GPU 1: NVIDIA H200",
            "all: expert layout, bf16, hidden 7168, top-8",
            "VERIFIED",
            "peer-read",
            "0 -> 1",
            "346.4",
            "dispatch (nccl)",
            "4096 tokens",
            "214.8",
            "204.1..225.5",
            "56.00 MiB",
            "273.4",
            "50 % of peer-read",
            "grow ",
        ] {
            assert!(text.contains(expected), "{expected} in\n{text}");
        }
        assert!(!text.contains('\u{1b}'), "no colour");
        assert!(text.lines().all(|line| line.chars().count() <= 130), "it fits a wide terminal");
    }

    #[test]
    fn what_else_was_found_stands_below() {
        let mut report = sample();
        let last = report.results.pop().unwrap();
        report
            .results
            .push(last.with("map us", 40.25).with("nodes", 500.0).with("no us", f64::NAN));
        let text = render(&report);
        assert!(text.ends_with("grow, 128 tokens, launched: map 40.2 us; 500 nodes\n"), "{text}");
    }

    #[test]
    fn wrong_outputs_are_shouted() {
        let mut report = sample();
        report.results[1].verified = false;
        let text = render(&report);
        assert!(text.contains("MISMATCH: the outputs of 1 results are wrong"));
        assert_eq!(text.matches(" NO ").count(), 1);
    }

    #[test]
    fn what_has_no_limit_and_moves_nothing_claims_neither() {
        let mut report = sample();
        report.results.drain(..report.results.len() - 1);
        report.limits.clear();
        let text = render(&report);
        assert!(!text.contains("peer-read") && !text.contains('%'), "{text}");
        report.results.clear();
        assert!(render(&report).contains("median us"));
    }

    #[test]
    fn times_keep_three_digits() {
        assert_eq!(
            [0.0, 1.234, 9.99, 17.26, 1234.56].map(us),
            ["0.00", "1.23", "9.99", "17.3", "1234.6"]
        );
    }
}

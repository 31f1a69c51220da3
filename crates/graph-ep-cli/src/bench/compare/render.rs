//! The comparison as a table.

use std::fmt::Write as _;

use comfy_table::{Cell, Table};

use super::super::report::shape::{Shapes, operation};
use super::super::report::{Entry, Report};
use super::super::table::us;
use super::{Change, Comparison, Pair, is_wrong};
use crate::table::{new_table, right};

/// What moved between `before` and `after`, whose `comparison` it is; ends in a line feed.
pub fn render(before: &Report, after: &Report, comparison: &Comparison<'_>) -> String {
    let both = before.results.iter().chain(&after.results);
    let shapes = Shapes::of(both.map(|entry| &entry.case));
    let mut text = String::new();
    let mut line = |line: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{line}");
    };
    for (name, report) in [("A", before), ("B", after)] {
        let hardware = report.hardware.join("; ");
        line(format!("{name}: commit {}, {}, {hardware}", report.commit, report.date));
    }
    line(format!("all: {}", shapes.shared()));
    let moved = comparison.limits.iter().filter(|pair| pair.change != Change::Same);
    for pair in moved {
        let to = pair.after.to.map_or(String::new(), |to| format!(" -> {to}"));
        line(format!(
            "the machine moved: {} {}{to} took {} us in A and {} us in B",
            pair.after.what,
            pair.after.from,
            us(pair.before.time.median_us),
            us(pair.after.time.median_us),
        ));
    }
    line(table(&comparison.results, &shapes).to_string());
    for (name, entries) in [("A", &comparison.only_before), ("B", &comparison.only_after)] {
        for entry in entries {
            line(format!("only in {name}: {}", in_words(entry, &shapes)));
        }
    }
    line(summary(comparison));
    text
}

fn table(pairs: &[Pair<'_, Entry>], shapes: &Shapes) -> Table {
    let mut table = new_table();
    table.set_header(
        ["op", "shape"]
            .map(Cell::new)
            .into_iter()
            .chain(["A us", "B us", "change", "of the limit", ""].map(right)),
    );
    for pair in pairs {
        let share = |entry: &Entry| {
            entry.limit_share.map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0))
        };
        table.add_row(vec![
            Cell::new(operation(&pair.after.case)),
            Cell::new(shapes.name(&pair.after.case)),
            right(us(pair.before.time.median_us)),
            right(us(pair.after.time.median_us)),
            right(difference(pair)),
            right(format!("{} -> {}", share(pair.before), share(pair.after))),
            Cell::new(verdict(pair)),
        ]);
    }
    table
}

/// By how much the median changed, in percent of the first.
fn difference(pair: &Pair<'_, Entry>) -> String {
    let (from, to) = (pair.before.time.median_us, pair.after.time.median_us);
    let percent = (to - from) / from * 100.0;
    if percent.is_finite() { format!("{percent:+.1} %") } else { "-".to_owned() }
}

fn verdict(pair: &Pair<'_, Entry>) -> String {
    let mut words = Vec::new();
    match pair.change {
        Change::Same => {}
        Change::Faster => words.push("faster"),
        Change::Slower => words.push("SLOWER"),
    }
    if is_wrong(pair) {
        words.push("WRONG");
    } else if !pair.after.verified {
        words.push("wrong in both");
    }
    words.join(", ")
}

fn in_words(entry: &Entry, shapes: &Shapes) -> String {
    let (operation, name) = (operation(&entry.case), shapes.name(&entry.case));
    if name.is_empty() { operation } else { format!("{operation}, {name}") }
}

fn summary(comparison: &Comparison<'_>) -> String {
    let count = |change| comparison.results.iter().filter(|pair| pair.change == change).count();
    let wrong = comparison.results.iter().filter(|pair| is_wrong(pair)).count();
    let wrong = if wrong > 0 { format!(", {wrong} not verified any more") } else { String::new() };
    format!(
        "{} slower, {} faster, {} within noise ({} % of the median, or spreads that overlap){wrong}",
        count(Change::Slower),
        count(Change::Faster),
        count(Change::Same),
        comparison.noise * 100.0,
    )
}

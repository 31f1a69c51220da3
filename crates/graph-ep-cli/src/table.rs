//! The closing table: what a run did, for a person.
//!
//! Two tables, one of the run and one of its ranks. They are readable without colour and in any
//! terminal that knows box-drawing characters.

use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};

use crate::report::{Outcome, Report, Timing};

/// Step positions that are listed before the rest is counted.
const STEPS_LISTED: usize = 12;

/// The closing table of `report`, ending in a line feed.
pub fn render(report: &Report) -> String {
    format!("{}\n{}\n{}\n", heading(report), run_table(report), rank_table(report))
}

/// What was run, in one line, then how it ended.
fn heading(report: &Report) -> String {
    let Report { routing, ranks, experts, top_k, layers, tokens, hidden, dtype, .. } = report;
    let Report { backend, mode, growth, capacity_factor, alignment, .. } = report;
    let outcome = match report.outcome {
        Outcome::Verified => "VERIFIED: every output is what it should be".to_owned(),
        Outcome::Mismatch => format!("MISMATCH: {} values differ", count(report.mismatched_values)),
        Outcome::Failed => {
            format!("FAILED: {}", report.failure.as_deref().unwrap_or("no reason was given"))
        }
    };
    format!(
        "{routing} on {ranks} ranks ({backend})\n\
         {experts} experts, top-{top_k}, {layers} layers, {tokens} tokens a step, \
         {hidden} x {dtype}\n\
         mode {mode}, growth {growth}, capacity factor {capacity_factor}, alignment {alignment}\n\
         {outcome}"
    )
}

fn run_table(report: &Report) -> Table {
    let mut table = new_table();
    table.set_header(["run", "", ""]);
    let mut row = |what: &str, value: String, note: &str| {
        table.add_row([Cell::new(what), right(value), Cell::new(note)]);
    };
    let ran = report.required_rows.len();
    row(
        "steps",
        count(ran as u64),
        &if ran == report.steps { String::new() } else { format!("of {} asked for", report.steps) },
    );
    row(
        "overflowed",
        count(report.overflowed_steps.len() as u64),
        &listed(&report.overflowed_steps),
    );
    row("replays", count(report.replays), "steps launched again, once each attempt");
    row("growths", count(report.growths), "summed over ranks");
    row("rounds a step", count(report.rounds_per_step), "the most of any rank and layer");
    row("rows recovered", count(report.recovered_rows), "missing in runs that were discarded");
    row("rows dropped", count(report.dropped_rows), "missing in outputs that were kept");
    row(
        "values verified",
        count(report.verified_values),
        &format!("{} differ", count(report.mismatched_values)),
    );
    row(
        "host syncs",
        count(report.host_syncs_in_clean_steps),
        "between launch and record, in clean steps",
    );
    let memory = &report.memory;
    let limit = memory.limit_bytes.map_or(String::new(), |b| format!(", limit {}", bytes(b)));
    let start = format!("{} at the start{limit}", bytes(memory.initial_bytes));
    row("memory a rank", bytes(memory.final_bytes), &start);
    let share = percent(memory.final_bytes, memory.worst_case_bytes);
    row("worst case", bytes(memory.worst_case_bytes), &format!("memory is {share} of it"));
    let timings = &report.timings_us;
    for (what, timing) in [
        ("clean step", timings.clean_step),
        ("overflowed step", timings.recovered_step),
        ("recording", timings.recording),
        ("growing", timings.growing),
    ] {
        match timing {
            Some(timing) => row(what, duration(timing.median), &spread(&timing)),
            None => row(what, "-".to_owned(), "did not occur"),
        }
    }
    table
}

fn rank_table(report: &Report) -> Table {
    let mut table = new_table();
    let header =
        ["rank", "initial rows", "final rows", "peak required", "of worst case", "recordings"];
    table.set_header(header.map(right));
    for rank in 0..report.ranks {
        // A run that failed early may know less than one entry a rank.
        let entry = |list: &[usize]| list.get(rank).copied();
        let shown = |value: Option<usize>| value.map_or("-".to_owned(), |v| count(v as u64));
        let capacity = entry(&report.final_capacity_rows);
        let recordings = report.graph_recordings.get(rank).map_or("-".to_owned(), |&r| count(r));
        table.add_row(
            [
                rank.to_string(),
                count(report.initial_capacity_rows as u64),
                shown(capacity),
                shown(entry(&report.peak_required_rows)),
                capacity.map_or("-".to_owned(), |rows| {
                    percent(rows as u64, report.worst_case_rows as u64)
                }),
                recordings,
            ]
            .map(right),
        );
    }
    table
}

/// A table as all of the program are.
pub(crate) fn new_table() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table
}

/// A cell whose text ends where those above and below it end.
pub(crate) fn right(text: impl Into<String>) -> Cell {
    Cell::new(text.into()).set_alignment(CellAlignment::Right)
}

/// `1234567` as `1 234 567`.
fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped
}

/// Bytes in the largest binary unit of which there is at least one.
pub(crate) fn bytes(number: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = number as f64;
    let mut shown = None;
    for unit in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        shown = Some(unit);
    }
    shown.map_or(format!("{number} B"), |unit| format!("{value:.2} {unit}"))
}

fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => format!("{:.1} %", part as f64 * 100.0 / whole as f64),
    }
}

/// Microseconds in a unit that keeps three or four digits.
fn duration(us: f64) -> String {
    match us {
        _ if us < 1e3 => format!("{us:.1} us"),
        _ if us < 1e6 => format!("{:.2} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}

fn spread(timing: &Timing) -> String {
    let Timing { count, min, max, .. } = *timing;
    format!("median of {count}, {} to {}", duration(min), duration(max))
}

fn listed(steps: &[usize]) -> String {
    let shown: Vec<String> = steps.iter().take(STEPS_LISTED).map(usize::to_string).collect();
    let more = steps.len().saturating_sub(STEPS_LISTED);
    match (steps.len(), more) {
        (0, _) => String::new(),
        (1, _) => format!("step {}", shown[0]),
        (_, 0) => format!("steps {}", shown.join(", ")),
        _ => format!("steps {} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{built_in_sample, sample};
    use crate::{trace, workload};

    #[test]
    fn everything_asked_of_a_run_is_in_the_table() {
        let text = render(&built_in_sample());
        for expected in [
            "byte-lm-64e-top8-512 on 8 ranks (host)",
            "VERIFIED",
            "steps 0, 13",
            "4 321",
            "33 554 432",
            "2.44 MiB",
            "1.62 MiB at the start, limit 64.00 MiB",
            "6.50 MiB",
            "memory is 37.5 % of it",
            "840.0 us",
            "median of 3, 812.0 us to 1.01 ms",
            "did not occur",
            "overflowed step",
            "35.4 %",
        ] {
            assert!(text.contains(expected), "{expected}");
        }
        assert!(!text.contains('\u{1b}'), "no colour");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "it fits a wide terminal");
    }

    #[test]
    fn failures_say_so_and_partial_reports_render() {
        let mut report = built_in_sample();
        report.outcome = Outcome::Failed;
        report.failure = Some("rank 3 panicked".into());
        report.required_rows.truncate(2);
        report.final_capacity_rows.clear();
        report.peak_required_rows.truncate(1);
        report.graph_recordings.clear();
        let text = render(&report);
        assert!(text.contains("FAILED: rank 3 panicked") && text.contains("of 64 asked for"));

        report.outcome = Outcome::Mismatch;
        report.mismatched_values = 1234;
        assert!(render(&report).contains("MISMATCH: 1 234 values differ"));
    }

    #[test]
    fn long_lists_of_steps_are_cut() {
        let text = render(&sample(&trace::built_in().unwrap(), 8, true));
        assert!(text.contains("and 10 more"), "{text}");
    }

    #[test]
    fn a_run_without_overflow_renders() {
        let workload = workload::Workload::Balanced;
        let routing = workload::WorkloadConfig::new(workload, 0, 8).generate().unwrap();
        let text = render(&sample(&routing, 8, false));
        assert!(text.contains("overflowed"), "{text}");
    }

    #[test]
    fn numbers_are_grouped_and_scaled() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1 000", "1 234 567"]);
        assert_eq!([0, 1023, 1024, 1 << 30].map(bytes), ["0 B", "1023 B", "1.00 KiB", "1.00 GiB"]);
        assert_eq!(bytes(u64::MAX), "16777216.00 TiB");
        assert_eq!(
            [0.5, 999.9, 1e3, 2.5e6].map(duration),
            ["0.5 us", "999.9 us", "1.00 ms", "2.50 s"]
        );
        assert_eq!((percent(1, 3), percent(1, 0)), ("33.3 %".into(), "-".into()));
    }
}

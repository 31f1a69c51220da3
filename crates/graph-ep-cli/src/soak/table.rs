//! What a soak has to say, for a person.

use comfy_table::{Cell, Table};

use super::cycles::Held;
use super::report::{Entry, Report};
use crate::table::{new_table, right};

/// The tables of `report`, ending in a line feed.
pub(super) fn render(report: &Report) -> String {
    let verdict = match report.verified {
        true => "VERIFIED: every output was compared on its device, and is what it has to be",
        false => "FAILED",
    };
    let mut text = format!("{}\n{verdict}\n{}\n", report.hardware.join("\n"), results(report));
    for entry in &report.results {
        if let Some(first) = &entry.first_mismatch {
            text.push_str(&format!("{}: first mismatch: {first}\n", entry.name));
        }
        if entry.compared != entry.expected {
            let Entry { name, compared, expected, .. } = entry;
            text.push_str(&format!("{name}: {compared} outputs compared, of {expected}\n"));
        }
    }
    if let Some(held) = &report.held {
        text.push_str(&format!("{}\n", held_table(held.cycles, &held.before, &held.after)));
    }
    text
}

fn results(report: &Report) -> Table {
    let mut table = new_table();
    table.set_header([
        "group", "mode", "steps", "over", "replays", "growths", "recorded", "windows", "dropped",
        "compared", "differ", "seconds", "clean us",
    ]);
    for entry in &report.results {
        let numbers = [
            entry.steps,
            entry.overflowed,
            entry.replays,
            entry.growths,
            entry.recordings,
            entry.most_windows,
            entry.dropped,
            entry.compared,
            entry.mismatches,
        ];
        let clean = entry.clean_step_us.map_or("-".to_owned(), |us| format!("{us:.1}"));
        let mut row = vec![Cell::new(&entry.name), Cell::new(&entry.mode)];
        row.extend(numbers.map(|number| right(number.to_string())));
        row.extend([right(format!("{:.1}", entry.seconds)), right(clean)]);
        table.add_row(row);
    }
    table
}

fn held_table(cycles: usize, before: &Held, after: &Held) -> Table {
    let mut table = new_table();
    table.set_header(["held".to_owned(), "before".to_owned(), format!("after {cycles} groups")]);
    let mut row = |what: String, of: &dyn Fn(&Held) -> String| {
        table.add_row([Cell::new(what), right(of(before)), right(of(after))]);
    };
    row("descriptors".to_owned(), &|held| held.descriptors.to_string());
    row("threads".to_owned(), &|held| held.threads.to_string());
    row("mappings".to_owned(), &|held| held.mappings.to_string());
    for device in 0..before.free_bytes.len() {
        row(format!("bytes free on device {device}"), &|held| {
            held.free_bytes.get(device).map_or("-".to_owned(), u64::to_string)
        });
    }
    table
}

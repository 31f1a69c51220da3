//! What came out, for a person: policies over all scenes, then each number of ranks by itself.

use std::fmt::Write as _;

use comfy_table::{Cell, Table};

use super::report::{Report, SceneScores, Summary};
use crate::table::{new_table, right};

/// The closing tables of `report`, ending in a line feed.
pub(super) fn render(report: &Report) -> String {
    let costs = &report.costs;
    let mut text = format!(
        "capacity factor {}, alignment {}, seeds {:?}\n\
         times of {}:\n\
         a clean step {:.0} us, an overflow {:.0} us more, recording {:.0} us, mapping {:.0} us a GiB at {} \
         bytes a row\n",
        report.capacity_factor,
        report.alignment,
        report.seeds,
        costs.source,
        costs.clean_us,
        costs.overflow_us,
        costs.record_us,
        costs.map_gib_us,
        costs.row_bytes,
    );
    let mut add = |title: &str, table: &Table| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "\n{title}\n{table}");
    };
    add(
        "all scenes, each counting alike; rows in multiples of a clairvoyant's; *: no other policy loses less \
         time and holds fewer rows",
        &summaries(report),
    );
    for scenes in report.scenes.chunk_by(|a, b| a.ranks == b.ranks) {
        let title = format!(
            "{} ranks: steps replayed, time lost in % of clean steps, rows reserved in multiples of a \
             clairvoyant's",
            scenes[0].ranks
        );
        add(&title, &scenes_of(scenes));
    }
    text
}

fn summaries(report: &Report) -> Table {
    let mut table = new_table();
    table.set_header(
        std::iter::once(Cell::new("policy"))
            .chain(["", "replays", "lost %", "worst", "reserved", "worst", "held"].map(right)),
    );
    let all = report.summaries();
    let scene = |(_, scene): (f64, usize)| match report.scenes.get(scene) {
        Some(scene) => format!("{} on {}", short(&scene.routing), scene.ranks),
        None => String::new(),
    };
    for one in &all {
        let worst_lost = match one.worst_lost.0 > 0.0 {
            true => format!("{:.1} {}", one.worst_lost.0 * 100.0, scene(one.worst_lost)),
            false => "-".to_owned(),
        };
        let worst_reserved = format!("{:.2} {}", one.worst_reserved.0, scene(one.worst_reserved));
        table.add_row(vec![
            Cell::new(&one.policy),
            Cell::new(if undominated(one, &all) { "*" } else { "" }),
            right(one.replays.to_string()),
            right(format!("{:.2}", one.lost * 100.0)),
            right(worst_lost),
            right(format!("{:.2}", one.reserved)),
            right(worst_reserved),
            right(format!("{:.2}", one.held)),
        ]);
    }
    table
}

/// Whether no other policy is better in one thing and no worse in the other. References, which know
/// what no policy can, compete with nobody.
fn undominated(one: &Summary, all: &[Summary]) -> bool {
    let reference = |one: &Summary| one.policy.starts_with("clairvoyant");
    let better = |other: &Summary| {
        let no_worse = other.lost <= one.lost && other.held <= one.held;
        !reference(other) && no_worse && (other.lost, other.held) != (one.lost, one.held)
    };
    !reference(one) && !all.iter().any(better)
}

fn scenes_of(scenes: &[SceneScores]) -> Table {
    let mut table = new_table();
    let names = scenes.iter().map(|scene| right(short(&scene.routing)));
    table.set_header(std::iter::once(Cell::new("policy")).chain(names));
    let policies = scenes.first().map_or(0, |scene| scene.scores.len());
    for place in 0..policies {
        let mut row = Vec::new();
        for score in scenes.iter().filter_map(|scene| scene.scores.get(place)) {
            if row.is_empty() {
                row.push(Cell::new(&score.policy));
            }
            row.push(right(format!(
                "{} {:.1} {:.2}",
                score.replays,
                score.lost_share() * 100.0,
                score.reserved_ratio()
            )));
        }
        table.add_row(row);
    }
    table
}

/// A name that fits a column.
fn short(name: &str) -> String {
    name.chars().take(10).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(policy: &str, lost: f64, held: f64) -> Summary {
        Summary {
            policy: policy.into(),
            replays: 0,
            lost,
            worst_lost: (lost, 0),
            reserved: held,
            worst_reserved: (held, 0),
            held,
        }
    }

    #[test]
    fn only_what_is_better_in_neither_is_dominated() {
        let all = [
            summary("clairvoyant", 0.0, 1.0),
            summary("exact", 0.5, 1.1),
            summary("headroom", 0.1, 2.0),
            summary("adaptive", 0.1, 1.5),
            summary("worst case", 0.0, 8.0),
        ];
        let found: Vec<bool> = all.iter().map(|one| undominated(one, &all)).collect();
        assert_eq!(found, [false, true, false, true, true]);
        // Equals do not dominate each other.
        assert!(undominated(&all[3], &[all[3].clone(), all[3].clone()]));
    }
}

//! Laws, errors and predictions for a person.

use std::fmt::Write as _;

use comfy_table::Cell;

use super::cells::{HALVES, Kind, Rates, Way};
use super::law::LEAST_POINTS;
use super::laws::{Checked, Errors, Laws};
use super::predict::{Further, Network, Prediction};
use super::steps::StepLaw;
use crate::bench::report::Op;
use crate::bench::report::shape::Shapes;
use crate::table::{new_table, right};

/// The laws of exchanges, how far they are off, and how far those would be in which wire and memory
/// add up.
pub(super) fn laws(laws: &Laws, checked: &[Checked], added: &[Checked]) -> String {
    if checked.is_empty() {
        return String::new();
    }
    let mut table = new_table();
    let names =
        ["fixed us", "peer us", "further us", "ns a choice", "ns an expert", "wire", "memory"];
    table.set_header(["half", "kind"].map(Cell::new).into_iter().chain(names.map(right)));
    for (kind, half, law) in laws.all() {
        let mut row = vec![Cell::new(HALVES[half].to_string()), Cell::new(kind_name(kind))];
        row.extend(
            [
                number(law.fixed, 1.0, 1),
                number(law.peer, 1.0, 1),
                number(law.further, 1.0, 2),
                number(law.choices, 1.0, 2),
                number(law.experts, 1e3, 1),
                number(law.wire, 1.0, 2),
                number(law.memory, 1.0, 2),
            ]
            .map(right),
        );
        table.add_row(row);
    }
    let mut text = format!(
        "t = fixed + peer [R > 1] + further (R - 2) + choice T k + expert E + max(wire W, memory M)\n\
         W and M: the bytes at the measured limits; -: not told apart by these data\n{table}\n"
    );
    let mut table = new_table();
    table.set_header(
        ["op", "kind"].map(Cell::new).into_iter().chain(
            [
                "points",
                "error, median",
                "worst",
                "held out, median",
                "worst",
                "if added, median",
                "worst",
            ]
            .map(right),
        ),
    );
    let mut kinds: Vec<Kind> = checked.iter().map(|one| one.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        for op in [Op::Dispatch, Op::Combine, Op::Pair] {
            let of = |all: &[Checked]| -> Vec<Checked> {
                all.iter().filter(|one| one.kind == kind && one.op == op).cloned().collect()
            };
            let here = of(checked);
            if here.is_empty() {
                continue;
            }
            let fitted = Errors::of(here.iter().map(Checked::error));
            let held = Errors::of(here.iter().filter_map(Checked::held_out_error));
            let mut row = vec![Cell::new(op.to_string()), Cell::new(kind_name(kind))];
            row.push(right(fitted.count.to_string()));
            let added = of(added);
            let added = Errors::of(added.iter().filter_map(Checked::held_out_error));
            for errors in [fitted, held, added] {
                row.push(right(errors_of(errors, errors.median)));
                row.push(right(errors_of(errors, errors.worst)));
            }
            table.add_row(row);
        }
    }
    let held = Errors::of(checked.iter().filter_map(Checked::held_out_error));
    let _ = writeln!(
        text,
        "{table}\nall {} operations held out: median error {}, worst {}",
        held.count,
        percent(held.median),
        percent(held.worst)
    );
    for kind in checked.iter().map(|one| one.kind).collect::<std::collections::BTreeSet<_>>() {
        let saved = [false, true].map(|several| laws.saved(kind, several));
        if saved.iter().any(Option::is_some) {
            let [one, several] = saved.map(|saved| number(saved, 1.0, 1));
            let _ = writeln!(
                text,
                "a pair, {}, is shorter than its halves: by {one} us of one rank, {several} of several",
                kind_name(kind)
            );
        }
    }
    text
}

/// Growth, recovery and rounds.
pub(super) fn steps(laws: &[StepLaw]) -> String {
    if laws.is_empty() {
        return String::new();
    }
    let mut table = new_table();
    table.set_header(
        ["what", "us"]
            .map(Cell::new)
            .into_iter()
            .chain(["points", "error, median", "worst", "held out, median", "worst"].map(right)),
    );
    for law in laws {
        let term = |(name, found): &(&str, Option<f64>)| {
            found.map(|us| match *name {
                "once" => format!("{us:.1}"),
                _ => format!("{us:.2} x {name}"),
            })
        };
        let terms: Vec<String> = law.terms.iter().filter_map(term).collect();
        let mut row = vec![Cell::new(law.what), Cell::new(terms.join(" + "))];
        row.push(right(law.fitted.count.to_string()));
        for errors in [law.fitted, law.held_out] {
            row.push(right(errors_of(errors, errors.median)));
            row.push(right(errors_of(errors, errors.worst)));
        }
        table.add_row(row);
    }
    format!("\n{table}\n")
}

/// Every operation.
pub(super) fn points(checked: &[Checked]) -> String {
    let mut table = new_table();
    table.set_header(
        ["op", "kind", "shape"]
            .map(Cell::new)
            .into_iter()
            .chain(["measured us", "fitted us", "error", "held out us", "error"].map(right)),
    );
    let shapes = Shapes::of(checked.iter().map(|one| &one.case));
    for one in checked {
        let held = one.held_out.map_or("-".to_owned(), |us| format!("{us:.1}"));
        table.add_row(vec![
            Cell::new(one.op.to_string()),
            Cell::new(if one.kind.way == Way::Push { "push" } else { "pull" }),
            Cell::new(shapes.name(&one.case)),
            right(format!("{:.1}", one.measured)),
            right(format!("{:.1}", one.fitted)),
            right(signed(one.error())),
            right(held),
            right(one.held_out_error().map_or("-".to_owned(), signed)),
        ]);
    }
    format!("\nall: {}\n{table}\n", shapes.shared())
}

/// What was asked for, and why the rest of it is not there.
pub(super) fn predictions(all: &[Prediction], rates: &Rates, network: &Network) -> String {
    let mut text = String::new();
    if !all.is_empty() {
        text += &predicted(all, rates, network);
    }
    for flat in [false, true] {
        // Whatever there is of a layout there is for all sizes.
        if !all.iter().any(|one| one.exchange.flat == flat) {
            let _ = writeln!(
                text,
                "\nno prediction of rows {}: no {LEAST_POINTS} verified dispatches and no {LEAST_POINTS} \
                 verified combines in these reports\nthat push such rows among ranks with a GPU each",
                layout_name(flat)
            );
        }
    }
    text
}

fn predicted(all: &[Prediction], rates: &Rates, network: &Network) -> String {
    let mut table = new_table();
    table.set_header(
        ["layout"].map(Cell::new).into_iter().chain(
            [
                "ranks",
                "experts",
                "top-k",
                "hidden",
                "tokens",
                "dispatch us",
                "combine us",
                "pair us",
                "bytes us",
            ]
            .map(right),
        ),
    );
    for one in all {
        let exchange = &one.exchange;
        let mark = match one.further {
            Further::Measured => "",
            Further::Shared => "~ ",
            Further::Unknown => ">= ",
        };
        let mut row = vec![Cell::new(layout_name(exchange.flat))];
        for size in [exchange.ranks, exchange.experts, exchange.top_k, one.hidden, exchange.tokens]
        {
            row.push(right(size.to_string()));
        }
        for one_us in one.us {
            row.push(right(one_us.map_or("-".to_owned(), |value| format!("{mark}{}", us(value)))));
        }
        row.push(right(format!("{:.1}", one.payload)));
        table.add_row(row);
    }
    let Rates { write, copy, .. } = rates;
    format!(
        "\npredicted: BF16, pushed, a GPU for each rank, uniform routing, alignment 16; peer writes {write:.0} \
         GB/s, copies {copy:.0};\nbeyond {} ranks {} GB/s a rank and no latency of its own; what ranks \
         beyond two cost by themselves:\n>= is not known and left out, ~ is from ranks that shared a GPU\n{table}\n",
        network.domain, network.gbps
    )
}

fn us(us: f64) -> String {
    if us < 100.0 { format!("{us:.1}") } else { format!("{us:.0}") }
}

fn layout_name(flat: bool) -> &'static str {
    if flat { "flat" } else { "by expert" }
}

fn kind_name(kind: Kind) -> String {
    format!(
        "{}, {}{}",
        layout_name(kind.flat),
        if kind.way == Way::Push { "push" } else { "pull" },
        if kind.shared { ", shared GPU" } else { "" }
    )
}

fn number(value: Option<f64>, factor: f64, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{:.digits$}", value * factor))
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// None where nothing was checked.
fn errors_of(errors: Errors, share: f64) -> String {
    if errors.count == 0 { "-".to_owned() } else { percent(share) }
}

fn signed(share: f64) -> String {
    format!("{:+.1} %", share * 100.0)
}

//! What reports say of exchanges, as equations: what was measured, and what it depends on.

use std::collections::BTreeMap;

use crate::bench::report::{By, Case, Entry, LayoutChoice, LimitKind, Op, Report, Work};

/// How rows travelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    Push,
    Pull,
}

/// Exchanges that obey one law: the same code ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) flat: bool,
    pub(super) way: Way,
    /// Ranks shared GPUs, or were on the host: their bytes met in one memory.
    pub(super) shared: bool,
}

/// What the time of a half depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Terms {
    /// 1 if there is another rank, else 0.
    pub(super) peer: f64,
    /// Ranks beyond two.
    pub(super) further: f64,
    /// Thousands of pairs of a token and an expert that it chose, of each rank.
    pub(super) choices: f64,
    /// Experts, over all ranks: counts of each travel between all pairs of ranks.
    pub(super) experts: f64,
    /// Microseconds that the bytes take at the limit of the wire and at that of memory.
    pub(super) wire: f64,
    pub(super) memory: f64,
}

/// The rates that limits were measured to have, in 10⁹ bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    pub(super) write: f64,
    pub(super) read: f64,
    pub(super) copy: f64,
}

impl Rates {
    /// Those of a report, by all multiprocessors, of the slowest. Where no peer was measured the rate is
    /// infinite, for no byte crosses either.
    pub(super) fn of(report: &Report) -> Self {
        let rate = |what: LimitKind| {
            let all = report.limits.iter().filter(|limit| limit.what == what && limit.sms == 0);
            all.filter_map(|limit| limit.gbps).fold(f64::INFINITY, f64::min)
        };
        Self {
            write: rate(LimitKind::PeerWrite),
            read: rate(LimitKind::PeerRead),
            copy: rate(LimitKind::MemoryCopy),
        }
    }

    /// The terms of a half.
    pub(super) fn terms(
        &self,
        (op, way): (Op, Way),
        (ranks, tokens, top_k, experts): (usize, usize, usize, usize),
        work: Work,
    ) -> Terms {
        let us = |bytes: u64, gbps: f64| bytes as f64 / gbps / 1e3;
        let pulls = op == Op::Dispatch && way == Way::Pull;
        // Rows that are pushed land before they are placed, and are read twice where they come from: three
        // times more in memory than what an exchange cannot do without.
        let landed = if op == Op::Dispatch && way == Way::Push { 3 * work.wire_bytes } else { 0 };
        Terms {
            peer: if ranks > 1 { 1.0 } else { 0.0 },
            further: ranks.saturating_sub(2) as f64,
            choices: (tokens * top_k) as f64 / 1e3,
            experts: experts as f64,
            wire: us(work.wire_bytes, if pulls { self.read } else { self.write }),
            memory: us(work.memory_bytes + landed, self.copy),
        }
    }
}

/// One exchange: the halves and the pair that were measured of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cell {
    /// Its parameters; the operation is that of the first half, the variant how rows travelled.
    pub(super) case: Case,
    pub(super) kind: Kind,
    /// Terms and microseconds of dispatch and combine.
    pub(super) halves: [Option<(Terms, f64)>; 2],
    /// Microseconds of a pair.
    pub(super) pair: Option<f64>,
}

/// The halves, in the order of [`Cell::halves`].
pub(super) const HALVES: [Op; 2] = [Op::Dispatch, Op::Combine];

/// The exchanges of all reports, in order of their parameters: by our own code, with all
/// multiprocessors, padding cleared, verified.
pub(super) fn cells(reports: &[Report]) -> Vec<Cell> {
    let mut cells: BTreeMap<(Case, usize), Cell> = BTreeMap::new();
    for (number, report) in reports.iter().enumerate() {
        let rates = Rates::of(report);
        for entry in report.results.iter().filter(|entry| usable(entry)) {
            let Case { ranks, tokens, top_k, experts, .. } = entry.case;
            let kind = kind(&entry.case);
            let variant = if kind.way == Way::Push { "push" } else { "pull" }.to_owned();
            // How many layers a replay had follows from other parameters and memory.
            let case = Case { op: Op::Dispatch, variant, layers: 0, ..entry.case.clone() };
            let cell = cells.entry((case.clone(), number)).or_insert(Cell {
                case,
                kind,
                halves: [None; 2],
                pair: None,
            });
            let us = entry.time.median_us;
            match HALVES.iter().position(|op| *op == entry.case.op) {
                Some(half) => {
                    let sizes = (ranks, tokens, top_k, experts);
                    let terms = rates.terms((entry.case.op, kind.way), sizes, entry.work);
                    cell.halves[half] = Some((terms, us));
                }
                None => cell.pair = Some(us),
            }
        }
    }
    cells.into_values().collect()
}

fn usable(entry: &Entry) -> bool {
    let exchange = matches!(entry.case.op, Op::Dispatch | Op::Combine | Op::Pair);
    let whole = entry.case.sms == 0 && entry.case.padding.is_cleared();
    let ours = entry.case.by == By::GraphEp && entry.verified;
    exchange && whole && ours && entry.time.median_us > 0.0
}

fn kind(case: &Case) -> Kind {
    let asked = |way| case.variant.split(", ").any(|word| word == way);
    let shared = case.gpus < case.ranks;
    let way = match (asked("push"), asked("pull")) {
        (true, _) => Way::Push,
        (_, true) => Way::Pull,
        // Ranks that share a GPU pull unless they are told to push.
        _ => {
            if shared {
                Way::Pull
            } else {
                Way::Push
            }
        }
    };
    Kind { flat: case.layout == LayoutChoice::Flat, way, shared }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::report::tests::{case, entry, sample};
    use crate::bench::report::{Limit, LimitKind, Padding};
    use crate::bench::stats::Quantiles;

    /// A report whose times follow a law: 10 µs, 4 for a peer, 2 for a thousand choices, and the longer
    /// of 1.25 × the wire at 100 GB/s and 1.5 × the memory at 1000 GB/s; a pair saves 3.
    pub(crate) fn lawful() -> Report {
        let mut report = sample();
        let time = |us: f64| Quantiles::of([us]).unwrap();
        let rate = |what, gbps: u64| Limit::new(what, (0, None), 0, gbps * 1000, time(1.0));
        report.limits = vec![rate(LimitKind::PeerWrite, 100), rate(LimitKind::MemoryCopy, 1000)];
        report.results.clear();
        for ranks in [1, 2] {
            for tokens in [1_usize, 8, 64, 512, 2048, 4096] {
                let mut sum = 0.0;
                for op in [Op::Dispatch, Op::Combine, Op::Pair] {
                    let mut entry = entry(case(op, tokens), 1.0);
                    entry.case = Case { ranks, gpus: ranks, ..entry.case };
                    let wire = if ranks > 1 { tokens as u64 * 14_336 } else { 0 };
                    // Combines of few ranks are bound by the wire, dispatches by memory.
                    let memory = tokens as u64 * if op == Op::Combine { 70_000 } else { 140_000 };
                    entry.work = Work { wire_bytes: wire, memory_bytes: memory };
                    let landed = if op == Op::Dispatch { 3 * wire } else { 0 };
                    let payload =
                        (1.25 * wire as f64 / 1e5).max(1.5 * (memory + landed) as f64 / 1e6);
                    let us = 10.0 + 4.0 * (ranks - 1) as f64 + 0.016 * tokens as f64 + payload;
                    sum += us;
                    entry.time = time(if op == Op::Pair { sum - us - 3.0 } else { us });
                    report.results.push(entry);
                }
            }
        }
        report
    }

    #[test]
    fn halves_and_pairs_of_one_exchange_are_one_cell() {
        let cells = cells(&[lawful()]);
        assert_eq!(cells.len(), 12);
        assert!(cells.iter().all(|cell| cell.halves.iter().all(Option::is_some)));
        let last =
            cells.iter().find(|cell| cell.case.ranks == 2 && cell.case.tokens == 4096).unwrap();
        let (dispatch, us) = last.halves[0].unwrap();
        assert_eq!((dispatch.peer, dispatch.further, dispatch.experts), (1.0, 0.0, 256.0));
        assert!((dispatch.choices - 32.768).abs() < 1e-9);
        assert!((dispatch.wire - 4096.0 * 14_336.0 / 1e5).abs() < 1e-6);
        assert!((dispatch.memory - 4096.0 * (140_000.0 + 3.0 * 14_336.0) / 1e6).abs() < 1e-6);
        let (combine, other) = last.halves[1].unwrap();
        assert!((combine.memory - 4096.0 * 0.07).abs() < 1e-6);
        assert!((us + other - 3.0 - last.pair.unwrap()).abs() < 0.01);
    }

    #[test]
    fn what_another_did_or_part_of_it_is_left_out() {
        let mut report = lawful();
        report.results.truncate(4);
        report.results[0].case.by = By::Nccl;
        report.results[1].case.sms = 24;
        report.results[2].verified = false;
        report.results[3].case.padding = Padding::Left;
        assert!(cells(&[report]).is_empty());
    }

    #[test]
    fn ranks_that_share_pull_unless_told_to_push() {
        let of = |variant: &str, gpus| {
            kind(&Case { variant: variant.into(), gpus, ..case(Op::Dispatch, 1) })
        };
        assert_eq!((of("", 2).way, of("", 2).shared), (Way::Push, false));
        assert_eq!((of("", 1).way, of("", 1).shared), (Way::Pull, true));
        assert_eq!(of("quantised before, push", 1).way, Way::Push);
        assert_eq!(of("pull", 2).way, Way::Pull);
    }
}

//! What an overflow and a growth cost, in microseconds: measured figures, not guesses.

use serde::{Deserialize, Serialize};

use super::PoliciesError;
use crate::bench::growth::{Growth, Memory};
use crate::bench::report::{By, Entry, Op, Report};

/// Times that a policy is judged with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Where they are from, in words.
    pub source: String,
    /// A step that does not overflow.
    pub clean_us: f64,
    /// What a step that overflows and is replayed takes beyond one that does not: the run that was
    /// discarded, the ranks' agreement, recording and the start of the replay.
    pub overflow_us: f64,
    /// Recording again, where capacity changes between steps.
    pub record_us: f64,
    /// Mapping one GiB: fresh memory, if that was measured by itself.
    pub map_gib_us: f64,
    /// Bytes that are mapped for a row.
    pub row_bytes: usize,
}

impl Costs {
    /// Two H200s, steps of four layers of 128 tokens a rank, hidden 7168, top-8 of 256 experts, BF16:
    /// `benches/results/2026-11-30-bench-steps-h200-x2.json`.
    pub fn measured(row_bytes: usize) -> Self {
        Self {
            source: "two H200s, 4 layers, 128 tokens a rank, hidden 7168, BF16".to_owned(),
            clean_us: 378.03,
            overflow_us: 509.668,
            record_us: 59.665,
            map_gib_us: 2115.549,
            row_bytes,
        }
    }

    /// Times of `report`, from the results that have `tokens` tokens a rank; recording is the median
    /// over all, since it is a small difference of large times.
    ///
    /// # Errors
    ///
    /// [`PoliciesError::Costs`], naming what the report lacks.
    pub fn of(report: &Report, tokens: usize, row_bytes: usize) -> Result<Self, PoliciesError> {
        let lacks = |what: &'static str| PoliciesError::Costs { what, tokens };
        let clean = recover(report, "clean");
        let shaped = recover(report, "capacity-shaped");
        let counted = recover(report, "device-counted");
        let here = |entries: &[&Entry]| {
            let entry = entries.iter().find(|entry| entry.case.tokens == tokens);
            entry.map(|entry| entry.time.median_us)
        };
        let clean_us = here(&clean).ok_or(lacks("recover clean"))?;
        let shaped_us = here(&shaped).ok_or(lacks("recover capacity-shaped"))?;
        let mut recording: Vec<f64> = shaped
            .iter()
            .filter_map(|entry| {
                let of = |other: &&&Entry| same_shape(entry, other);
                let counted = counted.iter().find(of)?;
                Some((entry.time.median_us - counted.time.median_us).max(0.0))
            })
            .collect();
        recording.sort_by(f64::total_cmp);
        let record_us =
            *recording.get(recording.len() / 2).ok_or(lacks("recover device-counted"))?;
        let map_gib_us = map_gib_us(report).ok_or(lacks("grow"))?;
        Ok(Self {
            source: format!("{}, {tokens} tokens a rank", report.hardware.join(", ")),
            clean_us,
            overflow_us: (shaped_us - clean_us).max(0.0),
            record_us,
            map_gib_us,
            row_bytes,
        })
    }

    /// Mapping or unmapping so many rows.
    pub(super) fn map_us(&self, rows: u32) -> f64 {
        f64::from(rows) * self.row_bytes as f64 / (1_u64 << 30) as f64 * self.map_gib_us
    }
}

/// Results of recover of one kind; what was asked for of the transfer follows behind a comma.
fn recover<'r>(report: &'r Report, kind: &str) -> Vec<&'r Entry> {
    let right = |entry: &&Entry| {
        let named = entry.case.variant.split(", ").next() == Some(kind);
        entry.case.op == Op::Recover && entry.case.by == By::GraphEp && named
    };
    report.results.iter().filter(right).collect()
}

fn same_shape(a: &Entry, b: &Entry) -> bool {
    let shape = |entry: &Entry| {
        let (case, way) = (&entry.case, entry.case.variant.split_once(", "));
        (case.tokens, case.ranks, case.layers, case.padding, way.map(|(_, way)| way.to_owned()))
    };
    shape(a) == shape(b)
}

/// Microseconds in which a GiB is mapped: of fresh memory, which growing usually finds, or of what there is.
fn map_gib_us(report: &Report) -> Option<f64> {
    let read = |entry: &Entry| Some((Growth::read(&entry.case.variant)?, entry.time.median_us));
    let grown = || report.results.iter().filter(|e| e.case.op == Op::Grow).filter_map(read);
    let fresh = grown().find(|(growth, _)| growth.memory == Memory::Fresh);
    fresh.or_else(|| grown().next()).map(|(growth, us)| us / growth.gib)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Case;
    use crate::bench::report::tests::{case, entry, sample};

    fn report() -> Report {
        let recover = |tokens, kind: &str, us| {
            let case = Case { variant: kind.into(), ..case(Op::Recover, tokens) };
            entry(case, us)
        };
        let mut report = sample();
        report.results = vec![
            recover(8, "clean, push", 100.0),
            recover(8, "capacity-shaped, push", 300.0),
            recover(8, "device-counted, push", 250.0),
            recover(64, "clean", 1000.0),
            recover(64, "capacity-shaped", 2100.0),
            recover(64, "device-counted", 2200.0),
            entry(Case { variant: "by 512.00 MiB".into(), ..case(Op::Grow, 8) }, 40.0),
        ];
        report
    }

    #[test]
    fn times_are_differences_of_medians() {
        let costs = Costs::of(&report(), 64, 32).unwrap();
        assert_eq!((costs.clean_us, costs.overflow_us), (1000.0, 1100.0));
        // 50 at 8 tokens, less than nothing at 64: the larger of two.
        assert_eq!((costs.record_us, costs.map_gib_us), (50.0, 80.0));
        assert_eq!(costs.map_us(1 << 25), 80.0);
        assert_eq!(Costs::of(&report(), 8, 32).unwrap().overflow_us, 200.0);
    }

    #[test]
    fn what_is_mapped_is_fresh_where_that_was_measured() {
        let mut report = report();
        let case = Case { variant: "by 512.00 MiB, fresh".into(), ..case(Op::Grow, 8) };
        report.results.push(entry(case, 10.0));
        assert_eq!(Costs::of(&report, 64, 32).unwrap().map_gib_us, 20.0);
    }

    #[test]
    fn what_a_report_lacks_is_named() {
        let error = Costs::of(&report(), 9, 32).unwrap_err();
        assert!(error.to_string().contains("recover clean"), "{error}");
        let mut report = report();
        report.results.pop();
        assert!(Costs::of(&report, 8, 32).unwrap_err().to_string().contains("grow"));
    }
}

//! The laws of all kinds of exchanges, and how far they are off: on what they were fitted to, and on
//! what was held out.

use std::collections::BTreeMap;

use super::cells::{Cell, Kind};
use super::law::{Form, Law};
use crate::bench::report::{Case, Op};

/// Laws of the halves, and what a pair saves.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Laws {
    halves: BTreeMap<(Kind, usize), Law>,
    /// Microseconds by which a pair is shorter than its halves by themselves: marks, starts, and waiting
    /// for each other, each once in place of twice. Of a single rank, and of several.
    saved: BTreeMap<(Kind, bool), f64>,
}

impl Laws {
    /// The laws of `cells`, all but those of the exchange `except`.
    pub(super) fn of(cells: &[Cell], form: Form, except: Option<&Case>) -> Self {
        let mut laws = Self::default();
        let seen = || cells.iter().filter(|cell| Some(&cell.case) != except);
        let mut kinds: Vec<Kind> = cells.iter().map(|cell| cell.kind).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let of_kind = || seen().filter(|cell| cell.kind == kind);
            for half in [0, 1] {
                let points: Vec<_> = of_kind().filter_map(|cell| cell.halves[half]).collect();
                if let Some(law) = Law::of(&points, form) {
                    laws.halves.insert((kind, half), law);
                }
            }
            for several in [false, true] {
                let here = of_kind().filter(|cell| (cell.case.ranks > 1) == several);
                let saved: Vec<f64> = here
                    .filter_map(|cell| Some(cell.halves[0]?.1 + cell.halves[1]?.1 - cell.pair?))
                    .collect();
                if let Some(saved) = median(saved) {
                    laws.saved.insert((kind, several), saved);
                }
            }
        }
        laws
    }

    /// All laws, with what they are of.
    pub(super) fn all(&self) -> impl Iterator<Item = (Kind, usize, &Law)> {
        self.halves.iter().map(|((kind, half), law)| (*kind, *half, law))
    }

    /// The law of a half; none where too little was measured.
    pub(super) fn half(&self, kind: Kind, half: usize) -> Option<&Law> {
        self.halves.get(&(kind, half))
    }

    /// What a pair saves.
    pub(super) fn saved(&self, kind: Kind, several: bool) -> Option<f64> {
        self.saved.get(&(kind, several)).copied()
    }

    /// Microseconds of an operation of `cell`, by these laws.
    fn us(&self, cell: &Cell, op: Op) -> Option<f64> {
        let half = |half: usize| Some(self.half(cell.kind, half)?.us(&cell.halves[half]?.0));
        match op {
            Op::Dispatch => half(0),
            Op::Combine => half(1),
            _ => Some(half(0)? + half(1)? - self.saved(cell.kind, cell.case.ranks > 1)?),
        }
    }
}

/// One operation: what was measured and what laws say.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Checked {
    pub(super) case: Case,
    pub(super) kind: Kind,
    pub(super) op: Op,
    pub(super) measured: f64,
    /// By the laws of everything.
    pub(super) fitted: f64,
    /// By the laws of everything but this exchange; none where the rest is too little.
    pub(super) held_out: Option<f64>,
}

impl Checked {
    /// How far the law of everything is off, over what was measured.
    pub(super) fn error(&self) -> f64 {
        self.fitted / self.measured - 1.0
    }

    /// The same of what was held out.
    pub(super) fn held_out_error(&self) -> Option<f64> {
        self.held_out.map(|us| us / self.measured - 1.0)
    }
}

/// Checks every operation of every exchange: each is held out once, with all that was measured of it.
pub(super) fn checked(cells: &[Cell], form: Form) -> Vec<Checked> {
    let all = Laws::of(cells, form, None);
    let mut checked = Vec::new();
    for cell in cells {
        let others = Laws::of(cells, form, Some(&cell.case));
        let times =
            [cell.halves[0].map(|half| half.1), cell.halves[1].map(|half| half.1), cell.pair];
        for (op, measured) in [Op::Dispatch, Op::Combine, Op::Pair].into_iter().zip(times) {
            let (Some(measured), Some(fitted)) = (measured, all.us(cell, op)) else { continue };
            checked.push(Checked {
                case: cell.case.clone(),
                kind: cell.kind,
                op,
                measured,
                fitted,
                held_out: others.us(cell, op),
            });
        }
    }
    checked
}

/// How large errors are, their sign aside.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Errors {
    pub(super) count: usize,
    pub(super) median: f64,
    pub(super) worst: f64,
}

impl Errors {
    pub(super) fn of(errors: impl Iterator<Item = f64>) -> Self {
        let all: Vec<f64> = errors.map(f64::abs).collect();
        let worst = all.iter().copied().fold(0.0, f64::max);
        Self { count: all.len(), worst, median: median(all).unwrap_or(0.0) }
    }
}

/// The middle one, or the mean of the two in the middle.
pub(super) fn median(mut all: Vec<f64>) -> Option<f64> {
    all.sort_unstable_by(f64::total_cmp);
    let (low, high) = (all.get(all.len().saturating_sub(1) / 2)?, all.get(all.len() / 2)?);
    Some((low + high) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::super::cells::cells;
    use super::super::cells::tests::lawful;
    use super::*;

    #[test]
    fn what_follows_a_law_is_foretold_from_the_rest() {
        let cells = cells(&[lawful()]);
        let checked = checked(&cells, Form::Overlapped);
        assert_eq!(checked.len(), 3 * 12);
        let held = Errors::of(checked.iter().filter_map(Checked::held_out_error));
        assert_eq!(held.count, 3 * 12);
        assert!(held.median < 0.02 && held.worst < 0.25, "{held:?}");
        let laws = Laws::of(&cells, Form::Overlapped, None);
        assert!((laws.saved(cells[0].kind, true).unwrap() - 3.0).abs() < 0.01);
    }

    #[test]
    fn a_point_that_is_off_is_seen_when_it_is_held_out() {
        let mut report = lawful();
        for entry in report.results.iter_mut().filter(|e| e.case.tokens == 64 && e.case.ranks == 2)
        {
            entry.time = entry.time.scaled(3.0);
        }
        let checked = checked(&cells(&[report]), Form::Overlapped);
        let worst = checked
            .iter()
            .min_by(|a, b| a.held_out_error().unwrap().total_cmp(&b.held_out_error().unwrap()))
            .unwrap();
        assert_eq!((worst.case.tokens, worst.case.ranks), (64, 2));
        assert!(worst.held_out_error().unwrap() < -0.5);
    }

    #[test]
    fn medians_are_of_any_number() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(Errors::of([-0.5, 0.1].into_iter()).worst, 0.5);
    }
}

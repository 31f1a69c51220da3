//! The law of a half: a chain of things that follow each other, then bytes.
//!
//! ```text
//! t = fixed + peer · [R > 1] + further · (R − 2)⁺ + choice · T·k + expert · E + payload
//! payload = max(wire · W, memory · M)
//! ```
//!
//! W and M are the times of the bytes at the measured limits of wire and memory; coefficients of 1 would
//! be as fast as these. Rows are sent, landed and placed by blocks that do not wait for each other, so
//! the shorter of the two is hidden behind the longer. That none of it is, so that they add up, can be
//! fitted as well, so that data may decide.

use super::cells::Terms;
use super::solve;

/// How wire and memory go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The longer one counts.
    Overlapped,
    /// They add up.
    Added,
}

/// The fitted coefficients; none where the data do not tell one apart from those before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Law {
    pub(super) form: Form,
    pub(super) fixed: Option<f64>,
    pub(super) wire: Option<f64>,
    pub(super) memory: Option<f64>,
    pub(super) peer: Option<f64>,
    pub(super) choices: Option<f64>,
    pub(super) further: Option<f64>,
    pub(super) experts: Option<f64>,
}

/// Points that a law is fitted to, at least.
pub(super) const LEAST_POINTS: usize = 3;

/// Fits after which points do not change sides any more, at the latest.
const ROUNDS: usize = 16;

impl Law {
    /// The law of some points: terms, and microseconds. None of fewer than [`LEAST_POINTS`].
    pub(super) fn of(points: &[(Terms, f64)], form: Form) -> Option<Self> {
        if points.len() < LEAST_POINTS {
            return None;
        }
        if form == Form::Added {
            return Some(Self::fitted(points, form, |terms| [terms.memory, terms.wire]));
        }
        let mut sides: Vec<bool> =
            points.iter().map(|(terms, _)| terms.wire > terms.memory).collect();
        let mut law = Self::sided(points, &sides);
        for _ in 0..ROUNDS {
            let now: Vec<bool> = points.iter().map(|(terms, _)| law.on_wire(terms)).collect();
            if now == sides {
                break;
            }
            law = Self::sided(points, &now);
            sides = now;
        }
        Some(law)
    }

    /// The law if it is known of which points the wire takes longer.
    fn sided(points: &[(Terms, f64)], sides: &[bool]) -> Self {
        let mut sides = sides.iter();
        Self::fitted(points, Form::Overlapped, |terms| match sides.next() {
            Some(true) => [0.0, terms.wire],
            _ => [terms.memory, 0.0],
        })
    }

    fn fitted(
        points: &[(Terms, f64)],
        form: Form,
        mut payload: impl FnMut(&Terms) -> [f64; 2],
    ) -> Self {
        let rows: Vec<Vec<f64>> = points
            .iter()
            .map(|(terms, _)| {
                let [memory, wire] = payload(terms);
                let Terms { peer, choices, further, experts, .. } = *terms;
                // In the order in which they are believed.
                vec![1.0, memory, wire, peer, choices, further, experts]
            })
            .collect();
        let times: Vec<f64> = points.iter().map(|(_, us)| *us).collect();
        let found = solve::fit(&rows, &times);
        let [fixed, memory, wire, peer, choices, further, experts] =
            std::array::from_fn(|at| found.get(at).copied().flatten());
        Self { form, fixed, wire, memory, peer, choices, further, experts }
    }

    /// Whether the wire takes longer. What was not told apart goes at the limit.
    fn on_wire(&self, terms: &Terms) -> bool {
        self.wire.unwrap_or(1.0) * terms.wire > self.memory.unwrap_or(1.0) * terms.memory
    }

    /// Microseconds by this law; a coefficient that was not found counts for nothing, but no byte is
    /// faster than its limit.
    pub(super) fn us(&self, terms: &Terms) -> f64 {
        let of = |coefficient: Option<f64>, amount: f64| coefficient.unwrap_or(0.0) * amount;
        let wire = self.wire.unwrap_or(1.0) * terms.wire;
        let memory = self.memory.unwrap_or(1.0) * terms.memory;
        let payload = match self.form {
            Form::Overlapped => wire.max(memory),
            // Collinear: the one that was found stands for both.
            Form::Added => of(self.wire, terms.wire) + of(self.memory, terms.memory),
        };
        of(self.fixed, 1.0)
            + of(self.peer, terms.peer)
            + of(self.further, terms.further)
            + of(self.choices, terms.choices)
            + of(self.experts, terms.experts)
            + payload
    }
}

#[cfg(test)]
mod tests {
    use super::super::cells::cells;
    use super::super::cells::tests::lawful;
    use super::*;

    fn points(half: usize) -> Vec<(Terms, f64)> {
        cells(&[lawful()]).iter().filter_map(|cell| cell.halves[half]).collect()
    }

    #[test]
    fn the_law_that_times_follow_is_found() {
        for half in [0, 1] {
            let law = Law::of(&points(half), Form::Overlapped).unwrap();
            for (terms, us) in points(half) {
                assert!(
                    (law.us(&terms) - us).abs() < 0.02 * us,
                    "{law:?}: {} for {us}",
                    law.us(&terms)
                );
            }
        }
        let combine = Law::of(&points(1), Form::Overlapped).unwrap();
        // With one top-k and one width choices grow with bytes, and are paid for with them.
        let (bytes, choices) = (1.25 * 0.14336, 0.016);
        assert!((combine.wire.unwrap() - (bytes + choices) / 0.14336).abs() < 0.01, "{combine:?}");
        assert_eq!(combine.choices, None);
        assert!((combine.fixed.unwrap() - 10.0).abs() < 0.1, "{combine:?}");
        assert!((combine.peer.unwrap() - 4.0).abs() < 0.2, "{combine:?}");
        // No group had more than two ranks.
        assert_eq!(combine.further, None);
    }

    #[test]
    fn few_points_make_no_law_and_limits_are_never_beaten() {
        assert_eq!(Law::of(&points(0)[..2], Form::Overlapped), None);
        let one_rank: Vec<_> =
            points(1).into_iter().filter(|(terms, _)| terms.peer == 0.0).collect();
        let law = Law::of(&one_rank, Form::Overlapped).unwrap();
        assert_eq!((law.wire, law.peer), (None, None));
        let terms = Terms { wire: 1000.0, ..Terms::default() };
        assert!(law.us(&terms) >= 1000.0);
    }
}

//! The size that results are laid out along.

use clap::ValueEnum;

use super::{Case, Op};
use crate::args::display_as_value_name;

display_as_value_name!(Axis);

/// A number among the parameters of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Axis {
    /// Tokens of each rank
    Tokens,
    /// Elements of a token
    Hidden,
    /// Choices of a token
    TopK,
    /// Experts, over all ranks
    Experts,
    /// Ranks of the group
    Ranks,
    /// Streaming multiprocessors
    Sms,
    /// Layers of a step
    Layers,
}

impl Axis {
    /// The one of which `cases` have most; of several, the first in the order above.
    pub fn of<'c>(cases: impl Iterator<Item = &'c Case> + Clone) -> Self {
        let mut best = (Self::Tokens, 0);
        for axis in Self::value_variants() {
            let mut values: Vec<usize> = cases.clone().map(|case| axis.value(case)).collect();
            values.sort_unstable();
            values.dedup();
            if values.len() > best.1 {
                best = (*axis, values.len());
            }
        }
        best.0
    }

    /// Its number in `case`.
    pub fn value(self, case: &Case) -> usize {
        match self {
            Self::Tokens => case.tokens,
            Self::Hidden => case.hidden,
            Self::TopK => case.top_k,
            Self::Experts => case.experts,
            Self::Ranks => case.ranks,
            Self::Sms => case.sms as usize,
            Self::Layers => layers(case),
        }
    }

    /// What it is called along an axis.
    pub fn title(self) -> &'static str {
        match self {
            Self::Tokens => "tokens of each rank",
            Self::Hidden => "elements of a token",
            Self::TopK => "experts of a token",
            Self::Experts => "experts over all ranks",
            Self::Ranks => "ranks",
            Self::Sms => "multiprocessors",
            Self::Layers => "layers of a step",
        }
    }

    /// `case` without this number and what follows from it: results of one line are equal then.
    pub fn erased(self, case: &Case) -> Case {
        let mut case = Case { layers: layers(case), ..case.clone() };
        match self {
            Self::Tokens => case.tokens = 0,
            Self::Hidden => case.hidden = 0,
            Self::TopK => case.top_k = 0,
            Self::Experts => case.experts = 0,
            Self::Sms => case.sms = 0,
            Self::Layers => case.layers = 0,
            Self::Ranks => {
                // Ranks with a GPU each are one line, those that share so many GPUs another.
                case.gpus = if case.gpus >= case.ranks { usize::MAX } else { case.gpus };
                case.ranks = 0;
            }
        }
        case
    }
}

/// Layers of a step. How many an exchange is measured over follows from its size, and means nothing.
fn layers(case: &Case) -> usize {
    match case.op {
        Op::Replay | Op::Recover | Op::Host | Op::Counters => case.layers,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::case;
    use super::*;

    #[test]
    fn what_varies_most_is_the_axis_and_tokens_unless_something_does() {
        let of = |cases: &[Case]| Axis::of(cases.iter());
        assert_eq!(of(&[]), Axis::Tokens);
        assert_eq!(of(&[case(Op::Pair, 1)]), Axis::Tokens);
        let experts = [8, 64, 256].map(|experts| Case { experts, ..case(Op::Pair, 1) });
        assert_eq!(of(&experts), Axis::Experts);
        // As many tokens as ranks.
        let both = [1, 2].map(|n| Case { ranks: n, ..case(Op::Pair, n) });
        assert_eq!(of(&both), Axis::Tokens);
        // Layers of an exchange follow from its size.
        let layers = [16, 6, 4].map(|layers| Case { layers, ..case(Op::Pair, 1) });
        assert_eq!(of(&layers), Axis::Tokens);
        let layers = layers.map(|case| Case { op: Op::Replay, ..case });
        assert_eq!(of(&layers), Axis::Layers);
    }

    #[test]
    fn cases_of_one_line_are_equal_without_their_number() {
        for axis in Axis::value_variants() {
            let one = case(Op::Replay, 8);
            let mut other = one.clone();
            match axis {
                Axis::Tokens => other.tokens = 9,
                Axis::Hidden => other.hidden = 8,
                Axis::TopK => other.top_k = 3,
                Axis::Experts => other.experts = 9,
                Axis::Ranks => (other.ranks, other.gpus) = (4, 4),
                Axis::Sms => other.sms = 3,
                Axis::Layers => other.layers = 3,
            }
            assert_eq!(axis.erased(&one), axis.erased(&other), "{axis}");
            assert_ne!(axis.value(&one), axis.value(&other), "{axis}");
        }
        let apart = case(Op::Pair, 1);
        let shared = Case { gpus: 1, ..apart.clone() };
        assert_ne!(Axis::Ranks.erased(&apart), Axis::Ranks.erased(&shared));
    }
}

//! What the laws say of sizes that nobody has measured.

use super::cells::{HALVES, Kind, Rates, Terms, Way};
use super::expected::Exchange;
use super::laws::Laws;
use crate::bench::report::{Op, Work};

/// The sizes to predict: every combination.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wanted {
    pub(super) ranks: Vec<usize>,
    pub(super) tokens: Vec<usize>,
    pub(super) top_k: Vec<usize>,
    /// Over all ranks; rounded up to a multiple of the ranks.
    pub(super) experts: Vec<usize>,
    pub(super) hidden: Vec<usize>,
}

/// The machine that is not there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Network {
    /// Ranks that NVLink connects.
    pub(super) domain: usize,
    /// What each rank sends beyond it, in 10⁹ bytes a second.
    pub(super) gbps: f64,
}

/// What is predicted of one exchange, in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Prediction {
    pub(super) exchange: Exchange,
    pub(super) hidden: usize,
    /// Dispatch, combine, pair, as far as there are laws.
    pub(super) us: [Option<f64>; 3],
    /// Where the cost of ranks beyond two is from.
    pub(super) further: Further,
    /// Of a pair: microseconds of the bytes alone, at the limits.
    pub(super) payload: f64,
}

/// Where the cost of ranks beyond two is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Further {
    /// There are none, or ranks with a GPU each were measured.
    Measured,
    /// Ranks that shared GPUs stand in.
    Shared,
    /// Nobody measured more than two: what is predicted is the least.
    Unknown,
}

/// Rows by expert, aligned to so many.
const ALIGNMENT: usize = 16;

pub(super) fn predict(
    laws: &Laws,
    rates: &Rates,
    network: &Network,
    wanted: &Wanted,
) -> Vec<Prediction> {
    let mut found = Vec::new();
    for flat in [false, true] {
        for ranks in &wanted.ranks {
            for hidden in &wanted.hidden {
                for experts in &wanted.experts {
                    for top_k in &wanted.top_k {
                        for tokens in &wanted.tokens {
                            let exchange = Exchange {
                                ranks: *ranks,
                                tokens: *tokens,
                                top_k: *top_k,
                                experts: (*experts).max(*top_k).next_multiple_of(*ranks),
                                row_bytes: 2 * hidden,
                                sum_bytes: 2 * hidden,
                                alignment: ALIGNMENT,
                                flat,
                            };
                            found.extend(one(laws, rates, network, exchange, *hidden));
                        }
                    }
                }
            }
        }
    }
    found
}

/// None where there is no law of either half.
fn one(
    laws: &Laws,
    rates: &Rates,
    network: &Network,
    exchange: Exchange,
    hidden: usize,
) -> Option<Prediction> {
    let kind = Kind { flat: exchange.flat, way: Way::Push, shared: false };
    let halves = exchange.halves();
    let mut us = [None; 3];
    let mut payload = 0.0;
    let mut further = Further::Measured;
    for (half, work) in [halves.dispatch, halves.combine].into_iter().enumerate() {
        let terms = terms(HALVES[half], rates, network, &exchange, work);
        payload += terms.wire.max(terms.memory);
        let Some(law) = laws.half(kind, half) else { continue };
        us[half] = Some(law.us(&terms));
        if law.further.is_none() && exchange.ranks > 2 {
            let shared = laws.half(Kind { shared: true, ..kind }, half);
            let each = shared.and_then(|law| law.further);
            us[half] = us[half].map(|us| us + each.unwrap_or(0.0) * terms.further);
            let from = if each.is_some() { Further::Shared } else { Further::Unknown };
            further = further.max(from);
        }
    }
    if us[0].is_none() && us[1].is_none() {
        return None;
    }
    let saved = laws.saved(kind, exchange.ranks > 1).unwrap_or(0.0);
    us[2] = us[0].zip(us[1]).map(|(dispatch, combine)| dispatch + combine - saved);
    Some(Prediction { exchange, hidden, us, further, payload })
}

/// Bytes for other domains leave by the network while those for this one leave by NVLink.
fn terms(op: Op, rates: &Rates, network: &Network, exchange: &Exchange, work: Work) -> Terms {
    let Exchange { ranks, tokens, top_k, experts, .. } = *exchange;
    let sizes = (ranks, tokens, top_k, experts);
    let mut terms = rates.terms((op, Way::Push), sizes, work);
    let outside = ranks.saturating_sub(network.domain.max(1));
    if outside > 0 {
        let share = outside as f64 / (ranks - 1) as f64;
        let beyond = share * work.wire_bytes as f64 / network.gbps / 1e3;
        terms.wire = beyond.max((1.0 - share) * terms.wire);
    }
    terms
}

#[cfg(test)]
mod tests {
    use super::super::cells::tests::lawful;
    use super::super::cells::{Rates, cells};
    use super::super::law::Form;
    use super::*;

    fn predicted(ranks: &[usize], network: Network) -> Vec<Prediction> {
        let report = lawful();
        let laws = Laws::of(&cells(std::slice::from_ref(&report)), Form::Overlapped, None);
        let wanted = Wanted {
            ranks: ranks.to_vec(),
            tokens: vec![4096],
            top_k: vec![8],
            experts: vec![256],
            hidden: vec![7168],
        };
        predict(&laws, &Rates::of(&report), &network, &wanted)
    }

    #[test]
    fn more_ranks_take_longer_and_beyond_a_domain_the_network_binds() {
        let network = Network { domain: 72, gbps: 10.0 };
        let all = predicted(&[1, 2, 8, 72, 1024], network);
        // There is a law by expert only.
        assert_eq!(all.len(), 5);
        let pairs: Vec<f64> = all.iter().map(|one| one.us[2].unwrap()).collect();
        assert!(pairs.is_sorted(), "{pairs:?}");
        assert_eq!(all[3].exchange.experts, 288);
        // Two ranks were measured; of eight it is not known what six of them cost.
        assert_eq!((all[1].further, all[2].further), (Further::Measured, Further::Unknown));
        let fast = predicted(&[1024], Network { domain: 1024, gbps: 10.0 });
        assert!(fast[0].payload < 0.2 * all[4].payload);
    }
}

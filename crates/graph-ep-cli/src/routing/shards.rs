//! The tokens of each rank.

use std::ops::Range;

use super::{Ownership, RoutingError, RoutingParts};
use crate::demand::even_range;

/// Which tokens each rank owns in each step, for one number of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    ranks: usize,
    tokens: usize,
    steps: usize,
    /// `[steps, ranks + 1]` if steps differ; otherwise none, and every step is divided evenly.
    offsets: Option<Vec<usize>>,
}

impl Shards {
    pub(super) fn new(parts: &RoutingParts, ranks: usize) -> Result<Self, RoutingError> {
        if ranks == 0 {
            return Err(RoutingError::NoRanks);
        }
        if ranks > parts.experts {
            return Err(RoutingError::MoreRanksThanExperts { ranks, experts: parts.experts });
        }
        let offsets = match &parts.ownership {
            Ownership::Even => None,
            Ownership::Split { ranks: fixed, offsets } if *fixed == ranks => Some(offsets.clone()),
            Ownership::Split { ranks: fixed, .. } => {
                return Err(RoutingError::RanksFixed { fixed: *fixed, ranks });
            }
        };
        Ok(Self { ranks, tokens: parts.tokens, steps: parts.steps, offsets })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The tokens that `rank` owns in `step`, as positions along the token dimension. May be empty.
    ///
    /// # Panics
    ///
    /// As a slice does, if `step` or `rank` does not exist.
    pub fn range(&self, step: usize, rank: usize) -> Range<usize> {
        assert!(step < self.steps && rank < self.ranks, "no rank {rank} in step {step}");
        match &self.offsets {
            None => even_range(self.tokens, self.ranks, rank),
            Some(offsets) => {
                let entry = step * (self.ranks + 1) + rank;
                offsets[entry]..offsets[entry + 1]
            }
        }
    }

    /// T: the most tokens that a rank owns in any step, for which staging and landing are sized.
    ///
    /// `ceil(N / R)` where tokens are divided evenly.
    pub fn max_tokens(&self) -> usize {
        match &self.offsets {
            None => self.tokens.div_ceil(self.ranks),
            Some(offsets) => offsets
                .chunks_exact(self.ranks + 1)
                .flat_map(|row| row.windows(2).map(|pair| pair[1] - pair[0]))
                .max()
                .unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Routing, tests::parts};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_split_is_followed_and_fixes_the_ranks() {
        let mut split = parts();
        split.ownership = Ownership::Split { ranks: 2, offsets: vec![0, 0, 3, 0, 2, 3] };
        let routing = Routing::new(split).unwrap();
        let shards = routing.shards(2).unwrap();
        assert_eq!([shards.range(0, 0), shards.range(0, 1)], [0..0, 0..3]);
        assert_eq!([shards.range(1, 0), shards.range(1, 1)], [0..2, 2..3]);
        assert_eq!(shards.max_tokens(), 3);
        assert_eq!(routing.shards(3), Err(RoutingError::RanksFixed { fixed: 2, ranks: 3 }));
    }

    #[test]
    fn every_rank_needs_an_expert() {
        let routing = Routing::new(parts()).unwrap();
        routing.shards(5).unwrap();
        let refused = RoutingError::MoreRanksThanExperts { ranks: 6, experts: 5 };
        assert_eq!(routing.shards(6), Err(refused));
        assert_eq!(routing.shards(0), Err(RoutingError::NoRanks));
    }

    proptest! {
        #[test]
        fn even_shards_cover_every_token_once(tokens in 1_usize..200, ranks in 1_usize..40) {
            let even = RoutingParts {
                experts: 40, top_k: 1, steps: 1, layers: 1, tokens, ids: vec![0; tokens],
                ..RoutingParts::default()
            };
            let shards = Routing::new(even).unwrap().shards(ranks).unwrap();
            let owned: Vec<usize> = (0..ranks).flat_map(|rank| shards.range(0, rank)).collect();
            prop_assert_eq!(owned, (0..tokens).collect::<Vec<_>>());
            let most = (0..ranks).map(|rank| shards.range(0, rank).len()).max();
            prop_assert_eq!(most, Some(shards.max_tokens()));
        }
    }
}

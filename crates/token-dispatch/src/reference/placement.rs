//! Which rank owns a token, and which rank owns an expert.
//!
//! Both are dealt out in contiguous shares: of `n` things over `R` ranks, rank `r` owns
//! `[r·n/R, (r+1)·n/R)`, each division rounding down. Shares differ by one at most, every thing has
//! exactly one owner, and a rank may own none when `n < R`.

use std::ops::Range;

use super::ReferenceError;

/// The share `[r·n/R, (r+1)·n/R)` of `count` things that `rank` of `ranks` owns.
///
/// Empty when `rank` is not in the group.
pub fn share(count: usize, ranks: usize, rank: usize) -> Range<usize> {
    if rank >= ranks {
        return 0..0;
    }
    // In 128 bits, so that the product cannot wrap.
    let start = |rank: usize| (rank as u128 * count as u128 / ranks as u128) as usize;
    start(rank)..start(rank + 1)
}

/// The tokens of a step of `tokens` that `rank` of `ranks` owns.
pub fn tokens_of_rank(tokens: usize, ranks: usize, rank: usize) -> Range<usize> {
    share(tokens, ranks, rank)
}

/// The most tokens that any rank owns: `ceil(tokens / ranks)`.
pub fn tokens_per_rank(tokens: usize, ranks: usize) -> usize {
    (0..ranks).map(|rank| tokens_of_rank(tokens, ranks, rank).len()).max().unwrap_or(0)
}

/// The part of `matrix`, `[tokens, columns]`, that `rank` owns.
pub fn rows_of_rank<T>(matrix: &[T], columns: usize, ranks: usize, rank: usize) -> &[T] {
    let tokens = matrix.len().checked_div(columns).unwrap_or(0);
    let owned = tokens_of_rank(tokens, ranks, rank);
    &matrix[owned.start * columns..owned.end * columns]
}

/// Which rank holds each expert.
///
/// Contiguous shares are the rule; an explicit list serves placements that a load balancer chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertMap {
    ranks: usize,
    rank_of: Vec<usize>,
}

impl ExpertMap {
    /// Deals `experts` out in contiguous [shares](share).
    ///
    /// # Errors
    /// [`ReferenceError::NoRanks`].
    pub fn contiguous(experts: usize, ranks: usize) -> Result<Self, ReferenceError> {
        let rank_of = (0..ranks)
            .flat_map(|rank| share(experts, ranks, rank).map(move |_expert| rank))
            .collect();
        Self::from_ranks(rank_of, ranks)
    }

    /// Expert `e` lies on rank `rank_of[e]`.
    ///
    /// # Errors
    /// [`ReferenceError::NoRanks`], or [`ReferenceError::RankOutOfRange`] for the first expert
    /// placed outside the group.
    pub fn from_ranks(rank_of: Vec<usize>, ranks: usize) -> Result<Self, ReferenceError> {
        if ranks == 0 {
            return Err(ReferenceError::NoRanks);
        }
        match rank_of.iter().position(|&rank| rank >= ranks) {
            Some(expert) => {
                Err(ReferenceError::RankOutOfRange { expert, rank: rank_of[expert], ranks })
            }
            None => Ok(Self { ranks, rank_of }),
        }
    }

    /// Ranks in the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Experts placed.
    pub fn experts(&self) -> usize {
        self.rank_of.len()
    }

    /// The rank that holds `expert`; `None` if there is no such expert.
    pub fn owner_of_expert(&self, expert: usize) -> Option<usize> {
        self.rank_of.get(expert).copied()
    }

    /// The experts that `rank` holds, ascending. An expert's position in this list is its local
    /// slot: the place of its rows among the groups that the rank receives.
    pub fn experts_of_rank(&self, rank: usize) -> Vec<usize> {
        (0..self.experts()).filter(|&expert| self.rank_of[expert] == rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn seven_tokens_over_three_ranks() {
        // 0·7/3 = 0, 1·7/3 = 2, 2·7/3 = 4, 3·7/3 = 7.
        let shares: Vec<_> = (0..3).map(|rank| tokens_of_rank(7, 3, rank)).collect();
        assert_eq!(shares, [0..2, 2..4, 4..7]);
        assert_eq!(tokens_per_rank(7, 3), 3);
        assert_eq!(tokens_of_rank(7, 3, 3), 0..0);
    }

    #[test]
    fn fewer_experts_than_ranks_leave_ranks_without() {
        // 0·2/4 = 0, 1·2/4 = 0, 2·2/4 = 1, 3·2/4 = 1, 4·2/4 = 2.
        let map = ExpertMap::contiguous(2, 4).unwrap();
        let held: Vec<_> = (0..4).map(|rank| map.experts_of_rank(rank)).collect();
        assert_eq!(held, [vec![], vec![0], vec![], vec![1]]);
        assert_eq!(map.owner_of_expert(1), Some(3));
        assert_eq!(map.owner_of_expert(2), None);
    }

    #[test]
    fn an_explicit_list_keeps_slots_ascending() {
        let map = ExpertMap::from_ranks(vec![1, 0, 1, 0, 1], 2).unwrap();
        assert_eq!(map.experts_of_rank(0), [1, 3]);
        assert_eq!(map.experts_of_rank(1), [0, 2, 4]);
        assert_eq!(
            ExpertMap::from_ranks(vec![0, 2], 2),
            Err(ReferenceError::RankOutOfRange { expert: 1, rank: 2, ranks: 2 })
        );
        assert_eq!(ExpertMap::contiguous(4, 0), Err(ReferenceError::NoRanks));
    }

    #[test]
    fn rows_of_a_rank_follow_its_tokens() {
        let matrix = [0, 1, 10, 11, 20, 21];
        assert_eq!(rows_of_rank(&matrix, 2, 2, 0), [0, 1]);
        assert_eq!(rows_of_rank(&matrix, 2, 2, 1), [10, 11, 20, 21]);
        assert_eq!(rows_of_rank::<i32>(&[], 0, 2, 1), []);
    }

    proptest! {
        #[test]
        fn every_thing_has_one_owner_and_shares_are_even(count in 0_usize..200, ranks in 1_usize..20) {
            let dealt: Vec<usize> = (0..ranks).flat_map(|rank| share(count, ranks, rank)).collect();
            prop_assert_eq!(dealt, (0..count).collect::<Vec<_>>());
            for rank in 0..ranks {
                let len = share(count, ranks, rank).len();
                prop_assert!(len == count / ranks || len == count.div_ceil(ranks));
            }
            prop_assert_eq!(tokens_per_rank(count, ranks), count.div_ceil(ranks));

            let map = ExpertMap::contiguous(count, ranks).unwrap();
            for rank in 0..ranks {
                for expert in map.experts_of_rank(rank) {
                    prop_assert_eq!(map.owner_of_expert(expert), Some(rank));
                }
            }
        }
    }
}

//! Receive rows: what a rank requires, what it is granted at first, and what it could need at worst.
//!
//! A rank receives its rows grouped by expert, each group filled up to a multiple of the alignment
//! `a`, so a *row* here is a padded row unless it is called otherwise.

use super::placement::ExpertMap;
use super::routing::tokens_per_expert;

/// `count` rounded up to a multiple of `alignment`; an alignment of zero counts as one.
pub fn round_up(count: usize, alignment: usize) -> usize {
    let alignment = alignment.max(1);
    // A capacity factor is anybody's number: what lies beyond the largest multiple stays there.
    count.checked_next_multiple_of(alignment).unwrap_or(usize::MAX / alignment * alignment)
}

/// `Σ round_up(count, a)`: the rows of groups of these sizes.
pub fn padded_rows(counts: impl IntoIterator<Item = usize>, alignment: usize) -> usize {
    counts.into_iter().map(|count| round_up(count, alignment)).sum()
}

/// Rows that `rank` requires in one layer: `Σ round_up(count, a)` over the experts it holds.
///
/// `counts` are the tokens of each expert, from all sources. An expert without a count has none.
pub fn required_rows(counts: &[usize], map: &ExpertMap, rank: usize, alignment: usize) -> usize {
    let count = |expert: usize| counts.get(expert).copied().unwrap_or(0);
    padded_rows(map.experts_of_rank(rank).into_iter().map(count), alignment)
}

/// The capacity that every rank starts with: `ceil(factor · (T·k))`, computed in f64, rounded up to
/// the alignment.
///
/// `tokens_per_rank` is T, the most tokens that a rank brings. `T·k` is what a rank would receive
/// under balanced routing, without padding, so the factor is the slack over that. Nothing is
/// clamped: a large factor gives more than the worst case. A factor that is not a positive number
/// gives zero.
pub fn initial_capacity(
    tokens_per_rank: usize,
    top_k: usize,
    factor: f64,
    alignment: usize,
) -> usize {
    round_up((factor * tokens_per_rank.saturating_mul(top_k) as f64).ceil() as usize, alignment)
}

/// A capacity that no routing of `tokens` tokens can exceed on any rank.
///
/// For a rank that holds `E_r` experts, `M = N·min(k, E_r)` (token, expert) pairs can meet there, and
/// at most `min(E_r, M)` groups can be non-empty, each padded by at most `a − 1` rows. The sum of the
/// groups is a multiple of `a`, so
///
/// ```text
/// rows ≤ floor((M + min(E_r, M)·(a − 1)) / a) · a
/// ```
///
/// and the result is the maximum of that over the ranks.
pub fn worst_case_rows(tokens: usize, top_k: usize, map: &ExpertMap, alignment: usize) -> usize {
    let a = alignment.max(1);
    (0..map.ranks())
        .map(|rank| {
            let experts = map.experts_of_rank(rank).len();
            let pairs = tokens * top_k.min(experts);
            (pairs + experts.min(pairs) * (a - 1)) / a * a
        })
        .max()
        .unwrap_or(0)
}

/// The greatest requirement of any rank over `layers`, each `[tokens, top_k]`, one entry a rank.
///
/// All layers share one capacity, so a step requires of a rank what its worst layer does.
pub fn required_in_step(
    layers: &[&[i64]],
    top_k: usize,
    map: &ExpertMap,
    alignment: usize,
) -> Vec<usize> {
    let counts: Vec<Vec<usize>> =
        layers.iter().map(|topk| tokens_per_expert(topk, top_k, map.experts())).collect();
    let of_rank = |rank| counts.iter().map(move |c| required_rows(c, map, rank, alignment)).max();
    (0..map.ranks()).map(|rank| of_rank(rank).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_rank_pads_each_of_its_experts() {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        // Rank 0: 1 → 4, 4 → 4. Rank 1: 0 → 0, 9 → 12.
        assert_eq!(required_rows(&[1, 4, 0, 9], &map, 0, 4), 8);
        assert_eq!(required_rows(&[1, 4, 0, 9], &map, 1, 4), 12);
        assert_eq!(required_rows(&[1, 4, 0, 9], &map, 1, 1), 9);
    }

    #[test]
    fn a_step_requires_what_its_worst_layer_does() {
        let map = ExpertMap::contiguous(2, 2).unwrap();
        // Layer 0: two tokens to expert 0, one to expert 1. Layer 1: three to expert 1.
        let layers: [&[i64]; 2] = [&[0, 0, 1], &[1, 1, 1]];
        assert_eq!(required_in_step(&layers, 1, &map, 2), [2, 4]);
        assert_eq!(required_in_step(&[], 1, &map, 2), [0, 0]);
    }

    #[test]
    fn initial_capacity_rounds_twice_and_clamps_nothing() {
        // 1.25 · (256·8) = 2560, a multiple of 16.
        assert_eq!(initial_capacity(256, 8, 1.25, 16), 2560);
        // 1.1 · (3·1) = 3.3…, 4 after the ceiling, 8 after the alignment.
        assert_eq!(initial_capacity(3, 1, 1.1, 8), 8);
        assert_eq!(initial_capacity(256, 8, 100.0, 16), 204_800);
        assert_eq!(initial_capacity(256, 8, 0.0, 16), 0);
        assert_eq!(initial_capacity(256, 8, f64::NAN, 16), 0);
        assert_eq!(initial_capacity(256, 8, f64::INFINITY, 16), usize::MAX - 15);
    }

    #[test]
    fn worst_case_by_hand() {
        // Eight experts a rank: M = 2048·8 = 16384; (16384 + 8·15)/16 = 1031.5 → 1031·16 = 16496.
        let map = ExpertMap::contiguous(64, 8).unwrap();
        assert_eq!(worst_case_rows(2048, 8, &map, 16), 16_496);
        // One expert a rank: M = 5·1; (5 + 1·3)/4 = 2 → 8 rows.
        let map = ExpertMap::contiguous(2, 2).unwrap();
        assert_eq!(worst_case_rows(5, 2, &map, 4), 8);
        // A rank without experts needs nothing, and no tokens need nothing.
        assert_eq!(worst_case_rows(0, 2, &map, 4), 0);
    }

    proptest! {
        #[test]
        fn no_routing_exceeds_the_worst_case(
            topk in prop::collection::vec(-1_i64..6, 0..60),
            top_k in 1_usize..5,
            ranks in 1_usize..4,
            alignment in prop::sample::select(vec![1_usize, 2, 4, 16]),
        ) {
            let tokens = topk.len() / top_k;
            let map = ExpertMap::contiguous(6, ranks).unwrap();
            let counts = tokens_per_expert(&topk[..tokens * top_k], top_k, 6);
            let worst = worst_case_rows(tokens, top_k, &map, alignment);
            for rank in 0..ranks {
                prop_assert!(required_rows(&counts, &map, rank, alignment) <= worst);
            }
        }

        #[test]
        fn some_routing_reaches_the_worst_case(
            // Enough tokens that each expert's remainder can be chosen.
            tokens in 8_usize..40, alignment in prop::sample::select(vec![1_usize, 2, 4]),
        ) {
            // One rank, two experts, top-1: expert 0 takes one token, expert 1 the others; or two.
            let map = ExpertMap::contiguous(2, 1).unwrap();
            let reached = (0..=alignment)
                .map(|first| required_rows(&[first, tokens - first], &map, 0, alignment))
                .max();
            prop_assert_eq!(reached, Some(worst_case_rows(tokens, 1, &map, alignment)));
        }
    }
}

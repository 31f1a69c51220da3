//! What routing asks of each rank, computed from the routing alone.
//!
//! The engine finds the same numbers on its ranks while it runs. Computing them here as well, from
//! their definition and in the plainest way, gives the run something to be held against, and says
//! beforehand what a capacity amounts to.
//!
//! A *row* is one token at one expert. A rank's receive buffer groups its rows by expert, and each
//! expert's rows are rounded up to the alignment.

use std::ops::Range;

use crate::routing::Routing;

/// The part of `[0, total)` that falls to `part` of `parts`: `[part·total/parts,
/// (part+1)·total/parts)`, floor division.
///
/// Tokens and experts are both divided so. `parts` must not be zero.
pub fn even_range(total: usize, parts: usize, part: usize) -> Range<usize> {
    // In u128 the product cannot overflow, and the quotient is at most `total`.
    let at = |i: usize| (i as u128 * total as u128 / parts as u128) as usize;
    at(part)..at(part + 1)
}

/// Rows of every rank's receive buffer at the start, unless that is more than the [worst
/// case](worst_case_rows): `ceil(factor · (max_tokens · top_k))` in f64, rounded up to `alignment`. `None`
/// if that is beyond what can be addressed.
pub fn initial_capacity_rows(
    factor: f64,
    max_tokens: usize,
    top_k: usize,
    alignment: usize,
) -> Option<usize> {
    let rows = (factor * max_tokens.checked_mul(top_k)? as f64).ceil();
    // 2^63 is the first power of two that no allocation can have.
    if !(0.0..9.2e18).contains(&rows) {
        return None;
    }
    (rows as usize).checked_next_multiple_of(alignment)
}

/// The most rows that any routing of `tokens` tokens can require of a rank, padding included.
///
/// The maximum over ranks of `floor((M + min(E_r, M)·(a − 1)) / a)·a`, where the rank holds `E_r`
/// experts and can be sent `M = tokens·min(top_k, E_r)` rows. `None` if that is beyond what can be
/// addressed.
pub fn worst_case_rows(
    tokens: usize,
    ranks: usize,
    experts: usize,
    top_k: usize,
    alignment: usize,
) -> Option<usize> {
    let mut worst = 0;
    for rank in 0..ranks {
        let local = even_range(experts, ranks, rank).len();
        let rows = tokens.checked_mul(top_k.min(local))?;
        let padded = local.min(rows).checked_mul(alignment - 1)?.checked_add(rows)?;
        worst = worst.max(padded / alignment * alignment);
    }
    Some(worst)
}

/// Padded rows that each step requires of each rank: `[steps][ranks]`, the maximum over all layers
/// of the step.
///
/// `ranks` is at least one and at most the number of experts, `alignment` at least one.
pub fn required_rows(routing: &Routing, ranks: usize, alignment: usize) -> Vec<Vec<usize>> {
    let mut counts = vec![0_usize; routing.experts()];
    (0..routing.steps())
        .map(|step| {
            let mut peak = vec![0; ranks];
            for layer in 0..routing.layers() {
                counts.fill(0);
                for &id in routing.layer(step, layer).ids {
                    // −1, the only negative id, is no expert.
                    if let Ok(expert) = usize::try_from(id) {
                        counts[expert] += 1;
                    }
                }
                for (rank, peak) in peak.iter_mut().enumerate() {
                    let local = &counts[even_range(counts.len(), ranks, rank)];
                    let rows: usize = local.iter().map(|c| c.next_multiple_of(alignment)).sum();
                    *peak = rows.max(*peak);
                }
            }
            peak
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::RoutingParts;
    use proptest::prelude::*;

    #[test]
    fn parts_differ_by_one_at_most_and_large_totals_do_not_overflow() {
        assert_eq!((0..3).map(|i| even_range(10, 3, i)).collect::<Vec<_>>(), [0..3, 3..6, 6..10]);
        assert_eq!(even_range(usize::MAX, 2, 1), usize::MAX / 2..usize::MAX);
    }

    #[test]
    fn the_initial_capacity_is_rounded_up_twice() {
        // 1.25 · 64 · 8 = 640 exactly; 1.1 · 3 · 2 = 6.6… → 7 → 8.
        assert_eq!(initial_capacity_rows(1.25, 64, 8, 16), Some(640));
        assert_eq!(initial_capacity_rows(1.1, 3, 2, 4), Some(8));
        assert_eq!(initial_capacity_rows(1e300, 64, 8, 16), None);
        assert_eq!(initial_capacity_rows(f64::NAN, 64, 8, 16), None);
        assert_eq!(initial_capacity_rows(1.0, usize::MAX, 8, 16), None);
    }

    #[test]
    fn the_worst_case_is_as_defined() {
        // 512 tokens, 8 of 64 experts on each of 8 ranks: M = 4096, and 8 experts waste at most 15
        // rows each.
        assert_eq!(worst_case_rows(512, 8, 64, 8, 16), Some((4096 + 8 * 15) / 16 * 16));
        // Without alignment there is no padding.
        assert_eq!(worst_case_rows(512, 8, 64, 8, 1), Some(4096));
        // Uneven experts: ranks of 3, 3 and 4; the one with four decides.
        assert_eq!(worst_case_rows(10, 3, 10, 4, 1), Some(40));
        assert_eq!(worst_case_rows(usize::MAX, 1, 2, 2, 1), None);
    }

    proptest! {
        #[test]
        fn no_routing_requires_more_than_the_worst_case(
            ranks in 1_usize..6,
            alignment in prop::sample::select(vec![1_usize, 2, 16]),
            choices in prop::collection::vec(
                prop::sample::subsequence(vec![0, 1, 2, 3, 4, 5, 6], 3), 1..30,
            ),
        ) {
            let tokens = choices.len();
            let routing = Routing::new(RoutingParts {
                experts: 7, top_k: 3, steps: 1, layers: 1, tokens, ids: choices.concat(),
                ..RoutingParts::default()
            }).unwrap();
            let required = required_rows(&routing, ranks, alignment);
            let worst = worst_case_rows(tokens, ranks, 7, 3, alignment).unwrap();
            prop_assert!(required[0].iter().all(|&rows| rows <= worst));
            // Unpadded, the ranks together receive every choice once.
            let unpadded: usize = required_rows(&routing, ranks, 1)[0].iter().sum();
            prop_assert_eq!(unpadded, tokens * 3);
        }
    }
}

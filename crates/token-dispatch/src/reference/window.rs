//! What a receiver takes when its capacity is less than it requires.
//!
//! A receiver orders its *items*: an item is one token with at least one expert on this rank, and the
//! order is (source rank, token). It takes the longest prefix of what is left for which
//!
//! ```text
//! Σ over its experts of round_up(count, a) ≤ capacity
//! ```
//!
//! An item is taken whole or not at all, and the first that does not fit ends the prefix even if a
//! later one would fit: what was taken is then a single cut in the order, which one number tells.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::ReferenceError;
use super::placement::ExpertMap;
use super::required::padded_rows;
use super::routing::{choices, tokens};

/// One token, as one receiver sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// The rank that owns the token.
    pub source: usize,
    /// The token's index among that rank's own tokens.
    pub token: usize,
    /// The experts it goes to on this receiver, ascending; never empty.
    pub experts: Vec<usize>,
}

/// The items of `receiver`, in its order.
///
/// `topk[s]` holds the ids of source rank `s`, `[tokens of s, top_k]`.
pub fn items(topk: &[&[i64]], top_k: usize, map: &ExpertMap, receiver: usize) -> Vec<Item> {
    let mut items = Vec::new();
    for (source, ids) in topk.iter().enumerate() {
        for (token, ids) in tokens(ids, top_k).enumerate() {
            let experts: Vec<usize> = choices(ids, map.experts())
                .into_iter()
                .map(|choice| choice.expert)
                .filter(|&expert| map.owner_of_expert(expert) == Some(receiver))
                .collect();
            if !experts.is_empty() {
                items.push(Item { source, token, experts });
            }
        }
    }
    items
}

/// Padded rows that `items` occupy together.
pub fn rows(items: &[Item], alignment: usize) -> usize {
    let mut counts = BTreeMap::new();
    for expert in items.iter().flat_map(|item| &item.experts) {
        *counts.entry(expert).or_insert(0) += 1;
    }
    padded_rows(counts.into_values(), alignment)
}

/// How many of `left` one window takes: the longest prefix that fits `capacity`.
pub fn longest_prefix(left: &[Item], capacity: usize, alignment: usize) -> usize {
    let mut counts = BTreeMap::new();
    for (taken, item) in left.iter().enumerate() {
        for expert in &item.experts {
            *counts.entry(expert).or_insert(0) += 1;
        }
        if padded_rows(counts.values().copied(), alignment) > capacity {
            return taken;
        }
    }
    left.len()
}

/// The windows in which a receiver works off all of its items, each as a range of them.
///
/// Every window begins with empty groups. No items give no window.
///
/// # Errors
/// [`ReferenceError::ItemExceedsCapacity`] if an item does not fit an empty window. That never
/// happens at a capacity of at least `min(k, E_local)·a`.
pub fn windows(
    items: &[Item],
    capacity: usize,
    alignment: usize,
) -> Result<Vec<Range<usize>>, ReferenceError> {
    let mut windows = Vec::new();
    let mut start = 0;
    while start < items.len() {
        let taken = longest_prefix(&items[start..], capacity, alignment);
        if taken == 0 {
            let rows = rows(&items[start..=start], alignment);
            return Err(ReferenceError::ItemExceedsCapacity { item: start, rows, capacity });
        }
        windows.push(start..start + taken);
        start += taken;
    }
    Ok(windows)
}

/// Rows that a single window of `taken` items leaves behind: the (item, expert) pairs beyond it,
/// without padding.
pub fn dropped_rows(items: &[Item], taken: usize) -> usize {
    items.iter().skip(taken).map(|item| item.experts.len()).sum()
}

/// Which (receiver, source, token) triples were processed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Processed(Option<HashSet<(usize, usize, usize)>>);

impl Processed {
    /// Every item of every receiver.
    pub fn all() -> Self {
        Self(None)
    }

    /// The first `taken[r]` of `items[r]`, for each receiver r.
    ///
    /// # Errors
    /// [`ReferenceError::RankCount`] if the lists differ in length, and
    /// [`ReferenceError::PrefixTooLong`].
    pub fn prefixes(items: &[Vec<Item>], taken: &[usize]) -> Result<Self, ReferenceError> {
        if items.len() != taken.len() {
            let (found, ranks) = (taken.len(), items.len());
            return Err(ReferenceError::RankCount { what: "prefixes", found, ranks });
        }
        let mut processed = HashSet::new();
        for (rank, (items, &taken)) in items.iter().zip(taken).enumerate() {
            let Some(prefix) = items.get(..taken) else {
                return Err(ReferenceError::PrefixTooLong { rank, taken, items: items.len() });
            };
            processed.extend(prefix.iter().map(|item| (rank, item.source, item.token)));
        }
        Ok(Self(Some(processed)))
    }

    /// Whether `receiver` processed token `token` of rank `source`.
    pub fn contains(&self, receiver: usize, source: usize, token: usize) -> bool {
        self.0.as_ref().is_none_or(|processed| processed.contains(&(receiver, source, token)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::required::required_rows;
    use super::super::routing::tokens_per_expert;
    use super::*;

    fn item(source: usize, token: usize, experts: &[usize]) -> Item {
        Item { source, token, experts: experts.to_vec() }
    }

    #[test]
    fn items_are_ordered_by_source_then_token() {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        // Source 0 brings three tokens, source 1 two; top-2.
        let topk: [&[i64]; 2] = [&[3, 0, /**/ 1, 0, /**/ 2, 3], &[-1, 2, /**/ 1, 1]];
        assert_eq!(
            items(&topk, 2, &map, 0),
            [item(0, 0, &[0]), item(0, 1, &[0, 1]), item(1, 1, &[1])]
        );
        assert_eq!(
            items(&topk, 2, &map, 1),
            [item(0, 0, &[3]), item(0, 2, &[2, 3]), item(1, 0, &[2])]
        );
    }

    #[test]
    fn a_prefix_counts_padding_and_stops_at_the_first_that_does_not_fit() {
        let list = [item(0, 0, &[0]), item(0, 1, &[0]), item(0, 2, &[0, 1]), item(0, 3, &[0])];
        // With a = 2 the prefixes need 2, 2, 4+2 = 6 and 4+2 = 6 rows.
        assert_eq!(rows(&list[..1], 2), 2);
        assert_eq!(rows(&list[..3], 2), 6);
        assert_eq!(longest_prefix(&list, 1, 2), 0);
        assert_eq!(longest_prefix(&list, 2, 2), 2);
        // Item 3 alone would need 4 rows together with the first two; item 2 comes before it.
        assert_eq!(longest_prefix(&list, 4, 2), 2);
        assert_eq!(longest_prefix(&list, 5, 2), 2);
        assert_eq!(longest_prefix(&list, 6, 2), 4);
        // Left behind by a window of two: (2, 0), (2, 1), (3, 0).
        assert_eq!(dropped_rows(&list, 2), 3);
        assert_eq!(dropped_rows(&list, 4), 0);
    }

    #[test]
    fn each_window_counts_from_zero() {
        let list = [item(0, 0, &[0]), item(0, 1, &[0]), item(0, 2, &[0, 1]), item(0, 3, &[0])];
        // [0, 1] need 2 rows; [2] needs 4 and so does [2, 3].
        assert_eq!(windows(&list, 4, 2), Ok(vec![0..2, 2..4]));
        let whole = 0..list.len();
        assert_eq!(windows(&list, 6, 2), Ok(vec![whole]));
        assert_eq!(windows(&[], 0, 2), Ok(vec![]));
        assert_eq!(
            windows(&list, 3, 2),
            Err(ReferenceError::ItemExceedsCapacity { item: 2, rows: 4, capacity: 3 })
        );
    }

    #[test]
    fn processed_is_a_prefix_for_each_receiver() {
        let lists = [vec![item(0, 0, &[0]), item(1, 5, &[0])], vec![item(0, 3, &[1])]];
        let processed = Processed::prefixes(&lists, &[1, 1]).unwrap();
        assert!(processed.contains(0, 0, 0));
        assert!(!processed.contains(0, 1, 5));
        assert!(processed.contains(1, 0, 3));
        assert!(Processed::all().contains(7, 7, 7));
        assert_eq!(
            Processed::prefixes(&lists, &[1, 2]),
            Err(ReferenceError::PrefixTooLong { rank: 1, taken: 2, items: 1 })
        );
        assert!(Processed::prefixes(&lists, &[1]).is_err());
    }

    const TOP_K: usize = 3;
    const EXPERTS: usize = 7;

    /// The ids of `ranks` sources with up to eight tokens each, faults included.
    fn sources(ranks: usize) -> impl Strategy<Value = Vec<Vec<i64>>> {
        let token = prop::collection::vec(-2_i64..EXPERTS as i64 + 1, TOP_K);
        prop::collection::vec(prop::collection::vec(token, 0..9), ranks)
            .prop_map(|ranks| ranks.into_iter().map(|tokens| tokens.concat()).collect())
    }

    proptest! {
        #[test]
        fn windows_partition_the_items_fit_and_are_longest(
            (ranks, topk) in (1_usize..5).prop_flat_map(|ranks| (Just(ranks), sources(ranks))),
            alignment in prop::sample::select(vec![1_usize, 2, 4, 16]),
            spare in 0_usize..40,
        ) {
            let map = ExpertMap::contiguous(EXPERTS, ranks).unwrap();
            let topk: Vec<&[i64]> = topk.iter().map(Vec::as_slice).collect();
            let all = tokens_per_expert(&topk.concat(), TOP_K, EXPERTS);
            let mut pairs = 0;
            for receiver in 0..ranks {
                let list = items(&topk, TOP_K, &map, receiver);
                let local = map.experts_of_rank(receiver).len();
                let capacity = TOP_K.min(local) * alignment + spare;
                let windows = windows(&list, capacity, alignment).unwrap();

                // A partition, in order, without an empty part.
                let covered: Vec<usize> = windows.iter().cloned().flatten().collect();
                prop_assert_eq!(covered, (0..list.len()).collect::<Vec<_>>());
                for window in windows {
                    prop_assert!(!window.is_empty());
                    prop_assert!(rows(&list[window.clone()], alignment) <= capacity);
                    if window.end < list.len() {
                        prop_assert!(rows(&list[window.start..=window.end], alignment) > capacity);
                    }
                    pairs += list[window].iter().map(|item| item.experts.len()).sum::<usize>();
                }

                // One window of all of them takes exactly the rows that the rank requires.
                let required = required_rows(&all, &map, receiver, alignment);
                prop_assert_eq!(rows(&list, alignment), required);
                prop_assert_eq!(longest_prefix(&list, required, alignment), list.len());
                if required > 0 {
                    prop_assert!(longest_prefix(&list, required - 1, alignment) < list.len());
                }
            }
            // Nothing lost, nothing duplicated: all windows of all ranks hold every valid pair.
            prop_assert_eq!(pairs, all.iter().sum::<usize>());
        }

        #[test]
        fn taken_and_dropped_rows_are_all_rows(topk in sources(1), capacity in 0_usize..60) {
            let map = ExpertMap::contiguous(EXPERTS, 1).unwrap();
            let list = items(&[&topk[0]], TOP_K, &map, 0);
            let taken = longest_prefix(&list, capacity, 4);
            let kept: usize = list[..taken].iter().map(|item| item.experts.len()).sum();
            prop_assert_eq!(kept + dropped_rows(&list, taken), dropped_rows(&list, 0));
        }
    }
}

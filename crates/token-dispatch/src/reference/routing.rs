//! Which of a token's top-k ids count, and how many tokens each expert gets.
//!
//! A router gives every token `top_k` ids. −1 says "no expert". Any other id outside the experts, and
//! every occurrence of an id after its first within the same token, is a fault of the router: it is
//! counted, and then treated as −1, so that bad routing loses its own contribution and nothing else.

/// One id that counts: `choice` is its position among the token's ids, which is where its weight is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Position among the token's top-k ids.
    pub choice: usize,
    /// The expert chosen.
    pub expert: usize,
}

/// Ids that were treated as none although the router meant something by them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InvalidIds {
    /// Ids that are neither −1 nor an expert.
    pub out_of_range: usize,
    /// Occurrences of an expert after its first within one token.
    pub repeated: usize,
}

impl InvalidIds {
    /// Both kinds together.
    pub fn total(self) -> usize {
        self.out_of_range + self.repeated
    }
}

/// The choices of one token that count, in **ascending order of expert**.
pub fn choices(ids: &[i64], experts: usize) -> Vec<Choice> {
    let mut counted: Vec<Choice> = Vec::new();
    for (choice, &id) in ids.iter().enumerate() {
        if let Some(expert) = in_range(id, experts)
            && counted.iter().all(|earlier| earlier.expert != expert)
        {
            counted.push(Choice { choice, expert });
        }
    }
    counted.sort_by_key(|choice| choice.expert);
    counted
}

/// Counts the faults in `topk`, `[tokens, top_k]`.
///
/// A `top_k` of zero means that no token has an id.
pub fn invalid_ids(topk: &[i64], top_k: usize, experts: usize) -> InvalidIds {
    let mut faults = InvalidIds::default();
    for ids in tokens(topk, top_k) {
        let none = ids.iter().filter(|&&id| id == -1).count();
        let in_range = ids.iter().filter(|&&id| in_range(id, experts).is_some()).count();
        faults.out_of_range += ids.len() - none - in_range;
        faults.repeated += in_range - choices(ids, experts).len();
    }
    faults
}

/// Tokens that each expert gets from `topk`, `[tokens, top_k]`: one entry an expert.
pub fn tokens_per_expert(topk: &[i64], top_k: usize, experts: usize) -> Vec<usize> {
    let mut counts = vec![0; experts];
    for ids in tokens(topk, top_k) {
        for choice in choices(ids, experts) {
            counts[choice.expert] += 1;
        }
    }
    counts
}

/// The ids of each token in turn.
pub(super) fn tokens(topk: &[i64], top_k: usize) -> impl Iterator<Item = &[i64]> {
    // With a top-k of zero the slice is empty, and a chunk of one never comes.
    topk.chunks(top_k.max(1))
}

fn in_range(id: i64, experts: usize) -> Option<usize> {
    usize::try_from(id).ok().filter(|&expert| expert < experts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn choices_ascend_by_expert_and_remember_their_position() {
        // Of 5, −1, 2, 5, 9, −7 with six experts: 2 and the first 5.
        let counted = choices(&[5, -1, 2, 5, 9, -7], 6);
        assert_eq!(counted, [Choice { choice: 2, expert: 2 }, Choice { choice: 0, expert: 5 }]);
    }

    #[test]
    fn faults_are_counted_apart_from_none() {
        // Token 0: 9 and −7 are out of range. Token 1: 1 comes thrice, twice too often.
        let topk = [9, -7, -1, 0, /**/ 1, 1, 1, -1];
        let faults = invalid_ids(&topk, 4, 6);
        assert_eq!(faults, InvalidIds { out_of_range: 2, repeated: 2 });
        assert_eq!(faults.total(), 4);
        assert_eq!(tokens_per_expert(&topk, 4, 6), [1, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn a_repeated_id_beyond_the_experts_is_out_of_range_each_time() {
        assert_eq!(invalid_ids(&[8, 8], 2, 8), InvalidIds { out_of_range: 2, repeated: 0 });
        assert_eq!(invalid_ids(&[i64::MAX, i64::MIN], 2, 8).out_of_range, 2);
    }

    #[test]
    fn no_ids_at_all() {
        assert_eq!(tokens_per_expert(&[], 0, 2), [0, 0]);
        assert_eq!(invalid_ids(&[], 0, 2), InvalidIds::default());
    }

    proptest! {
        #[test]
        fn every_id_counts_is_none_or_is_a_fault(
            topk in prop::collection::vec(-3_i64..8, 0..40).prop_map(|mut ids| {
                ids.truncate(ids.len() / 4 * 4);
                ids
            }),
        ) {
            let counted: usize = tokens_per_expert(&topk, 4, 5).iter().sum();
            let none = topk.iter().filter(|&&id| id == -1).count();
            prop_assert_eq!(counted + none + invalid_ids(&topk, 4, 5).total(), topk.len());
        }
    }
}

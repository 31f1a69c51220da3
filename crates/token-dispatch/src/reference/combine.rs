//! The combined output of one layer, bit for bit.
//!
//! The arithmetic contract, in f32, every operation rounded and none contracted:
//!
//! 1. For each rank that holds an expert of the token: start at +0; for the token's experts on that
//!    rank, **in ascending order**, add weight × result. Round the sum once to the number format: that
//!    is the rank's *partial*.
//! 2. For each token: start at +0; add the partials **in ascending order of rank**. Round the sum
//!    once to the number format.
//!
//! A rank that holds no expert of the token, or did not process it, has no partial: nothing is added
//! for it. A token without any partial is +0.
//!
//! Nothing in this depends on how tokens were batched, windowed or placed in memory, so every mode
//! has to give the same bits.

use super::arithmetic::multiply_then_add;
use super::exchange::Exchange;
use super::window::Processed;
use super::{Format, ReferenceError};

/// The output of every token: one `[tokens, hidden]` matrix of numbers of the format for each rank.
///
/// `expert(e, row)` is the result of expert `e` for a row, before it is rounded to the number format.
/// `processed` says which items the receivers took; the others contribute nothing.
///
/// # Errors
/// [`ReferenceError::ExpertWidth`].
pub fn exact(
    exchange: &Exchange<'_>,
    expert: impl Fn(usize, &[f32]) -> Vec<f32>,
    processed: &Processed,
) -> Result<Vec<Vec<f32>>, ReferenceError> {
    (0..exchange.sources().len())
        .map(|source| {
            let mut output = Vec::with_capacity(exchange.tokens(source) * exchange.hidden());
            for token in 0..exchange.tokens(source) {
                let partials = partials(exchange, &expert, processed, source, token)?;
                output.extend(add_partials(exchange.format(), exchange.hidden(), &partials));
            }
            Ok(output)
        })
        .collect()
}

/// The partials of one token, ascending by rank: `[hidden]` each.
fn partials(
    exchange: &Exchange<'_>,
    expert: &impl Fn(usize, &[f32]) -> Vec<f32>,
    processed: &Processed,
    source: usize,
    token: usize,
) -> Result<Vec<Vec<f32>>, ReferenceError> {
    let map = exchange.map();
    let choices = exchange.weighted_choices(source, token);
    let mut partials = Vec::new();
    for rank in 0..map.ranks() {
        let local: Vec<_> = choices
            .iter()
            .filter(|(choice, _)| map.owner_of_expert(choice.expert) == Some(rank))
            .collect();
        if local.is_empty() || !processed.contains(rank, source, token) {
            continue;
        }
        let mut sum = vec![0.0_f32; exchange.hidden()];
        for &&(choice, weight) in &local {
            let result = exchange.apply(choice.expert, exchange.row(source, token), expert)?;
            for (sum, value) in sum.iter_mut().zip(result) {
                *sum = multiply_then_add(*sum, weight, value);
            }
        }
        partials.push(sum.into_iter().map(|sum| exchange.format().round(sum)).collect());
    }
    Ok(partials)
}

fn add_partials(format: Format, hidden: usize, partials: &[Vec<f32>]) -> Vec<f32> {
    let mut sum = vec![0.0_f32; hidden];
    for partial in partials {
        for (sum, value) in sum.iter_mut().zip(partial) {
            *sum += value;
        }
    }
    sum.into_iter().map(|sum| format.round(sum)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::exchange::Source;
    use super::super::placement::ExpertMap;
    use super::super::window::items;
    use super::*;

    /// Expert e multiplies by e + 1.
    fn scale(expert: usize, row: &[f32]) -> Vec<f32> {
        row.iter().map(|value| value * (expert + 1) as f32).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn two_ranks_two_tokens_by_hand() {
        let map = ExpertMap::contiguous(4, 2).unwrap();
        // Rank 0: token [1, 2] to experts 3 (weight ½) and 0 (weight ¼).
        //   rank 0: ¼·(1·[1, 2]) = [0.25, 0.5]; rank 1: ½·(4·[1, 2]) = [2, 4]; sum [2.25, 4.5].
        // Rank 1: token [8, −8] to experts 1 (weight 1) and none: 2·[8, −8] = [16, −16].
        let sources = vec![
            Source { values: &[1.0, 2.0], topk: &[3, 0], weights: &[0.5, 0.25] },
            Source { values: &[8.0, -8.0], topk: &[1, -1], weights: &[1.0, 9.0] },
        ];
        for format in Format::ALL {
            let exchange = Exchange::new(&map, format, 2, 2, sources.clone()).unwrap();
            let output = exact(&exchange, scale, &Processed::all()).unwrap();
            assert_eq!(output, [[2.25, 4.5], [16.0, -16.0]]);
        }
    }

    #[test]
    fn each_partial_is_rounded_before_ranks_are_added() {
        // Weights 1 and 2^−8 on the value 1: in BF16 1 + 2^−8 is a tie that rounds to 1.
        let w = 2.0_f32.powi(-8);
        let source = Source { values: &[1.0], topk: &[0, 1, 2, 3], weights: &[1.0, w, 1.0, w] };
        let one = |_: usize, row: &[f32]| row.to_vec();

        // All on one rank: 2 + 2^−7 in f32, rounded once to 2 (BF16 numbers near 2 are 2^−6 apart,
        // so this is a tie as well, and 2 is even).
        let map = ExpertMap::contiguous(4, 1).unwrap();
        let exchange = Exchange::new(&map, Format::Bf16, 4, 1, vec![source]).unwrap();
        assert_eq!(exact(&exchange, one, &Processed::all()).unwrap(), [[2.0]]);

        // With three times w: 2 + 1.5·2^−7 rounds up to 2 + 2^−6 on one rank. On two ranks the
        // partials 1 + 2·w = 1 + 2^−7 (exact) and 1 + w → 1 add up to 2 + 2^−7 → 2.
        let weights = [1.0, 2.0 * w, 1.0, w];
        let source = Source { weights: &weights, ..source };
        let exchange = Exchange::new(&map, Format::Bf16, 4, 1, vec![source]).unwrap();
        let on_one = exact(&exchange, one, &Processed::all()).unwrap();
        assert_eq!(on_one, [[2.0 + 2.0_f32.powi(-6)]]);

        let map = ExpertMap::contiguous(4, 2).unwrap();
        let idle = Source { values: &[], topk: &[], weights: &[] };
        let exchange = Exchange::new(&map, Format::Bf16, 4, 1, vec![source, idle]).unwrap();
        let on_two = exact(&exchange, one, &Processed::all()).unwrap();
        assert_eq!(on_two, [vec![2.0], vec![]]);
    }

    #[test]
    fn experts_are_added_in_ascending_order_whatever_the_order_of_choice() {
        // (2^24 + 1) + −2^24 is 0 in f32, (2^24 − 2^24) + 1 is 1.
        let big = 2.0_f32.powi(24);
        let map = ExpertMap::contiguous(3, 1).unwrap();
        let identity = |_: usize, row: &[f32]| row.to_vec();
        let output = |topk: &[i64], weights: &[f32]| {
            let source = Source { values: &[1.0], topk, weights };
            let exchange = Exchange::new(&map, Format::Fp32, 3, 1, vec![source]).unwrap();
            exact(&exchange, identity, &Processed::all()).unwrap()[0][0]
        };
        assert_eq!(output(&[0, 1, 2], &[big, 1.0, -big]), 0.0);
        assert_eq!(output(&[2, 0, 1], &[-big, big, 1.0]), 0.0);
        assert_eq!(output(&[0, 1, 2], &[big, -big, 1.0]), 1.0);
        assert_eq!(output(&[2, 1, 0], &[1.0, -big, big]), 1.0);
    }

    #[test]
    fn partials_are_added_in_ascending_order_of_rank() {
        let big = 2.0_f32.powi(24);
        // Expert e lies on rank 2 − e, so ascending ranks meet the weights from the back.
        let map = ExpertMap::from_ranks(vec![2, 1, 0], 3).unwrap();
        let idle = Source { values: &[], topk: &[], weights: &[] };
        let identity = |_: usize, row: &[f32]| row.to_vec();
        let output = |weights: &[f32]| {
            let source = Source { values: &[1.0], topk: &[0, 1, 2], weights };
            let sources = vec![source, idle, idle];
            let exchange = Exchange::new(&map, Format::Fp32, 3, 1, sources).unwrap();
            exact(&exchange, identity, &Processed::all()).unwrap()[0][0]
        };
        assert_eq!(output(&[1.0, -big, big]), 1.0);
        assert_eq!(output(&[-big, 1.0, big]), 0.0);
    }

    #[test]
    fn expert_results_are_rounded_before_they_are_weighted() {
        let map = ExpertMap::contiguous(1, 1).unwrap();
        let source = Source { values: &[1.0], topk: &[0], weights: &[384.0] };
        let exchange = Exchange::new(&map, Format::Bf16, 1, 1, vec![source]).unwrap();
        // The expert gives 1 + 2^−8, which rounds to 1. Unrounded it would give 385.5 and that 386,
        // since the BF16 numbers near 384 are 2 apart.
        let nudge = |_: usize, row: &[f32]| vec![row[0] + 2.0_f32.powi(-8)];
        assert_eq!(exact(&exchange, nudge, &Processed::all()).unwrap(), [[384.0]]);
    }

    #[test]
    fn no_expert_gives_plus_zero_and_a_repeat_counts_once() {
        let map = ExpertMap::contiguous(2, 1).unwrap();
        // Token 0: none and out of range. Token 1: expert 1 twice; the first weight is the one used.
        let source = Source {
            values: &[-3.0, 5.0],
            topk: &[-1, 2, /**/ 1, 1],
            weights: &[1.0, 1.0, /**/ 0.5, 100.0],
        };
        let exchange = Exchange::new(&map, Format::Fp16, 2, 1, vec![source]).unwrap();
        let output = exact(&exchange, scale, &Processed::all()).unwrap();
        assert_eq!(bits(&output[0]), bits(&[0.0, 5.0]));
    }

    #[test]
    fn a_single_negative_zero_comes_out_positive() {
        let map = ExpertMap::contiguous(1, 1).unwrap();
        let source = Source { values: &[-0.0], topk: &[0], weights: &[1.0] };
        let exchange = Exchange::new(&map, Format::Bf16, 1, 1, vec![source]).unwrap();
        let output = exact(&exchange, scale, &Processed::all()).unwrap();
        assert_eq!(bits(&output[0]), bits(&[0.0]));
    }

    #[test]
    fn items_beyond_the_prefix_contribute_nothing() {
        let map = ExpertMap::contiguous(2, 2).unwrap();
        // Both ranks bring one token for both experts, with weights 1 and 1.
        let topk: [&[i64]; 2] = [&[0, 1], &[0, 1]];
        let source = |values, topk| Source { values, topk, weights: &[1.0, 1.0] };
        let sources = vec![source(&[1.0], topk[0]), source(&[f32::INFINITY], topk[1])];
        let exchange = Exchange::new(&map, Format::Bf16, 2, 1, sources).unwrap();
        let lists: Vec<_> = (0..2).map(|rank| items(&topk, 2, &map, rank)).collect();

        // Rank 0 takes only rank 0's token, rank 1 takes none: 1·1 and nothing.
        let processed = Processed::prefixes(&lists, &[1, 0]).unwrap();
        let output = exact(&exchange, scale, &processed).unwrap();
        assert_eq!(bits(&output.concat()), bits(&[1.0, 0.0]));
        // Rank 0 takes none, rank 1 both: 2·1 and 2·∞.
        let processed = Processed::prefixes(&lists, &[0, 2]).unwrap();
        let output = exact(&exchange, scale, &processed).unwrap();
        assert_eq!(bits(&output.concat()), bits(&[2.0, f32::INFINITY]));
    }

    #[test]
    fn an_expert_of_another_width_is_refused() {
        let map = ExpertMap::contiguous(1, 1).unwrap();
        let source = Source { values: &[1.0], topk: &[0], weights: &[1.0] };
        let exchange = Exchange::new(&map, Format::Fp32, 1, 1, vec![source]).unwrap();
        assert_eq!(
            exact(&exchange, |_, _| vec![], &Processed::all()),
            Err(ReferenceError::ExpertWidth { expert: 0, found: 0, expected: 1 })
        );
    }
}

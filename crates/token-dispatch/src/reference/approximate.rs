//! The combined output in f64, and how far the exact one may lie from it.
//!
//! [`naive_f64`] is what combine is *for*: `Σ weight · expert(token)` over the token's experts, with no
//! intermediate rounding. Whatever order and precision an implementation chooses, its result has to
//! stay within [`tolerance`] of that; whatever it loses, doubles or misplaces shows up here even if
//! the [exact rule](super::combine) itself were wrong.

use super::arithmetic::power_of_two;
use super::exchange::Exchange;
use super::window::Processed;
use super::{Format, ReferenceError};

/// One output value as f64 gives it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Approximation {
    /// `Σ weight · result`.
    pub value: f64,
    /// The most that a correct output differs from [`value`](Self::value); infinite where overflow,
    /// or a weight or value that is not finite, leaves nothing to compare.
    pub tolerance: f64,
}

impl Approximation {
    /// Whether `output` lies within the tolerance.
    pub fn admits(self, output: f32) -> bool {
        self.tolerance == f64::INFINITY || (f64::from(output) - self.value).abs() <= self.tolerance
    }
}

/// The output of every token, in f64: one `[tokens, hidden]` matrix for each rank.
///
/// Arguments as in [`exact`](super::exact); the expert's result is rounded to the number format, since
/// that is the form in which combine reads it.
///
/// # Errors
/// [`ReferenceError::ExpertWidth`].
pub fn naive_f64(
    exchange: &Exchange<'_>,
    expert: impl Fn(usize, &[f32]) -> Vec<f32>,
    processed: &Processed,
) -> Result<Vec<Vec<Approximation>>, ReferenceError> {
    (0..exchange.sources().len())
        .map(|source| {
            let mut output = Vec::with_capacity(exchange.tokens(source) * exchange.hidden());
            for token in 0..exchange.tokens(source) {
                output.extend(naive_token(exchange, &expert, processed, source, token)?);
            }
            Ok(output)
        })
        .collect()
}

fn naive_token(
    exchange: &Exchange<'_>,
    expert: &impl Fn(usize, &[f32]) -> Vec<f32>,
    processed: &Processed,
    source: usize,
    token: usize,
) -> Result<Vec<Approximation>, ReferenceError> {
    let taken = |expert| {
        let owner = exchange.map().owner_of_expert(expert);
        owner.is_some_and(|rank| processed.contains(rank, source, token))
    };
    let mut terms = 0;
    let mut sums = vec![(0.0_f64, 0.0_f64); exchange.hidden()];
    for (choice, weight) in exchange.weighted_choices(source, token) {
        if !taken(choice.expert) {
            continue;
        }
        let result = exchange.apply(choice.expert, exchange.row(source, token), expert)?;
        for ((sum, magnitude), value) in sums.iter_mut().zip(result) {
            let product = f64::from(weight) * f64::from(value);
            *sum += product;
            *magnitude += product.abs();
        }
        terms += 1;
    }
    let approximate = |(value, magnitude)| Approximation {
        value,
        tolerance: tolerance(exchange.format(), terms, magnitude),
    };
    Ok(sums.into_iter().map(approximate).collect())
}

/// The most that a combined value may differ from `Σ wᵢ·vᵢ`, for `terms` products whose magnitudes
/// sum to `magnitude` = S = `Σ |wᵢ·vᵢ|`.
///
/// Write `u = 2⁻²⁴` and `η = 2⁻¹⁵⁰` for the roundoff of f32, relative and in its subnormal range, and
/// `uₚ`, `ηₚ` for those of the number format (both zero for FP32, which rounding leaves alone). Follow
/// one of the K terms to the output; it passes through
///
/// - its product: a factor `1 + δ`, `|δ| ≤ u`, and an error of at most η if it is subnormal;
/// - the additions to its rank's sum: with n terms there, n − 1 that round, since the first adds to
///   zero; a factor `1 + δ` each and never more, because sums of f32 numbers that fall in the
///   subnormal range are exact;
/// - the rounding of the partial: a factor `1 + δ`, `|δ| ≤ uₚ`, and at most ηₚ;
/// - the additions over the ranks: with m partials, m − 1 that round, as before;
/// - the final rounding: a factor `1 + δ`, `|δ| ≤ uₚ`, and at most ηₚ.
///
/// The factors number 1 + (n − 1) + (m − 1) of f32 and two of the number format. Each of the other
/// m − 1 ranks has a term of its own, so n + m − 1 ≤ K, and no term is magnified by more than
///
/// ```text
/// G = (1 + u)^K · (1 + uₚ)²
/// ```
///
/// There are K products, at most K partials, and one output that add an absolute error, itself
/// magnified by less than G. Hence
///
/// ```text
/// |output − Σ wᵢ·vᵢ| ≤ S·(G − 1) + G·(K·η + (K + 1)·ηₚ)
/// ```
///
/// to which `S·(K + 2)·2⁻⁵⁰` is added for the f64 arithmetic that computes the sum, S and this bound.
/// For BF16 all of that is close to `2⁻⁷·S`: two roundings of a value of that size.
///
/// If `G·S` and the absolute part exceed the largest finite number of the format, an intermediate result
/// may overflow, and the bound is infinite.
pub fn tolerance(format: Format, terms: usize, magnitude: f64) -> f64 {
    if terms == 0 {
        // Nothing was rounded: the output is zero.
        return 0.0;
    }
    let (u, eta) = (power_of_two(-24), power_of_two(-150));
    let (u_p, eta_p) = (format.unit_roundoff(), format.subnormal_roundoff());
    let k = terms as f64;
    let growth = (1.0 + u).powf(k) * (1.0 + u_p) * (1.0 + u_p);
    let absolute = growth * (k * eta + (k + 1.0) * eta_p);
    let largest = growth * magnitude + absolute;
    if largest.is_nan() || largest > format.max_finite() {
        return f64::INFINITY;
    }
    magnitude * (growth - 1.0) + absolute + magnitude * (k + 2.0) * power_of_two(-50)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::combine::exact;
    use super::super::exchange::Source;
    use super::super::placement::ExpertMap;
    use super::super::window::{items, longest_prefix};
    use super::*;

    #[test]
    fn the_sum_and_its_tolerance_by_hand() {
        let map = ExpertMap::contiguous(2, 1).unwrap();
        let source = Source { values: &[4.0], topk: &[1, 0], weights: &[0.5, -0.25] };
        let exchange = Exchange::new(&map, Format::Bf16, 2, 1, vec![source]).unwrap();
        let output = naive_f64(&exchange, |_, row| row.to_vec(), &Processed::all()).unwrap();
        // 0.5·4 − 0.25·4 = 1, S = 3, (1 + 2^−8)² − 1 ≈ 2^−7.
        assert_eq!(output[0][0].value, 1.0);
        let tolerance = output[0][0].tolerance;
        assert!(tolerance > 3.0 / 128.0 && tolerance < 3.02 / 128.0, "{tolerance:e}");
        assert!(output[0][0].admits(1.0 + 2.0_f32.powi(-6)));
        assert!(!output[0][0].admits(1.0 + 2.0_f32.powi(-5)));
    }

    #[test]
    fn fp32_is_held_to_a_few_roundoffs_of_f32() {
        let bound = tolerance(Format::Fp32, 8, 1.0);
        assert!(bound > 8.0 * power_of_two(-24) && bound < 8.01 * power_of_two(-24));
        assert_eq!(tolerance(Format::Fp32, 0, 0.0), 0.0);
    }

    #[test]
    fn overflow_admits_anything_and_nothing_else_does() {
        assert_eq!(tolerance(Format::Fp16, 1, 65504.0), f64::INFINITY);
        assert!(tolerance(Format::Fp16, 1, 60000.0).is_finite());
        assert_eq!(tolerance(Format::Bf16, 1, f64::NAN), f64::INFINITY);
        let lost = Approximation { value: f64::NAN, tolerance: f64::INFINITY };
        assert!(lost.admits(f32::NAN));
        let kept = Approximation { value: 1.0, tolerance: 0.5 };
        assert!(!kept.admits(f32::NAN) && !kept.admits(f32::INFINITY));
    }

    const HIDDEN: usize = 2;

    /// Values, ids and weights.
    type Token = (Vec<f32>, Vec<i64>, Vec<f32>);

    /// Everything that an exchange is made of.
    #[derive(Debug, Clone)]
    struct Case {
        format: Format,
        ranks: usize,
        experts: usize,
        top_k: usize,
        /// One list of tokens a rank.
        sources: Vec<Vec<Token>>,
        capacity: usize,
    }

    /// Numbers of ordinary size, tiny ones down to the subnormals of f32, and zeros of both signs.
    fn number() -> impl Strategy<Value = f32> {
        let tiny = (-4.0_f32..4.0, 0_i32..150).prop_map(|(x, shift)| x * 2.0_f32.powi(-shift));
        prop_oneof![4 => -4.0_f32..4.0, 2 => tiny, 1 => Just(0.0), 1 => Just(-0.0), 1 => 0.0_f32..1e4]
    }

    fn case() -> impl Strategy<Value = Case> {
        (prop::sample::select(&Format::ALL), 1_usize..5, 1_usize..9, 1_usize..6, 0_usize..40)
            .prop_flat_map(|(format, ranks, experts, top_k, capacity)| {
                let token = (
                    prop::collection::vec(number().prop_map(move |x| format.round(x)), HIDDEN),
                    prop::collection::vec(-2_i64..experts as i64 + 1, top_k),
                    prop::collection::vec(number(), top_k),
                );
                let sources = prop::collection::vec(prop::collection::vec(token, 0..5), ranks);
                sources.prop_map(move |sources| Case {
                    format,
                    ranks,
                    experts,
                    top_k,
                    sources,
                    capacity,
                })
            })
    }

    /// Differs for each expert and column, with signs and results that need rounding.
    fn expert(expert: usize, row: &[f32]) -> Vec<f32> {
        let factor = |column: usize| 0.37 * (expert + 1) as f32 - 0.91 * column as f32;
        row.iter().enumerate().map(|(column, value)| value * factor(column) + 0.1).collect()
    }

    /// Runs `check` on the exchange that `case` describes.
    fn with_exchange<T>(case: &Case, check: impl FnOnce(&Exchange<'_>) -> T) -> T {
        let column = |rank: usize| {
            let tokens = &case.sources[rank];
            let values: Vec<f32> = tokens.iter().flat_map(|token| token.0.clone()).collect();
            let topk: Vec<i64> = tokens.iter().flat_map(|token| token.1.clone()).collect();
            let weights: Vec<f32> = tokens.iter().flat_map(|token| token.2.clone()).collect();
            (values, topk, weights)
        };
        let owned: Vec<_> = (0..case.ranks).map(column).collect();
        let sources =
            owned.iter().map(|(values, topk, weights)| Source { values, topk, weights }).collect();
        let map = ExpertMap::contiguous(case.experts, case.ranks).unwrap();
        check(&Exchange::new(&map, case.format, case.top_k, HIDDEN, sources).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]

        #[test]
        fn the_exact_output_is_within_tolerance(case in case()) {
            with_exchange(&case, |exchange| {
                let output = exact(exchange, expert, &Processed::all()).unwrap();
                let naive = naive_f64(exchange, expert, &Processed::all()).unwrap();
                for (output, naive) in output.concat().into_iter().zip(naive.concat()) {
                    prop_assert!(naive.admits(output), "{output:e} against {naive:?}");
                    prop_assert!(case.format.represents(output));
                }
                Ok(())
            })?;
        }

        #[test]
        fn so_is_a_truncated_one_and_it_is_exact_where_nothing_was_cut(case in case()) {
            with_exchange(&case, |exchange| {
                let topk: Vec<&[i64]> = exchange.sources().iter().map(|s| s.topk).collect();
                let lists: Vec<_> = (0..case.ranks)
                    .map(|rank| items(&topk, case.top_k, exchange.map(), rank))
                    .collect();
                let taken: Vec<_> =
                    lists.iter().map(|list| longest_prefix(list, case.capacity, 2)).collect();
                let cut = Processed::prefixes(&lists, &taken).unwrap();
                let whole = exact(exchange, expert, &Processed::all()).unwrap();
                let output = exact(exchange, expert, &cut).unwrap();
                let naive = naive_f64(exchange, expert, &cut).unwrap();
                for source in 0..case.ranks {
                    for token in 0..exchange.tokens(source) {
                        let row = token * HIDDEN..(token + 1) * HIDDEN;
                        for index in row.clone() {
                            prop_assert!(naive[source][index].admits(output[source][index]));
                        }
                        let touched = lists.iter().zip(&taken).any(|(list, &taken)| {
                            list[taken..].iter().any(|i| (i.source, i.token) == (source, token))
                        });
                        if !touched {
                            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                            prop_assert_eq!(
                                bits(&output[source][row.clone()]),
                                bits(&whole[source][row])
                            );
                        }
                    }
                }
                Ok(())
            })?;
        }

        #[test]
        fn a_lost_or_doubled_row_is_noticed(
            format in prop::sample::select(&Format::ALL),
            weights in prop::collection::vec(0.1_f32..1.0, 2..5),
            value in 0.5_f32..2.0,
        ) {
            // Terms of one sign and of like size: each is far larger than the tolerance.
            let sum: f64 = weights.iter().map(|&w| f64::from(w) * f64::from(value)).sum();
            let bound = tolerance(format, weights.len(), sum);
            let smallest = weights.iter().copied().fold(1.0_f32, f32::min);
            prop_assert!(f64::from(smallest) * f64::from(value) > 2.0 * bound);
        }

        #[test]
        fn where_the_rows_lie_does_not_matter_to_the_sum(case in case()) {
            // The same tokens and experts with all experts on one rank: within both tolerances.
            with_exchange(&case, |exchange| {
                let all = Processed::all();
                let spread = naive_f64(exchange, expert, &all).unwrap();
                let map = ExpertMap::from_ranks(vec![0; case.experts], case.ranks).unwrap();
                let sources = exchange.sources().to_vec();
                let exchange =
                    Exchange::new(&map, case.format, case.top_k, HIDDEN, sources).unwrap();
                let together = exact(&exchange, expert, &all).unwrap();
                for (output, naive) in together.concat().into_iter().zip(spread.concat()) {
                    prop_assert!(naive.admits(output), "{output:e} against {naive:?}");
                }
                Ok(())
            })?;
        }
    }
}

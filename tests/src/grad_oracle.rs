//! What has to come out of a backward pass: bit for bit by the contract, and in f64 by the sums.
//!
//! The experts are affine, so their gradients are sums too. With g the gradient of a token's output,
//! w the weight of a choice, and a(c) what its expert multiplies column c by:
//!
//! ```text
//! gradient of the token:   Σ over its choices   w · a(c) · g(c)
//! gradient of a weight:    Σ over the columns   g(c) · result(c)
//! ```

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::{Approximation, Item};

use crate::case::Case;
use crate::grads::{GradRun, output_grads};
use crate::inputs::Inputs;
use crate::oracle::{LayerOracle, bits, same};
use crate::rows::{choices_of, placed, values_of};

/// What has to come out of the backward pass of one layer, on every rank.
#[derive(Clone, Debug)]
pub struct GradOracle {
    /// Gradients as they arrive at the experts.
    pub rows: Vec<Vec<u32>>,
    /// Gradients of the tokens, bit for bit.
    pub tokens: Vec<Vec<u32>>,
    /// The same in f64.
    pub naive: Vec<Vec<Approximation>>,
    /// Gradients of the weights in f64; exactly zero for choices that were not processed.
    pub weights: Vec<Vec<Approximation>>,
}

impl GradOracle {
    /// The backward pass of `layer` in `step`, of whose forward pass every rank had `capacity` rows.
    ///
    /// # Panics
    ///
    /// If the case is none.
    pub fn new(case: &Case, step: usize, layer: usize, capacity: Option<&[u32]>) -> Self {
        let inputs = Inputs::of_all(case, step, layer);
        let taken = LayerOracle::new(case, &inputs, capacity).taken;
        let grads: Vec<Vec<f32>> =
            (0..case.world()).map(|rank| output_grads(case, step, layer, rank)).collect();
        let of_item = |item: &Item| &grads[item.source][item.token * case.hidden..][..case.hidden];

        let row = |weight: Option<f32>, grads: &[f32]| -> Vec<f32> {
            let weighted = grads.iter().map(|g| weight.map_or(*g, |weight| weight * g));
            weighted.map(|g| case.number().round(g)).collect()
        };
        let rows = (0..case.world()).map(|rank| {
            let (placed, _) = placed(case, &inputs, rank, &taken[rank]);
            let rows = placed.iter().flat_map(|placed| match placed {
                None => vec![0.0; case.hidden],
                Some(placed) => {
                    let weight = (!case.caller_weighs()).then(|| placed.choices[0].1);
                    row(weight, of_item(placed.item))
                }
            });
            bits(&rows.collect::<Vec<_>>())
        });

        let mut tokens: Vec<Vec<f32>> = grads.iter().map(|own| vec![0.0; own.len()]).collect();
        let mut naive: Vec<Vec<Naive>> =
            grads.iter().map(|own| vec![Naive::default(); own.len()]).collect();
        let mut weights: Vec<Vec<Approximation>> = inputs
            .iter()
            .map(|own| vec![Approximation { value: 0.0, tolerance: 0.0 }; own.ids.len()])
            .collect();
        // Ranks in order, so that partial sums are added in theirs.
        for item in taken.iter().flatten() {
            let grads = of_item(item);
            let partial = partial(case, &inputs, item, grads);
            for (column, partial) in partial.into_iter().enumerate() {
                tokens[item.source][item.token * case.hidden + column] += partial;
            }
            for (choice, weight) in choices_of(case, &inputs, item) {
                for (column, grad) in (0u32..).zip(grads) {
                    let scale = synthetic::coefficients(choice.expert as u32, column).0;
                    let term = f64::from(weight) * f64::from(scale) * f64::from(*grad);
                    let at = item.token * case.hidden + column as usize;
                    naive[item.source][at].add(term);
                }
                weights[item.source][item.token * case.top_k + choice.choice] =
                    weight_grad(case, choice.expert, values_of(case, &inputs, item), grads);
            }
        }
        let round = |values: Vec<f32>| {
            bits(&values.into_iter().map(|v| case.number().round(v)).collect::<Vec<_>>())
        };
        Self {
            rows: rows.collect(),
            tokens: tokens.into_iter().map(round).collect(),
            naive: naive
                .into_iter()
                .map(|sums| sums.into_iter().map(|sum| sum.bounded(case)).collect())
                .collect(),
            weights,
        }
    }

    /// Holds every rank's run of this layer to this; rows only where all are in one window.
    ///
    /// # Panics
    ///
    /// Where a run differs.
    pub fn check(&self, what: &str, runs: &[&GradRun], whole: bool) {
        for (rank, run) in runs.iter().enumerate() {
            let at = format!("{what}: rank {rank}");
            if whole {
                same(&format!("{at}: gradients of rows"), &run.rows, &self.rows[rank]);
            }
            same(&format!("{at}: gradients of tokens"), &run.tokens, &self.tokens[rank]);
            let known = [(&run.tokens, &self.naive[rank]), (&run.weights, &self.weights[rank])];
            for (seen, naive) in known {
                assert_eq!(seen.len(), naive.len(), "{at}");
                for (seen, naive) in seen.iter().zip(naive) {
                    let seen = f32::from_bits(*seen);
                    assert!(naive.admits(seen), "{at}: {seen:e} against {naive:?}");
                }
            }
        }
    }
}

/// What the rank that took `item` sends back to its owner.
fn partial(case: &Case, inputs: &[Inputs], item: &Item, grads: &[f32]) -> Vec<f32> {
    let number = case.number();
    let mut sum = vec![0f32; case.hidden];
    for (choice, weight) in choices_of(case, inputs, item) {
        for (column, (sum, grad)) in (0u32..).zip(sum.iter_mut().zip(grads)) {
            let scale = synthetic::coefficients(choice.expert as u32, column).0;
            let weighted: f32 = weight * grad;
            // Where combine multiplied the product is a row, and so rounded; in the flat layout the
            // sum of all choices is.
            let grad = if case.caller_weighs() { weighted } else { number.round(weighted) };
            let product: f32 = scale * grad;
            *sum += if case.flat() { product } else { number.round(product) };
        }
    }
    sum.into_iter().map(|sum| number.round(sum)).collect()
}

/// The gradient of a weight: a sum of `hidden` products in f32, in any order.
fn weight_grad(case: &Case, expert: usize, values: &[f32], grads: &[f32]) -> Approximation {
    let results = synthetic::apply(expert as u32, values).into_iter();
    let (mut value, mut magnitude) = (0.0, 0.0);
    for (result, grad) in results.zip(grads) {
        let product = f64::from(case.number().round(result)) * f64::from(*grad);
        value += product;
        magnitude += product.abs();
    }
    let roundings = case.hidden as f64 + 1.0;
    let growth = (1.0 + 2f64.powi(-24)).powf(roundings) - 1.0;
    Approximation { value, tolerance: magnitude * growth * 1.01 + roundings * 2f64.powi(-149) }
}

/// A sum in f64 and what bounds the error of its like in fewer bits.
#[derive(Clone, Copy, Debug, Default)]
struct Naive {
    value: f64,
    magnitude: f64,
    terms: usize,
}

impl Naive {
    fn add(&mut self, term: f64) {
        self.value += term;
        self.magnitude += term.abs();
        self.terms += 1;
    }

    /// Each term is rounded to the number format at most twice on its way into a partial sum, which
    /// is rounded, as is the sum of these; and to f32 twice as a product and once in each sum. No
    /// factor is above one that could magnify what subnormal numbers lose, but for the weights, whose
    /// product is rounded first.
    fn bounded(self, case: &Case) -> Approximation {
        let number = case.number();
        let terms = self.terms as f64;
        let growth =
            (1.0 + 2f64.powi(-24)).powf(terms + 3.0) * (1.0 + number.unit_roundoff()).powi(4);
        let roundings = 4.0 * terms + 1.0;
        let absolute = roundings * (number.subnormal_roundoff() + 2f64.powi(-149)) * growth;
        let tolerance = self.magnitude * (growth - 1.0) * 1.000_001 + absolute;
        Approximation { value: self.value, tolerance }
    }
}

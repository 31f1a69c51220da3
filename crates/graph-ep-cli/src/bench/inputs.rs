//! What ranks are given: routings, made up by a named pattern, and rows.
//!
//! Every number is a function of the seed and of the place where it stands, so that any rank can say
//! what any other was given without being sent it.

mod skew;
mod tape;

pub use skew::Skew;
pub use tape::Tape;

use super::bytes::Counts;
use super::cases::Shape;
use skew::Chooser;

/// Routings that are used in turn, so that none is known from the replay before.
pub const ROUTINGS: usize = 4;

/// The routings of every rank and layer of a shape.
#[derive(Clone, Debug)]
pub struct Inputs {
    layers: usize,
    tokens: usize,
    top_k: usize,
    ranks: usize,
    /// `[routings, ranks, layers, tokens, top_k]`.
    ids: Vec<i32>,
    /// The same shape.
    weights: Vec<f32>,
    /// `[routings, layers]`.
    counts: Vec<Counts>,
}

impl Inputs {
    /// Makes up [`ROUTINGS`] routings of `layers` layers. The shape has been checked: no token has more
    /// choices than there are experts. Allocates eight bytes for each choice.
    pub fn new(shape: &Shape, layers: usize, seed: u64) -> Self {
        let Shape { tokens, top_k, ranks, experts, skew, .. } = *shape;
        let choices = ROUTINGS * ranks * layers * tokens * top_k;
        let mut inputs = Self {
            layers,
            tokens,
            top_k,
            ranks,
            ids: Vec::with_capacity(choices),
            weights: Vec::with_capacity(choices),
            counts: Vec::with_capacity(ROUTINGS * layers),
        };
        let mut choosers: Vec<Chooser> =
            (0..layers).map(|layer| Chooser::new(skew, experts, ranks, seed, layer)).collect();
        for routing in 0..ROUTINGS {
            for rank in 0..ranks {
                for (layer, chooser) in choosers.iter_mut().enumerate() {
                    for token in 0..tokens {
                        let place = (routing, layer, rank * tokens + token);
                        let (ids, weights) = (&mut inputs.ids, &mut inputs.weights);
                        chooser.choose(place, top_k, ids, weights);
                    }
                }
            }
        }
        for routing in 0..ROUTINGS {
            for layer in 0..layers {
                let of_rank = (0..ranks).map(|rank| inputs.ids(routing, layer, rank));
                let counts = Counts::new(of_rank, top_k, experts);
                inputs.counts.push(counts);
            }
        }
        inputs
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// `[tokens, top_k]` expert ids of a rank in one layer of a routing.
    pub fn ids(&self, routing: usize, layer: usize, rank: usize) -> &[i32] {
        &self.ids[self.range(routing, layer, rank)]
    }

    /// `[tokens, top_k]` weights that belong to them; those of a token add up to one.
    pub fn weights(&self, routing: usize, layer: usize, rank: usize) -> &[f32] {
        &self.weights[self.range(routing, layer, rank)]
    }

    /// The ids of every rank in one layer, as the reference takes them.
    pub fn wide_ids(&self, routing: usize, layer: usize) -> Vec<Vec<i64>> {
        let widen = |rank| self.ids(routing, layer, rank).iter().map(|id| i64::from(*id)).collect();
        (0..self.ranks).map(widen).collect()
    }

    /// What one layer of a routing sends where.
    pub fn counts(&self, routing: usize, layer: usize) -> &Counts {
        &self.counts[routing * self.layers + layer]
    }

    /// What every layer of every routing sends where.
    pub fn all_counts(&self) -> &[Counts] {
        &self.counts
    }

    fn range(&self, routing: usize, layer: usize, rank: usize) -> std::ops::Range<usize> {
        let choices = self.tokens * self.top_k;
        let at = ((routing * self.ranks + rank) * self.layers + layer) * choices;
        at..at + choices
    }
}

/// The rows of every rank and layer of a shape.
#[derive(Clone, Debug)]
pub struct Rows {
    ranks: usize,
    tokens: usize,
    most_rows: usize,
    token: Tape,
    scales: Option<Tape>,
    results: Option<Tape>,
}

impl Rows {
    /// Rows for `inputs`.
    pub fn new(shape: &Shape, inputs: &Inputs, seed: u64) -> Self {
        let count = inputs.layers * shape.ranks * shape.tokens;
        let required = |rank| inputs.counts.iter().map(move |counts| counts.required(shape, rank));
        let most_rows = (0..shape.ranks).flat_map(required).max().unwrap_or(0);
        let (token, scales, results) = if shape.plain() {
            (Tape::of_values(shape.sums(), shape.hidden, count, seed), None, None)
        } else {
            let received = inputs.layers * shape.ranks * most_rows;
            (
                Tape::of_bytes(shape.row_bytes(), count, seed),
                Some(Tape::of_bytes(shape.scale_bytes(), count, seed + 1)),
                Some(Tape::of_values(shape.sums(), shape.hidden, received, seed + 2)),
            )
        };
        Self { ranks: shape.ranks, tokens: shape.tokens, most_rows, token, scales, results }
    }

    /// The row of a token.
    pub fn token(&self, layer: usize, rank: usize, token: usize) -> &[u8] {
        self.token.row(self.number(layer, rank) + token)
    }

    /// The scales beside the row of a token, if there are any.
    pub fn scales(&self, layer: usize, rank: usize, token: usize) -> Option<&[u8]> {
        self.scales.as_ref().map(|tape| tape.row(self.number(layer, rank) + token))
    }

    /// What stands for an expert's result in a receive row of `rank`, where rows are no values that could
    /// be added up as they are.
    pub fn result(&self, layer: usize, rank: usize, row: usize) -> Option<&[u8]> {
        let number = (layer * self.ranks + rank) * self.most_rows + row;
        self.results.as_ref().map(|tape| tape.row(number))
    }

    /// All rows that `row` gives, from 0 to `count`, one behind the other.
    pub fn all<'r>(count: usize, row: impl Fn(usize) -> Option<&'r [u8]>) -> Vec<u8> {
        (0..count).filter_map(row).collect::<Vec<_>>().concat()
    }

    fn number(&self, layer: usize, rank: usize) -> usize {
        (layer * self.ranks + rank) * self.tokens
    }
}

/// All that ranks are given for a shape.
#[derive(Clone, Debug)]
pub struct Given {
    /// Routings.
    pub inputs: Inputs,
    /// Rows.
    pub rows: Rows,
}

impl Given {
    /// Makes up `layers` layers for `shape`.
    pub fn new(shape: &Shape, layers: usize, seed: u64) -> Self {
        let inputs = Inputs::new(shape, layers, seed);
        let rows = Rows::new(shape, &inputs, seed);
        Self { inputs, rows }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::bench::cases::tests::shape;

    #[test]
    fn routings_ranks_and_layers_differ_and_a_seed_repeats() {
        let shape = shape();
        let inputs = Inputs::new(&shape, 2, 5);
        let all: HashSet<Vec<i32>> = (0..ROUTINGS)
            .flat_map(|routing| (0..2).map(move |layer| (routing, layer)))
            .flat_map(|(routing, layer)| (0..shape.ranks).map(move |rank| (routing, layer, rank)))
            .map(|(routing, layer, rank)| inputs.ids(routing, layer, rank).to_vec())
            .collect();
        assert_eq!(all.len(), ROUTINGS * 2 * shape.ranks);
        let again = Inputs::new(&shape, 2, 5);
        assert_eq!((&inputs.ids, &inputs.weights), (&again.ids, &again.weights));
        assert_ne!(inputs.ids, Inputs::new(&shape, 2, 6).ids);
    }

    proptest! {
        #[test]
        fn tokens_choose_distinct_experts_and_weigh_them(
            skew in prop::sample::select(Skew::ALL.to_vec()),
            experts in 1_usize..40,
            ranks in 1_usize..5,
            top_k in 1_usize..9,
            seed: u64,
        ) {
            let (ranks, top_k) = (ranks.min(experts), top_k.min(experts));
            let shape = Shape { skew, experts, ranks, top_k, tokens: 5, ..shape() };
            let inputs = Inputs::new(&shape, 1, seed);
            for (ids, weights) in inputs.ids.chunks(top_k).zip(inputs.weights.chunks(top_k)) {
                let distinct: HashSet<_> = ids.iter().collect();
                prop_assert_eq!(distinct.len(), top_k);
                prop_assert!(ids.iter().all(|id| (0..experts as i32).contains(id)));
                prop_assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
                prop_assert!(weights.iter().all(|weight| *weight > 0.0));
            }
        }
    }
}

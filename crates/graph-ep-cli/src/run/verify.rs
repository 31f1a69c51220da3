//! Whether what came out is what should have.
//!
//! Every value is held against two things. The oracle adds up in f64 what each expert makes of each
//! token, and says how far the engine's roundings may lead from that. Eager mode, run beside by a
//! second group, has to agree bit for bit; where rows were dropped on purpose, the exact reference
//! with the same truncation takes its place.

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::{
    Exchange, ExpertMap, Payload, Processed, ReferenceError, Source, exact, naive_f64, window,
};

use serde::{Deserialize, Serialize};

use super::Plan;
use super::tensors::{LayerInput, dtype};
use crate::args::Dtype;

/// Values compared, and those that differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) verified: u64,
    pub(super) mismatched: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Tally) {
        self.verified += other.verified;
        self.mismatched += other.mismatched;
    }
}

/// Checks the outputs of one rank.
#[derive(Debug)]
pub(super) struct Verifier<'p> {
    plan: &'p Plan,
    map: ExpertMap,
    payload: Payload,
    rank: usize,
}

impl<'p> Verifier<'p> {
    pub(super) fn new(plan: &'p Plan, rank: usize) -> Result<Self, ReferenceError> {
        let map = ExpertMap::contiguous(plan.routing.experts(), plan.args.ranks)?;
        let payload = match plan.args.dtype {
            Dtype::Bf16 => Payload::Bf16,
            Dtype::Fp16 => Payload::Fp16,
            Dtype::Fp32 => Payload::Fp32,
        };
        Ok(Self { plan, map, payload, rank })
    }

    /// Compares `output` of one layer with the oracle, and bit for bit with `eager` or, under
    /// truncation to `capacity` rows, with the reference.
    pub(super) fn check(
        &self,
        step: usize,
        layer: usize,
        input: &LayerInput,
        output: &[u8],
        bitwise: Bitwise<'_>,
    ) -> Result<Tally, ReferenceError> {
        let topk: Vec<i64> = input.ids.iter().map(|id| i64::from(*id)).collect();
        let mut sources =
            vec![Source { values: &[], topk: &[], weights: &[] }; self.plan.args.ranks];
        sources[self.rank] = Source { values: &input.values, topk: &topk, weights: &input.weights };
        let hidden = self.plan.args.hidden;
        let exchange =
            Exchange::new(&self.map, self.payload, self.plan.routing.top_k(), hidden, sources)?;
        let expert = |expert: usize, row: &[f32]| synthetic::apply(expert as u32, row);
        let processed = match bitwise {
            Bitwise::Eager(_) => Processed::all(),
            Bitwise::Truncated { capacity } => self.processed(step, layer, capacity)?,
        };
        let dtype = dtype(self.plan.args.dtype);
        let mut values = vec![0f32; input.values.len()];
        dtype.decode(output, &mut values);
        let expected = naive_f64(&exchange, expert, &processed)?;
        let reference: Vec<u8> = match bitwise {
            Bitwise::Eager(eager) => eager.to_vec(),
            Bitwise::Truncated { .. } => {
                let rows = exact(&exchange, expert, &processed)?;
                let mut bytes = vec![0; output.len()];
                dtype.encode(&rows[self.rank], &mut bytes);
                bytes
            }
        };
        let same = |at: usize| {
            let size = dtype.bytes();
            output[at * size..(at + 1) * size] == reference[at * size..(at + 1) * size]
        };
        let wrong = values
            .iter()
            .zip(&expected[self.rank])
            .enumerate()
            .filter(|(at, (value, expected))| !expected.admits(**value) || !same(*at))
            .count();
        Ok(Tally { verified: values.len() as u64, mismatched: wrong as u64 })
    }

    /// What a layer of every receiver takes with `capacity` rows. All ranks have the same capacity
    /// where rows are dropped, since none grows.
    fn processed(
        &self,
        step: usize,
        layer: usize,
        capacity: usize,
    ) -> Result<Processed, ReferenceError> {
        let (top_k, ranks) = (self.plan.routing.top_k(), self.plan.args.ranks);
        let ids: Vec<i64> =
            self.plan.routing.layer(step, layer).ids.iter().map(|id| i64::from(*id)).collect();
        let sources: Vec<&[i64]> = (0..ranks)
            .map(|rank| {
                let range = self.plan.shards.range(step, rank);
                &ids[range.start * top_k..range.end * top_k]
            })
            .collect();
        let items: Vec<_> = (0..ranks)
            .map(|receiver| window::items(&sources, top_k, &self.map, receiver))
            .collect();
        let taken: Vec<usize> = items
            .iter()
            .map(|items| window::longest_prefix(items, capacity, self.plan.args.alignment))
            .collect();
        Processed::prefixes(&items, &taken)
    }
}

/// What an output is compared with bit for bit.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bitwise<'a> {
    /// The output of eager mode.
    Eager(&'a [u8]),
    /// The reference, with every receiver truncated to so many rows.
    Truncated {
        /// Rows of every rank.
        capacity: usize,
    },
}

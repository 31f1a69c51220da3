//! Whether what came out is what should have.
//!
//! Every value is held against two things. The oracle adds up in f64 what each expert makes of each
//! token, and says how far the engine's roundings may lead from that. Eager mode, run beside by a
//! second group, has to agree bit for bit; where rows were dropped on purpose, the exact reference
//! with the same truncation takes its place.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread;

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::{
    Exchange, ExpertMap, Payload, Processed, ReferenceError, Source, exact, naive_f64, window,
};

use serde::{Deserialize, Serialize};

use super::Plan;
use super::tensors::{LayerInput, dtype};
use crate::args::Dtype;

/// What an expert makes of a row.
fn expert(expert: usize, row: &[f32]) -> Vec<f32> {
    synthetic::apply(expert as u32, row)
}

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
        let tokens = Source { values: &input.values, topk: &topk, weights: &input.weights };
        match bitwise {
            Bitwise::Eager(eager) => self.check_parts(tokens, output, eager),
            Bitwise::Truncated { capacity } => {
                let processed = self.processed(step, layer, capacity)?;
                let rows = exact(&self.exchange(tokens)?, expert, &processed)?;
                let mut reference = vec![0; output.len()];
                dtype(self.plan.args.dtype).encode(&rows[self.rank], &mut reference);
                self.compare(tokens, output, &reference, &processed)
            }
        }
    }

    /// Compares tokens all of whose rows were processed. None depends on another, so that threads which have
    /// nothing else to do take parts of them.
    fn check_parts(
        &self,
        tokens: Source<'_>,
        output: &[u8],
        eager: &[u8],
    ) -> Result<Tally, ReferenceError> {
        let top_k = self.plan.routing.top_k();
        let idle = thread::available_parallelism().map_or(1, NonZero::get) / self.plan.args.ranks;
        let part = (tokens.topk.len() / top_k).div_ceil(idle.max(1)).max(1);
        let all = tokens.values.len() as u64;
        let values = part * self.plan.args.hidden;
        let bytes = values * dtype(self.plan.args.dtype).bytes();
        let parts = tokens
            .values
            .chunks(values)
            .zip(tokens.topk.chunks(part * top_k).zip(tokens.weights.chunks(part * top_k)))
            .zip(output.chunks(bytes).zip(eager.chunks(bytes)));
        thread::scope(|scope| {
            let checks: Vec<_> = parts
                .map(|((values, (topk, weights)), (output, eager))| {
                    let tokens = Source { values, topk, weights };
                    scope.spawn(move || self.compare(tokens, output, eager, &Processed::all()))
                })
                .collect();
            let mut tally = Tally::default();
            for check in checks {
                tally.add(check.join().unwrap_or_else(|panic| resume_unwind(panic))?);
            }
            // What an output lacks is not right either.
            let missing = all - tally.verified;
            tally.add(Tally { verified: missing, mismatched: missing });
            Ok(tally)
        })
    }

    /// An exchange of this rank's tokens, beside ranks that have none.
    fn exchange<'t>(&'t self, tokens: Source<'t>) -> Result<Exchange<'t>, ReferenceError> {
        let none = Source { values: &[], topk: &[], weights: &[] };
        let mut sources = vec![none; self.plan.args.ranks];
        sources[self.rank] = tokens;
        let (top_k, hidden) = (self.plan.routing.top_k(), self.plan.args.hidden);
        Exchange::new(&self.map, self.payload, top_k, hidden, sources)
    }

    /// Counts values of `output` that the oracle does not admit, or that are not those of `reference`.
    fn compare(
        &self,
        tokens: Source<'_>,
        output: &[u8],
        reference: &[u8],
        processed: &Processed,
    ) -> Result<Tally, ReferenceError> {
        let dtype = dtype(self.plan.args.dtype);
        let mut values = vec![0f32; tokens.values.len()];
        dtype.decode(output, &mut values);
        let expected = naive_f64(&self.exchange(tokens)?, expert, processed)?;
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

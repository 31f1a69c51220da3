//! Whether what came out is what should have.
//!
//! Every value is held against two things. The oracle adds up in f64 what each expert makes of each
//! token, and says how far the engine's roundings may lead from that. Eager mode, run beside by a
//! second group, has to agree bit for bit; where rows were dropped on purpose, the exact reference
//! takes its place, and both see only the choices that [`truncation`] leaves.

mod truncation;

use std::borrow::Cow;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread;

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::{
    Exchange, ExpertMap, Format, Processed, ReferenceError, Source, exact, naive_f64,
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
    format: Format,
    rank: usize,
}

impl<'p> Verifier<'p> {
    pub(super) fn new(plan: &'p Plan, rank: usize) -> Result<Self, ReferenceError> {
        let map = ExpertMap::contiguous(plan.routing.experts(), plan.args.ranks)?;
        let format = match plan.args.dtype {
            Dtype::Bf16 => Format::Bf16,
            Dtype::Fp16 => Format::Fp16,
            Dtype::Fp32 => Format::Fp32,
        };
        Ok(Self { plan, map, format, rank })
    }

    /// Compares `output` of one layer with the oracle, and bit for bit with what `bitwise` says. Where
    /// lengths differ all is mismatched.
    pub(super) fn check(
        &self,
        step: usize,
        layer: usize,
        input: &LayerInput,
        output: &[u8],
        bitwise: Bitwise<'_>,
    ) -> Result<Tally, ReferenceError> {
        let mut topk: Vec<i64> = input.ids.iter().map(|id| i64::from(*id)).collect();
        let eager = match bitwise {
            Bitwise::Eager(eager) => Some(eager),
            Bitwise::Truncated { capacity } => {
                self.truncate(step, layer, capacity, &mut topk);
                None
            }
        };
        let tokens = Source { values: &input.values, topk: &topk, weights: &input.weights };
        let size = dtype(self.plan.args.dtype).bytes();
        let expected = input.values.len() * size;
        let beside = eager.map_or(expected, <[u8]>::len);
        if [output.len(), beside] != [expected; 2] {
            // Which value belongs to which is not known: none is right.
            let all = expected.max(output.len()).max(beside).div_ceil(size) as u64;
            return Ok(Tally { verified: all, mismatched: all });
        }
        // What the machine has, shared among the ranks, all of which check at the same time.
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        self.check_parts(tokens, output, eager, threads / self.plan.args.ranks)
    }

    /// Compares tokens all of whose choices were processed, in at most so many parts beside each other: none
    /// of them depends on another.
    fn check_parts(
        &self,
        tokens: Source<'_>,
        output: &[u8],
        eager: Option<&[u8]>,
        parts: usize,
    ) -> Result<Tally, ReferenceError> {
        let top_k = self.plan.routing.top_k();
        let part = (tokens.topk.len() / top_k).div_ceil(parts.max(1)).max(1);
        let values = part * self.plan.args.hidden;
        let bytes = values * dtype(self.plan.args.dtype).bytes();
        let parts: Vec<_> = tokens
            .values
            .chunks(values)
            .zip(tokens.topk.chunks(part * top_k).zip(tokens.weights.chunks(part * top_k)))
            .zip(output.chunks(bytes).enumerate())
            .map(|((values, (topk, weights)), (at, output))| {
                let tokens = Source { values, topk, weights };
                let eager = eager.map(|eager| &eager[at * bytes..][..output.len()]);
                move || self.compare(tokens, output, eager)
            })
            .collect();
        let Some((own, others)) = parts.split_last() else { return Ok(Tally::default()) };
        thread::scope(|scope| {
            let others: Vec<_> = others.iter().map(|part| scope.spawn(part)).collect();
            let mut tally = own()?;
            for other in others {
                tally.add(other.join().unwrap_or_else(|panic| resume_unwind(panic))?);
            }
            Ok(tally)
        })
    }

    /// An exchange of this rank's tokens, beside ranks that have none.
    fn exchange<'t>(&'t self, tokens: Source<'t>) -> Result<Exchange<'t>, ReferenceError> {
        let none = Source { values: &[], topk: &[], weights: &[] };
        let mut sources = vec![none; self.plan.args.ranks];
        sources[self.rank] = tokens;
        let (top_k, hidden) = (self.plan.routing.top_k(), self.plan.args.hidden);
        Exchange::new(&self.map, self.format, top_k, hidden, sources)
    }

    /// Counts values of `output` that the oracle does not admit, or that are not those of `eager`, or of the
    /// exact reference without it. All hold a value for each of the tokens'.
    fn compare(
        &self,
        tokens: Source<'_>,
        output: &[u8],
        eager: Option<&[u8]>,
    ) -> Result<Tally, ReferenceError> {
        let dtype = dtype(self.plan.args.dtype);
        let mut values = vec![0f32; tokens.values.len()];
        dtype.decode(output, &mut values);
        let exchange = self.exchange(tokens)?;
        let expected = naive_f64(&exchange, expert, &Processed::all())?;
        let bits = match eager {
            Some(eager) => Cow::Borrowed(eager),
            None => {
                let rows = exact(&exchange, expert, &Processed::all())?;
                let mut bits = vec![0; output.len()];
                dtype.encode(&rows[self.rank], &mut bits);
                Cow::Owned(bits)
            }
        };
        let size = dtype.bytes();
        let same = output.chunks(size).zip(bits.chunks(size)).map(|(output, bits)| output == bits);
        let wrong = values
            .iter()
            .zip(&expected[self.rank])
            .zip(same)
            .filter(|((value, expected), same)| !expected.admits(**value) || !same)
            .count();
        Ok(Tally { verified: values.len() as u64, mismatched: wrong as u64 })
    }
}

/// What an output is compared with bit for bit.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bitwise<'a> {
    /// The output of eager mode.
    Eager(&'a [u8]),
    /// The exact reference, with every receiver truncated to so many rows.
    Truncated {
        /// Rows of every rank.
        capacity: usize,
    },
}

#[cfg(test)]
mod tests;

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
    /// truncation to `capacity` rows, with the reference. Where lengths differ all is mismatched.
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
        let size = dtype(self.plan.args.dtype).bytes();
        let expected = input.values.len() * size;
        let beside = match bitwise {
            Bitwise::Eager(eager) => eager.len(),
            Bitwise::Truncated { .. } => expected,
        };
        if [output.len(), beside] != [expected; 2] {
            // Which value belongs to which is not known: none is right.
            let all = expected.max(output.len()).max(beside).div_ceil(size) as u64;
            return Ok(Tally { verified: all, mismatched: all });
        }
        match bitwise {
            Bitwise::Eager(eager) => {
                // What the machine has, shared among the ranks, all of which check at the same time.
                let threads = thread::available_parallelism().map_or(1, NonZero::get);
                self.check_parts(tokens, output, eager, threads / self.plan.args.ranks)
            }
            Bitwise::Truncated { capacity } => {
                let processed = self.processed(step, layer, capacity)?;
                let rows = exact(&self.exchange(tokens)?, expert, &processed)?;
                let mut reference = vec![0; output.len()];
                dtype(self.plan.args.dtype).encode(&rows[self.rank], &mut reference);
                self.compare(tokens, output, &reference, &processed)
            }
        }
    }

    /// Compares tokens all of whose rows were processed, in at most so many parts beside each other: none of
    /// them depends on another.
    fn check_parts(
        &self,
        tokens: Source<'_>,
        output: &[u8],
        eager: &[u8],
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
            .zip(output.chunks(bytes).zip(eager.chunks(bytes)))
            .map(|((values, (topk, weights)), (output, eager))| {
                let tokens = Source { values, topk, weights };
                move || self.compare(tokens, output, eager, &Processed::all())
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
        Exchange::new(&self.map, self.payload, top_k, hidden, sources)
    }

    /// Counts values of `output` that the oracle does not admit, or that are not those of `reference`. Both
    /// hold a value for each of the tokens'.
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn plan() -> Plan {
        let line = "graph-ep run --workload balanced --ranks 2 --steps 1 --hidden 16 --dtype fp32";
        let cli = Cli::try_parse_from(line.split_whitespace()).expect("arguments");
        let Command::Run(args) = cli.command else { panic!("another command") };
        Plan::new(&args).expect("a plan")
    }

    /// The first tokens of rank 0, and what should come out of them.
    fn tokens(verifier: &Verifier<'_>, tokens: usize) -> (LayerInput, Vec<u8>) {
        let input = LayerInput::new(verifier.plan, 0, 0, 0..tokens);
        let topk: Vec<i64> = input.ids.iter().map(|id| i64::from(*id)).collect();
        let source = Source { values: &input.values, topk: &topk, weights: &input.weights };
        let exchange = verifier.exchange(source).expect("an exchange");
        let rows = exact(&exchange, expert, &Processed::all()).expect("outputs");
        let mut output = vec![0; size_of_val(&input.values[..])];
        dtype(Dtype::Fp32).encode(&rows[0], &mut output);
        (input, output)
    }

    #[test]
    fn parts_find_what_the_whole_finds() {
        let plan = plan();
        let verifier = Verifier::new(&plan, 0).expect("a verifier");
        let (input, output) = tokens(&verifier, 7);
        let topk: Vec<i64> = input.ids.iter().map(|id| i64::from(*id)).collect();
        let source = Source { values: &input.values, topk: &topk, weights: &input.weights };
        // One in the first token, one in the last, which may be in a part that is shorter.
        let mut wrong = output.clone();
        for at in [3, 6 * 16] {
            wrong[at * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        for parts in [0, 1, 2, 3, 4, 7, 64] {
            let found = |output, eager| {
                verifier.check_parts(source, output, eager, parts).expect("it can be compared")
            };
            let all = |mismatched| Tally { verified: 7 * 16, mismatched };
            assert_eq!(found(&output, &output), all(0), "{parts} parts");
            assert_eq!(found(&wrong, &wrong), all(2), "{parts} parts: the oracle");
            assert_eq!(found(&output, &wrong), all(2), "{parts} parts: eager mode");
        }
    }

    #[test]
    fn where_a_value_lacks_or_is_one_too_many_none_is_right() {
        let plan = plan();
        let verifier = Verifier::new(&plan, 0).expect("a verifier");
        let (input, output) = tokens(&verifier, 7);
        let checked = |input, output, bitwise| {
            verifier.check(0, 0, input, output, bitwise).expect("it can be compared")
        };
        let all = |values| Tally { verified: values, mismatched: values };
        let eager = Bitwise::Eager(&output);
        assert_eq!(checked(&input, &output, eager), Tally { verified: 112, mismatched: 0 });
        let longer = [&output[..], &[0; 4]].concat();
        let row = &output[..16 * 4];
        for (output, bitwise) in [
            (&output[..111 * 4], eager),
            (row, eager),
            (row, Bitwise::Eager(row)),
            (&output, Bitwise::Eager(row)),
            (&output, Bitwise::Eager(&[])),
            (row, Bitwise::Truncated { capacity: 1 << 20 }),
        ] {
            assert_eq!(checked(&input, output, bitwise), all(112), "{} bytes", output.len());
        }
        assert_eq!(checked(&input, &longer, eager), all(113));
        let none = LayerInput::default();
        assert_eq!(checked(&none, &[], Bitwise::Eager(&[])), Tally::default());
        assert_eq!(checked(&none, row, Bitwise::Eager(&[])), all(16));
    }
}

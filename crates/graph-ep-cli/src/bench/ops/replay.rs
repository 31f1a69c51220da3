//! A whole step with experts: replayed from a graph, launched operation by operation, and eagerly.
//!
//! The stream is idle when a step begins, as in an engine that reads each step's record before it begins
//! the next; what is timed goes from the moment at which all ranks are aligned to the end of the step.

use std::time::Instant;

use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{Backend, BodyError, Lane, Step, StepGraph, StepMode, StepOptions};

use super::super::interval::Interval;
use super::error::OpError;
use super::layers::{Layer, Layers, Receive};
use super::part::{Check, Part};
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Results;

/// How a step is brought to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Replay,
    Launches,
    Eager,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Replay => "replay",
            Self::Launches => "launches",
            Self::Eager => "eager",
        }
    }
}

/// The operations of a step.
pub(super) struct Program<B: Backend> {
    layers: Vec<Layer<B>>,
    lane: Lane<B>,
    experts: SyntheticExperts<B>,
}

impl<B: Backend> Program<B> {
    /// The step of `layers`. Loads a kernel.
    pub(super) fn new(part: &Part<'_, B>, layers: &Layers<B>) -> Result<Self, OpError> {
        let experts = SyntheticExperts::new(&part.group)?;
        Ok(Self { layers: layers.layers.clone(), lane: part.lane()?, experts })
    }

    /// Queues or records it.
    pub(super) fn queue(&self, step: &mut Step<'static, B>) -> Result<(), BodyError> {
        for layer in &self.layers {
            let receiver = layer.receiver();
            let received = receiver.received(step.row_limit(&receiver.set));
            if step.options().mode() == StepMode::Rounds {
                layer
                    .rounds(&self.lane, step, |step| self.experts.queue(step.queue(), &received))?;
                continue;
            }
            layer.dispatch(&self.lane, step)?;
            self.experts.queue(step.queue(), &received)?;
            layer.combine(&self.lane, step)?;
        }
        Ok(())
    }
}

/// Measures a step each way. Collective.
pub(super) fn measure<B: Backend>(part: &Part<'_, B>) -> Result<Vec<Entry>, OpError> {
    let layers = part.step_layers();
    let capacity = (0..layers).map(|layer| part.enough(layer)).max().unwrap_or(0);
    let receive =
        Receive { layers, capacity: &[capacity], max_rows: capacity, shared: true, alike: false };
    let layers = Layers::new(part, receive)?;
    let program = Program::new(part, &layers)?;
    let marks = Interval::new(part.backend())?;
    let graph =
        StepGraph::record(part.group.dispatcher(), part.stream(), StepOptions::new(), |step| {
            program.queue(step)
        })?;
    part.meet("the step is recorded")?;
    let step = Timed { part, layers, program, marks, graph, capacity };
    let ways = [Way::Replay, Way::Launches, Way::Eager];
    ways.into_iter().map(|way| step.entry(way)).collect()
}

struct Timed<'s, 'p, B: Backend> {
    part: &'s Part<'p, B>,
    layers: Layers<B>,
    program: Program<B>,
    marks: Interval<B>,
    graph: StepGraph<'static, B>,
    capacity: u32,
}

impl<B: Backend> Timed<'_, '_, B> {
    fn entry(&self, way: Way) -> Result<Entry, OpError> {
        let part = self.part;
        let (samples, next) = part.sample(|routing| {
            let host = self.run(way, routing)?;
            Ok(vec![self.marks.microseconds(part.backend())?, host])
        })?;
        let check = Check { routing: next, results: Results::Synthetic, rows_kept: false };
        let verified = part.verified(&self.layers, check, || self.run(way, next).map(drop))?;
        let half =
            |first: usize| -> Vec<f64> { samples.iter().skip(first).step_by(2).copied().collect() };
        let count = self.layers.layers.len();
        let of_pair = part.halves.pair();
        let work = Work {
            wire_bytes: of_pair.wire_bytes * count as u64,
            memory_bytes: of_pair.memory_bytes * count as u64,
        };
        let case = part.case(Op::Replay, way.name(), way == Way::Replay, count);
        let mut entry = part.entry(case, &half(0), 1, (work, None), verified)?;
        entry.host_us = Some(part.quantiles(&half(1))?.median_us);
        Ok(entry)
    }

    /// Runs one step and waits for it; microseconds of the host in the calls that queue it.
    fn run(&self, way: Way, routing: usize) -> Result<f64, OpError> {
        let (part, queue) = (self.part, self.part.queue());
        self.layers.give(&queue, routing)?;
        part.align.queue(&queue)?;
        queue.reach(&self.marks.from)?;
        let begin = Instant::now();
        let step = match way {
            Way::Replay => self.graph.replay(part.stream())?,
            Way::Launches => self.launch(StepOptions::new())?,
            Way::Eager => {
                let mode = StepMode::Eager { max_rows: self.capacity };
                self.launch(StepOptions::new().with_mode(mode))?
            }
        };
        let host = begin.elapsed().as_secs_f64() * 1e6;
        queue.reach(&self.marks.to)?;
        part.wait(step)?;
        Ok(host)
    }

    fn launch(&self, options: StepOptions) -> Result<u32, OpError> {
        let part = self.part;
        let mut step = Step::begin(part.group.dispatcher(), part.queue(), options)?;
        let rank = part.group.context().rank();
        self.program.queue(&mut step).map_err(|source| OpError::Body { rank, source })?;
        Ok(step.finish()?.number.unwrap_or_default())
    }
}

//! Dispatch, combine, and one after the other.
//!
//! A replay holds several layers, each with memory of its own. In one graph every dispatch and every
//! combine is timed by itself, with all ranks aligned before each; in another only the whole, from one
//! alignment on, divided by the number of layers.

use graph_ep::{Backend, BodyError, Lane, Step, StepGraph, StepOptions};

use super::super::interval::Interval;
use super::error::OpError;
use super::layers::{Layers, Receive};
use super::part::{Check, Part};
use crate::bench::bytes::{combine_bound, dispatch_bound, pair_bound};
use crate::bench::report::{Entry, Op};
use crate::bench::verify::Results;

/// Measures those of `ops` that are here. Collective.
pub(super) fn measure<B: Backend>(part: &Part<'_, B>, ops: &[Op]) -> Result<Vec<Entry>, OpError> {
    let layers = part.layers();
    let capacity: Vec<u32> = (0..layers).map(|layer| part.enough(layer)).collect();
    let max_rows = capacity.iter().copied().max().unwrap_or(0);
    let receive = Receive { layers, capacity: &capacity, max_rows, shared: false, alike: false };
    let layers = Layers::new(part, receive)?;
    let mut entries = Vec::new();
    let (dispatch, combine) = (ops.contains(&Op::Dispatch), ops.contains(&Op::Combine));
    if dispatch || combine {
        entries.extend(apart(part, &layers, (dispatch, combine))?);
    }
    if ops.contains(&Op::Pair) {
        entries.push(together(part, &layers)?);
    }
    Ok(entries)
}

/// Each half by itself.
fn apart<B: Backend>(
    part: &Part<'_, B>,
    layers: &Layers<B>,
    (dispatch, combine): (bool, bool),
) -> Result<Vec<Entry>, OpError> {
    let lane = part.lane()?;
    let interval = |_| Interval::new(part.backend());
    let marks = (0..2 * layers.layers.len()).map(interval).collect::<Result<Vec<_>, _>>()?;
    let timed = |step: &mut Step<'static, B>,
                 marks: &Interval<B>,
                 work: &dyn Fn(&mut Step<'static, B>) -> Result<(), BodyError>|
     -> Result<(), BodyError> {
        part.align.queue(step.queue())?;
        step.queue().reach(&marks.from)?;
        work(step)?;
        Ok(step.queue().reach(&marks.to)?)
    };
    let graph = record(part, |step| {
        for (layer, marks) in layers.layers.iter().zip(marks.chunks(2)) {
            timed(step, &marks[0], &|step| Ok(layer.dispatch(&lane, step)?))?;
            timed(step, &marks[1], &|step| Ok(layer.combine(&lane, step)?))?;
        }
        Ok(())
    })?;
    let (samples, next) = part.sample(|routing| {
        part.replay(layers, &graph, routing)?;
        let taken = marks.iter().map(|marks| marks.microseconds(part.backend()));
        Ok(taken.collect::<Result<Vec<_>, _>>()?)
    })?;
    let verified = verify(part, layers, &graph, next)?;
    // Dispatches and combines take turns.
    let half =
        |first: usize| -> Vec<f64> { samples.iter().skip(first).step_by(2).copied().collect() };
    let (limits, sms) = (&part.setup.limits, part.shape.sms);
    let count = layers.layers.len();
    let mut entries = Vec::new();
    if dispatch {
        let work = part.halves.dispatch;
        let bound = dispatch_bound(limits, sms, part.pushes(), work);
        let case = part.case(Op::Dispatch, part.variant(), true, count);
        entries.push(part.entry(case, &half(0), 1, (work, bound), verified)?);
    }
    if combine {
        let work = part.halves.combine;
        let bound = combine_bound(limits, sms, work);
        let case = part.case(Op::Combine, part.variant(), true, count);
        entries.push(part.entry(case, &half(1), 1, (work, bound), verified)?);
    }
    Ok(entries)
}

/// All layers behind each other.
fn together<B: Backend>(part: &Part<'_, B>, layers: &Layers<B>) -> Result<Entry, OpError> {
    let lane = part.lane()?;
    let marks = Interval::new(part.backend())?;
    let graph = record(part, |step| {
        part.align.queue(step.queue())?;
        step.queue().reach(&marks.from)?;
        for layer in &layers.layers {
            layer.dispatch(&lane, step)?;
            layer.combine(&lane, step)?;
        }
        Ok(step.queue().reach(&marks.to)?)
    })?;
    let (samples, next) = part.sample(|routing| {
        part.replay(layers, &graph, routing)?;
        Ok(vec![marks.microseconds(part.backend())?])
    })?;
    let verified = verify(part, layers, &graph, next)?;
    let count = layers.layers.len();
    let bound = pair_bound(&part.setup.limits, part.shape.sms, part.pushes(), &part.halves);
    let case = part.case(Op::Pair, part.variant(), true, count);
    part.entry(case, &samples, count, (part.halves.pair(), bound), verified)
}

/// Records a step of `body`. The ranks meet behind it.
fn record<B: Backend>(
    part: &Part<'_, B>,
    body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
) -> Result<StepGraph<'static, B>, OpError> {
    let options = StepOptions::new();
    let graph = StepGraph::record(part.group.dispatcher(), part.stream(), options, body)?;
    part.meet("the step is recorded")?;
    Ok(graph)
}

/// Replays once more, on a routing that was not the last, over spoilt memory.
fn verify<B: Backend>(
    part: &Part<'_, B>,
    layers: &Layers<B>,
    graph: &StepGraph<'static, B>,
    routing: usize,
) -> Result<bool, OpError> {
    let check = Check { routing, results: Results::Rows, rows_kept: true };
    part.verified(layers, check, || part.replay(layers, graph, routing).map(drop))
}

impl<B: Backend> Part<'_, B> {
    /// The lane on which everything here runs.
    pub(super) fn lane(&self) -> Result<Lane<B>, OpError> {
        let lane = self.group.dispatcher().lane(0);
        lane.ok_or_else(|| OpError::Setup("the dispatcher has no lane".to_owned()))
    }

    /// Whether dispatches of recorded steps push their rows.
    fn pushes(&self) -> bool {
        self.group.dispatcher().pushes()
    }

    /// What tells an exchange of this shape from another that could be meant.
    fn variant(&self) -> &'static str {
        if self.shape.plain() { "" } else { "quantised before" }
    }

    /// Receive rows of this rank that suffice for every routing of a layer.
    pub(super) fn enough(&self, layer: usize) -> u32 {
        self.required(layer).max().unwrap_or(0)
    }

    /// Receive rows that every routing of a layer requires of this rank.
    pub(super) fn required(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        let (inputs, shape, rank) = (&self.given.inputs, self.shape, self.rank());
        let rows = move |routing| inputs.counts(routing, layer).required(shape, rank) as u32;
        (0..crate::bench::inputs::ROUTINGS).map(rows)
    }
}

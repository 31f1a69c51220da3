//! One more round: a step whose layers take one window each, and one whose layers take another for what
//! is left over.
//!
//! Nothing stands between dispatch and combine. The difference of the two is what a window more costs
//! beyond its rows. Both replay one routing over and over: how many windows a layer takes depends on it.

use graph_ep::{Backend, StepGraph, StepMode, StepOptions};

use super::error::OpError;
use super::layers::{Layers, NOBODY, Receive};
use super::part::{Interval, Part};
use crate::bench::report::{Entry, Op};
use crate::bench::verify::Results;

/// The routing that is replayed.
const ROUTING: usize = 0;

/// Measures both. Collective. Where no capacity makes every layer take a second window on every rank,
/// only the first.
pub(super) fn measure<B: Backend>(part: &Part<'_, B>) -> Result<Vec<Entry>, OpError> {
    let layers = part.layers();
    let required = (0..layers).map(|layer| part.required(layer).nth(ROUTING).unwrap_or(0));
    let required: Vec<u32> = required.collect();
    // Whatever routing requires, a window has to hold any one token.
    let least = part.group.dispatcher().least_rows();
    let enough: Vec<u32> = required.iter().map(|rows| *rows.max(&least)).collect();
    let mut entries = vec![windows(part, &enough)?];
    // One aligned group of rows fewer: few items are left over.
    let alignment = part.shape.alignment as u32;
    let fewer = required.iter().map(|rows| rows.saturating_sub(alignment));
    let fewer: Vec<u32> = fewer.collect();
    let too_few = fewer.iter().any(|rows| *rows < least);
    if part.most("whether a window can be too small", f64::from(u8::from(too_few)))? == 0.0 {
        entries.push(windows(part, &fewer)?);
    }
    Ok(entries)
}

/// Measures a step with these receive rows for its layers.
fn windows<B: Backend>(part: &Part<'_, B>, capacity: &[u32]) -> Result<Entry, OpError> {
    let max_rows = capacity.iter().copied().max().unwrap_or(0);
    let receive =
        Receive { layers: capacity.len(), capacity, max_rows, shared: false, alike: false };
    let layers = Layers::new(part, receive)?;
    let (lane, marks) = (part.lane()?, Interval::new(part.backend())?);
    let options = StepOptions::new().mode(StepMode::Rounds);
    let graph = StepGraph::record(part.group.dispatcher(), part.stream(), options, |step| {
        part.align.queue(step.queue())?;
        step.queue().reach(&marks.from)?;
        for layer in &layers.layers {
            layer.rounds(&lane, step)?;
        }
        Ok(step.queue().reach(&marks.to)?)
    })?;
    part.meet("the step is recorded")?;
    let mut windows = 0;
    let (samples, _) = part.sample(|_| {
        windows = windows.max(part.replay(&layers, &graph, ROUTING)?.windows);
        Ok(vec![marks.microseconds(part.backend())?])
    })?;
    // So that nothing is right for having been right before.
    part.replay(&layers, &graph, NOBODY)?;
    layers.poison(part)?;
    part.backend().synchronize(part.stream())?;
    part.meet("everything is spoilt")?;
    part.replay(&layers, &graph, ROUTING)?;
    part.meet("the last replay is over")?;
    let verified = part.all_right(layers.check(part, ROUTING, Results::Rows, false)?)?;
    let windows = part.most("windows of a step", f64::from(windows))?;
    let count = layers.layers.len();
    let case = part.case(Op::Round, &format!("W={windows}"), true, count);
    part.entry(case, &samples, count, (part.halves.pair(), None), verified)
}

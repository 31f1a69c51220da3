//! One more round: a step whose layers take one window each, and one whose layers take another for what
//! is left over.
//!
//! Nothing stands between dispatch and combine. Times are those of one layer: of a replay, divided by its
//! layers. The difference of the two is what one more round of one layer costs: few rows are left over for
//! it, and the others move in either. Both replay one routing over and over: how many windows a layer
//! takes depends on it.

use graph_ep::{Backend, DispatchError, StepGraph, StepMode, StepOptions};

use super::super::interval::Interval;
use super::error::OpError;
use super::layers::{Layers, Receive};
use super::part::{Check, Part};
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
        let more = windows(part, &fewer)?;
        let one = &entries[0].time;
        let rounds = (windows_of(&more) - windows_of(&entries[0])).max(1.0);
        let each = (more.time.median_us - one.median_us) / rounds;
        entries.push(more.with("one more round of one layer us", each));
    }
    Ok(entries)
}

/// The name of a detail: the most windows that a layer takes on any rank.
const WINDOWS: &str = "windows of a layer at most";

fn windows_of(entry: &Entry) -> f64 {
    entry.details.get(WINDOWS).copied().unwrap_or(1.0)
}

/// Measures a step with these receive rows for its layers.
fn windows<B: Backend>(part: &Part<'_, B>, capacity: &[u32]) -> Result<Entry, OpError> {
    let max_rows = capacity.iter().copied().max().unwrap_or(0);
    let receive =
        Receive { layers: capacity.len(), capacity, max_rows, shared: false, alike: false };
    let layers = Layers::new(part, receive)?;
    let (lane, marks) = (part.lane()?, Interval::new(part.backend())?);
    let options = StepOptions::new().with_mode(StepMode::Rounds);
    let graph = StepGraph::record(part.group.dispatcher(), part.stream(), options, |step| {
        part.align.queue(step.queue())?;
        step.queue().reach(&marks.from)?;
        for layer in &layers.layers {
            layer.rounds(&lane, step, |_| Ok::<(), DispatchError>(()))?;
        }
        Ok(step.queue().reach(&marks.to)?)
    })?;
    part.meet("the step is recorded")?;
    let mut windows = 0;
    let (samples, _) = part.sample(|_| {
        windows = windows.max(part.replay(&layers, &graph, ROUTING)?.windows);
        Ok(vec![marks.microseconds(part.backend())?])
    })?;
    let check = Check { routing: ROUTING, results: Results::Rows, rows_kept: false };
    let verified =
        part.verified(&layers, check, || part.replay(&layers, &graph, ROUTING).map(drop))?;
    let windows = part.most("windows of a step", f64::from(windows))?;
    let count = layers.layers.len();
    let case = part.case(Op::Round, &format!("W={windows}"), true, count);
    let entry = part.entry(case, &samples, count, (part.halves.pair(), None), verified)?;
    let nodes = graph.node_count() as f64;
    Ok(entry.with(WINDOWS, windows).with("layers", count as f64).with("nodes", nodes))
}

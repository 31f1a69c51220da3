//! A step whose routing requires more rows than there are, until its outputs are complete.
//!
//! Before every sample the ranks give back what they had grown by, and record the step again with a
//! routing that needs nothing, so that each sample finds what the first overflow of an engine finds. Then
//! the step overflows, and is recovered; then it runs once more, and now fits. Times are those of the
//! host, from the launch to the record that counts: what a recovery costs is its time less that of two
//! steps that fit.

use std::time::Duration;

use graph_ep::ep_context::cuda::{CallTime, clock_calls};
use graph_ep::{
    Backend, Buffer, GrowthPolicy, Outcome, RecoverySettings, RowShaping, StepGraph, StepReport,
    StepRunner,
};

use super::error::OpError;
use super::grow::{shrink, time_of};
use super::layers::{Layers, NOBODY, Receive};
use super::part::{Check, Part};
use super::replay::Program;
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Results;

/// Numbers of a sample.
const SAMPLED: usize = 7;

/// What making a graph executable takes of recording, in one recovery.
const GRAPH_CALLS: [(&str, &str); 3] = [
    ("once instantiating us", "cuGraphInstantiateWithFlags"),
    ("once updating us", "cuGraphExecUpdate_v2"),
    ("once uploading us", "cuGraphUpload"),
];

/// By how much routing exceeds the rows, at least.
const EXCESS: f64 = 1.1;

/// Measures a recovery with each kind of graph, and the step without one. Collective.
pub(super) fn measure<B: Backend>(part: &Part<'_, B>) -> Result<Vec<Entry>, OpError> {
    let least = part.required(0).min().unwrap_or(0);
    let alignment = part.shape.alignment as u32;
    let few = (f64::from(least) / EXCESS) as u32 / alignment * alignment;
    let receive = Receive {
        layers: part.step_layers(),
        capacity: &[few],
        max_rows: part.enough(0),
        shared: true,
        // A layer that requires more than those before it would take one more replay.
        alike: true,
    };
    let layers = Layers::new(part, receive)?;
    let mut entries = Vec::new();
    for (shaping, name) in
        [(RowShaping::Capacity, "capacity-shaped"), (RowShaping::DeviceCounted, "device-counted")]
    {
        let mut recovery = Recovery::new(part, &layers, few, shaping)?;
        let (samples, next) = part.sample(|routing| recovery.sample(routing))?;
        let nodes = recovery.nodes();
        let (verified, calls) = recovery.verify(next)?;
        let each = |first: usize| -> Vec<f64> {
            samples.iter().skip(first).step_by(SAMPLED).copied().collect()
        };
        let nothing = (Work::default(), None);
        let count = layers.layers.len();
        let case = part.case(Op::Recover, name, true, count);
        let [_, _, beyond, first, recording, mapping, rest] = part.medians::<SAMPLED>(&samples)?;
        let entry = part.entry(case, &each(0), 1, nothing, verified)?;
        let mut entry = entry
            .with("beyond two steps that fit us", beyond)
            .with("first run us", first)
            .with("recording us", recording)
            .with("mapping us", mapping)
            .with("rest us", rest)
            .with("nodes", nodes as f64);
        for (name, call) in GRAPH_CALLS {
            let us = part.most(call, time_of(&calls, &[call]))?;
            if us > 0.0 {
                entry = entry.with(name, us);
            }
        }
        entries.push(entry);
        if shaping == RowShaping::Capacity {
            let case = part.case(Op::Recover, "clean", true, count);
            entries.push(part.entry(case, &each(1), 1, nothing, verified)?);
        }
    }
    Ok(entries)
}

struct Recovery<'r, 'p, B: Backend> {
    part: &'r Part<'p, B>,
    layers: &'r Layers<B>,
    few: u32,
    runner: StepRunner<B>,
    /// A little memory, taken so that graphs which were dropped are given back where ranks wait for each
    /// other, and not when one records while another runs.
    taken: Vec<Buffer<B>>,
}

impl<'r, 'p, B: Backend> Recovery<'r, 'p, B> {
    fn new(
        part: &'r Part<'p, B>,
        layers: &'r Layers<B>,
        few: u32,
        shaping: RowShaping,
    ) -> Result<Self, OpError> {
        let program = Program::new(part, layers)?;
        let settings =
            RecoverySettings::new().with_growth(GrowthPolicy::Exact).with_shaping(shaping);
        let Some(layer) = layers.layers.first() else {
            return Err(OpError::Setup("a step without layers cannot be recovered".to_owned()));
        };
        let runner = StepRunner::new(
            part.group.dispatcher(),
            part.stream().clone(),
            layer.receiver().set.clone(),
            settings,
            Box::new(move |step| program.queue(step)),
        )?;
        Ok(Self { part, layers, few, runner, taken: Vec::new() })
    }

    /// Microseconds of a step that was recovered; of the same step when it fits; of the first beyond two of
    /// the second; of its first run, of recording, of mapping; and of its rest beyond one that fits.
    fn sample(&mut self, routing: usize) -> Result<Vec<f64>, OpError> {
        self.reset()?;
        let recovered = self.step(routing, true)?;
        let clean = self.step(routing, false)?;
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let (times, fits) = (recovered.times, us(clean.times.total));
        let parts = [times.first_run, times.recording, times.growing].map(us);
        let (total, known) = (us(times.total), parts.iter().sum::<f64>());
        let [first, recording, mapping] = parts;
        let sampled: [f64; SAMPLED] =
            [total, fits, total - 2.0 * fits, first, recording, mapping, total - known - fits];
        Ok(sampled.to_vec())
    }

    /// Operations of the step's graph.
    fn nodes(&self) -> usize {
        self.runner.graph().map_or(0, StepGraph::node_count)
    }

    /// Whether a recovered step has the right outputs, and the calls of the driver that it took.
    fn verify(&mut self, routing: usize) -> Result<(bool, Vec<CallTime>), OpError> {
        self.reset()?;
        let check = Check { routing, results: Results::Synthetic, rows_kept: false };
        let mut calls = Vec::new();
        let verified = self.part.verified(self.layers, check, || {
            let (recovered, clocked) = clock_calls(|| self.step(routing, true));
            calls = clocked;
            recovered.map(drop)
        })?;
        // The next runner begins with the rows that this one began with.
        self.reset()?;
        self.runner.invalidate();
        Ok((verified, calls))
    }

    /// Back to the rows that do not suffice, with a graph for them.
    fn reset(&mut self) -> Result<(), OpError> {
        self.runner.invalidate();
        self.part.backend().synchronize(self.part.stream())?;
        self.part.meet("graphs are dropped")?;
        self.taken.push(self.part.group.allocate(1)?);
        shrink(self.part, self.runner.rows(), self.few)?;
        self.step(NOBODY, false).map(drop)
    }

    /// Runs a step that must or must not overflow.
    fn step(&mut self, routing: usize, overflows: bool) -> Result<StepReport, OpError> {
        self.layers.give(&self.part.queue(), routing)?;
        self.part.backend().synchronize(self.part.stream())?;
        self.part.meet("the next step")?;
        let report = self.runner.run()?;
        let (right, expected) = match overflows {
            true => {
                let once = Outcome::Recovered { replays: 1, eager: false };
                (report.outcome == once, "recovered by one replay")
            }
            false => (report.outcome == Outcome::Clean, "clean"),
        };
        if right {
            return Ok(report);
        }
        Err(OpError::Step {
            rank: self.part.rank(),
            operation: "recover",
            found: format!("{:?}", report.outcome),
            expected,
        })
    }
}

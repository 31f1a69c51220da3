//! What the host spends on a step that fits, whoever waits for it: launching it, and settling it when its
//! record is there.
//!
//! A sample is two steps. In the first the two calls are timed by the clock of the host, and nothing else:
//! what passes between them, while the device works, is not counted. In the second the calls of the driver
//! within them are timed too, which costs a little for each: so its launch of the graph, which no way to
//! replay a step can do without, is known from the same place. What is left is ours.

use std::time::{Duration, Instant};

use graph_ep::ep_context::cuda::{CallTime, DriverCalls, clock_calls};
use graph_ep::{
    Backend, Launched, Outcome, OverflowError, OverflowPolicy, Phase, RecoverySettings, StepGraph,
    StepRunner,
};

use super::error::OpError;
use super::layers::{Layers, Receive};
use super::part::{Check, Part};
use super::replay::Program;
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Results;

/// Numbers of a sample.
const SAMPLED: usize = 6;

/// The call that launches a graph.
const LAUNCH: &str = "cuGraphLaunch";

/// Measures a step with one window in each layer, and one with loops over windows. Collective.
pub(super) fn measure<B: Backend>(part: &Part<'_, B>) -> Result<Vec<Entry>, OpError> {
    let layers = part.step_layers();
    let enough = (0..layers).map(|layer| part.enough(layer)).max().unwrap_or(0);
    // Whatever routing requires, a window has to hold any one token.
    let capacity = enough.max(part.group.dispatcher().least_rows());
    let receive =
        Receive { layers, capacity: &[capacity], max_rows: capacity, shared: true, alike: false };
    let layers = Layers::new(part, receive)?;
    let ways = [(OverflowPolicy::Recover, "recover"), (OverflowPolicy::Rounds, "rounds")];
    ways.into_iter().map(|(policy, name)| entry(part, &layers, policy, name)).collect()
}

fn entry<B: Backend>(
    part: &Part<'_, B>,
    layers: &Layers<B>,
    policy: OverflowPolicy,
    name: &str,
) -> Result<Entry, OpError> {
    let mut steps = Steps::new(part, layers, policy)?;
    steps.run(0, false)?;
    part.meet("the step is recorded")?;
    let mut quiet = true;
    let (samples, next) = part.sample(|routing| {
        let plain = steps.run(routing, false)?;
        let clocked = steps.run(routing, true)?;
        quiet &= plain.quiet && clocked.quiet;
        let (mut graph, mut others, mut calls) = (0.0, 0.0, 0);
        for call in &clocked.calls {
            calls += call.calls;
            *(if call.call == LAUNCH { &mut graph } else { &mut others }) += us(call.time);
        }
        let (launch, settle) = (us(plain.launch), us(plain.settle));
        let sampled: [f64; SAMPLED] =
            [launch + settle, launch, settle, graph, others, calls as f64];
        Ok(sampled.to_vec())
    })?;
    let check = Check { routing: next, results: Results::Synthetic, rows_kept: false };
    let right = part.verified(layers, check, || steps.run(next, false).map(drop))?;
    let quiet = part.most("who called what waits", f64::from(u8::from(!quiet)))? == 0.0;
    if !quiet {
        tracing::error!(name, "a step that fits made a call that may wait or allocates");
    }
    let case = part.case(Op::Host, name, true, layers.layers.len());
    let whole: Vec<f64> = samples.iter().step_by(SAMPLED).copied().collect();
    let entry = part.entry(case, &whole, 1, (Work::default(), None), right && quiet)?;
    let [all, launch, settle, graph, others, calls] = part.medians::<SAMPLED>(&samples)?;
    let mut entry = entry
        .with("launching us", launch)
        .with("settling us", settle)
        .with("nodes", steps.runner.graph().map_or(0, StepGraph::node_count) as f64);
    entry.host_us = Some(all);
    if calls > 0.0 {
        entry = entry
            .with("calls of the driver", calls)
            .with("cuGraphLaunch us", graph)
            .with("other calls of the driver us", others)
            .with("beyond cuGraphLaunch us", all - graph);
    }
    Ok(entry)
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

struct Steps<'s, 'p, B: Backend> {
    part: &'s Part<'p, B>,
    layers: &'s Layers<B>,
    runner: StepRunner<B>,
}

/// What a step took of the host.
struct Taken {
    launch: Duration,
    settle: Duration,
    /// The calls of the driver in both, if they were timed.
    calls: Vec<CallTime>,
    /// Whether none of them waits for the device, or may, as those that allocate.
    quiet: bool,
}

impl<'s, 'p, B: Backend> Steps<'s, 'p, B> {
    fn new(
        part: &'s Part<'p, B>,
        layers: &'s Layers<B>,
        policy: OverflowPolicy,
    ) -> Result<Self, OpError> {
        let program = Program::new(part, layers)?;
        let Some(layer) = layers.layers.first() else {
            return Err(OpError::Setup("a step without layers has nothing to launch".to_owned()));
        };
        let runner = StepRunner::new(
            part.group.dispatcher(),
            part.stream().clone(),
            layer.receiver().set.clone(),
            RecoverySettings::new().with_overflow(policy),
            Box::new(move |step| program.queue(step)),
        )?;
        Ok(Self { part, layers, runner })
    }

    /// Runs a step that has to fit.
    fn run(&mut self, routing: usize, clocked: bool) -> Result<Taken, OpError> {
        self.layers.give(&self.part.queue(), routing)?;
        self.part.backend().synchronize(self.part.stream())?;
        self.part.meet("the next step")?;
        let (launched, launch, mut calls, quiet) = timed(clocked, || self.runner.launch());
        let launched = launched?;
        self.wait(&launched);
        let (report, settle, more, quiet_too) = timed(clocked, || self.runner.settle(launched));
        let report = report?;
        calls.extend(more);
        if report.outcome != Outcome::Clean {
            return Err(OpError::Step {
                rank: self.part.rank(),
                operation: "host",
                found: format!("{:?}", report.outcome),
                expected: "clean",
            });
        }
        // The first step records, which may do both.
        Ok(Taken { launch, settle, calls, quiet: quiet && quiet_too })
    }

    /// Waits until there is a record, or none will come, which settling will find out.
    fn wait(&self, launched: &Launched) {
        let deadline = self.part.group.context().deadlines().of(Phase::Record);
        let begin = Instant::now();
        while !self.runner.is_done(launched) && begin.elapsed() < deadline {
            std::thread::yield_now();
        }
    }
}

/// Does `work`: what it gives, how long that took, the calls of the driver if they are to be timed too,
/// and whether none of them waits or allocates.
fn timed<T>(
    clocked: bool,
    work: impl FnOnce() -> Result<T, OverflowError>,
) -> (Result<T, OverflowError>, Duration, Vec<CallTime>, bool) {
    let before = DriverCalls::of_this_thread();
    let begin = Instant::now();
    let (result, calls) = if clocked { clock_calls(work) } else { (work(), Vec::new()) };
    let time = begin.elapsed();
    let after = DriverCalls::of_this_thread();
    let quiet = (after.wait, after.allocate) == (before.wait, before.allocate);
    (result, time, calls, quiet)
}

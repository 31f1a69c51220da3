//! A step whose routing requires more rows than there are, until its outputs are complete.
//!
//! Before every sample the ranks give back what they had grown by, and record the step again with a
//! routing that needs nothing, so that each sample finds what the first overflow of an engine finds. Then
//! the step overflows, and is recovered; then it runs once more, and now fits. Times are those of the
//! host, from the launch to the record that counts: what a recovery costs is its time less that of two
//! steps that fit.

use graph_ep::{
    Backend, Buffer, GrowthPolicy, Outcome, RecoverySettings, RowShaping, StepReport, StepRunner,
};

use super::error::OpError;
use super::grow::shrink;
use super::layers::{Layers, NOBODY, Receive};
use super::part::Part;
use super::replay::Program;
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Results;

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
        let verified = recovery.verify(next)?;
        let each =
            |first: usize| -> Vec<f64> { samples.iter().skip(first).step_by(2).copied().collect() };
        let nothing = (Work::default(), None);
        let count = layers.layers.len();
        let case = part.case(Op::Recover, name, true, count);
        entries.push(part.entry(case, &each(0), 1, nothing, verified)?);
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
        let settings = RecoverySettings::new().growth(GrowthPolicy::Exact).shaping(shaping);
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

    /// Microseconds of a step that was recovered, and of the same step when it fits.
    fn sample(&mut self, routing: usize) -> Result<Vec<f64>, OpError> {
        self.reset()?;
        let recovered = self.step(routing, true)?;
        let clean = self.step(routing, false)?;
        Ok([recovered, clean].map(|report| report.times.total.as_secs_f64() * 1e6).to_vec())
    }

    fn verify(&mut self, routing: usize) -> Result<bool, OpError> {
        self.reset()?;
        self.layers.poison(self.part)?;
        self.step(routing, true)?;
        self.part.meet("the last step is over")?;
        let wrong = self.layers.check(self.part, routing, Results::Synthetic, false)?;
        let verified = self.part.all_right(wrong)?;
        // The next runner begins with the rows that this one began with.
        self.reset()?;
        self.runner.invalidate();
        Ok(verified)
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

//! One rank: records the step, runs all of them, checks what came out.

use std::error::Error;

use graph_ep::overflow::Refusal;
use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{
    Adjustments, Backend, Buffer, DeviceSlice, ExpertParallel, MoeLayer, OverflowError,
    OverflowPolicy, Phase, RecoverySettings, RowShaping, Step, StepRunner, TokenCount, TopKIds,
};

use super::processes::ProcessError;
use super::step::StepDone;
use super::tensors::LayerInput;
use super::verify::{Bitwise, Tally, Verifier};
use super::{Plan, interrupt};
use crate::args::{GraphChoice, Mode, RunArgs};

/// Why a rank stopped before the last step.
pub(super) type RankError = Box<dyn Error + Send + Sync + 'static>;

/// A step overflowed, and the mode is to fail. Every rank stops there.
#[derive(Debug, thiserror::Error)]
#[error("step {step} requires more rows than there are, and --mode static does not grow")]
pub(super) struct Overflowed {
    step: usize,
}

/// A step overflowed, and a rank cannot grow. Every rank stops there.
#[derive(Debug, thiserror::Error)]
#[error(
    "step {step} cannot be recovered: rank {by} requires {} rows and has {}: {}",
    refusal.required, refusal.budget, refusal.reason
)]
pub(super) struct Refused {
    step: usize,
    by: usize,
    refusal: Refusal,
}

/// Ctrl-C came to a rank. Every rank stops before the same step.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; every rank has ended")]
pub(super) struct Interrupted;

/// Runs every step on one rank. `done` is told of each, and may end the run.
pub(super) fn run<B: Backend>(
    plan: &Plan,
    group: &ExpertParallel<B>,
    eager: Option<&ExpertParallel<B>>,
    mut done: impl FnMut(StepDone) -> Result<(), ProcessError>,
) -> Result<(), RankError> {
    let rank = group.context().rank().index();
    let mut main = Runner::new(plan, group)?;
    let mut reference = eager.map(|eager| Runner::new(plan, eager)).transpose()?;
    let verifier = Verifier::new(plan, rank)?;
    for step in 0..plan.routing.steps() {
        let inputs = main.write(plan, group, step)?;
        // So that the time of a step is that of the step, and not of waiting for a rank that still
        // checks the last one.
        let deadline = group.context().deadlines().of(Phase::Record);
        // Ctrl-C comes to processes one after the other, and none may wait for one that has left.
        let interrupted = [u8::from(interrupt::requested())];
        let rendezvous = group.context().rendezvous();
        let all = rendezvous.all_gather("the next step", &interrupted, deadline)?;
        if all.concat().contains(&1) {
            return Err(Interrupted.into());
        }
        let ran = match plan.args.mode {
            Mode::Eager => main.runner.run_eager(),
            _ => main.runner.run(),
        };
        let report = match ran {
            Ok(report) => report,
            Err(OverflowError::Overflow { report }) => {
                done(StepDone::new(rank, step, &report, Tally::default()))?;
                return Err(Overflowed { step }.into());
            }
            Err(OverflowError::Refused { rank: by, refusal, report }) => {
                done(StepDone::new(rank, step, &report, Tally::default()))?;
                return Err(Refused { step, by: by.index(), refusal }.into());
            }
            Err(error) => return Err(error.into()),
        };
        if let (Some(eager), Some(reference)) = (eager, &mut reference) {
            reference.write(plan, eager, step)?;
            reference.runner.run_eager()?;
        }
        let mut tally = Tally::default();
        for (layer, input) in inputs.iter().enumerate() {
            let output = main.output(group, layer, input)?;
            let beside = match (eager, &reference) {
                (Some(eager), Some(reference)) => Some(reference.output(eager, layer, input)?),
                _ => None,
            };
            let bitwise = match &beside {
                Some(bytes) => Bitwise::Eager(bytes),
                None => Bitwise::Truncated { capacity: report.capacity_before as usize },
            };
            tally.add(verifier.check(step, layer, input, &output, bitwise)?);
        }
        done(StepDone::new(rank, step, &report, tally))?;
    }
    Ok(())
}

/// A recorded step and the tensors that it captured.
struct Runner<B: Backend> {
    runner: StepRunner<B>,
    /// How many tokens the step has: a device word, since it differs from step to step.
    count: Buffer<B>,
    layers: Vec<Tensors<B>>,
}

/// The tensors of one layer on one rank, for the most tokens that it can have.
struct Tensors<B: Backend> {
    tokens: Buffer<B>,
    ids: Buffer<B>,
    weights: Buffer<B>,
    output: Buffer<B>,
}

impl<B: Backend> Runner<B> {
    fn new(plan: &Plan, group: &ExpertParallel<B>) -> Result<Self, RankError> {
        let most = plan.shards.max_tokens().max(1);
        let (top_k, row_bytes) = (plan.routing.top_k(), group.dispatcher().config().row_bytes());
        let count = group.allocate(size_of::<u32>())?;
        let layers = (0..plan.routing.layers())
            .map(|_| {
                Ok(Tensors {
                    tokens: group.allocate(most * row_bytes)?,
                    ids: group.allocate(most * top_k * size_of::<i32>())?,
                    weights: group.allocate(most * top_k * size_of::<f32>())?,
                    output: group.allocate(most * row_bytes)?,
                })
            })
            .collect::<Result<Vec<_>, graph_ep::Error>>()?;
        let inputs: Vec<MoeLayer<'static, B>> = layers
            .iter()
            .map(|tensors| MoeLayer {
                scales: None,
                tokens: tensors.tokens.slice(),
                count: TokenCount::Device(count.slice(), most),
                topk_ids: TopKIds::I32(tensors.ids.slice()),
                topk_weights: Some(tensors.weights.slice()),
                output: tensors.output.slice(),
            })
            .collect();
        let experts = SyntheticExperts::new(group)?;
        let body = {
            let group = group.clone();
            move |step: &mut Step<'static, B>| {
                for input in &inputs {
                    group.layer(step, input, |queue, received| experts.queue(queue, received))?;
                }
                Ok(())
            }
        };
        let runner = group.runner(settings(&plan.args), body)?;
        Ok(Self { runner, count, layers })
    }

    /// Puts the inputs of `step` where the graph finds them, and returns them.
    fn write(
        &self,
        plan: &Plan,
        group: &ExpertParallel<B>,
        step: usize,
    ) -> Result<Vec<LayerInput>, RankError> {
        let dtype = group.dispatcher().config().dtype();
        let range = plan.shards.range(step, group.context().rank().index());
        group.write(&self.count, &(range.len() as u32).to_le_bytes())?;
        let mut inputs = Vec::with_capacity(self.layers.len());
        for (layer, tensors) in self.layers.iter().enumerate() {
            let input = LayerInput::new(plan, step, layer, range.clone());
            let mut rows = vec![0; input.values.len() * dtype.bytes()];
            dtype.encode(&input.values, &mut rows);
            group.write(&tensors.tokens, &rows)?;
            group.write(&tensors.ids, bytemuck::cast_slice(&input.ids))?;
            group.write(&tensors.weights, bytemuck::cast_slice(&input.weights))?;
            // What is not written by the step must not pass for what should have been.
            group.write(&tensors.output, &vec![0xff; tensors.output.bytes()])?;
            inputs.push(input);
        }
        Ok(inputs)
    }

    /// The output of one layer, as bytes.
    fn output(
        &self,
        group: &ExpertParallel<B>,
        layer: usize,
        input: &LayerInput,
    ) -> Result<Vec<u8>, RankError> {
        let dtype = group.dispatcher().config().dtype();
        let mut bytes = vec![0; input.values.len() * dtype.bytes()];
        let output: DeviceSlice<'static, B> = self.layers[layer].output.slice();
        group.read(&output, &mut bytes)?;
        Ok(bytes)
    }
}

/// How steps are run and recovered, as the arguments say.
fn settings(args: &RunArgs) -> RecoverySettings {
    RecoverySettings::new()
        .with_overflow(match args.mode {
            Mode::Static => OverflowPolicy::Fail,
            Mode::Drop => OverflowPolicy::Drop,
            Mode::Rounds => OverflowPolicy::Rounds,
            Mode::Eager | Mode::Recover => OverflowPolicy::Recover,
        })
        .with_growth(args.growth.into())
        .with_shaping(match args.graph {
            GraphChoice::CapacityShaped => RowShaping::Capacity,
            GraphChoice::DeviceCounts => RowShaping::DeviceCounted,
        })
        .with_adjustments(Adjustments {
            look_ahead: args.look_ahead,
            // Parsed as a number that fits.
            shrink_after: args
                .shrink_after
                .and_then(|steps| u32::try_from(steps).ok()?.try_into().ok()),
            ..Adjustments::default()
        })
}

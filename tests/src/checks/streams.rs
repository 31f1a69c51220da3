//! Lanes in flight on two streams of one step, forked and joined by events, each with a budget of
//! multiprocessors for each call.

use graph_ep::{Backend, BodyError, Step, StepGraph, StepMode, StepOptions};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::checks::budgets::Budgeted;
use crate::engine::Graphs;
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::rig::{Rig, Stage};

type Stream<T> = <<T as TestBackend>::Backend as Backend>::Stream;

/// What a step queues on its own stream and on a second one.
type Body<T> = fn(&Rig<T>, &mut Step<'static, <T as TestBackend>::Backend>, &Stream<T>) -> Queued;

type Queued = Result<(), BodyError>;

/// How the steps of a case come to run, one after the other.
const STAGES: [Stage; 6] = [
    Stage::Replayed,
    Stage::Replayed,
    Stage::Embedded,
    Stage::Embedded,
    Stage::Direct(StepMode::Static),
    Stage::Direct(StepMode::Eager { max_rows: u32::MAX }),
];

/// Runs steps of `case` whose body is `body`: recorded, in an engine's capture, directly and eagerly, each
/// on two streams, and holds them to the oracle.
fn conforms<T: TestBackend>(what: &str, case: &Case, body: Body<T>) {
    let runs = T::on_ranks(case.world(), |env| {
        let rig = std::sync::Arc::new(Rig::<T>::new(env, case));
        let context = rig.group.context();
        let second = context.stream("second").expect("a stream is left");
        let queued = {
            let (rig, second) = (rig.clone(), second.clone());
            move |step: &mut Step<'static, T::Backend>| body(&rig, step, &second)
        };
        let (dispatcher, stream) = (rig.group.dispatcher(), rig.group.stream());
        let graph = StepGraph::record(dispatcher, stream, StepOptions::new(), queued.clone());
        let graph =
            graph.unwrap_or_else(|error| panic!("rank {}: its graph: {error:?}", rig.rank()));
        let mut graphs = Graphs::of(&rig);
        let embedded =
            graphs.capture(|stream| rig.group.embed(stream, StepOptions::new(), queued.clone()));
        let embedded = embedded.unwrap_or_else(|(error, _)| {
            panic!("rank {}: the engine's graph: {error:?}", rig.rank());
        });
        rig.meet("the second stream and the graphs are there");
        let direct = |mode| -> Result<u32, BodyError> {
            let options = StepOptions::new().with_mode(mode);
            let mut step = Step::begin(dispatcher, rig.direct(), options)?;
            queued(&mut step)?;
            Ok(step.finish()?.number.expect("it runs"))
        };
        let launch = |stage| match stage {
            Stage::Replayed => Ok(graph.replay(stream)?),
            Stage::Embedded => Ok(embedded.replay(|| Ok(graphs.launch()?))?),
            Stage::Direct(mode) => direct(mode),
        };
        let runs = STAGES.into_iter().enumerate();
        runs.map(|(step, stage)| rig.run_as(stage, step, || launch(stage))).collect::<Vec<_>>()
    });
    for ((step, runs), stage) in by_step(&runs).iter().enumerate().zip(STAGES) {
        let limited = !matches!(stage, Stage::Direct(StepMode::Eager { .. }));
        let capacity = limited.then_some(case.capacity.as_deref()).flatten();
        StepOracle::new(case, step, capacity).check(&format!("{what}, step {step}, {stage}"), runs);
    }
}

/// So many layers that take two lanes in turn.
fn case<T: TestBackend>(layers: usize) -> Case {
    Case { lanes: 2, layers, skew: Skew::Rotating, ..Case::new(3) }.on::<T>()
}

/// A whole layer on the second stream beside a whole one on the step's own, with room and without.
pub fn two_lanes_on_two_streams<T: TestBackend>() {
    let body: Body<T> = |rig, step, second| {
        let [own, beside] = [0, 1].map(|layer| Budgeted { rig, layer });
        own.dispatch(step)?;
        step.branch(second, |step| -> Queued {
            beside.dispatch(step)?;
            beside.experts(step)
        })?;
        own.experts(step)?;
        own.combine(step)?;
        step.branch(second, |step| beside.combine(step))?;
        Ok(step.join(second)?)
    };
    for rows in [128, 8] {
        conforms::<T>(&format!("{rows} rows"), &case::<T>(2).capacity(rows), body);
    }
}

/// Micro-batches in a pipeline: the rows of the next are dispatched on the second stream beside the
/// experts of this one.
pub fn a_dispatch_beside_the_experts_of_another_lane<T: TestBackend>() {
    let body: Body<T> = |rig, step, second| {
        let layers = [0, 1, 2, 3].map(|layer| Budgeted { rig, layer });
        layers[0].dispatch(step)?;
        for (at, layer) in layers.iter().enumerate() {
            if let Some(next) = layers.get(at + 1) {
                step.branch(second, |step| next.dispatch(step))?;
                layer.experts(step)?;
                step.join(second)?;
            } else {
                layer.experts(step)?;
            }
            layer.combine(step)?;
        }
        Ok(())
    };
    for rows in [128, 8] {
        conforms::<T>(&format!("{rows} rows"), &case::<T>(4).capacity(rows), body);
    }
}

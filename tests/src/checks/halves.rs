//! Dispatches and combines in halves, with what the caller does between them.

use graph_ep::{
    Backend, BodyError, Combine, Dispatch, Payload, Step, StepMode, StepOptions, TokenCount,
    TopKIds,
};

use super::lanes::refusal;
use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{RankRun, by_step};
use crate::program::Program;
use crate::rig::{Rig, Stage};

/// The halves of a pair, in their order. The experts run behind the second.
const HALVES: [Half; 4] =
    [Half::DispatchSend, Half::DispatchReceive, Half::CombineSend, Half::CombineReceive];

/// What a half of a dispatch is given.
type Given<'s, T> = Dispatch<'s, 'static, <T as TestBackend>::Backend>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    DispatchSend,
    DispatchReceive,
    CombineSend,
    CombineReceive,
}

impl Half {
    /// Queues this half of a layer.
    fn queue<T: TestBackend>(
        self,
        program: &Program<T>,
        step: &mut Step<'static, T::Backend>,
        rig: &Rig<T>,
        layer: usize,
    ) -> Result<(), graph_ep::BodyError> {
        let (lane, dispatch) = (program.lane(layer)?, program.arguments(layer)?);
        let memory = rig.layer(layer);
        let combine = Combine {
            handle: &memory.handle,
            expert_rows: memory.results.slice(),
            output: memory.output.slice(),
        };
        match self {
            Half::DispatchSend => lane.dispatch_send(step, &dispatch)?,
            Half::DispatchReceive => {
                lane.dispatch_receive(step, &dispatch)?;
                program.experts(step, layer)?;
            }
            Half::CombineSend => lane.combine_send(step, &combine)?,
            Half::CombineReceive => lane.combine_receive(step, &combine)?,
        }
        Ok(())
    }
}

/// Two layers, each on a lane of its own.
fn case() -> Case {
    Case { lanes: 2, layers: 2, skew: Skew::Rotating, ..Case::new(3) }
}

/// Both layers in halves, the halves of one between those of the other.
fn interleaved<T: TestBackend>(
    rig: &Rig<T>,
    program: &Program<T>,
    step: &mut Step<'static, T::Backend>,
) -> Result<(), graph_ep::BodyError> {
    for half in HALVES {
        for layer in 0..2 {
            half.queue(program, step, rig, layer)?;
        }
    }
    Ok(())
}

/// Halves of two layers between each other, direct, recorded and eager, equal the oracle.
pub fn halves_equal_the_oracle<T: TestBackend>() {
    for rows in [128, 8] {
        let case = case().on::<T>().capacity(rows);
        let runs = T::on_ranks(case.world(), |env| {
            let rig = std::sync::Arc::new(Rig::<T>::new(env, &case));
            let body = {
                let rig = rig.clone();
                move |step: &mut Step<'static, T::Backend>| interleaved(&rig, &rig.program(), step)
            };
            let (dispatcher, stream) = (rig.group.dispatcher(), rig.group.stream());
            let graph =
                graph_ep::StepGraph::record(dispatcher, stream, StepOptions::new(), body.clone())
                    .expect("it can be recorded");
            let direct = |step: usize, mode: StepMode| {
                rig.run_as(Stage::Direct(mode), step, || -> Result<u32, BodyError> {
                    let options = StepOptions::new().with_mode(mode);
                    let mut queued = Step::begin(dispatcher, rig.direct(), options)?;
                    body(&mut queued)?;
                    Ok(queued.finish()?.number.expect("it runs"))
                })
            };
            let mut runs = vec![direct(0, StepMode::Static), rig.replay(&graph, 1)];
            // Whole pairs and halves follow each other on a lane.
            runs.push(rig.run(2, StepMode::Static));
            runs.push(rig.replay(&graph, 3));
            runs.push(direct(4, StepMode::Eager { max_rows: u32::MAX }));
            runs
        });
        let capacity = vec![rows; case.world()];
        for (step, runs) in by_step(&runs).iter().enumerate() {
            let capacity = (step < 4).then_some(capacity.as_slice());
            let oracle = StepOracle::new(&case, step, capacity);
            oracle.check(&format!("{rows} rows, step {step}"), runs);
        }
    }
}

/// A rank may split what others queue whole, and either half of a pair by itself.
pub fn every_rank_splits_as_it_likes<T: TestBackend>() {
    let case = case().on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
        let rank = rig.group.context().rank().index();
        [0, 1]
            .map(|number| {
                rig.write(number);
                let mut step = Step::begin(dispatcher, rig.direct(), StepOptions::new())
                    .expect("it is queued");
                for layer in 0..2 {
                    let (splits_dispatch, splits_combine) =
                        ((rank + layer).is_multiple_of(2), (rank + number).is_multiple_of(2));
                    if splits_dispatch {
                        Half::DispatchSend.queue(&program, &mut step, &rig, layer).expect("queued");
                        Half::DispatchReceive
                            .queue(&program, &mut step, &rig, layer)
                            .expect("queued");
                    } else {
                        program.dispatch(&mut step, layer).expect("queued");
                        program.experts(&mut step, layer).expect("queued");
                    }
                    if splits_combine {
                        Half::CombineSend.queue(&program, &mut step, &rig, layer).expect("queued");
                        Half::CombineReceive
                            .queue(&program, &mut step, &rig, layer)
                            .expect("queued");
                    } else {
                        program.combine(&mut step, layer).expect("queued");
                    }
                }
                let queued = step.finish().expect("it is queued").number.expect("it runs");
                rig.seen(Stage::Direct(StepMode::Static), number, queued)
            })
            .to_vec()
    });
    for (number, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, number, None).check(&format!("step {number}"), runs);
    }
}

/// Each half on all ranks before the next on any: nothing that runs ever waits for something that has
/// not run, so that a tool may run one operation of the device at a time.
pub fn halves_one_after_the_other_never_wait<T: TestBackend>() {
    let case = case().on::<T>();
    let runs: Vec<RankRun> = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.write(0);
        let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
        let settled = |what: &str| {
            rig.group.context().backend().synchronize(rig.group.stream()).expect("it ran");
            rig.meet(what);
        };
        settled("written");
        let mut step =
            Step::begin(dispatcher, rig.direct(), StepOptions::new()).expect("it is queued");
        for layer in 0..2 {
            for half in HALVES {
                half.queue(&program, &mut step, &rig, layer).expect("it is queued");
                settled("half of a pair");
            }
        }
        let number = step.finish().expect("it is queued").number.expect("it runs");
        rig.seen(Stage::Direct(StepMode::Static), 0, number)
    });
    StepOracle::new(&case, 0, None).check("one after the other", &runs);
}

/// Halves in another order, whole operations amid them, and steps that end amid them are refused.
pub fn halves_out_of_order_are_refused<T: TestBackend>() {
    use Half::{CombineReceive, CombineSend, DispatchReceive, DispatchSend};
    let case = case().on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let wrong: [(&[Half], &str); 8] = [
            (&[DispatchReceive], "no dispatch"),
            (&[DispatchSend, CombineSend], "dispatch_receive comes next"),
            (&[DispatchSend, DispatchReceive, DispatchReceive], "combine_send comes next"),
            (&[DispatchSend, DispatchReceive, CombineReceive], "combine_send comes next"),
            (
                &[DispatchSend, DispatchReceive, CombineSend, CombineSend],
                "combine_receive comes next",
            ),
            (&[DispatchSend, DispatchSend], "without its combine"),
            // What ends amid a pair.
            (&[DispatchSend], "dispatch_receive comes next"),
            (&[DispatchSend, DispatchReceive, CombineSend], "combine_receive comes next"),
        ];
        for (halves, reason) in wrong {
            let refused = refusal(&rig, |program, step| {
                halves.iter().try_for_each(|half| half.queue(program, step, &rig, 0))
            });
            assert!(refused.is_some_and(|text| text.contains(reason)), "{halves:?}");
        }
        let whole_combine = refusal(&rig, |program, step| {
            DispatchSend.queue(program, step, &rig, 0)?;
            program.combine(step, 0)
        });
        assert!(whole_combine.is_some_and(|text| text.contains("dispatch_receive")), "combined");
        let other_lane = refusal(&rig, |program, step| {
            DispatchSend.queue(program, step, &rig, 0)?;
            DispatchReceive.queue(program, step, &rig, 1)
        });
        assert!(other_lane.is_some_and(|text| text.contains("lane 1")), "received");
    });
}

/// The receiver's half of a dispatch is given what the sender's was: it reads this rank's own tokens where
/// that one found them, as many as that one has listed.
pub fn second_halves_with_other_arguments_are_refused<T: TestBackend>() {
    let counted = Case { device_count: true, ..case() };
    let bytes = Payload::Bytes { row_bytes: 16, scale_bytes: 16 };
    for case in [case(), counted, Case { payload: bytes, ..case() }] {
        let case = case.on::<T>();
        T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let other = rig.layer(1);
            let refused = |argument: &str, change: &dyn Fn(&mut Given<'_, T>)| {
                let told = refusal(&rig, |program, step| {
                    let lane = program.lane(0)?;
                    lane.dispatch_send(step, &program.arguments(0)?)?;
                    let mut changed = program.arguments(0)?;
                    change(&mut changed);
                    Ok(lane.dispatch_receive(step, &changed)?)
                });
                assert!(told.is_some_and(|text| text.contains(argument)), "{argument}");
            };
            refused("address of the tokens", &|a| a.tokens = other.tokens.slice());
            refused("address of topk_ids", &|a| a.topk_ids = TopKIds::I32(other.ids.slice()));
            refused("address of topk_weights", &|a| a.topk_weights = None);
            if case.scale_bytes() > 0 {
                refused("address of the scales", &|a| a.scales = Some(other.scales.slice()));
            }
            refused("number of tokens", &|a| {
                let word = other.count.slice();
                a.count = TokenCount::Device(word, case.max_tokens());
            });
            refused("number of tokens", &|a| {
                a.count = match &a.count {
                    TokenCount::Fixed(tokens) => TokenCount::Fixed(tokens - 1),
                    TokenCount::Device(word, most) => TokenCount::Device(word.clone(), most - 1),
                };
            });
        });
    }
}

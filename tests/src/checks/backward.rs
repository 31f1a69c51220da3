//! Backward passes of dispatch and combine on kept handles.

use graph_ep::{BodyError, DType, DispatchError, Layout, Payload, StepMode, Weighting};

use super::everywhere::least_rows;
use crate::backend::{TestBackend, enough_ranks};
use crate::case::{Case, Skew};
use crate::grad_oracle::GradOracle;
use crate::grads::{GradRig, GradRun};

fn training() -> Case {
    let tokens = vec![6, 0, 7];
    Case { backward: true, skew: Skew::Rotating, top_k: 3, lanes: 2, tokens, ..Case::new(3) }
}

/// Who multiplies and how rows lie, in all the ways there are.
fn ways() -> [(Layout, Weighting); 3] {
    let (grouped, flat) = (Layout::ExpertGrouped, Layout::Flat);
    [(grouped, Weighting::Combine), (grouped, Weighting::Caller), (flat, Weighting::Caller)]
}

/// Holds what ranks saw of `step` to the oracle, layer by layer.
fn check(what: &str, case: &Case, step: usize, rows: Option<&[u32]>, runs: &[&Vec<GradRun>]) {
    for layer in 0..case.layers {
        let of_layer: Vec<&GradRun> = runs.iter().map(|run| &run[layer]).collect();
        let oracle = GradOracle::new(case, step, layer, rows);
        oracle.check(&format!("{what}: step {step}, layer {layer}"), &of_layer, true);
    }
}

const EAGER: StepMode = StepMode::Eager { max_rows: u32::MAX };

/// A forward and a backward pass of `case` in one step, eager, direct and replayed.
fn conforms<T: TestBackend>(what: &str, case: &Case) {
    let case = &case.clone().on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = GradRig::<T>::new(env, case);
        let program = rig.program();
        let run = |step: usize, mode| {
            rig.write(step);
            rig.launch(mode, |step| program.queue(step));
            rig.seen(step)
        };
        let mut runs = vec![run(0, EAGER), run(1, StepMode::Static)];
        let graph = rig.record(StepMode::Static, |step| program.queue(step));
        for step in 2..4 {
            rig.write(step);
            rig.replay(&graph);
            runs.push(rig.seen(step));
        }
        runs
    });
    for step in 0..4 {
        let of_step: Vec<_> = runs.iter().map(|rank| &rank[step]).collect();
        check(what, case, step, None, &of_step);
    }
}

/// Gradients of rows, tokens and weights are what the contract says, bit for bit where it says so and
/// else within the tolerance of the sums in f64; padding rows are zero.
pub fn gradients_equal_the_oracle<T: TestBackend>() {
    for (layout, weighting) in ways() {
        let case = Case { layout, weighting, ..training() };
        let what = format!("{layout:?}, {weighting:?}");
        conforms::<T>(&what, &case);
        conforms::<T>(&what, &Case { dtype: DType::Fp32, hidden: 72, layers: 2, ..case.clone() });
        conforms::<T>(&what, &Case { dtype: DType::Fp16, bad_ids: true, ..case.clone() });
        conforms::<T>(&what, &Case { device_count: true, wide_ids: true, ..case });
    }
}

/// Groups of 1 to 8 ranks.
pub fn gradients_on_one_to_eight_ranks<T: TestBackend>() {
    for world in [1, 2, 5, 8] {
        if !enough_ranks::<T>(world) {
            continue;
        }
        let case = Case { backward: true, top_k: 2, ..Case::new(world) };
        conforms::<T>(&format!("{world} ranks"), &case);
    }
}

/// Several layers, a handle each, run forward in one step and backward in another, in reverse order;
/// two microbatches whose passes are interleaved.
pub fn handles_are_kept_until_their_backward_pass<T: TestBackend>() {
    for (layout, weighting) in ways() {
        // Layers 0 and 1 are one microbatch, 2 and 3 the other.
        let case = Case { layout, weighting, layers: 4, ..training() }.on::<T>();
        let runs = T::on_ranks(case.world(), |env| {
            let rig = GradRig::<T>::new(env, &case);
            let program = rig.program();
            let forward = |layers: [usize; 2]| {
                let program = rig.program();
                move |step: &mut graph_ep::Step<'static, T::Backend>| -> Result<(), BodyError> {
                    layers.into_iter().try_for_each(|layer| {
                        program.forward.dispatch(step, layer)?;
                        program.forward.experts(step, layer)?;
                        program.forward.combine(step, layer)
                    })
                }
            };
            let first = rig.record(StepMode::Static, forward([0, 1]));
            let last = rig.record(StepMode::Static, |step| {
                [1, 0].into_iter().try_for_each(|layer| program.backward(step, layer))
            });
            (0..2)
                .map(|step| {
                    rig.write(step);
                    rig.replay(&first);
                    rig.launch(StepMode::Static, forward([2, 3]));
                    rig.launch(StepMode::Static, |step| {
                        [3, 2].into_iter().try_for_each(|layer| program.backward(step, layer))
                    });
                    rig.replay(&last);
                    rig.seen(step)
                })
                .collect::<Vec<_>>()
        });
        for step in 0..2 {
            let of_step: Vec<_> = runs.iter().map(|rank| &rank[step]).collect();
            check(&format!("{layout:?}, {weighting:?}"), &case, step, None, &of_step);
        }
    }
}

/// A layer's backward pass on one lane while another layer's forward pass is open on the other.
pub fn a_forward_and_a_backward_pass_at_once<T: TestBackend>() {
    let case = Case { layers: 2, ..training() }.on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = GradRig::<T>::new(env, &case);
        let program = rig.program();
        rig.write(0);
        rig.launch(StepMode::Static, |step| {
            let (first, second) = (program.forward.lane(0)?, program.forward.lane(1)?);
            program.forward.dispatch(step, 0)?;
            program.forward.experts(step, 0)?;
            program.forward.combine(step, 0)?;
            program.forward.dispatch(step, 1)?;
            first.combine_backward(step, &program.combine_arguments(0))?;
            program.forward.experts(step, 1)?;
            program.forward.combine(step, 1)?;
            program.experts_backward(step, 0)?;
            second.combine_backward(step, &program.combine_arguments(1))?;
            program.experts_backward(step, 1)?;
            second.dispatch_backward(step, &program.dispatch_arguments(1))?;
            Ok(first.dispatch_backward(step, &program.dispatch_arguments(0))?)
        });
        rig.seen(0)
    });
    check("at once", &case, 0, None, &runs.iter().collect::<Vec<_>>());
}

/// Rows that were left out of the forward pass have no part in the gradients.
pub fn dropped_rows_have_no_gradients<T: TestBackend>() {
    for (layout, weighting) in ways() {
        let case = Case { layout, weighting, ..training() };
        for rows in [[4, 8, 4], [12, 0, 16]] {
            let case = Case { capacity: Some(rows.to_vec()), ..case.clone() }.on::<T>();
            let runs = T::on_ranks(case.world(), |env| {
                let rig = GradRig::<T>::new(env, &case);
                let program = rig.program();
                rig.write(0);
                rig.launch(StepMode::Static, |step| program.queue(step));
                rig.seen(0)
            });
            let what = format!("{layout:?}, {weighting:?}, {rows:?} rows");
            check(&what, &case, 0, case.capacity.as_deref(), &runs.iter().collect::<Vec<_>>());
        }
    }
}

/// Backward in rounds, with a handful of rows, gives the gradients of a pass with room for all.
pub fn rounds_give_the_same_gradients<T: TestBackend>() {
    for (layout, weighting) in ways() {
        let case = Case { layout, weighting, layers: 2, ..training() }.on::<T>();
        let tight = case.clone().capacity(least_rows(&case));
        let runs = T::on_ranks(case.world(), |env| {
            let rig = GradRig::<T>::new(env, &tight);
            let program = rig.program();
            let graph = rig.record(StepMode::Rounds, |step| program.queue(step));
            rig.rig.meet("all have recorded");
            let mut runs = Vec::new();
            for step in 0..3 {
                rig.write(step);
                rig.replay(&graph);
                runs.push(rig.seen(step));
            }
            rig.write(2);
            rig.launch(EAGER, |step| program.queue(step));
            runs.push(rig.seen(2));
            runs
        });
        for (at, step) in [0, 1, 2, 2].into_iter().enumerate() {
            for layer in 0..case.layers {
                let of_layer: Vec<_> = runs.iter().map(|rank| &rank[at][layer]).collect();
                let what = format!("{layout:?}, {weighting:?}: run {at}, layer {layer}");
                let oracle = GradOracle::new(&case, step, layer, None);
                let whole = at == 3;
                oracle.check(&what, &of_layer, whole);
            }
        }
        for rank in &runs {
            for (rounds, whole) in rank[2].iter().zip(&rank[3]) {
                assert_eq!(rounds.tokens, whole.tokens, "rounds and not");
                assert_eq!(rounds.weights, whole.weights, "rounds and not");
            }
        }
    }
}

/// What backward passes refuse: a group without them, a pass that does not follow its other half, and
/// memory that is too short.
pub fn backward_passes_that_cannot_be_are_refused<T: TestBackend>() {
    let case = Case { tokens: vec![5; 2], ..training() };
    let (case, without) =
        (Case { experts: 4, ..case.clone() }, Case { experts: 4, backward: false, ..case });
    let values = Case { payload: Payload::Fp8, hidden: 16, ..case.clone() };
    let told = T::on_ranks(2, |env| {
        env.build(&values.builder(graph_ep::Rank(0))).expect_err("gradients are values").to_string()
    });
    assert!(told.iter().all(|text| text.contains("backward")), "{told:?}");
    for case in [without, case] {
        T::on_ranks(2, |env| refuses::<T>(&GradRig::new(env, &case)));
    }
}

fn refuses<T: TestBackend>(rig: &GradRig<T>) {
    let (program, case) = (rig.program(), &rig.rig.case);
    let group = &rig.rig.group;
    let mut seen = Vec::new();
    let _: Result<_, _> = graph_ep::StepGraph::record(
        group.dispatcher(),
        group.stream(),
        graph_ep::StepOptions::new(),
        |step| {
            let lane = program.forward.lane(0)?;
            program.forward.dispatch(step, 0)?;
            program.forward.combine(step, 0)?;
            let mut short = program.combine_arguments(0);
            short.output_grads = short.output_grads.get(0..4 * case.sum_bytes()).ok_or("longer")?;
            seen.push(lane.combine_backward(step, &short));
            let mut short = program.combine_arguments(0);
            short.row_grads = short.row_grads.get(0..16).ok_or("longer")?;
            seen.push(lane.combine_backward(step, &short));
            seen.push(lane.dispatch_backward(step, &program.dispatch_arguments(0)));
            seen.push(lane.combine_backward(step, &program.combine_arguments(0)));
            seen.push(lane.combine_backward(step, &program.combine_arguments(0)));
            let mut short = program.dispatch_arguments(0);
            short.token_grads = short.token_grads.get(0..4 * case.sum_bytes()).ok_or("longer")?;
            seen.push(lane.dispatch_backward(step, &short));
            let mut short = program.dispatch_arguments(0);
            short.weight_grads = short.weight_grads.and_then(|grads| grads.get(0..8));
            seen.push(lane.dispatch_backward(step, &short));
            seen.push(lane.dispatch_backward(step, &program.dispatch_arguments(0)));
            Err("only looked at".into())
        },
    );
    let kind = |seen: &Result<(), DispatchError>| match seen {
        Ok(()) => "ok",
        Err(DispatchError::Argument { .. }) => "argument",
        Err(DispatchError::Order { .. }) => "order",
        Err(other) => panic!("{other:?}"),
    };
    let kinds: Vec<_> = seen.iter().map(kind).collect();
    if case.backward {
        let expected =
            ["argument", "argument", "order", "ok", "order", "argument", "argument", "ok"];
        assert_eq!(kinds, expected);
    } else {
        assert!(kinds.iter().all(|kind| matches!(*kind, "order" | "argument")), "{kinds:?}");
        assert_eq!(kinds[3], "order", "a whole pass is refused too");
    }
}

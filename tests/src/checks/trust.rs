//! A model whose second layer routes by the output of the first, overflowing in both: which
//! requirements of a discarded run may be believed.

use graph_ep::ep_context::Specialization;
use graph_ep::{
    Adjustments, Backend, BodyError, GrowthPolicy, LaunchShape, RecoverySettings,
    RoutingDependence, Step,
};

use crate::backend::TestBackend;
use crate::case::{Case, Order, Skew};
use crate::checks::refusal::Hooks;
use crate::inputs::{Inputs, Rows, encode};
use crate::kernels::{RouteByOutput, RouteByOutputParams, route};
use crate::oracle::{LayerOracle, StepOracle};
use crate::outcome::{Ended, Ran, by_step};
use crate::rig::Rig;

/// Where all go first, where they go then, and where those go that are lost.
const WORLD: usize = 3;

/// Layer 0 sends everything to expert 2 on rank 1, layer 1 what comes out of it to experts 0 and 1 on
/// rank 0, and rows that were left out of layer 0 to expert 4 on rank 2.
fn model(routing: RoutingDependence) -> Case {
    let tokens = vec![9, 3, 3];
    Case { top_k: 1, layers: 2, weights: false, routing, tokens, ..Case::new(WORLD) }.capacity(4)
}

fn first_inputs(case: &Case) -> Vec<Inputs> {
    let to_expert_2 = |inputs: Inputs| Inputs { ids: vec![2; inputs.ids.len()], ..inputs };
    Inputs::of_all(case, 0, 0).into_iter().map(to_expert_2).collect()
}

/// Both layers, where neither lacks room.
fn oracles(case: &Case) -> [LayerOracle; 2] {
    let first = LayerOracle::new(case, &first_inputs(case), None);
    let second: Vec<Inputs> = first
        .ranks
        .iter()
        .map(|rank| {
            let values: Vec<f32> = rank.output.iter().map(|bits| f32::from_bits(*bits)).collect();
            let bytes = encode(case.dtype, &values);
            let rows = bytes.chunks_exact(case.hidden * case.dtype.bytes());
            let ids: Vec<i64> = rows.map(|row| route(row).into()).collect();
            let weights = vec![1.0; ids.len()];
            Inputs::of(case, Rows::Values(values), ids, weights)
        })
        .collect();
    let second = LayerOracle::new(case, &second, None);
    assert!(first.required[1] > 4 && second.required[0] > 4, "both layers overflow");
    [first, second]
}

fn body<T: TestBackend>(
    rig: &Rig<T>,
) -> impl Fn(&mut Step<'static, T::Backend>) -> Result<(), BodyError> + Send + 'static {
    let constants = Specialization::new();
    let kernel = rig.group.context().backend().load::<RouteByOutput>(&constants).expect("loaded");
    let program = rig.program();
    let (output, tokens, ids) =
        (rig.layer(0).output.slice(), rig.layer(1).tokens.slice(), rig.layer(1).ids.slice());
    let count = rig.case.tokens[rig.rank()] as u32;
    let row_bytes = (rig.case.hidden * rig.case.dtype.bytes()) as u32;
    move |step| {
        program.dispatch(step, 0)?;
        program.experts(step, 0)?;
        program.combine(step, 0)?;
        let params = RouteByOutputParams {
            output: output.address(),
            tokens: tokens.address(),
            ids: ids.address(),
            count,
            row_bytes,
        };
        let uses = [&output, &tokens, &ids];
        // SAFETY: every address is that of a slice in `uses`, long enough for `count` tokens, and all
        // work on them is on this stream.
        unsafe {
            step.queue().launch::<RouteByOutput>(
                &kernel,
                LaunchShape::ONE_WARP,
                &params,
                &uses,
                &[],
            )
        }?;
        program.dispatch(step, 1)?;
        program.experts(step, 1)?;
        program.combine(step, 1)
    }
}

/// Runs the model twice and returns what each rank saw of both steps.
fn run<T: TestBackend>(case: &Case, settings: RecoverySettings) -> Vec<Vec<Ran>> {
    T::on_ranks(WORLD, |env| {
        let rig = Rig::<T>::new(env, case);
        let mut runner = rig.group.runner(settings, body(&rig)).expect("in range");
        (0..2)
            .map(|_| {
                rig.write_layer(0, &first_inputs(case)[rig.rank()]);
                let report = runner.run().expect("it recovers");
                let layers = (0..2).map(|layer| rig.seen_layer(layer, case.tokens[rig.rank()]));
                let record = (&report.record).into();
                Ran::new(crate::RankRun { layers: layers.collect(), record }, &report)
            })
            .collect()
    })
}

fn check_outputs(case: &Case, runs: &[Vec<Ran>]) {
    let oracles = oracles(case);
    for (rank, steps) in runs.iter().enumerate() {
        for (step, ran) in steps.iter().enumerate() {
            for (layer, oracle) in oracles.iter().enumerate() {
                let at = format!("step {step}, rank {rank}, layer {layer}");
                assert_eq!(ran.run.layers[layer].output, oracle.ranks[rank].output, "{at}");
            }
            assert_eq!(ran.run.record.dropped, 0);
        }
        assert_eq!(steps[1].ended, Ended::Clean, "the second step fits");
    }
}

/// Where routing depends on outputs, only what was required up to the first over-budget dispatch is
/// believed: each replay brings one layer further, no rank grows for rows that went astray, and the
/// result is that of a run with room.
pub fn what_follows_an_overflow_is_not_believed<T: TestBackend>() {
    let case = model(RoutingDependence::Dependent);
    let [first, second] = oracles(&case);
    let runs = run::<T>(&case, RecoverySettings::new().with_growth(GrowthPolicy::Exact));
    check_outputs(&case, &runs);
    for (rank, steps) in runs.iter().enumerate() {
        let ran = &steps[0];
        assert_eq!(ran.ended, Ended::Recovered { replays: 2, eager: false }, "rank {rank}");
        let discarded = ran.discarded.as_ref().expect("a run was discarded");
        assert_eq!(discarded.first_over, Some(0));
        assert_eq!(discarded.required, first.required, "the first layer alone counts");
        assert_eq!(discarded.required_by_dispatch, [first.required[rank], 0]);
        let both = first.required[rank].max(second.required[rank]);
        assert_eq!(ran.capacity_after, both.max(4), "rank {rank}");
    }
    assert_eq!(runs[2][0].capacity_after, 4, "rank 2 was sent nothing but rows gone astray");
}

/// Where routing is said not to depend on outputs every dispatch of the discarded run counts, those
/// behind the first over-budget one too.
pub fn independent_routing_counts_every_dispatch<T: TestBackend>() {
    let case = model(RoutingDependence::Independent);
    let runs = run::<T>(&case, RecoverySettings::new().with_growth(GrowthPolicy::Exact));
    check_outputs(&case, &runs);
    for steps in &runs {
        let discarded = steps[0].discarded.as_ref().expect("a run was discarded");
        // Rank 1 takes four of fifteen tokens; the other eleven come out as zeros and go to rank 2.
        assert_eq!(discarded.required[2], 12);
    }
    assert_eq!(runs[2][0].capacity_after, 12);
}

/// Hooks are called before each replay, and before the eager run at the end: with the attempt, and the
/// record of the run that it replaces.
pub fn hooks_follow_every_attempt<T: TestBackend>() {
    let case = model(RoutingDependence::Dependent);
    for max_replays in [1, 2] {
        let seen = T::on_ranks(WORLD, |env| {
            let rig = Rig::<T>::new(env, &case);
            let hooks = Hooks::default();
            let settings = RecoverySettings::new()
                .with_growth(GrowthPolicy::Exact)
                .with_max_replays(max_replays);
            let runner = rig.group.runner(settings, body(&rig)).expect("in range");
            let mut runner = runner.hooks(hooks.clone());
            rig.write_layer(0, &first_inputs(&case)[rig.rank()]);
            runner.run().expect("it recovers");
            let seen = hooks.seen.lock().expect("no panic");
            seen.iter().map(|(attempt, record)| (*attempt, record.first_over)).collect::<Vec<_>>()
        });
        assert_eq!(seen, vec![vec![(1, Some(0)), (2, Some(1))]; WORLD], "{max_replays} replays");
    }
}

/// Looking ahead is by what the run that was kept required: the first run of a step that overflowed
/// knew nothing of its later layers.
pub fn looking_ahead_is_by_the_run_that_was_kept<T: TestBackend>() {
    let case = model(RoutingDependence::Dependent);
    let [first, second] = oracles(&case);
    let ahead = Adjustments { look_ahead: Some(1.5), ..Adjustments::default() };
    let settings = RecoverySettings::new().with_growth(GrowthPolicy::Exact).with_adjustments(ahead);
    let runs = run::<T>(&case, settings);
    check_outputs(&case, &runs);
    for (rank, steps) in runs.iter().enumerate() {
        let required = first.required[rank].max(second.required[rank]);
        let covered = (required + required.div_ceil(2)).next_multiple_of(case.alignment).max(4);
        let most = case.max_rows_of(rank);
        assert_eq!(steps[0].capacity_after, covered.min(most), "rank {rank} of {required} rows");
    }
}

/// Layers that are in flight at once, on two lanes, where routing depends on outputs: whoever knows
/// of an overflow sends nothing more, whoever does not is not misled, and the result is that of a run
/// with room.
pub fn an_overflow_among_layers_in_flight_is_recovered<T: TestBackend>() {
    for order in [Order::Alternate, Order::Nested] {
        for rows in [4, 8] {
            let case = Case {
                order,
                layers: 3,
                lanes: 3,
                skew: Skew::Rotating,
                routing: RoutingDependence::Dependent,
                ..Case::new(WORLD)
            }
            .on::<T>()
            .capacity(rows);
            let runs = T::on_ranks(case.world(), |env| {
                let rig = Rig::<T>::new(env, &case);
                let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
                let steps = 0..4;
                steps
                    .map(|step| rig.step(&mut runner, step).expect("it recovers").run)
                    .collect::<Vec<_>>()
            });
            for (step, runs) in by_step(&runs).iter().enumerate() {
                let what = format!("{order:?}, {rows} rows, step {step}");
                StepOracle::new(&case, step, None).check_outputs(&what, runs);
                assert!(runs.iter().all(|run| run.record.dropped == 0), "{what}");
            }
        }
    }
}

/// With fewer replays than layers that overflow, the eager run at the end gives the same.
pub fn too_few_replays_end_in_an_eager_run<T: TestBackend>() {
    let case = model(RoutingDependence::Dependent);
    for max_replays in [0, 1] {
        let settings =
            RecoverySettings::new().with_growth(GrowthPolicy::Exact).with_max_replays(max_replays);
        let runs = run::<T>(&case, settings);
        check_outputs(&case, &runs);
        let ended = Ended::Recovered { replays: max_replays, eager: true };
        assert!(runs.iter().all(|steps| steps[0].ended == ended));
    }
}

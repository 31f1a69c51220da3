//! What holds for any routing and any sizes: nothing is lost or doubled, order is fixed, all modes
//! give the same bits, and capacity grows as far as it must and no further.

use graph_ep::{GrowthPolicy, Payload, RecoverySettings, StepMode, StepOptions};
use graph_ep_tests::checks::recovery::{self, POLICIES, Settings};
use graph_ep_tests::grad_oracle::GradOracle;
use graph_ep_tests::grads::GradRig;
use graph_ep_tests::oracle::StepOracle;
use graph_ep_tests::outcome::by_step;
use graph_ep_tests::{Case, HostThreads, Order, Rig, Skew, TestBackend};
use proptest::prelude::*;

fn policy() -> impl Strategy<Value = GrowthPolicy> {
    let factor = (0_u32..8).prop_map(|eighths| 1.0 + f64::from(eighths) / 8.0);
    prop_oneof![
        prop::sample::select(POLICIES.to_vec()),
        factor.clone().prop_map(|factor| GrowthPolicy::Headroom { factor }),
        factor.prop_map(|factor| GrowthPolicy::Geometric { factor: factor + 0.125 }),
    ]
}

/// Any case, and a capacity for each of its ranks, from nothing to more than enough.
fn limited() -> impl Strategy<Value = Case> {
    Case::any().prop_flat_map(|case| {
        let rows = prop::collection::vec(0..=case.worst_case(), case.world());
        rows.prop_map(move |rows| Case { capacity: Some(rows), ..case.clone() })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Received rows, their order, counts, padding, outputs and counters are those of the oracle, in
    /// a truncated run and in one with room, direct and replayed.
    #[test]
    fn static_and_eager_runs_are_the_oracles(case in limited()) {
        let world = case.world();
        let runs = HostThreads::on_ranks(world, |env| {
            let rig = Rig::<HostThreads>::new(env, &case);
            let direct = rig.run(0, StepMode::Static);
            let graph = rig.record(StepOptions::new()).expect("it can be recorded");
            let replayed = [0, 1].map(|step| rig.replay(&graph, step));
            let [same, other] = replayed;
            assert_eq!(direct.layers, same.layers, "a replay is a direct run");
            vec![direct, other, rig.run_eager(2)]
        });
        let rows: Vec<u32> = (0..world).map(|rank| case.rows_of(rank)).collect();
        for (step, runs) in by_step(&runs).iter().enumerate() {
            let capacity = (step < 2).then_some(rows.as_slice());
            StepOracle::new(&case, step, capacity).check(&format!("step {step}"), runs);
        }
    }

    /// Whatever the capacities, recovered steps lose nothing and give the bits of eager ones; a second
    /// run of the same step gives the same.
    #[test]
    fn recovered_runs_are_eager_runs(case in limited(), policy in policy(), nested in any::<bool>()) {
        let case = match nested {
            true => Case { order: Order::Nested, lanes: case.layers, ..case },
            false => case,
        };
        let runs = HostThreads::on_ranks(case.world(), |env| {
            let rig = Rig::<HostThreads>::new(env, &case);
            let settings = RecoverySettings::new().with_growth(policy);
            let mut runner = rig.runner(settings).expect("the factor is in range");
            let mut runs = Vec::new();
            for step in 0..3 {
                let recovered = rig.step(&mut runner, step).expect("it recovers").run;
                let eager = rig.run_eager(step);
                assert_eq!(recovered.outputs(), eager.outputs(), "recovered and eager");
                assert_eq!(recovered.record.dropped, 0);
                assert_eq!(eager, Rig::run_eager(&rig, step).renumbered(eager.record.step));
                runs.push(recovered);
            }
            runs
        });
        for (step, runs) in by_step(&runs).iter().enumerate() {
            StepOracle::new(&case, step, None).check_outputs(&format!("step {step}"), runs);
        }
    }

    /// Gradients of rows, tokens and weights are those of the oracle, of a truncated forward pass and of
    /// one with room.
    #[test]
    fn gradients_are_the_oracles(case in limited()) {
        let hidden = case.hidden.min(8);
        let case = Case { payload: Payload::Values, backward: true, hidden, ..case };
        let runs = HostThreads::on_ranks(case.world(), |env| {
            let rig = GradRig::<HostThreads>::new(env, &case);
            let program = rig.program();
            [StepMode::Static, StepMode::Eager { max_rows: u32::MAX }].map(|mode| {
                rig.write(0);
                rig.launch(mode, |step| program.queue(step));
                rig.seen(0)
            }).to_vec()
        });
        let rows: Vec<u32> = (0..case.world()).map(|rank| case.rows_of(rank)).collect();
        for (run, capacity) in [Some(rows.as_slice()), None].into_iter().enumerate() {
            for layer in 0..case.layers {
                let of_layer: Vec<_> = runs.iter().map(|rank| &rank[run][layer]).collect();
                let oracle = GradOracle::new(&case, 0, layer, capacity);
                oracle.check(&format!("run {run}, layer {layer}"), &of_layer, true);
            }
        }
    }

    /// Capacity never falls, suffices for every step that is kept, keeps within the limit, and is what
    /// the simulation says, on every rank and in every step.
    #[test]
    fn growth_is_monotone_sufficient_bounded_and_foretold(
        world in 1_usize..=4,
        tokens in prop::collection::vec(0_usize..=9, 4),
        start in 0_u32..6,
        spare in 0_u32..20,
        policy in policy(),
        seed in any::<u64>(),
    ) {
        const STEPS: usize = 6;
        let case = Case {
            tokens: tokens[..world].to_vec(),
            device_count: true,
            layers: 2,
            skew: Skew::Rotating,
            seed,
            ..Case::new(world)
        }
        .capacity(4 * start);
        let required: Vec<Vec<u32>> =
            (0..STEPS).map(|step| StepOracle::new(&case, step, None).required()).collect();
        let peak = required.iter().flatten().copied().max().unwrap_or(0);
        let limit = (peak + spare).min(case.max_rows_of(0)).max(case.rows_of(0));
        let settings = Settings { max_rows: Some(limit), ..Settings::of(policy) };
        let steps = recovery::run::<HostThreads>(&case, settings, STEPS);
        recovery::check("any routing", &case, settings, &steps);
        for (required, ranks) in required.iter().zip(&steps) {
            for (required, ran) in required.iter().zip(ranks) {
                prop_assert!(ran.capacity_after >= ran.capacity_before, "monotone");
                prop_assert!(ran.capacity_after >= *required, "sufficient");
                prop_assert!(ran.capacity_after <= limit, "bounded by {}", limit);
            }
        }
    }
}

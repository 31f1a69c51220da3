//! Every mode gives what the oracle says, and so the same bits.

use graph_ep::{
    MoeLayer, RecoverySettings, RowShaping, StepMode, StepOptions, TokenCount, TopKIds,
};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::inputs::{Inputs, decode, encode};
use crate::oracle::{LayerOracle, StepOracle, bits};
use crate::outcome::by_step;
use crate::rig::Rig;

/// Two layers on three ranks, with routing that overflows small capacities in one place or another.
fn skewed() -> Case {
    Case { skew: Skew::Rotating, layers: 2, tokens: vec![6, 3, 7], ..Case::new(3) }
}

/// Eager steps give what the oracle says, whatever the capacity was before.
pub fn eager_equals_the_oracle<T: TestBackend>() {
    for rows in [0, 4, 128] {
        let case = skewed().on::<T>().capacity(rows);
        let runs = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            (0..4).map(|step| rig.run_eager(step)).collect::<Vec<_>>()
        });
        for (step, runs) in by_step(&runs).iter().enumerate() {
            StepOracle::new(&case, step, None).check(&format!("{rows} rows, step {step}"), runs);
        }
    }
}

/// Static steps that fit give what the oracle says.
pub fn static_equals_the_oracle<T: TestBackend>() {
    let case = skewed().on::<T>();
    let rows = vec![case.worst_case(); case.world()];
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        (0..4).map(|step| rig.run(step, StepMode::Static)).collect::<Vec<_>>()
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, step, Some(&rows)).check(&format!("step {step}"), runs);
    }
}

/// Static steps that do not fit leave out what the oracle leaves out, and count it. Ranks may differ
/// in capacity, and have none.
pub fn truncation_equals_the_oracle<T: TestBackend>() {
    for rows in [[4, 4, 4], [8, 0, 12], [5, 7, 9], [16, 12, 20]] {
        let case = Case { capacity: Some(rows.to_vec()), ..skewed() }.on::<T>();
        let runs = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            (0..4).map(|step| rig.run(step, StepMode::Static)).collect::<Vec<_>>()
        });
        for (step, runs) in by_step(&runs).iter().enumerate() {
            let oracle = StepOracle::new(&case, step, case.capacity.as_deref());
            oracle.check(&format!("{rows:?} rows, step {step}"), runs);
        }
    }
}

/// A capacity of exactly the required rows suffices, and one row less does not.
pub fn the_required_rows_are_enough_and_no_fewer_are<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(1), ..Case::new(2) };
    let required = StepOracle::new(&case, 0, None).required();
    for (short, rank) in [(0, 0), (1, 0), (1, 1)] {
        let mut rows = required.clone();
        rows[rank] -= short;
        let case = Case { capacity: Some(rows.clone()), ..case.clone() };
        let runs = T::on_ranks(2, |env| Rig::<T>::new(env, &case).run(0, StepMode::Static));
        StepOracle::new(&case, 0, Some(&rows)).check(&format!("{rows:?} rows"), &runs);
        assert!(runs.iter().all(|run| run.record.first_over.is_some() == (short > 0)));
    }
}

/// Eager, static, replayed and recovered steps give the same bits for the same inputs.
pub fn all_modes_give_the_same_bits<T: TestBackend>() {
    let case = skewed().on::<T>().capacity(4);
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(RecoverySettings::new()).expect("default settings");
        let recovered = rig.step(&mut runner, 2).expect("it recovers").run;
        let eager = rig.run_eager(2);
        // By now there is room for the step.
        let fixed = rig.run(2, StepMode::Static);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        vec![recovered, eager, fixed, rig.replay(&graph, 2)]
    });
    let oracle = StepOracle::new(&case, 2, None);
    for (mode, runs) in ["recovered", "eager", "static", "replayed"].iter().zip(by_step(&runs)) {
        oracle.check_outputs(mode, &runs);
        assert!(runs.iter().all(|run| run.record.dropped == 0), "{mode}");
    }
}

/// One graph, replayed with fresh routing each time, does what direct steps do; shaped by capacity
/// or counted on the device, with room or without.
pub fn replays_equal_direct_steps<T: TestBackend>() {
    for shaping in [RowShaping::Capacity, RowShaping::DeviceCounted] {
        for rows in [8, 128] {
            let case = skewed().on::<T>().capacity(rows);
            let runs = T::on_ranks(case.world(), |env| {
                let rig = Rig::<T>::new(env, &case);
                let options = StepOptions::new().with_shaping(shaping);
                let graph = rig.record(options).expect("it can be recorded");
                assert_eq!(graph.dispatches(), 2);
                assert!(graph.node_count() > 0);
                (0..5).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>()
            });
            for (step, runs) in by_step(&runs).iter().enumerate() {
                let oracle = StepOracle::new(&case, step, case.capacity.as_deref());
                oracle.check(&format!("{shaping:?}, {rows} rows, step {step}"), runs);
            }
        }
    }
}

/// Two groups that run the same steps see the same, truncated or not, down to the last row.
pub fn runs_repeat_bit_for_bit<T: TestBackend>() {
    let case = Case { bad_ids: true, ..skewed() }.on::<T>().capacity(8);
    let run = || {
        T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            (0..3).map(|step| rig.run(step, StepMode::Static)).collect::<Vec<_>>()
        })
    };
    assert_eq!(run(), run());
}

/// The facade's layer, with its own receive buffers, gives what the oracle says.
pub fn the_layer_of_the_facade_equals_the_oracle<T: TestBackend>() {
    let case = Case { weights: false, ..Case::new(4) }.on::<T>();
    let outputs = T::on_ranks(case.world(), |env| {
        let rank = env.rank().index();
        let inputs = Inputs::new(&case, 0, 0, rank);
        let group = env.build(&case.builder(graph_ep::Rank::from_index(rank))).expect("built");
        let experts = graph_ep::synthetic::SyntheticExperts::new(&group).expect("loaded");
        let values = encode(case.dtype, &inputs.values);
        let ids = inputs.id_bytes(false);
        let tokens = group.allocate(values.len()).expect("memory");
        let topk = group.allocate(ids.len()).expect("memory");
        let output = group.allocate(values.len()).expect("memory");
        group.write(&tokens, &values).expect("fits");
        group.write(&topk, &ids).expect("fits");
        let layer = MoeLayer::new(
            tokens.slice(),
            TokenCount::Fixed(case.tokens[rank]),
            TopKIds::I32(topk.slice()),
            output.slice(),
        );
        let body = {
            let group = group.clone();
            move |step: &mut graph_ep::Step<'static, T::Backend>| {
                group.layer(step, &layer, |queue, received| experts.queue(queue, received))
            }
        };
        let mut runner = group.runner(RecoverySettings::new(), body).expect("default settings");
        runner.run().expect("it fits");
        let mut bytes = vec![0; values.len()];
        group.read(&output.slice(), &mut bytes).expect("it ran");
        bits(&decode(case.dtype, &bytes))
    });
    let oracle = LayerOracle::of_step(&case, 0, 0, None);
    for (rank, (seen, expected)) in outputs.iter().zip(&oracle.ranks).enumerate() {
        assert_eq!(seen, &expected.output, "rank {rank}");
    }
}

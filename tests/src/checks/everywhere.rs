//! One case in every mode of one group: what the checks of payloads, layouts and maps are made of.

use graph_ep::{GrowthPolicy, RecoverySettings, StepMode, StepOptions};

use crate::backend::TestBackend;
use crate::case::Case;
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::rig::Rig;

/// The fewest rows with which every rank can process any token, by the documented rule.
pub fn least_rows(case: &Case) -> u32 {
    let of_rank = |rank| case.top_k.min(case.slots_of(rank)) as u32 * case.alignment;
    (0..case.world()).map(of_rank).max().unwrap_or(0)
}

/// Truncated, in rounds, recovered, eager and with room, direct and replayed, in one group that starts
/// with too few rows: all of it is what the oracle says.
///
/// # Panics
///
/// Where it is not.
pub fn conforms<T: TestBackend>(what: &str, case: &Case) {
    let case = &case.clone().on::<T>();
    let tight = case.clone().capacity(least_rows(case));
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &tight);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        let rounds = rig.record_rounds();
        let mut runs = vec![
            rig.run(0, StepMode::Static),
            rig.replay(&graph, 1),
            rig.replay(&rounds, 2),
            rig.replay(&rounds, 3),
        ];
        let settings = RecoverySettings::new().with_growth(GrowthPolicy::Exact);
        let mut runner = rig.runner(settings).expect("in range");
        runs.extend([4, 5].map(|step| rig.step(&mut runner, step).expect("it recovers").run));
        runs.extend([rig.run_eager(6), rig.run(7, StepMode::Static)]);
        runs
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        let capacity: Vec<u32> = runs.iter().map(|run| run.record.capacity).collect();
        let modes = ["static", "replayed", "rounds", "rounds", "recovered", "recovered", "eager"];
        let mode = modes.get(step).unwrap_or(&"static");
        let at = format!("{what}: step {step}, {mode}");
        if *mode == "rounds" {
            let oracle = StepOracle::new(case, step, None);
            oracle.check_outputs(&at, runs);
            for (rank, run) in runs.iter().enumerate() {
                let trips = super::rounds::trips(&tight, step, rank);
                assert_eq!(
                    (run.record.dropped, run.record.windows),
                    (0, trips),
                    "{at}, rank {rank}"
                );
            }
            continue;
        }
        // Eager layers may each have had another capacity.
        let capacity = (*mode != "eager").then_some(capacity.as_slice());
        StepOracle::new(case, step, capacity).check(&at, runs);
        if matches!(*mode, "recovered" | "eager") {
            assert!(runs.iter().all(|run| run.record.dropped == 0), "{at}");
        }
    }
}

//! Launching steps before the record of an earlier one has been read.

use graph_ep::{StepMode, StepOptions};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::rig::Rig;

/// A step that overflows on one rank alone.
fn skewed() -> Case {
    Case { skew: Skew::Hot(0), layers: 2, ..Case::new(3) }.capacity(8)
}

/// Steps behind an over-budget one move nothing on any rank until they are resumed, however many are
/// in flight; then the over-budget step is replayed, and those behind it follow.
pub fn steps_behind_an_over_budget_one_drain<T: TestBackend>() {
    let case = Case { bad_ids: true, ..skewed() }.on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let (stream, rows) = (rig.group.stream(), rig.group.rows());
        let options = StepOptions::new().hold_on_overflow(true);
        let graph = rig.record(options).expect("it can be recorded");
        rig.write(0);
        let first = graph.replay(stream).expect("current");
        let behind: Vec<u32> = (0..3).map(|_| graph.replay(stream).expect("current")).collect();
        let over = rig.wait(first).expect("it ends");
        assert!(over.overflowed() && !over.drained);
        for number in behind {
            let drained = rig.wait(number).expect("it ends");
            assert!(drained.drained, "step {number} was not held back");
            assert_eq!((drained.delivered, drained.dropped), (0, 0));
            assert_eq!((drained.first_over, drained.peak()), (None, 0));
            assert_eq!((drained.invalid_ids, drained.repeated_ids), (0, 0));
        }
        let growth = rows.plan(rows.max_rows()).expect("it is reserved");
        rig.commit(growth);
        let (graph, _) = graph.record_again(stream, rig.body()).expect("it can be recorded");
        rig.group.dispatcher().resume(&rig.direct()).expect("the stream is alive");
        vec![rig.replay(&graph, 0), rig.replay(&graph, 1), rig.run(2, StepMode::Static)]
    });
    for (step, runs) in by_step(&results).iter().enumerate() {
        StepOracle::new(&case, step, None).check_outputs(&format!("step {step}"), runs);
        assert!(runs.iter().all(|run| !run.record.drained && run.record.dropped == 0));
    }
}

/// Clean steps in flight do not hold each other back.
pub fn clean_steps_run_ahead<T: TestBackend>() {
    let case = Case::new(3).on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let options = StepOptions::new().hold_on_overflow(true);
        let graph = rig.record(options).expect("it can be recorded");
        rig.write(0);
        let numbers: Vec<u32> =
            (0..5).map(|_| graph.replay(rig.group.stream()).expect("current")).collect();
        for number in numbers {
            let record = rig.wait(number).expect("it ends");
            assert!(!record.drained && !record.overflowed());
        }
    });
}

/// Without being asked to hold, steps behind an over-budget one run.
pub fn nothing_is_held_back_unasked<T: TestBackend>() {
    let case = skewed().on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        (0..3).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>()
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, step, case.capacity.as_deref()).check(&format!("step {step}"), runs);
    }
}

//! Launching steps before the record of an earlier one has been read.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use graph_ep::{
    DispatchError, GrowthPolicy, Outcome, OverflowError, RecoverySettings, StepMode, StepOptions,
    StepRunner,
};

use crate::backend::TestBackend;
use crate::belt::{Belt, BeltEngine, Rewind, STEPS, WINDOW};
use crate::case::{Case, Skew};
use crate::checks::refusal::Hooks;
use crate::engine::Graphs;
use crate::oracle::{LayerOracle, StepOracle};
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
        let options = StepOptions::new().with_hold_on_overflow(true);
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
        let options = StepOptions::new().with_hold_on_overflow(true);
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

/// A window of steps that slides on while some of them overflow: a step is launched for each that is settled.
/// Every one of them runs once, in the order in which they were launched, on what those before it left.
pub fn a_sliding_window_keeps_its_order<T: TestBackend>() {
    for engine in [false, true] {
        let case = Belt::<T>::case();
        let recovered = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let belt = || Belt { program: rig.program() };
            let settings = RecoverySettings::new().with_growth(GrowthPolicy::Exact);
            let counts: Arc<[AtomicUsize; 2]> = Arc::default();
            let runner = match engine {
                true => {
                    let graphs = Graphs::of(&rig);
                    let engine = BeltEngine { graphs, belt: belt() };
                    rig.group.engine_runner(settings, rig.group.stream().clone(), engine)
                }
                false => {
                    let belt = belt();
                    rig.group.runner(settings, move |step| belt.queue(step))
                }
            };
            let mut runner = runner
                .expect("in range")
                .hooks(Rewind { belt: belt(), counts: Arc::clone(&counts) });
            belt().fill(0).expect("the buffers are long enough");
            let (mut window, mut ran) = (VecDeque::new(), Vec::new());
            while ran.len() < STEPS {
                while window.len() < WINDOW && ran.len() + window.len() < STEPS {
                    window.push_back(runner.launch().expect("it can be launched"));
                    counts[0].fetch_add(1, Ordering::Relaxed);
                }
                let oldest = window.pop_front().expect("there are steps to come");
                ran.push(runner.settle(oldest).expect("it recovers"));
                counts[1].fetch_add(1, Ordering::Relaxed);
            }
            let numbers: Vec<_> = ran.iter().map(|report| report.record.step).collect();
            assert!(numbers.is_sorted(), "they ran in another order: {numbers:?}");
            for (step, report) in ran.iter().enumerate() {
                let record = &report.record;
                assert!(!record.drained && record.dropped == 0, "step {step}: {record:?}");
                let oracle = LayerOracle::new(&case, &Belt::<T>::inputs(&case, step), None);
                assert_eq!(record.required, oracle.required, "step {step}");
                let output = &oracle.ranks[rig.rank()].output;
                assert_eq!(belt().output(STEPS - 1 - step), *output, "step {step}");
            }
            let outcomes = ran.iter().map(|report| report.outcome != Outcome::Clean);
            outcomes.collect::<Vec<_>>()
        });
        let steps = &recovered[0];
        assert!(recovered.iter().all(|rank| rank == steps), "{recovered:?}");
        let close = steps.windows(WINDOW).any(|window| window.iter().filter(|r| **r).count() > 1);
        assert!(close, "two steps that are in flight at once are to overflow: {steps:?}");
    }
}

fn says<R: std::fmt::Debug>(result: Result<R, OverflowError>, part: &str) {
    match result {
        Err(OverflowError::Dispatch(DispatchError::Order { reason, .. })) => {
            assert!(reason.contains(part), "{part:?} is not in {reason:?}");
        }
        other => panic!("{part:?}: {other:?}"),
    }
}

/// No more steps are in flight than there are records, and no eager step beside any.
pub fn steps_in_flight_are_bounded_by_the_ring<T: TestBackend>() {
    let case = Case::new(2);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        let mut other = rig.runner(RecoverySettings::new()).expect("in range");
        rig.write(0);
        let most = rig.group.dispatcher().config().record_ring();
        let mut flight: VecDeque<_> =
            (0..most).map(|_| runner.launch().expect("there is a record for it")).collect();
        says(runner.launch(), "the record ring holds no more");
        says(other.launch(), "the record ring holds no more");
        says(runner.run_eager(), "in flight");
        let oldest = flight.pop_front().expect("some were launched");
        assert_eq!(runner.settle(oldest).expect("its record is there").outcome, Outcome::Clean);
        flight.push_back(runner.launch().expect("there is a record for it"));
        for launched in flight {
            assert_eq!(runner.settle(launched).expect("nothing is lost").outcome, Outcome::Clean);
        }
        runner.run_eager().expect("none is in flight");
    });
}

/// A step that nobody settles, though it overflows, is recovered with the next that somebody does.
pub fn steps_that_nobody_settles_are_recovered<T: TestBackend>() {
    let case = skewed().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        rig.write(0);
        let forgotten = runner.launch().expect("it can be launched");
        let (second, third) = (runner.launch(), runner.launch());
        let (second, third) = (second.expect("launched"), third.expect("launched"));
        let shape = rig.shape();
        let report = runner.settle(third).expect("the first is recovered");
        assert_eq!((report.outcome, report.record.dropped), (Outcome::Clean, 0));
        assert_ne!(rig.shape(), shape, "the first has grown the rows");
        assert!(runner.is_done(&forgotten) && runner.is_done(&second));
        says(runner.settle(second), "settled with a later one");
        rig.seen_with(0, &report.record)
    });
    StepOracle::new(&case, 0, None).check_outputs("the last of them", &results);
}

/// A refusal leaves what is in flight behind the step that it refuses: that runs then, in its order.
pub fn steps_behind_a_refused_one_run<T: TestBackend>() {
    let case = skewed().on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let hooks = Hooks { failures: u32::from(rig.rank() == 1), seen: Arc::default() };
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range").hooks(hooks);
        rig.write(0);
        let launch = |runner: &mut StepRunner<T::Backend>| runner.launch().expect("launched");
        let (first, second, third) =
            (launch(&mut runner), launch(&mut runner), launch(&mut runner));
        match runner.settle(first) {
            Err(OverflowError::Refused { rank, .. }) => assert_eq!(rank.0, 1),
            other => panic!("{other:?}"),
        }
        let fourth = launch(&mut runner);
        // The second overflows as well, and is recovered this time.
        let reports = [second, third, fourth].map(|launched| runner.settle(launched));
        let reports = reports.map(|report| report.expect("the hook works again"));
        let outcomes = reports.each_ref().map(|report| report.outcome);
        let recovered = Outcome::Recovered { replays: 1, eager: false };
        assert_eq!(outcomes, [recovered, Outcome::Clean, Outcome::Clean]);
        let numbers = reports.map(|report| report.record.step);
        assert!(numbers.is_sorted(), "they ran in another order: {numbers:?}");
    });
}

/// A step that somebody else's holds back has no outcome before that is acknowledged, and runs then before
/// any that is launched later.
pub fn steps_behind_an_over_budget_one_of_others_wait<T: TestBackend>() {
    let case = skewed().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new().with_hold_on_overflow(true)).expect("recorded");
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        rig.write(0);
        let over = graph.replay(rig.group.stream()).expect("current");
        let behind = [runner.launch(), runner.launch()].map(|step| step.expect("launched"));
        assert!(rig.wait(over).expect("it ends").overflowed());
        let [first, second] = behind;
        says(runner.settle(first), "is not recovered");
        rig.group.dispatcher().resume(&rig.direct()).expect("the stream is alive");
        let third = runner.launch().expect("launched behind those that were held");
        let reports = [second, third].map(|step| runner.settle(step).expect("it recovers"));
        let [second, third] = &reports;
        assert_eq!((second.outcome, third.outcome), (Outcome::Clean, Outcome::Clean));
        assert!(second.record.step < third.record.step, "{second:?}, {third:?}");
        rig.seen_with(0, &third.record)
    });
    StepOracle::new(&case, 0, None).check_outputs("the last of them", &results);
}

/// A step that was launched when those before it were let run again, and ran before one of them that had
/// moved nothing, is an error, not an outcome.
pub fn steps_that_passed_one_of_their_runner_are_told<T: TestBackend>() {
    let case = skewed().on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new().with_hold_on_overflow(true)).expect("recorded");
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        rig.write(0);
        graph.replay(rig.group.stream()).expect("current");
        let behind = runner.launch().expect("launched");
        rig.group.dispatcher().resume(&rig.direct()).expect("the stream is alive");
        let passed = runner.launch().expect("launched");
        says(runner.settle(behind), "has run since");
        let report = runner.settle(passed).expect("it recovers");
        assert_eq!(report.outcome, Outcome::Recovered { replays: 1, eager: false });
    });
}

/// Steps of two runners run in the order in which they were launched too: neither passes what the other has to
/// launch again.
pub fn runners_keep_the_order_of_each_other<T: TestBackend>() {
    let case = skewed().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let settings = RecoverySettings::new();
        let mut one = rig.runner(settings).expect("in range");
        let mut other = rig.runner(settings).expect("in range");
        rig.write(0);
        let launch = |runner: &mut StepRunner<T::Backend>| runner.launch().expect("launched");
        let first = launch(&mut one);
        let (second, third) = (launch(&mut other), launch(&mut one));
        let over = one.settle(first).expect("it recovers");
        assert_eq!(over.outcome, Outcome::Recovered { replays: 1, eager: false });
        says(one.launch(), "of another runner");
        let second = other.settle(second).expect("it fits");
        says(other.launch(), "of another runner");
        says(other.run_eager(), "of another runner");
        let third = one.settle(third).expect("it fits");
        let fourth = launch(&mut other);
        let fourth = other.settle(fourth).expect("it fits");
        let reports = [over, second, third, fourth];
        assert!(reports[1..].iter().all(|report| report.outcome == Outcome::Clean), "{reports:?}");
        let numbers = reports.each_ref().map(|report| report.record.step);
        assert!(numbers.is_sorted(), "they ran in another order: {numbers:?}");
        // Steps of a runner that is gone are in nobody's way.
        let gone = launch(&mut one);
        drop((one, gone));
        let last = other.run().expect("it fits");
        rig.seen_with(0, &last.record)
    });
    StepOracle::new(&case, 0, None).check_outputs("the last of them", &results);
}

/// A graph that is replayed by hand between the steps of a runner is launched again in its turn where it has taken
/// its place among them; where it has not, the runner's steps pass it.
pub fn graphs_replayed_by_hand_take_their_place<T: TestBackend>() {
    let case = skewed().on::<T>();
    for placed in [true, false] {
        let results = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let (dispatcher, stream) = (rig.group.dispatcher(), rig.group.stream());
            let order = dispatcher.launch_order();
            let graph = rig.record(StepOptions::new().with_hold_on_overflow(true));
            let graph = graph.expect("it can be recorded");
            let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
            rig.write(0);
            let first = runner.launch().expect("launched");
            let drained = graph.replay(stream).expect("current");
            let place = placed.then(|| order.enter());
            let third = runner.launch().expect("launched");
            assert_eq!(order.in_flight(), 2 + usize::from(placed));
            let over = runner.settle(first).expect("it recovers");
            assert_eq!(over.outcome, Outcome::Recovered { replays: 1, eager: false });
            assert!(rig.wait(drained).expect("it ends").drained);
            let (graph, _) = graph.record_again(stream, rig.body()).expect("it can be recorded");
            if let Some(place) = place {
                assert!(order.is_held(place) && !order.any_held_before(Some(place)));
                says(runner.launch(), "launched again first");
            }
            let by_hand = graph.replay(stream).expect("current");
            place.into_iter().for_each(|place| order.release(place));
            let second = rig.wait(by_hand).expect("it ends");
            assert!(!second.drained && !second.overflowed(), "{second:?}");
            place.into_iter().for_each(|place| order.leave(place));
            let third = runner.settle(third).expect("it fits");
            assert_eq!(third.outcome, Outcome::Clean);
            assert_eq!(second.step < third.record.step, placed, "{second:?}, {third:?}");
            assert_eq!(order.in_flight(), 0);
            rig.seen_with(0, &third.record)
        });
        StepOracle::new(&case, 0, None).check_outputs(&format!("placed: {placed}"), &results);
    }
}

/// A step that is settled though one of another runner before it is held back stays in flight.
pub fn a_step_behind_a_held_one_of_another_runner_stays_in_flight<T: TestBackend>() {
    let case = skewed().on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let settings = RecoverySettings::new();
        let mut one = rig.runner(settings).expect("in range");
        let mut other = rig.runner(settings).expect("in range");
        rig.write(0);
        let launch = |runner: &mut StepRunner<T::Backend>| runner.launch().expect("launched");
        let first = launch(&mut one);
        let (second, third) = (launch(&mut other), launch(&mut one));
        one.settle(first).expect("it recovers");
        says(one.settle(third), "of another runner");
        let second = other.settle(second).expect("it fits");
        // The third is settled before the fourth, since it is in flight.
        let fourth = one.run().expect("it fits");
        assert_eq!((second.outcome, fourth.outcome), (Outcome::Clean, Outcome::Clean));
        assert_eq!(fourth.record.step, second.record.step + 2, "the third ran between the two");
    });
}

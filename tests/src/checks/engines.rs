//! Recovery of steps whose graphs are an engine's.

use std::sync::Arc;

use graph_ep::{
    CaptureError, DispatchError, GrowthPolicy, Outcome, OverflowError, OverflowPolicy,
    RecoverySettings, RowSet, RowShaping, StepMode, StepOptions, StepRunner, TokenDispatcher,
};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::engine::{Asked, Engine};
use crate::odd_engines::{FailsOnce, Meddling, Other, Stubborn};
use crate::oracle::StepOracle;
use crate::outcome::{Ended, Ran, by_step};
use crate::rig::Rig;

fn tight() -> Case {
    Case { skew: Skew::Hot(2), layers: 2, ..Case::new(3) }.capacity(8)
}

fn runner<T: TestBackend>(
    rig: &Rig<T>,
    settings: RecoverySettings,
    engine: Engine<T>,
) -> StepRunner<T::Backend> {
    let stream = rig.group.stream().clone();
    rig.group.engine_runner(settings, stream, engine).expect("in range")
}

fn check(case: &Case, what: &str, results: &[Vec<Ran>]) {
    for (step, ranks) in by_step(results).iter().enumerate() {
        let runs: Vec<_> = ranks.iter().map(|ran| ran.run.clone()).collect();
        StepOracle::new(case, step, None).check_outputs(&format!("{what}, step {step}"), &runs);
        assert!(runs.iter().all(|run| run.record.dropped == 0), "{what}, step {step}");
    }
}

/// An engine that captures and launches its graphs itself recovers by the same steps as the library: it is
/// asked to capture again on every rank that grows, and to launch again. Whole steps and steps in pieces.
pub fn engines_recover_their_own_graphs<T: TestBackend>() {
    for (in_pieces, shaping) in [
        (false, RowShaping::Capacity),
        (true, RowShaping::Capacity),
        (false, RowShaping::DeviceCounted),
    ] {
        let case = tight().on::<T>();
        let results = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let engine = Engine { in_pieces, ..Engine::of(&rig) };
            let asked = engine.asked.clone();
            let growth = GrowthPolicy::headroom();
            let settings = RecoverySettings::new().with_growth(growth).with_shaping(shaping);
            let mut runner = runner(&rig, settings, engine);
            let mut other = rig.runner(settings).expect("in range");
            let ran: Vec<_> =
                (0..3).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect();
            let captures = match shaping {
                RowShaping::Capacity => vec![Asked::Capture],
                RowShaping::DeviceCounted => Vec::new(),
            };
            let mut wanted = vec![Asked::Capture, Asked::Launch];
            wanted.extend(captures);
            wanted.extend([Asked::Launch; 3]);
            assert_eq!(*asked.lock().expect("no panic"), wanted);
            assert_eq!(ran[0].ended, Ended::Recovered { replays: 1, eager: false });
            assert!(runner.embedded().is_some() && runner.graph().is_none());
            // The library's own graph takes the same steps from here on.
            let mut all = ran;
            all.push(rig.step(&mut other, 3).expect("it fits"));
            all
        });
        check(&case, &format!("in pieces: {in_pieces}, {shaping:?}"), &results);
    }
}

/// Steps that are launched before the first is settled drain behind one that overflows, and are launched
/// again when it is their turn.
pub fn engines_run_ahead<T: TestBackend>() {
    let case = tight().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = runner(&rig, RecoverySettings::new(), Engine::of(&rig));
        rig.write(0);
        let launched: Vec<_> =
            (0..3).map(|_| runner.launch().expect("it can be launched")).collect();
        let outcomes: Vec<_> = launched
            .into_iter()
            .map(|launched| runner.settle(launched).expect("it recovers"))
            .collect();
        assert!(matches!(outcomes[0].outcome, Outcome::Recovered { replays: 1, eager: false }));
        for report in &outcomes[1..] {
            assert_eq!((report.outcome, report.record.dropped), (Outcome::Clean, 0));
        }
        let last = outcomes.last().expect("three steps");
        vec![Ran::new(rig.seen_with(0, &last.record), last)]
    });
    check(&case, "the last of them", &results);
}

/// Steps behind one that a rank ran from a stale graph move nothing either, and are launched again, in their
/// order, when that has been told; those launched then follow them.
pub fn steps_behind_a_stale_one_are_launched_again<T: TestBackend>() {
    let case = Case { layers: 2, ..Case::new(2) };
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let engine = Meddling {
            engine: Engine::of(&rig),
            rows: rig.group.rows().clone(),
            direct: rig.direct(),
            left: (rig.rank() == 1).then_some(2),
        };
        let stream = rig.group.stream().clone();
        let settings = RecoverySettings::new();
        let mut runner = rig.group.engine_runner(settings, stream, engine).expect("in range");
        assert_eq!(rig.step(&mut runner, 0).expect("it fits").ended, Ended::Clean);
        rig.write(1);
        let stale = runner.launch().expect("it was current a moment ago");
        let behind = [runner.launch(), runner.launch()].map(|step| step.expect("launched"));
        match runner.settle(stale) {
            Err(OverflowError::Dispatch(DispatchError::StaleGraph { rank, .. })) => {
                assert_eq!(rank.index(), 1);
            }
            other => panic!("{other:?}"),
        }
        let again = runner.launch().expect("launched");
        let steps = behind.into_iter().chain([again]);
        let reports: Vec<_> =
            steps.map(|step| runner.settle(step).expect("nothing holds it back")).collect();
        assert!(reports.iter().all(|report| report.outcome == Outcome::Clean), "{reports:?}");
        let numbers: Vec<_> = reports.iter().map(|report| report.record.step).collect();
        assert!(numbers.is_sorted(), "they ran in another order: {numbers:?}");
        rig.seen_with(1, &reports[2].record)
    });
    StepOracle::new(&case, 1, None).check_outputs("behind a stale step", &runs);
}

/// After the last replay an engine runs a step eagerly if it can; otherwise it is refused on all ranks.
pub fn steps_that_no_replay_fits_run_eagerly_or_are_refused<T: TestBackend>() {
    for eager in [false, true] {
        let case = tight().on::<T>();
        let results = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let engine = Engine { eager, ..Engine::of(&rig) };
            let asked = Arc::clone(&engine.asked);
            let mut runner = runner(&rig, RecoverySettings::new().with_max_replays(0), engine);
            match (rig.step(&mut runner, 0), eager) {
                (Ok(ran), true) => {
                    assert_eq!(ran.ended, Ended::Recovered { replays: 0, eager: true });
                    assert!(asked.lock().expect("no panic").contains(&Asked::Eager));
                }
                (Err(OverflowError::Refused { rank, refusal, .. }), false) => {
                    assert_eq!(rank.0, 0);
                    assert!(refusal.reason.contains("does not run steps eagerly"), "{refusal:?}");
                }
                (other, _) => panic!("{other:?}"),
            }
            let mut other = rig.runner(RecoverySettings::new()).expect("in range");
            vec![rig.step(&mut other, 0).expect("it recovers")]
        });
        check(&case, &format!("eager: {eager}"), &results);
    }
}

/// A capture that fails on one rank in the middle of a recovery refuses on all, with its reason, and
/// changes nothing; the next step captures again.
pub fn a_capture_that_fails_refuses_on_all_ranks<T: TestBackend>() {
    let case = tight().on::<T>();
    let last = case.world() - 1;
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let engine = Engine::of(&rig);
        let fails = FailsOnce { engine, at: (rig.rank() == last).then_some(2) };
        let stream = rig.group.stream().clone();
        let mut runner =
            rig.group.engine_runner(RecoverySettings::new(), stream, fails).expect("in range");
        let before = rig.shape();
        match rig.step(&mut runner, 0) {
            Err(OverflowError::Refused { rank, refusal, .. }) => {
                assert_eq!(rank.index(), last);
                assert!(refusal.reason.contains("no graph to give"), "{refusal:?}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.shape(), before, "a refused growth changed the rows");
        vec![rig.step(&mut runner, 0).expect("it recovers")]
    });
    check(&case, "after the refusal", &results);
}

/// In rounds, dropped and failed on overflow, an engine's graph does what the policy says.
pub fn engines_follow_every_policy<T: TestBackend>() {
    let case = tight().on::<T>();
    let rounds = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let drop = RecoverySettings::new().with_overflow(OverflowPolicy::Drop);
        let mut dropping = runner(&rig, drop, Engine::of(&rig));
        assert_eq!(rig.step(&mut dropping, 0).expect("it drops").ended, Ended::Dropped);
        let fail = RecoverySettings::new().with_overflow(OverflowPolicy::Fail);
        let mut failing = runner(&rig, fail, Engine::of(&rig));
        match rig.step(&mut failing, 0) {
            Err(OverflowError::Overflow { .. }) => {}
            other => panic!("{other:?}"),
        }
        let rounds = RecoverySettings::new().with_overflow(OverflowPolicy::Rounds);
        let mut looping = runner(&rig, rounds, Engine::of(&rig));
        vec![rig.step(&mut looping, 0).expect("it fits")]
    });
    check(&case, "rounds", &rounds);
}

/// What an engine captures has to be what it was asked for: a step that would not hold back those behind it,
/// or that the runner cannot grow, is refused before it is launched, and dropped.
pub fn captures_of_another_step_are_refused<T: TestBackend>() {
    let case = Case::new(2);
    let plain = StepOptions::new();
    let holding = plain.with_hold_on_overflow(true);
    for (other, part) in [
        (Other::Options(plain), "hold_on_overflow"),
        (Other::Options(holding.with_shaping(RowShaping::DeviceCounted)), "shaping"),
        (Other::Options(holding.with_mode(StepMode::Rounds)), "mode"),
        (Other::Rows, "row set"),
        (Other::Group, "dispatcher"),
    ] {
        T::on_ranks(2, |env| {
            let rig = Rig::<T>::new(env, &case);
            let group = &rig.group;
            let stranger =
                TokenDispatcher::new(group.context(), group.dispatcher().config().clone());
            let stranger = stranger.expect("a second dispatcher");
            let rows =
                RowSet::new(group.context(), group.stream(), "other rows", 40, 40).expect("memory");
            let engine = Engine::of(&rig);
            let asked = Arc::clone(&engine.asked);
            let engine = Box::new(Stubborn { engine, group: group.clone(), other, rows });
            // The step of another group is the runner's that runs for a stranger.
            let of = if matches!(other, Other::Group) { &stranger } else { group.dispatcher() };
            let settings = RecoverySettings::new();
            let (stream, rows) = (group.stream().clone(), group.rows().clone());
            let mut runner =
                StepRunner::for_engine(of, stream, rows, settings, engine).expect("in range");
            rig.write(0);
            match runner.launch() {
                Err(OverflowError::Capture(CaptureError::Dispatch(DispatchError::Order {
                    reason,
                    ..
                }))) => assert!(reason.contains(part), "{part:?} is not in {reason:?}"),
                other => panic!("{part}: {other:?}"),
            }
            assert!(runner.embedded().is_none());
            assert_eq!(*asked.lock().expect("no panic"), [Asked::Discard]);
        });
    }
}

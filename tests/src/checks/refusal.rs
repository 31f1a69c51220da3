//! When a step cannot be replayed: the other policies, hooks, limits, the eager fallback.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use graph_ep::{
    Adjustments, BodyError, DType, GrowthPolicy, OverflowError, OverflowPolicy, RecoveryHooks,
    RecoverySettings, StepRecord, StepRunner,
};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{Ended, Ran, Record, by_step};
use crate::rig::Rig;

fn tight() -> Case {
    Case { skew: Skew::Hot(2), layers: 2, ..Case::new(3) }.capacity(8)
}

/// What a refusal says: the rank, and the text of the error.
type Told = (u32, String);

fn refused<T: TestBackend>(rig: &Rig<T>, runner: &mut StepRunner<T::Backend>, step: usize) -> Told {
    let before = rig.shape();
    match rig.step(runner, step) {
        Err(error @ OverflowError::Refused { rank, .. }) => {
            assert_eq!(rig.shape(), before, "a refused growth changed the rows");
            (rank.0, error.to_string())
        }
        other => panic!("{other:?}"),
    }
}

/// The refusal, which is the same on all ranks, and the steps that were run after it.
fn judge(case: &Case, rank: u32, holds: &[&str], results: Vec<(Told, Vec<Ran>)>) {
    let (told, after): (Vec<Told>, Vec<Vec<Ran>>) = results.into_iter().unzip();
    assert!(told.iter().all(|text| *text == told[0]), "ranks were told differently: {told:?}");
    assert_eq!(told[0].0, rank, "{told:?}");
    for part in holds {
        assert!(told[0].1.contains(part), "{part:?} is not in {:?}", told[0].1);
    }
    for (step, ranks) in by_step(&after).iter().enumerate() {
        let runs: Vec<_> = ranks.iter().map(|ran| ran.run.clone()).collect();
        StepOracle::new(case, step, None).check_outputs(&format!("step {step} after"), &runs);
        assert!(ranks.iter().all(|ran| ran.run.record.dropped == 0));
    }
}

/// Hooks that remember what they were called with, and fail the first so many times.
#[derive(Clone, Debug, Default)]
pub struct Hooks {
    /// How often they still fail.
    pub failures: u32,
    /// Attempt and discarded record of each call.
    pub seen: Arc<Mutex<Vec<(u32, Record)>>>,
}

impl RecoveryHooks for Hooks {
    fn before_replay(&mut self, discarded: &StepRecord, attempt: u32) -> Result<(), BodyError> {
        self.seen.lock().expect("no panic").push((attempt, discarded.into()));
        match self.failures {
            0 => Ok(()),
            _ => {
                self.failures -= 1;
                Err("the dice cannot be put back".into())
            }
        }
    }
}

/// Hooks are called once for every attempt, with the record of the run that is discarded, and not for
/// clean steps.
pub fn hooks_are_called_once_an_attempt<T: TestBackend>() {
    let case = tight().on::<T>();
    let seen = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let hooks = Hooks { failures: 0, seen: seen.clone() };
        let settings = RecoverySettings::new().with_growth(GrowthPolicy::headroom());
        let mut runner = rig.runner(settings).expect("in range").hooks(hooks);
        let first = rig.step(&mut runner, 0).expect("it recovers");
        rig.step(&mut runner, 0).expect("it fits");
        let seen = seen.lock().expect("no panic").clone();
        assert_eq!(seen, [(1, first.discarded.expect("discarded"))]);
        seen.len()
    });
    assert_eq!(seen, vec![1; case.world()]);
}

/// A hook that fails on one rank refuses the replay on all, with the same error; the next step works.
pub fn a_failing_hook_refuses_on_all_ranks<T: TestBackend>() {
    let case = tight().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let hooks = Hooks { failures: u32::from(rig.rank() == 1), seen: Arc::default() };
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range").hooks(hooks);
        let told = refused(&rig, &mut runner, 0);
        (told, (0..3).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect())
    });
    judge(&case, 1, &["rank 1", "the dice cannot be put back"], results);
}

/// A limit in rows that does not suffice refuses on all ranks, with the numbers of the one that it
/// holds back; the group goes on.
pub fn a_limit_in_rows_refuses_on_all_ranks<T: TestBackend>() {
    let case = tight().on::<T>();
    // Expert 2 is hot, and is held by rank 1.
    let required = StepOracle::new(&case, 0, None).required()[1];
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let limit = if rig.rank() == 1 { required - 1 } else { u32::MAX };
        let mut runner =
            rig.runner(RecoverySettings::new().with_max_rows(limit)).expect("in range");
        let told = refused(&rig, &mut runner, 0);
        assert_eq!(refused(&rig, &mut runner, 0), told, "refused again, in the same words");
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        (told, (0..3).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect())
    });
    let numbers = [required.to_string(), (required - 1).to_string()];
    for (told, _) in &results {
        let said = told.1.matches(&format!("requires {required} ")).count();
        assert_eq!(said, 1, "each number is said once: {:?}", told.1);
    }
    judge(&case, 1, &["rank 1", &numbers[0], "has 8", &numbers[1]], results);
}

/// Memory that runs out on one rank while it grows, by its limit or on its device, refuses on all
/// ranks and leaves what was charged as it was; the group goes on, and grows once there is memory.
pub fn memory_that_runs_out_refuses_on_all_ranks<T: TestBackend>() {
    // Eight rows of four-byte values fill a page, so that any growth needs another. One layer of few
    // tokens, since rows are long where pages are large; alignment makes them require enough.
    let (dtype, hidden) = (DType::Fp32, T::PAGE_BYTES / (8 * 4));
    let case =
        Case { dtype, hidden, layers: 1, tokens: vec![2; 3], alignment: 8, top_k: 3, ..tight() }
            .on::<T>();
    let last = case.world() - 1;
    let case = Case { skew: Skew::Hot(2 * last), ..case };
    assert!(StepOracle::new(&case, 0, None).required()[last] > 8, "the last rank has to grow");
    for device in [false, true] {
        let results = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
            let own = rig.group.context().account().clone();
            let account = if device { &rig.memory } else { &own };
            let before = (own.used(), rig.memory.used());
            if rig.rank() == last {
                account.set_limit(Some(account.used()));
            }
            let told = refused(&rig, &mut runner, 0);
            assert_eq!((own.used(), rig.memory.used()), before, "bytes in use");
            account.set_limit(None);
            // Memory is given back on a device only while no rank waits there.
            T::collect(rig.group.context().backend());
            rig.meet("what the refused growth had is gone");
            (told, (0..2).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect())
        });
        judge(&case, last as u32, &[&format!("rank {last}"), "out of memory"], results);
    }
}

/// Recovery settings that decide what ranks do together are compared when runners are made: every rank
/// is told the field, both values and who has them, and can then make a runner all the same. Limits
/// may differ, as memory does.
pub fn recovery_settings_that_differ_are_named<T: TestBackend>() {
    let usual = RecoverySettings::new();
    let ahead = Adjustments { look_ahead: Some(1.5), ..Adjustments::default() };
    let shrinking = Adjustments { shrink_after: NonZeroU32::new(3), ..Adjustments::default() };
    let differ = [
        ("overflow", usual.with_overflow(OverflowPolicy::Rounds), "recover", "rounds"),
        ("growth", usual.with_growth(GrowthPolicy::Exact), "adaptive", "exact"),
        ("look_ahead", usual.with_adjustments(ahead), "None", "Some(1.5)"),
        ("shrink_after", usual.with_adjustments(shrinking), "None", "Some(3)"),
        ("max_replays", usual.with_max_replays(5), "2", "5"),
    ];
    let case = Case::new(3).on::<T>();
    let last = case.world() - 1;
    let told = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let second = rig.rank() == last;
        let texts: Vec<String> = differ
            .iter()
            .map(|(_, other, ..)| {
                let settings = if second { *other } else { usual };
                rig.runner(settings).expect_err("a setting differs").to_string()
            })
            .collect();
        let limit = 1000 + rig.rank() as u32;
        rig.runner(usual.with_max_rows(limit).with_eager_max_rows(limit))
            .expect("limits may differ");
        texts
    });
    assert!(told.iter().all(|texts| *texts == told[0]), "{told:?}");
    for ((field, _, first, second), text) in differ.iter().zip(&told[0]) {
        let last = format!("rank {last}");
        for part in [*field, first, second, "rank 0", &last] {
            assert!(text.contains(part), "{field}: {part:?} is not in {text:?}");
        }
    }
}

/// Replays that are used up end in an eager run with the same result; a limit on eager rows that does
/// not suffice refuses on all ranks, and the group goes on.
pub fn eager_mode_is_the_last_resort<T: TestBackend>() {
    let case = tight().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let settings = RecoverySettings::new().with_max_replays(0);
        let mut limited = rig.runner(settings.with_eager_max_rows(8)).expect("in range");
        let told = refused(&rig, &mut limited, 0);
        let mut runner = rig.runner(settings).expect("in range");
        let steps: Vec<Ran> =
            (0..3).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect();
        assert_eq!(steps[0].ended, Ended::Recovered { replays: 0, eager: true });
        assert!(steps.iter().all(|ran| match ran.ended {
            Ended::Clean => true,
            Ended::Recovered { replays, eager } => replays == 0 && eager,
            _ => false,
        }));
        (told, steps)
    });
    // Ranks 0 and 1 both lack room; the lower one is named.
    judge(&case, 0, &["rank 0", "may have 8"], results);
}

/// A runner of the case's step whose body fails when it is queued for the second time on rank 1, so when it is
/// recorded again.
fn recorded_once_on_rank_1<T: TestBackend>(
    rig: &Rig<T>,
    settings: RecoverySettings,
) -> StepRunner<T::Backend> {
    let (program, calls) = (rig.program(), AtomicU32::new(0));
    let fails = rig.rank() == 1;
    let body = move |step: &mut graph_ep::Step<'static, T::Backend>| match calls
        .fetch_add(1, Ordering::Relaxed)
    {
        1 if fails => Err("no second recording".into()),
        _ => program.queue(step),
    };
    rig.group.runner(settings, body).expect("in range")
}

/// A body that cannot be recorded again on one rank makes all ranks run that step eagerly; once it
/// can be recorded, steps are replayed again.
pub fn a_body_that_cannot_be_recorded_again_runs_eagerly<T: TestBackend>() {
    let case = tight().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        // Rank 0 also grows, so that what it recorded for its plan has to go.
        let mut runner = recorded_once_on_rank_1(&rig, RecoverySettings::new());
        let steps: Vec<Ran> =
            (0..3).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect();
        assert_eq!(steps[0].ended, Ended::Recovered { replays: 0, eager: true });
        assert!(!matches!(steps[1].ended, Ended::Recovered { eager: true, .. }));
        assert_eq!(steps[1].run.record.dropped, 0);
        ((0, String::new()), steps)
    });
    judge(&case, 0, &[], results);
}

/// Where a body cannot be recorded again on one rank, and an eager run is known to need more rows than another
/// may have, no rank begins it: the step is refused on all, and the group goes on.
pub fn an_eager_run_beyond_its_limit_is_refused_beforehand<T: TestBackend>() {
    let case = tight().on::<T>();
    let required = StepOracle::new(&case, 0, None).required()[0];
    assert!(required > 8, "rank 0 lacks room");
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let limit = if rig.rank() == 0 { required - 1 } else { u32::MAX };
        let settings = RecoverySettings::new().with_eager_max_rows(limit);
        let mut runner = recorded_once_on_rank_1(&rig, settings);
        let told = refused(&rig, &mut runner, 0);
        (told, (0..3).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect())
    });
    let limit = format!("may have {}", required - 1);
    judge(&case, 0, &["rank 0", "eager", "rank 1", "no second recording", &limit], results);
}

/// A runner can run any step eagerly from the start.
pub fn a_runner_runs_eagerly_when_asked<T: TestBackend>() {
    let case = tight().on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        rig.write(0);
        let report = runner.run_eager().expect("there is no limit");
        let ran = Ran::new(rig.seen_with(0, &report.record), &report);
        assert_eq!((ran.ended, ran.recordings), (Ended::Eager, 0));
        assert!(ran.blocking_calls > 0, "eager mode looks at every dispatch");
        ran.run
    });
    StepOracle::new(&case, 0, None).check("eager", &runs);
}

/// Under the policy that drops, what fits is kept, what does not is counted, and nothing grows.
pub fn the_policy_drop_keeps_what_fits<T: TestBackend>() {
    let case = tight().on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let settings = RecoverySettings::new().with_overflow(OverflowPolicy::Drop);
        let mut runner = rig.runner(settings).expect("in range");
        (0..4)
            .map(|step| {
                let ran = rig.step(&mut runner, step).expect("it drops");
                assert_eq!(ran.ended == Ended::Dropped, ran.run.record.first_over.is_some());
                assert_eq!((ran.capacity_after, ran.growths, ran.blocking_calls), (8, 0, 0));
                assert_eq!((ran.discarded, ran.recovered_rows), (None, 0));
                ran.run
            })
            .collect::<Vec<_>>()
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, step, case.capacity.as_deref()).check(&format!("step {step}"), runs);
    }
}

/// Under the policy that fails, an overflow is an error on every rank, with the record; the group
/// goes on.
pub fn the_policy_fail_reports_and_goes_on<T: TestBackend>() {
    let case = tight().on::<T>();
    let first = StepOracle::new(&case, 0, case.capacity.as_deref());
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let settings = RecoverySettings::new().with_overflow(OverflowPolicy::Fail);
        let mut runner = rig.runner(settings).expect("in range");
        let shape = rig.shape();
        for _ in 0..2 {
            match rig.step(&mut runner, 0) {
                Err(OverflowError::Overflow { report }) => {
                    assert_eq!(report.record.first_over, first.first_over());
                    assert_eq!(report.record.required, first.required());
                    assert_eq!((report.capacity_before, report.growths), (8, 0));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(rig.shape(), shape);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        let steps: Vec<Ran> =
            (0..2).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect();
        ((0, String::new()), steps)
    });
    judge(&case, 0, &[], results);
}

/// Under the policy that fails, capacity that grows ahead covers the next such step.
pub fn the_policy_fail_grows_ahead_where_asked<T: TestBackend>() {
    let case = Case { layers: 1, ..tight() }.on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let adjustments = Adjustments { look_ahead: Some(1.0), ..Adjustments::default() };
        let settings = RecoverySettings::new()
            .with_overflow(OverflowPolicy::Fail)
            .with_growth(GrowthPolicy::Exact)
            .with_adjustments(adjustments);
        let mut runner = rig.runner(settings).expect("in range");
        match rig.step(&mut runner, 0) {
            Err(OverflowError::Overflow { report }) => {
                let required = report.record.required[rig.rank()];
                assert_eq!(report.capacity_after, required.max(report.capacity_before));
                assert_eq!(report.growths, u32::from(required > report.capacity_before));
            }
            other => panic!("{other:?}"),
        }
        let ran = rig.step(&mut runner, 0).expect("it fits by now");
        assert_eq!(ran.ended, Ended::Clean);
        ((0, String::new()), vec![ran])
    });
    judge(&case, 0, &[], results);
}

/// A runner that was told to forget its graph records the next step, and only that.
pub fn an_invalidated_runner_records_once<T: TestBackend>() {
    let case = Case::new(2);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        let mut recordings = Vec::new();
        for step in 0..4 {
            if step == 2 {
                runner.invalidate();
                assert!(runner.graph().is_none());
            }
            recordings.push(rig.step(&mut runner, step).expect("it fits").recordings);
        }
        assert_eq!(recordings, [1, 0, 1, 0]);
    });
}

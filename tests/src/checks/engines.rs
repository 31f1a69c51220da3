//! Recovery of steps whose graphs are an engine's.

use std::sync::Arc;

use graph_ep::{
    GrowthPolicy, Outcome, OverflowError, OverflowPolicy, RecoverySettings, RowShaping, StepRunner,
};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::engine::{Asked, Engine};
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
            let settings = RecoverySettings::new().growth(growth).shaping(shaping);
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

/// After the last replay an engine runs a step eagerly if it can; otherwise it is refused on all ranks.
pub fn steps_that_no_replay_fits_run_eagerly_or_are_refused<T: TestBackend>() {
    for eager in [false, true] {
        let case = tight().on::<T>();
        let results = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let engine = Engine { eager, ..Engine::of(&rig) };
            let asked = Arc::clone(&engine.asked);
            let mut runner = runner(&rig, RecoverySettings::new().max_replays(0), engine);
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
        let drop = RecoverySettings::new().overflow(OverflowPolicy::Drop);
        let mut dropping = runner(&rig, drop, Engine::of(&rig));
        assert_eq!(rig.step(&mut dropping, 0).expect("it drops").ended, Ended::Dropped);
        let fail = RecoverySettings::new().overflow(OverflowPolicy::Fail);
        let mut failing = runner(&rig, fail, Engine::of(&rig));
        match rig.step(&mut failing, 0) {
            Err(OverflowError::Overflow { .. }) => {}
            other => panic!("{other:?}"),
        }
        let rounds = RecoverySettings::new().overflow(OverflowPolicy::Rounds);
        let mut looping = runner(&rig, rounds, Engine::of(&rig));
        vec![rig.step(&mut looping, 0).expect("it fits")]
    });
    check(&case, "rounds", &rounds);
}

/// An engine whose capture of this number fails.
#[derive(Debug)]
struct FailsOnce<T: TestBackend> {
    engine: Engine<T>,
    at: Option<u32>,
}

impl<T: TestBackend> graph_ep::EngineGraph<T::Backend> for FailsOnce<T> {
    fn capture(
        &mut self,
        spec: &graph_ep::StepSpec<'_, T::Backend>,
    ) -> Result<graph_ep::EmbeddedStep<T::Backend>, graph_ep::BodyError> {
        self.at = self.at.map(|captures| captures.saturating_sub(1));
        if self.at == Some(0) {
            self.at = None;
            self.engine.failures = 1;
        }
        self.engine.capture(spec)
    }

    fn launch(&mut self) -> Result<(), graph_ep::BodyError> {
        self.engine.launch()
    }

    fn discard(&mut self) {
        self.engine.discard();
    }
}

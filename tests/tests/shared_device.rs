//! Runners of ranks that share a device record loops at once, and of ranks that do not, each when it likes.
//! On the host, whose ranks say that they share one.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use graph_ep::ep_context::rendezvous::{Gone, RendezvousError, ThreadRendezvous};
use graph_ep::ep_context::{ContextError, MemoryAccount, host::HostOptions};
use graph_ep::{
    Adjustments, BodyError, CaptureError, Deadlines, GrowthPolicy, HostBackend, OverflowError,
    OverflowPolicy, Phase, Rank, RecoverySettings, Rendezvous, Step, StepRunner,
};
use graph_ep_tests::HostThreads;
use graph_ep_tests::backend::{PATIENCE, RankEnv, RankResult, TestBackend, patient, threads};
use graph_ep_tests::case::{Case, Skew};
use graph_ep_tests::oracle::StepOracle;
use graph_ep_tests::outcome::{Ended, Ran, by_step};
use graph_ep_tests::rig::Rig;

/// What a rank did, in order: the purposes for which it met others, and what a test notes.
type Heard = Arc<Mutex<Vec<String>>>;

/// The host, its ranks on one device if they `SHARE` it, each on one of its own otherwise.
struct Ranks<const SHARE: bool>;

/// A rendezvous that notes what it is used for.
#[derive(Debug)]
struct Listening {
    inner: ThreadRendezvous,
    heard: Heard,
}

impl Rendezvous for Listening {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn all_gather(
        &self,
        purpose: &str,
        payload: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, RendezvousError> {
        note(&self.heard, purpose);
        self.inner.all_gather(purpose, payload, deadline)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn watch(&self, gone: Gone) {
        self.inner.watch(gone);
    }
}

impl<const SHARE: bool> TestBackend for Ranks<SHARE> {
    type Backend = HostBackend;
    type Rendezvous = Listening;

    const NAME: &'static str = if SHARE { "host, one device" } else { "host, a device each" };

    fn backend(rank: Rank, memory: &MemoryAccount) -> HostBackend {
        let name = if SHARE { "the device".to_owned() } else { format!("device {}", rank.0) };
        let options = HostOptions::new(format!("test rank {}", rank.0)).with_device(name);
        HostBackend::new(options.with_memory(memory.clone()))
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        threads(world, |env: RankEnv<HostThreads>| {
            let rendezvous = Listening { inner: env.rendezvous, heard: Heard::default() };
            body(RankEnv { rendezvous, memory: env.memory })
        })
    }
}

fn note(heard: &Heard, what: &str) {
    heard.lock().unwrap_or_else(PoisonError::into_inner).push(what.to_owned());
}

/// What was heard since this was asked last.
fn take(heard: &Heard) -> Vec<String> {
    std::mem::take(&mut *heard.lock().unwrap_or_else(PoisonError::into_inner))
}

const BEFORE: &str = "before a step is recorded";
const BODY: &str = "recording";
const AFTER: &str = "the recording of a step";

/// Three ranks of which the loaded one changes, with room for one token to begin with.
fn case() -> Case {
    Case { skew: Skew::Rotating, layers: 2, ..Case::new(3) }.capacity(8)
}

fn rounds() -> RecoverySettings {
    RecoverySettings::new().overflow(OverflowPolicy::Rounds).growth(GrowthPolicy::Exact)
}

/// A runner that notes when its body is recorded.
fn runner<const SHARE: bool>(
    rig: &Rig<Ranks<SHARE>>,
    settings: RecoverySettings,
    heard: &Heard,
) -> StepRunner<HostBackend> {
    let (body, heard) = (rig.body(), heard.clone());
    let noted = move |step: &mut Step<'static, HostBackend>| -> Result<(), BodyError> {
        note(&heard, BODY);
        body(step)
    };
    rig.group.runner(settings, noted).expect("in range")
}

/// Runs one step of `runner`, and says what the rank did for it.
fn step<const SHARE: bool>(
    rig: &Rig<Ranks<SHARE>>,
    runner: &mut StepRunner<HostBackend>,
    heard: &Heard,
    step: usize,
) -> (Ran, Vec<String>) {
    take(heard);
    let ran = rig.step(runner, step).expect("it ends");
    (ran, take(heard))
}

/// Steps whose capacity grows ahead of need, on ranks of which one after the other is loaded.
fn growing<const SHARE: bool>() -> Vec<Vec<(Ran, Vec<String>)>> {
    let ahead = Adjustments { look_ahead: Some(1.0), ..Adjustments::default() };
    let case = case();
    let ranks = Ranks::<SHARE>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        assert_eq!(rig.group.dispatcher().shares_devices(), SHARE);
        let mut runner = runner(&rig, rounds().adjustments(ahead), &heard);
        (0..12).map(|number| step(&rig, &mut runner, &heard, number)).collect::<Vec<_>>()
    });
    let steps = by_step(&ranks);
    for (number, ranks) in steps.iter().enumerate() {
        let runs: Vec<_> = ranks.iter().map(|(ran, _)| ran.run.clone()).collect();
        StepOracle::new(&case, number, None).check_outputs(&format!("step {number}"), &runs);
    }
    steps
}

/// Which ranks record before each step: all before the first, then those that have grown.
fn recording(steps: &[Vec<(Ran, Vec<String>)>], number: usize) -> Vec<bool> {
    match number.checked_sub(1) {
        None => vec![true; steps[0].len()],
        Some(before) => steps[before].iter().map(|(ran, _)| ran.growths > 0).collect(),
    }
}

#[test]
fn ranks_that_share_a_device_meet_before_and_after_any_of_them_records() {
    let steps = growing::<true>();
    let (mut alone, mut clean) = (false, false);
    for (number, ranks) in steps.iter().enumerate() {
        let recording = recording(&steps, number);
        for ((_, heard), records) in ranks.iter().zip(&recording) {
            let expected = match (recording.contains(&true), records) {
                (true, true) => vec![BEFORE, BODY, AFTER],
                (true, false) => vec![BEFORE, AFTER],
                (false, _) => vec![],
            };
            assert_eq!(*heard, expected, "step {number}");
        }
        alone |= recording.contains(&true) && recording.contains(&false);
        clean |= !recording.contains(&true);
    }
    assert!(alone, "no rank has grown without another");
    assert!(clean, "no step was launched as it was");
}

#[test]
fn ranks_with_a_device_each_do_not_meet() {
    let steps = growing::<false>();
    for (number, ranks) in steps.iter().enumerate() {
        for ((_, heard), records) in ranks.iter().zip(recording(&steps, number)) {
            let expected = if records { vec![BODY] } else { vec![] };
            assert_eq!(*heard, expected, "step {number}");
        }
    }
    assert!((1..12).any(|number| recording(&steps, number).contains(&true)), "none has grown");
}

#[test]
fn ranks_meet_again_after_an_eager_step_and_without_a_graph() {
    let case = case();
    let ranks = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let mut runner = runner(&rig, rounds(), &heard);
        let mut steps = Vec::new();
        for number in 0..6 {
            let capacity = rig.shape();
            match number {
                2 => {
                    rig.write(10);
                    runner.run_eager().expect("it ends");
                }
                4 => runner.invalidate(),
                _ => {}
            }
            let records = [0, 4].contains(&number) || rig.shape() != capacity;
            steps.push((records, step(&rig, &mut runner, &heard, number).1));
        }
        steps
    });
    let steps = by_step(&ranks);
    for (number, ranks) in steps.iter().enumerate() {
        for (records, heard) in ranks {
            let expected = match (number % 2, records) {
                (0, true) => vec![BEFORE, BODY, AFTER],
                (0, false) => vec![BEFORE, AFTER],
                _ => vec![],
            };
            assert_eq!(*heard, expected, "step {number}");
        }
    }
    let grew = |grew: bool| steps[2].iter().any(|(records, _)| *records == grew);
    assert!(grew(true) && grew(false), "the eager step is to grow some ranks and not all");
}

/// Steps without loops are recorded by each rank for itself; after growth the agreement, which no rank
/// passes before all have recorded, keeps every one of them from launching.
#[test]
fn without_loops_only_the_agreement_on_a_replay_is_waited_for() {
    let case = case();
    let ranks = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let settings = RecoverySettings::new().growth(GrowthPolicy::geometric());
        let mut runner = runner(&rig, settings, &heard);
        step(&rig, &mut runner, &heard, 0)
    });
    for (ran, heard) in &ranks {
        assert!(matches!(ran.ended, Ended::Recovered { eager: false, .. }), "{ran:?}");
        assert_eq!(heard[0], BODY);
        let agreement = "agreement on a replay";
        assert_eq!(heard.last().map(String::as_str), Some(agreement), "{heard:?}");
        assert!(heard.iter().all(|what| [BODY, agreement].contains(&what.as_str())), "{heard:?}");
    }
}

/// Ranks 0 and 2 launch first, and rank 1 when the launches of both have returned. Returns which ranks each
/// missed, if it did.
fn before_rank_1<const SHARE: bool>(deadlines: Deadlines) -> Vec<Option<Vec<u32>>> {
    let case = case();
    let (sender, receiver) = mpsc::channel();
    let receiver = Mutex::new(receiver);
    Ranks::<SHARE>::on_ranks(case.world(), |env| {
        let (sender, heard) = (sender.clone(), env.rendezvous.heard.clone());
        let rig = Rig::with(env, &case.builder(Rank(0)).deadlines(deadlines), &case);
        let mut runner = runner(&rig, rounds(), &heard);
        rig.write(0);
        if rig.rank() == 1 {
            let receiver = receiver.lock().expect("only rank 1 takes it");
            for _ in 0..2 {
                receiver.recv_timeout(2 * PATIENCE).expect("the others come back");
            }
        }
        let launched = runner.launch();
        sender.send(()).expect("somebody listens");
        match launched {
            Ok(launched) => {
                runner.settle(launched).expect("all have launched");
                None
            }
            Err(OverflowError::Context(ContextError::Rendezvous(RendezvousError::Deadline {
                purpose,
                deadline,
                missing,
            }))) => {
                assert_eq!((purpose.as_str(), deadline), (BEFORE, deadlines.of(Phase::Agreement)));
                Some(missing.iter().map(|rank| rank.0).collect())
            }
            Err(error) => panic!("{error:?}"),
        }
    })
}

#[test]
fn a_rank_that_does_not_come_is_named_within_the_deadline() {
    let deadlines = patient().with(Phase::Agreement, Duration::from_millis(500));
    // Rank 1 too finds the group at an end.
    for missed in before_rank_1::<true>(deadlines) {
        assert!(missed.as_ref().is_some_and(|ranks| ranks.contains(&1)), "{missed:?}");
    }
}

#[test]
fn a_launch_waits_for_no_rank_with_another_device() {
    assert_eq!(before_rank_1::<false>(patient()), [None, None, None]);
}

#[test]
fn where_one_rank_cannot_record_none_launches_and_all_can_try_again() {
    let case = case();
    let runs = Ranks::<true>::on_ranks(case.world(), |env| {
        let rig = Rig::new(env, &case);
        let (body, mut fails) = (rig.body(), rig.rank() == 1);
        let once = move |step: &mut Step<'static, HostBackend>| -> Result<(), BodyError> {
            match std::mem::take(&mut fails) {
                true => Err("not yet".into()),
                false => body(step),
            }
        };
        let mut runner = rig.group.runner(rounds(), once).expect("in range");
        rig.write(0);
        match (rig.rank(), runner.launch().expect_err("rank 1 fails")) {
            (1, OverflowError::Capture(CaptureError::Body { rank: Rank(1), .. })) => {}
            (0 | 2, OverflowError::Context(ContextError::Rendezvous(error))) => {
                let text = error.to_string();
                assert!(text.starts_with(&format!("{AFTER}: rank 1 failed")), "{text}");
                assert!(text.contains("not yet"), "{text}");
            }
            (rank, error) => panic!("rank {rank}: {error:?}"),
        }
        rig.step(&mut runner, 0).expect("all can record").run
    });
    StepOracle::new(&case, 0, None).check_outputs("recorded at last", &runs);
}

//! Runners of ranks that share a device record loops at once, and of ranks that do not, each when it likes.
//! On the host, whose ranks say that they share one.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use graph_ep::ep_context::rendezvous::{Gone, RendezvousError, ThreadRendezvous};
use graph_ep::ep_context::{ContextError, MemoryAccount, host::HostOptions};
use graph_ep::{
    Adjustments, BodyError, CaptureError, Deadlines, DispatchError, EmbeddedStep, EngineGraph,
    GrowthPolicy, HostBackend, OverflowError, OverflowPolicy, Phase, Queue, Rank, RecoverySettings,
    Rendezvous, RowSet, Step, StepRunner, StepSpec,
};
use graph_ep_tests::HostThreads;
use graph_ep_tests::backend::{PATIENCE, RankEnv, RankResult, TestBackend, patient, threads};
use graph_ep_tests::case::{Case, Skew};
use graph_ep_tests::engine::Engine;
use graph_ep_tests::inputs::{Inputs, Rows};
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
    RecoverySettings::new().with_overflow(OverflowPolicy::Rounds).with_growth(GrowthPolicy::Exact)
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
        let mut runner = runner(&rig, rounds().with_adjustments(ahead), &heard);
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

/// The engine of a runner, which notes its captures, and changes the capacity of its rank behind the back
/// of the runner when it launches for the `changes_at`th time.
struct Meddling {
    inner: Engine<Ranks<true>>,
    heard: Heard,
    rows: RowSet<HostBackend>,
    direct: Queue<'static, HostBackend>,
    changes_at: Option<u32>,
    launches: u32,
}

impl EngineGraph<HostBackend> for Meddling {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, HostBackend>,
    ) -> Result<EmbeddedStep<HostBackend>, BodyError> {
        note(&self.heard, BODY);
        self.inner.capture(spec)
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.launches += 1;
        if self.changes_at == Some(self.launches) {
            // SAFETY: the engine launches its graphs on this stream alone.
            unsafe { self.rows.plan(self.rows.capacity() + 4)?.commit(&self.direct) }?;
        }
        self.inner.launch()
    }

    fn discard(&mut self) {
        self.inner.discard();
    }
}

#[test]
fn ranks_meet_again_after_a_step_that_one_of_them_ran_from_a_stale_graph() {
    let case = case();
    let runs = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let (group, one) = (&rig.group, rig.rank() == 1);
        let engine = Box::new(Meddling {
            inner: Engine::of(&rig),
            heard: heard.clone(),
            rows: group.rows().clone(),
            direct: rig.direct(),
            changes_at: one.then_some(2),
            launches: 0,
        });
        let (stream, rows) = (group.stream().clone(), group.rows().clone());
        let runner = StepRunner::for_engine(group.dispatcher(), stream, rows, rounds(), engine);
        let mut runner = runner.expect("in range");
        step(&rig, &mut runner, &heard, 0);
        match runner.run() {
            Err(OverflowError::Dispatch(DispatchError::StaleGraph { rank: Rank(1), .. })) => {}
            other => panic!("{other:?}"),
        }
        assert!(take(&heard).is_empty(), "every graph was current before it was launched");
        let (ran, heard) = step(&rig, &mut runner, &heard, 2);
        let expected = if one { vec![BEFORE, BODY, AFTER] } else { vec![BEFORE, AFTER] };
        assert_eq!(heard, expected, "rank {}", rig.rank());
        ran.run
    });
    StepOracle::new(&case, 2, None).check_outputs("captured again", &runs);
}

/// A step that was launched behind one which grows the rows of some ranks, by another runner, is run again
/// when that is over, and first recorded again on these.
#[test]
fn ranks_meet_before_a_step_is_run_again_that_waited_for_another_to_be_recovered() {
    let case = Case { skew: Skew::Hot(0), ..Case::new(3) }.capacity(12);
    let ranks = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let recover = RecoverySettings::new().with_growth(GrowthPolicy::Exact);
        let mut recovering = runner(&rig, recover, &heard);
        let mut rounds = runner(&rig, rounds(), &heard);
        step(&rig, &mut rounds, &heard, 0);
        let capacity = rig.shape();
        rig.write(1);
        let over = recovering.launch().expect("recorded");
        let behind = rounds.launch().expect("recorded");
        recovering.settle(over).expect("there is room to grow");
        take(&heard);
        let report = rounds.settle(behind).expect("it is run again");
        let run = rig.seen_with(1, &report.record);
        (run, rig.shape() != capacity, take(&heard))
    });
    for (rank, (_, grown, heard)) in ranks.iter().enumerate() {
        let expected = if *grown { vec![BEFORE, BODY, AFTER] } else { vec![BEFORE, AFTER] };
        assert_eq!(*heard, expected, "rank {rank}");
    }
    let grew = |grew: bool| ranks.iter().any(|(_, grown, _)| *grown == grew);
    assert!(grew(true) && grew(false), "the step is to grow some ranks and not all");
    let runs: Vec<_> = ranks.into_iter().map(|(run, _, _)| run).collect();
    StepOracle::new(&case, 1, None).check_outputs("behind another", &runs);
}

/// Rank 1 cannot grow when that is due, and a step that was launched before is settled ere all meet. What it
/// then counts towards shrinking has to be what the others count for it.
#[test]
fn ranks_meet_where_one_shrinks_that_could_not_grow_before() {
    // Rows for rank 1, whose capacity of 40 is 48 after the first to all who think that it grew: 1.2 · 36
    // is below the one and not below the other.
    const ROWS: [usize; 8] = [48, 36, 8, 8, 8, 8, 8, 8];
    let case = Case { top_k: 1, tokens: vec![16; 3], ..Case::new(3) }.capacity(40);
    let ranks = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let (rank, rows) = (rig.rank(), rig.group.rows());
        let adjustments = Adjustments {
            look_ahead: Some(1.0),
            shrink_after: NonZeroU32::new(2),
            // Only rank 1 shrinks.
            min_rows: if rank == 1 { 0 } else { 40 },
        };
        let mut runner = runner(&rig, rounds().with_adjustments(adjustments), &heard);
        let launch = |runner: &mut StepRunner<HostBackend>, total: usize| {
            let own = total / 3 + usize::from(rank < total % 3);
            let ids = (0..16).map(|token| if token < own { 2 } else { -1 }).collect();
            let values = Rows::Values(vec![1.0; 16 * case.hidden]);
            rig.write_layer(0, &Inputs::of(&case, values, ids, vec![1.0; 16]));
            take(&heard);
            (runner.launch().expect("all can record"), take(&heard))
        };
        let (first, _) = launch(&mut runner, ROWS[0]);
        let (second, _) = launch(&mut runner, ROWS[1]);
        // As where there is no memory: another change is planned.
        let held = rows.plan(rows.capacity()).expect("none is planned");
        runner.settle(first).expect("it ends");
        held.cancel();
        runner.settle(second).expect("it ends");
        let steps = ROWS[2..].iter().map(|total| {
            let (launched, heard) = launch(&mut runner, *total);
            let report = runner.settle(launched).expect("it ends");
            (report.capacity_before, heard)
        });
        steps.collect::<Vec<_>>()
    });
    for (number, ranks) in by_step(&ranks).iter().enumerate() {
        let meets = |heard: &Vec<String>| heard.first().is_some_and(|what| what == BEFORE);
        let all = meets(&ranks[0].1);
        assert!(ranks.iter().all(|(_, heard)| meets(heard) == all), "{number}: {ranks:?}");
        assert!(all || ranks.iter().all(|(_, heard)| heard.is_empty()), "{number}: {ranks:?}");
    }
    let capacities: Vec<_> = ranks[1].iter().map(|(capacity, _)| *capacity).collect();
    assert_eq!(capacities.first(), Some(&40), "it could not grow");
    assert_eq!(capacities.last(), Some(&12), "it has shrunk");
}

/// Ranks to which nothing comes keep what a window takes, so that later steps can be recorded.
#[test]
fn rounds_shrink_no_further_than_one_token_needs() {
    let case = Case { top_k: 1, ..Case::new(2) }.capacity(40);
    let capacities = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let shrink_after = NonZeroU32::new(1);
        let adjustments = Adjustments { shrink_after, ..Adjustments::default() };
        let mut runner = runner(&rig, rounds().with_adjustments(adjustments), &heard);
        let values = Rows::Values(vec![1.0; 5 * case.hidden]);
        rig.write_layer(0, &Inputs::of(&case, values, vec![-1; 5], vec![1.0; 5]));
        runner.run().expect("it ends");
        let shrunk = runner.rows().capacity();
        rig.step(&mut runner, 1).expect("it can be recorded");
        (shrunk, rig.group.dispatcher().least_rows())
    });
    assert_eq!(capacities, [(4, 4); 2]);
}

/// Steps without loops are recorded by each rank for itself; after growth the agreement, which no rank
/// passes before all have recorded, keeps every one of them from launching.
#[test]
fn without_loops_only_the_agreement_on_a_replay_is_waited_for() {
    let case = case();
    let ranks = Ranks::<true>::on_ranks(case.world(), |env| {
        let heard = env.rendezvous.heard.clone();
        let rig = Rig::new(env, &case);
        let settings = RecoverySettings::new().with_growth(GrowthPolicy::geometric());
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

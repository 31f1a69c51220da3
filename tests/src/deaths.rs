//! Ranks that are killed, stopped, or never started, in every phase: each of the others names the
//! culprit and the phase within its deadline, ends in order, and leaves nothing behind.
//!
//! Only processes can die so; a body that returns is held to leaving nothing by
//! [`processes::run`](crate::processes::run).

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use graph_ep::ep_context::error::chain;
use graph_ep::ep_context::rendezvous::{Gone, RendezvousError, TcpRendezvous};
use graph_ep::ep_context::{Fault, FaultKind, MemoryAccount};
use graph_ep::{
    BodyError, Deadlines, DispatchError, Phase, Rank, RecoveryHooks, RecoverySettings, Rendezvous,
    Step, StepOptions, StepRecord,
};
use rustix::process::{Signal, getpid, kill_process};

use crate::backend::{PATIENCE, RankEnv};
use crate::case::{Case, Skew};
use crate::cuda_processes::CudaProcesses;
use crate::harness::Check;
use crate::meeting::Meeting;
use crate::processes::{Ending, HostProcesses, Processes, run_leaving};
use crate::rig::Rig;

/// A backend whose ranks are processes, and can die.
pub trait Mortal: Processes {
    /// Ranks of a group, of which one dies.
    const WORLD: usize;
    /// Of so many ways to die, one is tried.
    const ONE_OF: usize;
}

impl Mortal for HostProcesses {
    const WORLD: usize = 3;
    const ONE_OF: usize = 1;
}

impl Mortal for CudaProcesses {
    const WORLD: usize = 2;
    // A process takes its time to start on a GPU.
    const ONE_OF: usize = 5;
}

/// How long a step may take. Its clock runs only once all ranks have launched it.
const STEP: Duration = Duration::from_secs(2);

/// How long ranks wait for each other's hosts: far longer than those that live are apart.
const HOSTS: Duration = Duration::from_secs(4);

/// How much longer than its deadline any of this may take on a busy machine: what the rendezvous adds
/// where rank 0 is silent, and time to run.
const SLACK: Duration = Duration::from_secs(20);

/// The checks, for a harness that forks.
pub fn checks<T: Mortal>() -> Vec<Check> {
    vec![
        Check { name: "deaths::never_started", run: never_started::<T> },
        Check { name: "deaths::killed_anywhere_in_set_up", run: killed_anywhere_in_set_up::<T> },
        Check { name: "deaths::stopped_in_set_up", run: stopped_in_set_up::<T> },
        Check { name: "deaths::in_a_step", run: in_a_step::<T> },
        Check { name: "deaths::at_any_moment_of_a_step", run: at_any_moment_of_a_step::<T> },
        Check { name: "deaths::in_an_agreement", run: in_an_agreement::<T> },
        Check { name: "deaths::while_growing", run: while_growing::<T> },
        Check { name: "deaths::at_the_end", run: at_the_end::<T> },
        Check { name: "deaths::a_rank_that_ends_early", run: a_rank_that_ends_early::<T> },
    ]
}

/// Through which the victim learns that the others have come somewhere, so that nothing of what it
/// still had to tell them is lost.
struct Gate {
    reader: PipeReader,
    writer: PipeWriter,
}

impl Gate {
    fn new() -> Self {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        Self { reader, writer }
    }

    /// Says that this rank has come.
    fn pass(&self) {
        (&self.writer).write_all(&[1]).expect("the pipe is open");
    }

    /// Waits for all of so many others.
    fn wait(&self, others: usize) {
        (&self.reader).read_exact(&mut vec![0; others]).expect("the pipe is open");
    }
}

fn die(how: Signal) {
    kill_process(getpid(), how).expect("a process may signal itself");
    // A signal to oneself is there before the call returns; a stop may take effect a moment later.
    thread::sleep(PATIENCE);
}

/// Ways to die, and ranks to do so: the one that leads the rendezvous, and another. Either way and either
/// rank is among them.
fn victims<T: Mortal>() -> impl Iterator<Item = (usize, Signal)> {
    let all =
        [(0, Signal::KILL), (0, Signal::STOP), (1, Signal::KILL), (1, Signal::STOP)].into_iter();
    all.step_by(T::ONE_OF.min(3))
}

/// Runs `body` on every rank, of which `victim` is to die in it; returns what the others made of it.
fn survivors<T: Mortal, R: crate::RankResult>(
    what: &str,
    (victim, how): (usize, Signal),
    body: impl Fn(RankEnv<T>) -> R,
) -> Vec<R> {
    T::require(T::WORLD);
    let (meeting, joined) = (Meeting::new(T::WORLD), Gate::new());
    let endings = run_leaving(T::LEAVES, T::WORLD, |rank| {
        let rendezvous = meeting.join(rank);
        match rank == victim {
            true => joined.wait(T::WORLD - 1),
            false => joined.pass(),
        }
        body(RankEnv { rendezvous, memory: MemoryAccount::new(None) })
    });
    let mut results = Vec::new();
    for (rank, ending) in endings.into_iter().enumerate() {
        match ending {
            Ending::Killed(signal) if rank == victim => assert_eq!(signal, how, "{what}"),
            Ending::Stopped if rank == victim => assert_eq!(how, Signal::STOP, "{what}"),
            Ending::Returned(result) if rank != victim => results.push(result),
            Ending::Said(text) => panic!("{what}: rank {rank}: {text}"),
            Ending::Killed(signal) => panic!("{what}: rank {rank} was ended by {signal:?}"),
            Ending::Returned(_) => panic!("{what}: rank {rank} returned"),
            Ending::Stopped | Ending::Hung => panic!("{what}: rank {rank} did not end"),
        }
    }
    results
}

/// A rank that never comes is named when the others give up.
fn never_started<T: Mortal>() {
    T::require(T::WORLD);
    for absent in [0, T::WORLD - 1] {
        let meeting = Meeting::new(T::WORLD);
        let endings = run_leaving(T::LEAVES, T::WORLD, |rank| {
            let start = Instant::now();
            if rank == absent {
                return String::new();
            }
            let error = meeting.try_join(rank, HOSTS).expect_err("a rank is missing");
            assert!(start.elapsed() < HOSTS + SLACK, "{:?}", start.elapsed());
            error
        });
        for (rank, ending) in endings.into_iter().enumerate() {
            match ending {
                Ending::Returned(text) if rank != absent => {
                    assert!(text.contains(&format!("rank {absent} did not come")), "{text}");
                }
                Ending::Returned(_) => {}
                other => panic!("rank {rank}: {other:?}"),
            }
        }
    }
}

/// A rendezvous whose rank dies in place of one of its calls.
#[derive(Debug)]
struct Dying {
    inner: TcpRendezvous,
    calls: Arc<AtomicUsize>,
    dies: Option<(usize, Signal)>,
}

impl Rendezvous for Dying {
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
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some((at, how)) = self.dies
            && call == at
        {
            die(how);
        }
        self.inner.all_gather(purpose, payload, deadline)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn watch(&self, gone: Gone) {
        self.inner.watch(gone);
    }
}

/// Builds a group of which a rank dies at some call; returns how many calls this rank made, and what
/// it was told.
fn set_up<T: Mortal>(
    env: RankEnv<T>,
    victim: Option<(usize, usize, Signal)>,
) -> (usize, Option<String>) {
    let case = Case { lanes: 2, ..Case::new(T::WORLD) };
    let (rank, start) = (env.rank(), Instant::now());
    let calls = Arc::new(AtomicUsize::new(0));
    let dies = victim.filter(|(victim, ..)| *victim == rank.index()).map(|(_, at, how)| (at, how));
    let rendezvous = Dying { inner: env.rendezvous, calls: calls.clone(), dies };
    let deadlines = Deadlines::all(PATIENCE).with(Phase::Setup, HOSTS);
    let builder = case.builder(rank).deadlines(deadlines);
    let built = builder.build(T::backend(rank, &env.memory), rendezvous);
    let told = built.err().map(|error| chain(&error));
    assert!(start.elapsed() < HOSTS + SLACK, "{:?}", start.elapsed());
    (calls.load(Ordering::Relaxed), told)
}

/// How many times ranks meet in a set-up that succeeds.
fn calls_of_set_up<T: Mortal>() -> usize {
    T::require(T::WORLD);
    let calls = T::on_ranks(T::WORLD, |env| set_up(env, None));
    assert!(calls.iter().all(|call| call.1.is_none() && call.0 == calls[0].0), "{calls:?}");
    calls[0].0
}

fn named(what: &str, victim: usize, told: Vec<(usize, Option<String>)>) {
    for (_, told) in told {
        let told = told.unwrap_or_default();
        assert!(told.contains(&format!("rank {victim}")), "{what}: {told:?}");
    }
}

/// A rank that is killed between any two steps of the set-up is named at once.
fn killed_anywhere_in_set_up<T: Mortal>() {
    let calls = calls_of_set_up::<T>();
    assert!(calls > 6, "{calls} calls");
    for victim in [0, 1] {
        for at in (victim..calls).step_by(T::ONE_OF) {
            let what = format!("rank {victim} killed at call {at} of {calls}");
            let death = (victim, Signal::KILL);
            let told = survivors::<T, _>(&what, death, |env| {
                set_up(env, Some((victim, at, Signal::KILL)))
            });
            named(&what, victim, told);
        }
    }
}

/// One that is stopped is named when the deadline of set-up has passed.
fn stopped_in_set_up<T: Mortal>() {
    let calls = calls_of_set_up::<T>();
    let stops = [(1, 0), (1, calls / 2), (1, calls - 1), (0, calls / 2)];
    for (victim, at) in stops.into_iter().step_by(T::ONE_OF) {
        let what = format!("rank {victim} stopped at call {at} of {calls}");
        let death = (victim, Signal::STOP);
        let told =
            survivors::<T, _>(&what, death, |env| set_up(env, Some((victim, at, Signal::STOP))));
        named(&what, victim, told);
    }
}

/// Deadlines of a step of which a rank may be stopped.
fn short() -> Deadlines {
    Deadlines::all(STEP)
        .with(Phase::Setup, PATIENCE)
        .with(Phase::Record, PATIENCE)
        .with(Phase::Agreement, HOSTS)
}

fn rig<T: Mortal>(env: RankEnv<T>, case: &Case, deadlines: Deadlines) -> Rig<T> {
    Rig::with(env, &case.builder(Rank(0)).deadlines(deadlines), case)
}

fn fault_of<T: Mortal>(rig: &Rig<T>, number: u32) -> Fault {
    match rig.wait(number) {
        Err(DispatchError::Fault(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// A rank that has done only its part before some phase of a step, and then dies. One that is killed is
/// noticed long before any deadline.
fn in_a_step<T: Mortal>() {
    let whole = Case::new(T::WORLD);
    let open = Case { ends_in_dispatch: true, ..whole.clone() };
    for (phase, case, dispatches) in [
        (Phase::Dispatch, &whole, false),
        (Phase::Combine, &whole, true),
        (Phase::Acknowledge, &open, true),
    ] {
        for (victim, how) in victims::<T>() {
            let (what, launched) = (format!("{phase}, rank {victim}, {how:?}"), Gate::new());
            let (deadlines, kind) = match how {
                Signal::KILL => (Deadlines::all(PATIENCE), FaultKind::Gone),
                _ => (short(), FaultKind::Timeout),
            };
            let faults = survivors::<T, _>(&what, (victim, how), |env| {
                let rig = rig(env, case, deadlines);
                rig.write(0);
                let context = rig.group.context();
                let meet = || context.rendezvous().barrier("launched", PATIENCE);
                let suspended = context.suspend_deadlines();
                if rig.rank() == victim {
                    let dispatcher = rig.group.dispatcher();
                    let mut step =
                        Step::begin(dispatcher, rig.direct(), StepOptions::new()).expect("queued");
                    if dispatches {
                        rig.program().dispatch(&mut step, 0).expect("queued");
                        graph_ep::Backend::synchronize(context.backend(), rig.group.stream())
                            .expect("all have dispatched");
                    }
                    meet().expect("all are there");
                    launched.wait(T::WORLD - 1);
                    die(how);
                }
                let number = rig.launch(StepOptions::new()).expect("queued");
                meet().expect("all are there");
                launched.pass();
                let start = Instant::now();
                drop(suspended);
                let fault = fault_of(&rig, number);
                assert!(start.elapsed() < STEP + SLACK, "{:?}", start.elapsed());
                // The group stays as it is: later steps say the same.
                let later = rig.launch(StepOptions::new()).expect("queued");
                assert_eq!(fault_of(&rig, later), fault);
                (fault.culprit.index(), fault.phase.index(), fault.kind == kind)
            });
            let expected = vec![(victim, phase.index(), true); T::WORLD - 1];
            assert_eq!(faults, expected, "{what}");
        }
    }
}

/// A rank that is killed while steps run one after the other, wherever that is: the others name it.
fn at_any_moment_of_a_step<T: Mortal>() {
    let case = Case { layers: 4, lanes: 2, ..Case::new(T::WORLD) };
    for delay in [0, 300, 700, 1500, 4000] {
        let victim = delay as usize % 2;
        let what = format!("rank {victim} killed after {delay} µs");
        let culprits = survivors::<T, _>(&what, (victim, Signal::KILL), |env| {
            let rig = rig(env, &case, Deadlines::all(PATIENCE));
            let graph = rig.record(StepOptions::new()).expect("it can be recorded");
            rig.write(0);
            rig.wait(graph.replay(rig.group.stream()).expect("current")).expect("it ends");
            if rig.rank() == victim {
                thread::spawn(move || {
                    thread::sleep(Duration::from_micros(delay));
                    die(Signal::KILL);
                });
            }
            loop {
                let number = graph.replay(rig.group.stream()).expect("current");
                match rig.wait(number) {
                    Ok(_) => {}
                    Err(DispatchError::Fault(fault)) => return fault.culprit.index(),
                    Err(other) => panic!("{other:?}"),
                }
            }
        });
        assert_eq!(culprits, vec![victim; T::WORLD - 1], "{what}");
    }
}

fn overflowing(world: usize) -> Case {
    Case { skew: Skew::Hot(0), ..Case::new(world) }.capacity(4)
}

/// Runs a step that overflows; what the runner says of the rank that is gone.
fn refusal<T: Mortal>(rig: &Rig<T>) -> String {
    let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
    let start = Instant::now();
    let error = chain(&runner.run().expect_err("a rank is gone"));
    assert!(start.elapsed() < HOSTS + SLACK, "{:?}", start.elapsed());
    // Nothing was changed by a growth that all did not agree on.
    assert_eq!(rig.group.rows().capacity(), 4);
    error
}

fn names(what: &str, victim: usize, told: &[String]) {
    let name = format!("rank {victim}");
    for text in told {
        // One that is killed may be noticed before the survivor's own step has ended.
        let placed = text.contains("agreement") || text.contains("ended without leaving");
        assert!(text.contains(&name) && placed, "{what}: {text}");
    }
}

/// A rank that dies instead of agreeing on a replay.
fn in_an_agreement<T: Mortal>() {
    for (victim, how) in victims::<T>() {
        let what = format!("rank {victim}, {how:?}");
        let told = survivors::<T, _>(&what, (victim, how), |env| {
            let rig = rig(env, &overflowing(T::WORLD), short());
            rig.write(0);
            if rig.rank() == victim {
                let _runner = rig.runner(RecoverySettings::new()).expect("in range");
                let number = rig.launch(StepOptions::new()).expect("queued");
                rig.wait(number).expect("it ends");
                die(how);
            }
            refusal(&rig)
        });
        names(&what, victim, &told);
    }
}

struct Dies(Signal);

impl RecoveryHooks for Dies {
    fn before_replay(&mut self, _: &StepRecord, _: u32) -> Result<(), BodyError> {
        die(self.0);
        Ok(())
    }
}

/// A rank that dies when it has mapped memory for a growth, before it says so.
fn while_growing<T: Mortal>() {
    for (victim, how) in victims::<T>() {
        let what = format!("rank {victim}, {how:?}");
        let told = survivors::<T, _>(&what, (victim, how), |env| {
            let rig = rig(env, &overflowing(T::WORLD), short());
            rig.write(0);
            if rig.rank() == victim {
                let runner = rig.runner(RecoverySettings::new()).expect("in range");
                let _ = runner.hooks(Dies(how)).run();
            }
            refusal(&rig)
        });
        names(&what, victim, &told);
    }
}

/// A rank that dies when all work is done: the others leave as if it had not.
fn at_the_end<T: Mortal>() {
    for (victim, how) in victims::<T>() {
        let (what, came) = (format!("rank {victim}, {how:?}"), Gate::new());
        survivors::<T, _>(&what, (victim, how), |env| {
            let rig = rig(env, &Case::new(T::WORLD), short());
            rig.run_eager(0);
            rig.group.context().rendezvous().barrier("the end", PATIENCE).expect("all are there");
            if rig.rank() == victim {
                came.wait(T::WORLD - 1);
                die(how);
            }
            came.pass();
            let start = Instant::now();
            drop(rig);
            assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());
        });
    }
}

/// A rank that leaves in order while the others still run: they name it, in whichever call they are.
fn a_rank_that_ends_early<T: Mortal>() {
    T::require(T::WORLD);
    let told = T::on_ranks(T::WORLD, |env| {
        let rig = rig(env, &Case::new(T::WORLD), short());
        rig.run_eager(0);
        if rig.rank() == 1 {
            return None;
        }
        let number = rig.launch(StepOptions::new()).expect("queued");
        let fault = fault_of(&rig, number);
        let rendezvous = rig.group.context().rendezvous();
        let left = rendezvous.barrier("anything", PATIENCE).expect_err("a rank has left");
        Some((fault.culprit.0, fault.phase.index(), left.to_string()))
    });
    for (culprit, phase, left) in told.into_iter().flatten() {
        assert_eq!((culprit, phase), (1, Phase::Dispatch.index()));
        assert!(left.contains("rank 1"), "{left}");
    }
}

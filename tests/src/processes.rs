//! Ranks as processes of their own: forked from the process that runs the check, which has to be
//! without other threads; see [`harness`](crate::harness). On the host backend; those on GPUs are
//! [`cuda_processes`](crate::cuda_processes).
//!
//! A rank runs the body of the check as a thread would, since all of the check's memory is a copy in
//! its process; it meets the others over TCP, and sends what it returns through a pipe. When a body
//! has returned on the host, its process must be as it was before: without threads, descriptors or
//! mappings that it did not have.

use std::io::{PipeReader, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::host::HostOptions;
use graph_ep::ep_context::rendezvous::TcpRendezvous;
use graph_ep::{HostBackend, Rank};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

use crate::backend::{RankEnv, RankResult, TestBackend, said};
use crate::fork::{self, Status};
use crate::held::Held;
use crate::meeting::Meeting;

/// The longest that the ranks of a check may take, before they are killed.
pub(crate) const LONGEST: Duration = Duration::from_secs(240);

/// A backend whose ranks are processes.
pub trait Processes: TestBackend<Rendezvous = TcpRendezvous> {
    /// What a rank may still hold when its body has returned.
    const LEAVES: Leaves;

    /// Skips the check that runs if there is not what so many ranks need.
    fn require(world: usize);

    /// How many [workers](crate::workers) there are, where ranks are those.
    fn workers() -> usize {
        Self::most_ranks()
    }
}

/// The host backend, its ranks as processes.
#[derive(Clone, Copy, Debug)]
pub struct HostProcesses;

/// How the process of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending<R> {
    /// Its body returned this.
    Returned(R),
    /// Its body panicked, or something was left behind when it had returned.
    Said(String),
    /// A signal ended it.
    Killed(Signal),
    /// It was stopped, and killed once the others had ended.
    Stopped,
    /// It ran for too long.
    Hung,
}

impl TestBackend for HostProcesses {
    type Backend = HostBackend;
    type Rendezvous = TcpRendezvous;

    const NAME: &'static str = "host, processes";

    fn backend(rank: Rank, memory: &MemoryAccount) -> HostBackend {
        let options = HostOptions::new(format!("test rank {}", rank.0));
        HostBackend::new(options.with_memory(memory.clone()))
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        on_processes(world, body)
    }
}

impl Processes for HostProcesses {
    const LEAVES: Leaves = Leaves::Nothing;

    fn require(_world: usize) {}

    fn workers() -> usize {
        // Each of them judges what all return, so more would make a suite slow; and no check needs more.
        3
    }
}

/// Runs `body` on processes that are the ranks of a group; see [`TestBackend::try_on_ranks`].
pub fn on_processes<T: Processes, R: RankResult>(
    world: usize,
    body: impl Fn(RankEnv<T>) -> R + Send + Sync,
) -> Vec<Result<R, String>> {
    T::require(world);
    let meeting = Meeting::new(world);
    let endings = run_leaving(T::LEAVES, world, |rank| {
        body(RankEnv { rendezvous: meeting.join(rank), memory: MemoryAccount::new(None) })
    });
    let outcome = |ending| match ending {
        Ending::Returned(result) => Ok(result),
        Ending::Said(text) => Err(text),
        Ending::Killed(signal) => Err(format!("ended by {signal:?}")),
        Ending::Stopped => Err("stopped".to_owned()),
        Ending::Hung => Err(format!("did not end within {LONGEST:?}")),
    };
    endings.into_iter().map(outcome).collect()
}

/// What a process may still hold when its body has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// No thread, descriptor or shared mapping that it did not hold before.
    Nothing,
    /// Whatever it likes: the CUDA driver keeps what it has opened until its process ends.
    Anything,
}

/// Runs `body` in a process for each of `ranks`, and waits for all of them. Nothing may be left behind.
///
/// # Panics
///
/// If this process has other threads, or the system refuses processes or pipes.
pub fn run<R: RankResult>(ranks: usize, body: impl Fn(usize) -> R) -> Vec<Ending<R>> {
    run_leaving(Leaves::Nothing, ranks, body)
}

/// Runs `body` in a process for each of `ranks`, and waits for all of them.
///
/// # Panics
///
/// As [`run`].
pub fn run_leaving<R: RankResult>(
    leaves: Leaves,
    ranks: usize,
    body: impl Fn(usize) -> R,
) -> Vec<Ending<R>> {
    let mut children: Vec<Child> = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let mut reader = Some(reader);
        let id = fork::start(|| {
            // What is for the parent.
            children.iter_mut().for_each(|child| child.pipe = None);
            reader = None;
            let told = outcome(leaves, || body(rank));
            // Where nobody reads any more, nobody wants to know.
            let _ = writer.write_all(&postcard::to_allocvec(&told).unwrap_or_default());
        });
        if let Some(reader) = &reader {
            let flags = rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(reader, flags).expect("a pipe can be read without waiting");
        }
        children.push(Child { id, pipe: reader, told: Vec::new(), status: None });
    }
    watch(&mut children);
    children.into_iter().map(Child::ending).collect()
}

/// What `body` returned, or what it said when it panicked; or what it left behind and may not.
pub(crate) fn outcome<R>(leaves: Leaves, body: impl FnOnce() -> R) -> Result<R, String> {
    let before = Held::now();
    let result = catch_unwind(AssertUnwindSafe(body)).map_err(said)?;
    if leaves == Leaves::Nothing {
        before.again().map_err(|now| format!("left behind: {now:?} after {before:?}"))?;
    }
    Ok(result)
}

#[derive(Debug)]
struct Child {
    id: Pid,
    pipe: Option<PipeReader>,
    told: Vec<u8>,
    status: Option<Status>,
}

/// Reads what the children tell until all have ended, or none is left that could.
fn watch(children: &mut [Child]) {
    let start = Instant::now();
    loop {
        for child in children.iter_mut() {
            child.look();
        }
        let running = |child: &&mut Child| child.status.is_none();
        if children.iter_mut().find(running).is_none() {
            break;
        }
        if start.elapsed() > LONGEST {
            for child in children.iter_mut().filter(|child| child.status.is_none()) {
                child.status = Some(Status::Hung);
            }
            break;
        }
        let pipes = children.iter().filter_map(|child| child.pipe.as_ref());
        let mut pipes: Vec<_> = pipes.map(|pipe| PollFd::new(pipe, PollFlags::IN)).collect();
        // An end is seen by its pipe; a stop is only looked for.
        let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let _ = poll(&mut pipes, Some(&moment));
    }
    for child in children {
        if matches!(child.status, Some(Status::Stopped | Status::Hung)) {
            fork::kill(child.id);
        }
    }
}

impl Child {
    /// Takes note of what it has told, and of its end.
    fn look(&mut self) {
        self.read();
        if self.status.is_some() {
            return;
        }
        self.status = fork::status(self.id);
        if self.status.is_some() {
            self.read();
        }
    }

    fn read(&mut self) {
        let mut part = [0; 1 << 16];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut part) {
                Ok(0) => self.pipe = None,
                Ok(bytes) => self.told.extend(&part[..bytes]),
                Err(_) => return,
            }
        }
    }

    fn ending<R: RankResult>(self) -> Ending<R> {
        match self.status {
            Some(Status::Stopped) => Ending::Stopped,
            Some(Status::Hung) | None => Ending::Hung,
            Some(Status::Killed(signal)) => match Signal::from_named_raw(signal) {
                Some(signal) => Ending::Killed(signal),
                None => Ending::Said(format!("ended by signal {signal}")),
            },
            Some(Status::Ended) => match postcard::from_bytes(&self.told) {
                Ok(Ok(result)) => Ending::Returned(result),
                Ok(Err(said)) => Ending::Said(said),
                Err(error) => Ending::Said(format!("told nothing that can be read: {error}")),
            },
        }
    }
}

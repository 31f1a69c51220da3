//! Ranks as processes of their own: forked from the process that runs the check, which has to be
//! without other threads; see [`harness`](crate::harness). On the host backend; those on GPUs are
//! [`cuda_processes`](crate::cuda_processes).
//!
//! A rank runs the body of the check as a thread would, since all of the check's memory is a copy in
//! its process; it meets the others over TCP, and sends what it returns through a pipe. When a body
//! has returned on the host, its process must be as it was before: without threads, descriptors or
//! mappings that it did not have.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io::{PipeReader, Read, Write};
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::host::HostOptions;
use graph_ep::ep_context::rendezvous::{TcpConfig, TcpRendezvous, Token};
use graph_ep::{HostBackend, Rank};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, Signal, WaitOptions, getppid, kill_process, set_parent_process_death_signal, waitpid,
};

use crate::backend::{PATIENCE, RankEnv, RankResult, TestBackend, said};

// The standard library links the C library in any case, and has no wrapper of these two.
unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}

/// The longest that the ranks of a check may take, before they are killed.
const LONGEST: Duration = Duration::from_secs(240);

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

/// Where the ranks of a group meet: known to them alone.
#[derive(Clone, Debug)]
pub struct Meeting {
    world: usize,
    ports: Vec<u16>,
    group: String,
    token: Option<Token>,
}

impl Meeting {
    /// A place that is free now.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn new(world: usize) -> Self {
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr());
        let first = free.expect("a port").port();
        // Should somebody take it meanwhile, one of the next will do.
        let ports = (first..=u16::MAX).take(8).collect();
        let secret: [u64; 2] = [0; 2].map(|_: u64| RandomState::new().build_hasher().finish());
        let [group, token] = secret.map(|word| format!("{word:016x}"));
        Self { world, ports, group, token: Token::new(token) }
    }

    /// The handle of `rank`.
    ///
    /// # Panics
    ///
    /// If the ranks do not meet.
    pub fn join(&self, rank: usize) -> TcpRendezvous {
        self.try_join(rank, PATIENCE).expect("the ranks meet")
    }

    /// The same, within `deadline`.
    ///
    /// # Errors
    ///
    /// What the rendezvous reports, in words.
    pub fn try_join(&self, rank: usize, deadline: Duration) -> Result<TcpRendezvous, String> {
        let ports = self.ports.iter().copied();
        let config = TcpConfig::new(Rank::from_index(rank), self.world, "127.0.0.1", ports)
            .and_then(|config| config.with_group(self.group.clone()));
        let config = config.map_err(|error| error.to_string())?.with_token(self.token.clone());
        TcpRendezvous::meet(&config, deadline).map_err(|error| error.to_string())
    }
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
        on_processes(Leaves::Nothing, world, body)
    }
}

/// Runs `body` on processes that are the ranks of a group; see [`TestBackend::try_on_ranks`].
pub fn on_processes<T, R>(
    leaves: Leaves,
    world: usize,
    body: impl Fn(RankEnv<T>) -> R + Send + Sync,
) -> Vec<Result<R, String>>
where
    T: TestBackend<Rendezvous = TcpRendezvous>,
    R: RankResult,
{
    let meeting = Meeting::new(world);
    let endings = run_leaving(leaves, world, |rank| {
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
    assert_eq!(Held::now().threads, 1, "a process with other threads cannot be forked");
    let mut children: Vec<Child> = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let parent = rustix::process::getpid();
        // SAFETY: this process has one thread, as was just seen, so the child has all that its memory
        // speaks of. It returns from nothing that was called before: it ends below.
        let id = unsafe { fork() };
        if id != 0 {
            let id = Pid::from_raw(id).expect("the system has no more processes");
            let flags = rustix::fs::OFlags::NONBLOCK;
            rustix::fs::fcntl_setfl(&reader, flags).expect("a pipe can be read without waiting");
            children.push(Child { id, pipe: Some(reader), told: Vec::new(), status: None });
            continue;
        }
        // The handles of its elder siblings are for the parent.
        children.iter_mut().for_each(|child| child.pipe = None);
        drop(reader);
        let orphaned = set_parent_process_death_signal(Some(Signal::KILL)).is_err()
            || getppid() != Some(parent);
        if !orphaned {
            let told = tell(leaves, || body(rank));
            // Where nobody reads any more, nobody wants to know.
            let _ = writer.write_all(&told);
        }
        drop(writer);
        // SAFETY: ends the process, whose memory is nobody else's.
        unsafe { _exit(0) }
    }
    watch(&mut children);
    children.into_iter().map(Child::ending).collect()
}

/// Runs `body` and encodes what it returned, or what it said when it panicked.
fn tell<R: RankResult>(leaves: Leaves, body: impl FnOnce() -> R) -> Vec<u8> {
    let before = Held::now();
    let mut result = catch_unwind(AssertUnwindSafe(body)).map_err(said);
    if result.is_ok() && leaves == Leaves::Nothing {
        result = before
            .again()
            .map_err(|now| format!("left behind: {now:?} after {before:?}"))
            .and(result);
    }
    postcard::to_allocvec(&result).unwrap_or_default()
}

/// What a process holds that has to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Threads.
    pub threads: usize,
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings of memory that ranks share.
    pub shared: usize,
}

impl Held {
    /// What this process holds.
    ///
    /// # Panics
    ///
    /// If the system does not say.
    pub fn now() -> Self {
        let entries = |path| fs::read_dir(path).expect("proc is mounted").count();
        let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
        Self {
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
            shared: maps.lines().filter(|line| line.contains("memfd:ep-context")).count(),
        }
    }

    /// Waits until this process holds no more than this again: a thread that was joined may stay in
    /// the system's list for a moment. What graphs of engines kept is given back because this asks for it.
    ///
    /// # Errors
    ///
    /// What it holds, if that stays more.
    pub fn again(&self) -> Result<(), Self> {
        let start = Instant::now();
        loop {
            graph_ep::ep_context::reclaim();
            let now = Self::now();
            // A thread that was about to go may have been counted before.
            if now.threads <= self.threads
                && now.descriptors <= self.descriptors
                && now.shared <= self.shared
            {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(now);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[derive(Debug)]
struct Child {
    id: Pid,
    pipe: Option<PipeReader>,
    told: Vec<u8>,
    status: Option<Status>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ended,
    Killed(i32),
    Stopped,
    Hung,
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
            // Its number is its own until it has been waited for.
            let _ = kill_process(child.id, Signal::KILL);
            let _ = waitpid(Some(child.id), WaitOptions::empty());
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
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        if let Ok(Some((_, status))) = waitpid(Some(self.id), options) {
            self.status = Some(match status.terminating_signal() {
                Some(signal) => Status::Killed(signal),
                None if status.stopped() => Status::Stopped,
                None => Status::Ended,
            });
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

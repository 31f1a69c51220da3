//! What a backend brings to be tested, and how its ranks are run.

use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::host::HostOptions;
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{
    Backend, Deadlines, Error, ExpertParallel, ExpertParallelBuilder, HostBackend, Rank,
    Rendezvous, ThreadGroup, Transfer,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::harness;
use crate::workers::is_echo;

/// The most that anything in the suite waits for. It ends a test that hangs and decides no outcome:
/// far longer than any step takes on a busy machine with more ranks than cores.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a rank returns to the check that runs it: plain data, which could come from another process.
pub trait RankResult: Send + Serialize + DeserializeOwned {}

impl<R: Send + Serialize + DeserializeOwned> RankResult for R {}

/// A backend under test, and the way in which its ranks are started.
pub trait TestBackend: Sized + 'static {
    /// The device.
    type Backend: Backend;
    /// How the ranks meet.
    type Rendezvous: Rendezvous + 'static;

    /// What the suite is called in messages.
    const NAME: &'static str;

    /// Whether an operation of a device may fail while it runs without taking other tests with it.
    const OPERATIONS_MAY_BREAK: bool = true;

    /// The bytes of device memory that are mapped at a time, or a multiple of them: growth that ends
    /// in a piece that is mapped needs no memory.
    const PAGE_BYTES: usize = 4096;

    /// How rows get from rank to rank.
    const TRANSFER: Transfer = Transfer::Auto;

    /// The most ranks of a group on this machine. Checks that hold for any number of ranks run with as many
    /// as there may be: see [`Case::on`](crate::Case::on).
    fn most_ranks() -> usize {
        16
    }

    /// `builder` with what this backend adds to every group.
    fn settings(builder: &ExpertParallelBuilder) -> ExpertParallelBuilder {
        builder.clone().transfer(Self::TRANSFER)
    }

    /// What is missing on this machine that the backend needs; its checks are skipped then.
    fn missing() -> Option<String> {
        None
    }

    /// Gives back what was dropped, where that waits for a good moment. Nothing runs on the device.
    fn collect(backend: &Self::Backend) {
        let _ = backend;
    }

    /// The device of one rank. Its memory is counted in `memory`, and exhausted where that has a
    /// limit: a device that really runs out, which the library cannot know before.
    fn backend(rank: Rank, memory: &MemoryAccount) -> Self::Backend;

    /// Runs `body` on every rank of a group at the same time. Returns what each made of it, by rank;
    /// for a rank that panicked, what it said.
    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>>;

    /// As [`TestBackend::try_on_ranks`], where no rank may panic.
    ///
    /// # Panics
    ///
    /// With the ranks that panicked and what each said.
    fn on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<R> {
        let mut panics = Vec::new();
        let mut results = Vec::with_capacity(world);
        for (rank, outcome) in Self::try_on_ranks(world, body).into_iter().enumerate() {
            match outcome {
                Ok(result) => results.push(result),
                Err(panic) => panics.push(format!("rank {rank} of {world}: {panic}")),
            }
        }
        assert!(panics.is_empty(), "{}:\n{}", Self::NAME, panics.join("\n"));
        results
    }
}

/// What one rank has when it starts.
#[derive(Debug)]
pub struct RankEnv<T: TestBackend> {
    /// The rank's handle of the group.
    pub rendezvous: T::Rendezvous,
    /// The memory of the rank's device.
    pub memory: MemoryAccount,
}

impl<T: TestBackend> RankEnv<T> {
    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rendezvous.rank()
    }

    /// Ranks in the group.
    pub fn world(&self) -> usize {
        self.rendezvous.world()
    }

    /// Joins the group. Collective.
    ///
    /// # Errors
    ///
    /// What the builder refuses.
    pub fn build(
        self,
        builder: &ExpertParallelBuilder,
    ) -> Result<ExpertParallel<T::Backend>, Error> {
        let backend = T::backend(self.rank(), &self.memory);
        T::settings(builder).build(backend, self.rendezvous)
    }
}

/// Deadlines that nothing runs into unless a rank is missing.
pub fn patient() -> Deadlines {
    Deadlines::all(PATIENCE)
}

/// The host backend, its ranks as threads of this process, which push their rows unless they `PULL` them.
#[derive(Clone, Copy, Debug)]
pub struct HostRanks<const PULL: bool>;

/// Ranks that push.
pub type HostThreads = HostRanks<false>;

/// Ranks that pull.
pub type HostThreadsPull = HostRanks<true>;

impl<const PULL: bool> TestBackend for HostRanks<PULL> {
    type Backend = HostBackend;
    type Rendezvous = ThreadRendezvous;

    const NAME: &'static str = if PULL { "host, threads that pull" } else { "host, threads" };
    const TRANSFER: Transfer = if PULL { Transfer::Pull } else { Transfer::Auto };

    fn backend(rank: Rank, memory: &MemoryAccount) -> HostBackend {
        let options = HostOptions::new(format!("test rank {}", rank.0));
        HostBackend::new(options.with_memory(memory.clone()))
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        threads(world, body)
    }
}

/// The host backend with two ranks and no more, as on a machine with as many GPUs. For a program that is its
/// own [harness].
#[derive(Clone, Copy, Debug)]
pub struct HostPairs;

impl TestBackend for HostPairs {
    type Backend = HostBackend;
    type Rendezvous = ThreadRendezvous;

    const NAME: &'static str = "host, two threads";

    fn most_ranks() -> usize {
        2
    }

    fn backend(rank: Rank, memory: &MemoryAccount) -> HostBackend {
        HostThreads::backend(rank, memory)
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        if world > Self::most_ranks() {
            harness::skip(format!("{world} ranks, of which there are {}", Self::most_ranks()));
        }
        threads(world, body)
    }
}

/// Runs `body` on threads that are the ranks of a group; see [`TestBackend::try_on_ranks`].
pub fn threads<T, R>(
    world: usize,
    body: impl Fn(RankEnv<T>) -> R + Send + Sync,
) -> Vec<Result<R, String>>
where
    T: TestBackend<Rendezvous = ThreadRendezvous>,
    R: RankResult,
{
    let group = match ThreadGroup::new(world) {
        Ok(group) => group,
        Err(error) => return vec![Err(error.to_string())],
    };
    let body = Arc::new(body);
    thread::scope(|scope| {
        let ranks: Vec<_> = group
            .into_iter()
            .map(|rendezvous| {
                let body = body.clone();
                let name = format!("test {}", rendezvous.rank());
                thread::Builder::new().name(name).spawn_scoped(scope, move || {
                    body(RankEnv { rendezvous, memory: MemoryAccount::new(None) })
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| match rank {
                Ok(rank) => rank.join().map_err(said),
                Err(error) => Err(format!("could not be started: {error}")),
            })
            .collect()
    })
}

/// Whether there may be groups of so many ranks. If not, this says that what the check does with them is
/// skipped: it goes on, and shows less.
pub(crate) fn enough_ranks<T: TestBackend>(world: usize) -> bool {
    let most = T::most_ranks();
    if world > most {
        say_skipped(&format!("{world} ranks"), &format!("groups have at most {most}"));
        harness::on_fewer_ranks();
    }
    world <= most
}

/// Says that a check is skipped, past the harness, which keeps the output of tests that pass. Of
/// [workers](crate::workers) one says so.
pub fn say_skipped(check: &str, why: &str) {
    use std::io::Write;
    if is_echo() {
        return;
    }
    // Nowhere is left to say so if stderr is closed.
    let _ = writeln!(std::io::stderr(), "{check}: skipped: {why}");
}

pub(crate) fn said(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => match panic.downcast::<&'static str>() {
            Ok(text) => (*text).to_owned(),
            Err(_) => "panicked with a value that is no text".to_owned(),
        },
    }
}

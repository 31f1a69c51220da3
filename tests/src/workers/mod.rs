//! Ranks as processes that outlive checks: what a process has to do once, such as making a context on a
//! GPU and loading kernels, is done once for a whole suite.
//!
//! The process of the harness forks a worker for each rank that there may be, and knows nothing of devices.
//! A body is a closure and cannot be sent to a process that runs already. So every worker runs the whole
//! check, told its name: where the check runs ranks, each worker runs the body as the rank of its number, if
//! there is one, and is given what all ranks returned. So all of them go on alike, and come to the same
//! verdict. That takes checks which are functions of what their ranks return: whatever they do outside of
//! bodies is done in every worker.
//!
//! - `line`: what harness and worker say to each other.
//! - `pool`: the workers, as the harness sees them; `worker`: one of them.
//! - [`checks`]: workers that die, hang or disagree.

use std::marker::PhantomData;
use std::process::ExitCode;

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::rendezvous::TcpRendezvous;
use graph_ep::{ExpertParallelBuilder, Rank, Transfer};

use crate::backend::{RankEnv, RankResult, TestBackend};
use crate::cuda_processes::CudaProcesses;
use crate::harness::{self, Check, Verdict};
use crate::processes::{HostProcesses, LONGEST, Processes};

pub mod checks;
mod line;
mod pool;
mod worker;

use pool::Pool;
pub(crate) use worker::is_echo;

/// The backend of `T`, its ranks as workers. Its checks are run by [`main`].
#[derive(Clone, Copy, Debug)]
pub struct Workers<T>(PhantomData<T>);

/// The host backend, its ranks as workers.
pub type HostWorkers = Workers<HostProcesses>;

/// The CUDA backend, its ranks as workers that keep their contexts.
pub type CudaWorkers = Workers<CudaProcesses>;

impl<T: Processes> TestBackend for Workers<T> {
    type Backend = T::Backend;
    type Rendezvous = TcpRendezvous;

    const NAME: &'static str = T::NAME;
    const OPERATIONS_MAY_BREAK: bool = T::OPERATIONS_MAY_BREAK;
    const PAGE_BYTES: usize = T::PAGE_BYTES;
    const TRANSFER: Transfer = T::TRANSFER;

    fn most_ranks() -> usize {
        T::workers()
    }

    fn settings(builder: &ExpertParallelBuilder) -> ExpertParallelBuilder {
        T::settings(builder)
    }

    fn missing() -> Option<String> {
        T::missing()
    }

    fn collect(backend: &T::Backend) {
        T::collect(backend);
    }

    fn backend(rank: Rank, memory: &MemoryAccount) -> T::Backend {
        T::backend(rank, memory)
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        T::require(world);
        worker::on_ranks(T::LEAVES, world, std::any::type_name_of_val(&body), |rendezvous| {
            body(RankEnv { rendezvous, memory: MemoryAccount::new(None) })
        })
    }
}

/// Runs those of `checks` that the arguments of the process ask for, on workers of `T`, and says how they
/// ended. The checks are those of the suite for `Workers<T>`.
pub fn main<T: Processes>(suite: &str, checks: Vec<Check>) -> ExitCode {
    let all = checks.clone();
    let mut pool = None;
    harness::main_by(&[(suite, checks)], |check| {
        // What this asks for is known to the workers, which have a copy of the memory of this process.
        let pool = pool.get_or_insert_with(|| Pool::new(T::workers(), LONGEST, all.clone()));
        pool.run(check).unwrap_or_else(|why| {
            eprintln!("{}: {why}", check.name);
            Verdict::Failed(why)
        })
    })
}

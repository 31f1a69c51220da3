//! The CUDA backend, its ranks as processes with a GPU each, or with a part of the time of one.
//!
//! A process that has used the driver cannot be forked, since its context does not survive that. So
//! the process that runs the checks never uses it: which GPUs there are it learns from a child.

use std::sync::OnceLock;

use graph_ep::Rank;
use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::cuda::CudaBackend;
use graph_ep::ep_context::rendezvous::TcpRendezvous;

use crate::backend::{RankEnv, RankResult, TestBackend};
use crate::cuda::{CudaThreads, find_gpus, on_gpu};
use crate::harness;
use crate::processes::{Ending, Leaves, Processes, on_processes, run_leaving};

/// The variable that says how many processes share a GPU, one if it is not set. The GPU takes turns with
/// them, so that whatever waits for a peer waits for its turn.
const SHARING: &str = "GRAPH_EP_TEST_RANKS_A_GPU";

/// The CUDA backend, its ranks as processes: as many as there are GPUs, or a multiple of that where they share
/// them (`GRAPH_EP_TEST_RANKS_A_GPU`). A check that needs more is [skipped](harness::skip) where it needs them.
#[derive(Clone, Copy, Debug)]
pub struct CudaProcesses;

/// The numbers of the GPUs, or why there are none: what a child has found.
fn gpus() -> &'static Result<Vec<u32>, String> {
    static FOUND: OnceLock<Result<Vec<u32>, String>> = OnceLock::new();
    FOUND.get_or_init(|| match run_leaving(Leaves::Anything, 1, |_| find_gpus()).pop() {
        Some(Ending::Returned(found)) => found,
        other => Err(format!("the process that looks for GPUs: {other:?}")),
    })
}

/// How many processes share a GPU.
fn ranks_a_gpu() -> usize {
    let Ok(text) = std::env::var(SHARING) else { return 1 };
    text.parse().ok().filter(|ranks| *ranks > 0).expect("the number of processes that share a GPU")
}

impl TestBackend for CudaProcesses {
    type Backend = CudaBackend;
    type Rendezvous = TcpRendezvous;

    const NAME: &'static str = "CUDA, processes";
    // What it is told in differs; see `faults`.
    const OPERATIONS_MAY_BREAK: bool = CudaThreads::OPERATIONS_MAY_BREAK;
    const PAGE_BYTES: usize = CudaThreads::PAGE_BYTES;

    fn most_ranks() -> usize {
        let gpus = gpus().as_ref().map_or(0, Vec::len);
        (gpus * ranks_a_gpu()).min(CudaThreads::most_ranks())
    }

    fn missing() -> Option<String> {
        gpus().as_ref().err().cloned()
    }

    fn backend(rank: Rank, memory: &MemoryAccount) -> CudaBackend {
        // Found before this process was forked.
        let gpus = gpus().as_ref().expect("checks are skipped without a GPU");
        on_gpu(gpus[rank.index() % gpus.len()], rank, memory)
    }

    fn collect(backend: &CudaBackend) {
        CudaThreads::collect(backend);
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        on_processes(world, body)
    }
}

impl Processes for CudaProcesses {
    const LEAVES: Leaves = Leaves::Anything;

    fn require(world: usize) {
        match gpus().as_ref().map(Vec::len) {
            Ok(gpus) if Self::most_ranks() < world => harness::skip(format!(
                "{world} ranks; GPUs: {gpus}, ranks on each: {}",
                ranks_a_gpu()
            )),
            Ok(_) => {}
            Err(why) => harness::skip(why.clone()),
        }
    }
}

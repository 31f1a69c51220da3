//! The CUDA backend, its ranks as threads of this process.

use std::sync::OnceLock;

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::cuda::{CudaBackend, CudaOptions, DeviceProperties};
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{Rank, Transfer};

use crate::backend::{RankEnv, RankResult, TestBackend, threads};

/// The CUDA backend, its ranks as threads of this process, which share out the GPUs that the driver
/// shows among them.
///
/// Where ranks share a GPU they pull, unless they are made to `PUSH`.
#[derive(Clone, Copy, Debug)]
pub struct CudaRanks<const PUSH: bool>;

/// Ranks that push where each has a GPU of its own.
pub type CudaThreads = CudaRanks<false>;

/// Ranks that push on parts of a GPU too.
pub type CudaThreadsPush = CudaRanks<true>;

/// The numbers of the GPUs, or why there are none. Starts the driver in this process.
///
/// # Errors
///
/// Why there are none, in words.
pub(crate) fn find_gpus() -> Result<Vec<u32>, String> {
    match DeviceProperties::all() {
        Ok(gpus) if gpus.is_empty() => Err("the CUDA driver shows no GPU".to_owned()),
        Ok(gpus) => Ok(gpus.iter().map(|gpu| gpu.ordinal).collect()),
        Err(error) => Err(error.to_string()),
    }
}

/// A rank on the GPU of this number.
pub(crate) fn on_gpu(ordinal: u32, rank: Rank, memory: &MemoryAccount) -> CudaBackend {
    let options = CudaOptions::new(ordinal).with_label(format!("test rank {}", rank.0));
    CudaBackend::new(options.with_memory(memory.clone())).expect("the GPU can be used")
}

/// The GPUs, found once.
fn gpus() -> &'static Result<Vec<u32>, String> {
    static FOUND: OnceLock<Result<Vec<u32>, String>> = OnceLock::new();
    FOUND.get_or_init(find_gpus)
}

impl<const PUSH: bool> TestBackend for CudaRanks<PUSH> {
    type Backend = CudaBackend;
    type Rendezvous = ThreadRendezvous;

    const NAME: &'static str = if PUSH { "CUDA, threads that push" } else { "CUDA, threads" };
    const TRANSFER: Transfer = if PUSH { Transfer::Push } else { Transfer::Auto };
    // A kernel that traps takes the device's context with it, and that of every other test.
    const OPERATIONS_MAY_BREAK: bool = false;
    const PAGE_BYTES: usize = 2 << 20;

    fn missing() -> Option<String> {
        gpus().as_ref().err().cloned()
    }

    fn most_ranks() -> usize {
        // Each rank has streams of its own, and a GPU has 32 queues for all of them.
        8
    }

    fn backend(rank: Rank, memory: &MemoryAccount) -> CudaBackend {
        let gpus = gpus().as_ref().expect("checks are skipped without a GPU");
        on_gpu(gpus[rank.index() % gpus.len()], rank, memory)
    }

    fn collect(backend: &CudaBackend) {
        backend.collect().expect("what was dropped is given back");
    }

    fn try_on_ranks<R: RankResult>(
        world: usize,
        body: impl Fn(RankEnv<Self>) -> R + Send + Sync,
    ) -> Vec<Result<R, String>> {
        threads(world, body)
    }
}

//! The ranks of a soak as threads.

use std::thread;

use graph_ep::ep_context::error::chain;
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{BackendError, Rendezvous, ThreadGroup};

use super::SoakError;

/// Runs `body` on every rank of a group at the same time, each on the device that `backend` makes for
/// it. Returns what each made of it, by rank. A rank that fails tells the others, so that nobody waits
/// for it.
pub(super) fn on_ranks<B, T: Send>(
    ranks: usize,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
    body: &(impl Fn(B, Place) -> Result<T, SoakError> + Sync),
) -> Result<Vec<T>, SoakError> {
    let group = ThreadGroup::new(ranks).map_err(SoakError::Rendezvous)?;
    let outcomes = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        for (rank, rendezvous) in group.into_iter().enumerate() {
            let run = move || body(backend(rank)?, rendezvous);
            let thread = thread::Builder::new().name(format!("rank-{rank}"));
            threads.push(thread.spawn_scoped(scope, run));
        }
        let ended = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(SoakError::Panic)),
            Err(source) => Err(SoakError::Thread(source)),
        });
        ended.collect::<Vec<_>>()
    });
    let (mut results, mut failures) = (Vec::with_capacity(ranks), Vec::new());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(result) => results.push(result),
            Err(error) => failures.push(format!("rank {rank}: {}", chain(&error))),
        }
    }
    match failures.is_empty() {
        true => Ok(results),
        false => Err(SoakError::Ranks(failures.join("; "))),
    }
}

/// A rank's place in the group.
pub(super) type Place = ThreadRendezvous;

/// Exchanges a few numbers between all ranks. Collective.
pub(super) fn gather<const N: usize>(
    rendezvous: &dyn Rendezvous,
    purpose: &str,
    numbers: [u64; N],
    deadline: std::time::Duration,
) -> Result<Vec<[u64; N]>, SoakError> {
    let all = rendezvous.all_gather(purpose, bytemuck::cast_slice(&numbers), deadline)?;
    let numbers = all.iter().map(|bytes| {
        let mut numbers = [0; N];
        for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
            *number = bytes.try_into().map_or(0, u64::from_ne_bytes);
        }
        numbers
    });
    Ok(numbers.collect())
}

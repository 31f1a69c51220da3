//! Growth by memory that nobody gave back since the bench began.
//!
//! Every sample grows a row set of its own, all from the same few rows to the same many, and none is given
//! back before all is measured. What this bench has given back earlier, after measuring limits or other
//! operations, is taken first and held meanwhile, since a driver prefers it to what nobody has had yet. How
//! much it is follows from the most bytes that a rank ever held. A quarter of what was free stays free.

use std::time::Instant;

use graph_ep::ep_context::backend::GrowableMemory;
use graph_ep::{Backend, BackendError};

use super::super::error::OpError;
use super::super::part::Part;
use super::{Rows, Size};
use crate::gauge::Gauge;
use crate::table::bytes;

/// What was measured, and what keeps the memory.
pub(super) struct Fresh<B: Backend> {
    /// This rank's samples, one behind the other. None if there was memory for none.
    pub(super) samples: Vec<f64>,
    /// Rows that have grown: for each sample, and for the one before the first.
    pub(super) grown: Vec<Rows<B>>,
    /// What had been given back before.
    pub(super) taken: Option<B::Growable>,
}

/// Takes samples as long as every rank has memory for one more, as many as of anything else at most.
/// Collective: as many on every rank.
pub(super) fn measure<B: Gauge>(part: &Part<'_, B>, size: Size) -> Result<Fresh<B>, OpError> {
    let account = part.backend().account();
    part.meet("memory is counted")?;
    let given_back = part.most_held().saturating_sub(account.used());
    // One growth may be all that a rank may hold.
    let share = part.setup.memory.max(size.held());
    let left = affordable(part)?.saturating_sub(given_back);
    let room = left.min(share);
    part.meet("memory was counted")?;
    let mut fresh = Fresh { samples: Vec::new(), grown: Vec::new(), taken: None };
    if room >= size.held() {
        fresh.taken = if_there(take(part, given_back))?;
    }
    let ceiling = account.used().saturating_add(room);
    let fits = || account.used().checked_add(size.held()).is_some_and(|sum| sum <= ceiling);
    let mut own = fresh.taken.is_some();
    let mut enough = part.all("memory was taken", own)?;
    // The first is for warming up, unless there is no other.
    let mut wanted = 1;
    while enough && fresh.grown.len() < wanted {
        let begin = Instant::now();
        let rows = if fits() { if_there(Rows::new(part, size))? } else { None };
        own = rows.is_some();
        enough = part.all("there are more rows", own)?;
        let Some(rows) = rows.filter(|_| enough) else { break };
        part.meet("growing")?;
        let sample = if_there(rows.grow(part, size))?;
        own = sample.is_some();
        enough = part.all("all have grown", own)?;
        let Some(sample) = sample.filter(|_| enough) else { break };
        fresh.samples.extend(sample);
        fresh.grown.push(rows);
        if fresh.grown.len() == 1 {
            wanted += part.samples(begin.elapsed())?;
        } else if fresh.grown.len() == 2 {
            fresh.samples.drain(..sample.len());
        }
    }
    if fresh.grown.is_empty() {
        fresh.taken = None;
        if !own {
            tracing::warn!(
                "rank {}: growth by {} of fresh memory is not measured: {} are there for it, beside {} that \
                 were given back before",
                part.rank(),
                bytes(size.bytes()),
                bytes(left),
                bytes(given_back)
            );
        }
    }
    if !enough {
        // What some ranks had for a growth that others had no memory for.
        part.meet("no more can grow")?;
        part.backend().free_bytes()?;
        part.meet("what could grow is given back")?;
    }
    Ok(fresh)
}

/// Three quarters of the bytes that this rank can still have.
fn affordable<B: Gauge>(part: &Part<'_, B>) -> Result<u64, BackendError> {
    let account = part.backend().account();
    let free = part.backend().free_bytes()?.map(|bytes| bytes / part.sharing());
    let limit = account.limit().map(|limit| limit.saturating_sub(account.used()));
    let left = free.into_iter().chain(limit).min().unwrap_or(u64::MAX);
    Ok(left - left / 4)
}

/// Takes `bytes` bytes.
fn take<B: Backend>(part: &Part<'_, B>, bytes: u64) -> Result<B::Growable, BackendError> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    // Addresses for nothing are none.
    let memory = part.backend().reserve(bytes.max(1))?;
    memory.grow(bytes)?;
    Ok(memory)
}

/// None where memory is what lacks.
fn if_there<T>(made: Result<T, BackendError>) -> Result<Option<T>, BackendError> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(BackendError::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

//! The errors of configuring and queueing dispatch and combine.

use std::time::Duration;

use ep_context::{BackendError, ContextError, Fault, Rank};

/// What can go wrong between a configuration and the record of a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DispatchError {
    /// A setting is out of range.
    #[error("{field} is {value}, but must be {limit}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        limit: String,
    },
    /// An argument of an operation has the wrong size or is in the wrong state.
    #[error("{operation} on {rank}: {argument} is {value}, but must be {limit}")]
    Argument {
        /// The operation.
        operation: &'static str,
        /// The rank that was asked.
        rank: Rank,
        /// The argument.
        argument: &'static str,
        /// What it was.
        value: String,
        /// What it may be.
        limit: String,
    },
    /// The operation does not fit where it was asked for.
    #[error("{operation} on {rank}: {reason}")]
    Order {
        /// The operation.
        operation: &'static str,
        /// The rank that was asked.
        rank: Rank,
        /// Why it cannot be done here.
        reason: String,
    },
    /// Eager dispatch needs more rows than it may have.
    #[error("{rank} would receive {required} rows, but eager dispatch may hold {limit}")]
    EagerLimit {
        /// The rank that receives them.
        rank: Rank,
        /// Rows that routing sends there, padding included.
        required: u32,
        /// Rows that may be held.
        limit: u32,
    },
    /// A step's record did not appear in time.
    #[error("{rank}: the record of step {step} was not published within {waited:?}")]
    RecordTimeout {
        /// The rank that waited.
        rank: Rank,
        /// The step.
        step: u32,
        /// How long it waited.
        waited: Duration,
    },
    /// A step's record was overwritten before it was read.
    #[error(
        "{rank}: the record of step {step} is gone; the ring holds {ring} and step {found} is there"
    )]
    RecordLost {
        /// The rank that looked.
        rank: Rank,
        /// The step whose record was wanted.
        step: u32,
        /// The step whose record was found instead.
        found: u32,
        /// Records that the ring holds.
        ring: usize,
    },
    /// A rank replayed a graph that was recorded for another capacity than it has now. Its step moved
    /// nothing there, and its outputs count nowhere. Every rank says so, and the group goes on: that
    /// rank records again, and all replay.
    #[error(
        "step {step}: {rank} replayed a stale graph: recorded for generation {recorded} of its receive \
         capacity, now there is generation {now}; record it again"
    )]
    StaleGraph {
        /// The rank, the lowest if there are several.
        rank: Rank,
        /// The step.
        step: u32,
        /// The generation for which the graph was recorded; 32767 for that and all later ones.
        recorded: u64,
        /// The generation that holds; 65535 for that and all later ones.
        now: u64,
    },
    /// The group failed while a step ran.
    #[error("the group has failed: {0}")]
    Fault(#[from] Fault),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A collective operation failed.
    #[error(transparent)]
    Context(#[from] ContextError),
}

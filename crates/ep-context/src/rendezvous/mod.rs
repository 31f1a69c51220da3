//! How the ranks of a group find each other and exchange small messages while they set up.
//!
//! Every rank makes the same calls in the same order. What goes through here is a few kilobytes at
//! start-up and when memory grows; nothing of a step does.

use std::error::Error;
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use crate::Rank;

mod compare;
mod environment;
mod exchange;
mod message;
mod outcome;
mod tcp;
mod threads;

pub use compare::agree;
pub use environment::{Environment, EnvironmentError};
pub use exchange::{Exchange, ExchangeRendezvous};
pub use outcome::all_or_none;
pub(crate) use outcome::gather_or_none;
pub use tcp::{Obstacle, TcpConfig, TcpError, TcpRendezvous, Token};
pub use threads::{ThreadGroup, ThreadRendezvous};

/// The largest payload of one rank in one call, in bytes: 16 MiB.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// The largest number of ranks in a group.
pub const MAX_WORLD: usize = 1024;

/// One rank's place in a group, and the group's way to exchange bytes.
///
/// # Contract of an implementation
///
/// - Calls are collective: all ranks make the same calls in the same order. Payloads of different
///   calls are never mixed: where the `purpose` differs between ranks, all of them get
///   [`RendezvousError::Purpose`].
/// - Every call ends within its deadline, and at once when a rank has left or aborted.
/// - A failed call ends the group: every later call on every rank fails, with the same error.
/// - Dropping the value leaves the group.
pub trait Rendezvous: Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// Gives `payload` to every rank and returns the payloads of all, indexed by rank. Blocks until
    /// all ranks have called it, for at most `deadline`. `purpose` says in errors what the call is
    /// for, and is the same on all ranks.
    ///
    /// # Errors
    ///
    /// See [`RendezvousError`]; the group cannot be used any more then, except after
    /// [`RendezvousError::Busy`], which changes nothing.
    fn all_gather(
        &self,
        purpose: &str,
        payload: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, RendezvousError>;

    /// Blocks until all ranks have called it, for at most `deadline`.
    ///
    /// # Errors
    ///
    /// As [`Rendezvous::all_gather`].
    fn barrier(&self, purpose: &str, deadline: Duration) -> Result<(), RendezvousError> {
        self.all_gather(purpose, &[], deadline).map(drop)
    }

    /// Leaves the group because of `reason`, which every other rank is given by the call in which it
    /// waits, or else by its next one. Harmless where the group has failed already.
    fn abort(&self, reason: &str);

    /// Calls `gone` with the number of a rank whose process ended without leaving the group, once that
    /// is noticed, on whichever thread notices; at most for the first such rank. Meant for waits on a
    /// device, which would otherwise only find out by their deadline. A later call replaces `gone`.
    ///
    /// An implementation that cannot notice does nothing, which is the default.
    fn watch(&self, gone: Gone) {
        let _ = gone;
    }
}

/// What is told of a rank whose process ended. It does not block.
pub type Gone = Box<dyn Fn(Rank) + Send + Sync>;

/// Why ranks did not come together. The same error is given to every rank that still listens.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// A group of this many ranks cannot be made.
    #[error("a group of {world} ranks: the number of ranks is outside 1 to {MAX_WORLD}")]
    World {
        /// The number of ranks asked for.
        world: usize,
    },
    /// The group has no such rank.
    #[error("{rank} of a group of {world} ranks: ranks count from 0 to one less than that")]
    Rank {
        /// The rank asked for.
        rank: Rank,
        /// The number of ranks.
        world: usize,
    },
    /// Ranks did not come in time.
    #[error("{purpose}: {} did not come within {deadline:?}", Ranks(missing))]
    Deadline {
        /// What was waited for.
        purpose: String,
        /// The deadline of the rank that gave up.
        deadline: Duration,
        /// Every rank that had not come, in order.
        missing: Vec<Rank>,
    },
    /// Ranks are at different points of their set-up.
    #[error("{first} is at {first_purpose:?} while {second} is at {second_purpose:?}")]
    Purpose {
        /// The rank that came first.
        first: Rank,
        /// What it came for.
        first_purpose: String,
        /// The first rank that came for something else.
        second: Rank,
        /// What that one came for.
        second_purpose: String,
    },
    /// A rank ended, or dropped its handle, while others needed it.
    #[error("{purpose}: {rank} has left the group")]
    Left {
        /// The rank that left.
        rank: Rank,
        /// What the call was for that found it gone.
        purpose: String,
    },
    /// A rank gave up and said why.
    #[error("{purpose}: {rank} gave up: {reason}")]
    Aborted {
        /// The rank that gave up.
        rank: Rank,
        /// Its reason.
        reason: String,
        /// What the call was for that was told.
        purpose: String,
    },
    /// A rank could not do its part of what all were doing, so that none keeps anything. Every rank
    /// gets this error, and the group can still be used.
    #[error("{purpose}: {rank} failed: {reason}")]
    Peer {
        /// The lowest rank that failed.
        rank: Rank,
        /// What was being done.
        purpose: String,
        /// Its error, with the causes.
        reason: String,
    },
    /// A payload is too long.
    #[error(
        "{purpose}: {rank} has a payload of {bytes} bytes, more than the {MAX_PAYLOAD} allowed"
    )]
    Payload {
        /// The rank with the payload.
        rank: Rank,
        /// What it was for.
        purpose: String,
        /// Its length.
        bytes: usize,
    },
    /// A rank made a call while another thread of it was inside one.
    #[error("{rank} asks for {purpose:?} while a call of its own has not returned")]
    Busy {
        /// The rank.
        rank: Rank,
        /// What the refused call was for.
        purpose: String,
    },
    /// A payload does not hold what it should.
    #[error(
        "{purpose}: the message of {rank} cannot be read ({reason}); do all ranks run the same version?"
    )]
    Malformed {
        /// The rank whose payload it is.
        rank: Rank,
        /// What it was for.
        purpose: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Two processes claim to be the same rank.
    #[error("{rank} came twice; were two processes started with the same RANK?")]
    Duplicate {
        /// The rank.
        rank: Rank,
    },
    /// Ranks expect groups of different sizes.
    #[error(
        "{first} is one of {first_world} ranks and {second} one of {second_world}; do all have the \
         same WORLD_SIZE?"
    )]
    OtherWorld {
        /// The rank that leads the group.
        first: Rank,
        /// Its number of ranks.
        first_world: u32,
        /// The rank that joined as one of another group.
        second: Rank,
        /// Its number of ranks.
        second_world: u32,
    },
    /// Ranks are configured differently.
    #[error("{purpose}: {field} is {first_value} on {first} and {second_value} on {second}")]
    Differs {
        /// What was compared.
        purpose: String,
        /// The first field that differs.
        field: String,
        /// The lowest rank.
        first: Rank,
        /// Its value.
        first_value: String,
        /// The lowest rank with another value.
        second: Rank,
        /// That value.
        second_value: String,
    },
    /// Ranks compare different fields.
    #[error(
        "{purpose}: {first} compares {} where {second} compares {}; do all ranks run the same version?",
        first_field.as_deref().unwrap_or("nothing"),
        second_field.as_deref().unwrap_or("nothing")
    )]
    Fields {
        /// What was compared.
        purpose: String,
        /// The lowest rank.
        first: Rank,
        /// Its field; `None` if its list ends before.
        first_field: Option<String>,
        /// The lowest rank with another field in this place.
        second: Rank,
        /// That field.
        second_field: Option<String>,
    },
    /// An exchange supplied from outside failed.
    #[error("{purpose}: the exchange failed")]
    Exchange {
        /// What the call was for.
        purpose: String,
        /// What the exchange reported.
        source: Arc<dyn Error + Send + Sync>,
    },
}

/// Fails where a group of `world` ranks cannot be made, or has no `rank`.
fn check_place(rank: Rank, world: usize) -> Result<(), RendezvousError> {
    if world == 0 || world > MAX_WORLD {
        return Err(RendezvousError::World { world });
    }
    if rank.index() >= world {
        return Err(RendezvousError::Rank { rank, world });
    }
    Ok(())
}

/// A list of ranks, as errors print it.
pub(crate) struct Ranks<'a>(pub(crate) &'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, rank) in self.0.iter().enumerate() {
            write!(f, "{}{rank}", if i > 0 { ", " } else { "" })?;
        }
        if self.0.is_empty() { f.write_str("no rank") } else { Ok(()) }
    }
}

//! Turning the failure of one rank into the failure of all.

use std::error::Error;
use std::time::Duration;

use super::{Rendezvous, RendezvousError};
use crate::Rank;
use crate::error::chain;

/// What one rank has to say after it did its part.
type Outcome<'a> = Result<&'a [u8], String>;

/// Gives every rank its own value if all of them could do their part, and none of them one otherwise.
/// Blocks until all ranks call it, for at most `deadline`.
///
/// # Errors
///
/// [`RendezvousError::Peer`], the same on every rank, with the lowest rank that failed and its error
/// in words; where the ranks cannot even tell each other, what the rendezvous reports.
pub fn all_or_none<T, E: Error>(
    rendezvous: &dyn Rendezvous,
    purpose: &str,
    local: Result<T, E>,
    deadline: Duration,
) -> Result<T, RendezvousError> {
    let failure = local.as_ref().err().map(|error| chain(error));
    gather_or_none(rendezvous, purpose, failure.map_or(Ok(&[]), Err), deadline)?;
    // A rank that failed has returned by now.
    local.map_err(|error| RendezvousError::Peer {
        purpose: purpose.to_owned(),
        rank: rendezvous.rank(),
        reason: chain(&error),
    })
}

/// Gathers the bytes of every rank, if all of them have some.
///
/// # Errors
///
/// As for [`all_or_none`].
pub(crate) fn gather_or_none(
    rendezvous: &dyn Rendezvous,
    purpose: &str,
    local: Outcome<'_>,
    deadline: Duration,
) -> Result<Vec<Vec<u8>>, RendezvousError> {
    let malformed = |rank, error: postcard::Error| RendezvousError::Malformed {
        rank,
        purpose: purpose.to_owned(),
        reason: error.to_string(),
    };
    let mine =
        postcard::to_allocvec(&local).map_err(|error| malformed(rendezvous.rank(), error))?;
    let gathered = rendezvous.all_gather(purpose, &mine, deadline)?;
    let mut payloads = Vec::with_capacity(gathered.len());
    for (rank, bytes) in gathered.iter().enumerate() {
        let rank = Rank::from_index(rank);
        let outcome: Outcome<'_> =
            postcard::from_bytes(bytes).map_err(|error| malformed(rank, error))?;
        let payload = outcome.map_err(|reason| RendezvousError::Peer {
            purpose: purpose.to_owned(),
            rank,
            reason,
        })?;
        payloads.push(payload.to_vec());
    }
    Ok(payloads)
}

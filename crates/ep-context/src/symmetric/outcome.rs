//! Turning the failure of one rank into the failure of all.

use std::time::Duration;

use super::error::SymmetricError;
use crate::Rank;
use crate::error::chain;
use crate::rendezvous::{Rendezvous, RendezvousError};

/// Gathers what every rank has to say after it did its part, if all of them could do it.
///
/// # Errors
///
/// [`SymmetricError::Peer`], the same on every rank, with the lowest rank that failed; where the
/// ranks cannot even tell each other, what the rendezvous reports.
pub(super) fn all_or_none(
    rendezvous: &dyn Rendezvous,
    purpose: &str,
    local: Result<&[u8], &SymmetricError>,
    deadline: Duration,
) -> Result<Vec<Vec<u8>>, SymmetricError> {
    let malformed = |rank, error: postcard::Error| RendezvousError::Malformed {
        rank,
        purpose: purpose.to_owned(),
        reason: error.to_string(),
    };
    let outcome: Outcome<'_> = local.map_err(|error| chain(error));
    let mine =
        postcard::to_allocvec(&outcome).map_err(|error| malformed(rendezvous.rank(), error))?;
    let gathered = rendezvous.all_gather(purpose, &mine, deadline)?;
    let mut payloads = Vec::with_capacity(gathered.len());
    for (rank, bytes) in gathered.iter().enumerate() {
        let rank = Rank::from_index(rank);
        let outcome: Outcome<'_> =
            postcard::from_bytes(bytes).map_err(|error| malformed(rank, error))?;
        let payload = outcome.map_err(|reason| SymmetricError::Peer {
            purpose: purpose.to_owned(),
            rank,
            reason,
        })?;
        payloads.push(payload.to_vec());
    }
    Ok(payloads)
}

type Outcome<'a> = Result<&'a [u8], String>;

//! Turning the failure of one rank into the failure of all.

use std::error::Error;
use std::time::Duration;

use super::{Rendezvous, RendezvousError, message};
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
    let mine = message::encode(&local, rendezvous.rank(), purpose)?;
    let gathered = rendezvous.all_gather(purpose, &mine, deadline)?;
    let outcomes: Vec<Outcome<'_>> = message::decode_all(&gathered, purpose)?;
    let mut payloads = Vec::with_capacity(outcomes.len());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let (rank, purpose) = (Rank::from_index(rank), purpose.to_owned());
        let payload = outcome.map_err(|reason| RendezvousError::Peer { purpose, rank, reason })?;
        payloads.push(payload.to_vec());
    }
    Ok(payloads)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::rendezvous::ThreadGroup;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_no_outcome_is_refused_with_the_rank() {
        let mine = message::encode(&Outcome::Ok(b"x"), Rank(1), "sharing").expect("written");
        for (other, right) in [(mine.clone(), true), ([mine, vec![0]].concat(), false)] {
            let mut group = ThreadGroup::new(2).expect("a group");
            let (stranger, rank) = (group.remove(1), group.remove(0));
            thread::scope(|scope| {
                scope.spawn(move || stranger.all_gather("sharing", &other, LONG).map(drop));
                match gather_or_none(&rank, "sharing", Ok(b"y"), LONG) {
                    Ok(all) => assert_eq!((right, all), (true, vec![b"y".to_vec(), b"x".to_vec()])),
                    Err(error) => {
                        let text = error.to_string();
                        assert!(
                            !right && text.contains("rank 1 cannot be read (1 bytes"),
                            "{text}"
                        );
                    }
                }
            });
        }
    }
}

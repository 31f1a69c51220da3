//! What every rank says at some point, in words of one type.

use std::time::Duration;

use ep_context::rendezvous::{Rendezvous, RendezvousError};
use ep_context::{ContextError, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Waits for all ranks, and learns what each says, by rank. Collective.
///
/// # Errors
///
/// A rendezvous error if a rank is missing, and [`RendezvousError::Malformed`] with the rank whose words
/// are none of this type.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(
    rendezvous: &dyn Rendezvous,
    purpose: &str,
    own: &T,
    deadline: Duration,
) -> Result<Vec<T>, ContextError> {
    let malformed = |rank, error: postcard::Error| RendezvousError::Malformed {
        rank,
        purpose: purpose.to_owned(),
        reason: error.to_string(),
    };
    let mine = postcard::to_allocvec(own).map_err(|error| malformed(rendezvous.rank(), error))?;
    let words = rendezvous.all_gather(purpose, &mine, deadline)?;
    let read = |(rank, words): (usize, &Vec<u8>)| {
        let told = postcard::from_bytes(words);
        told.map_err(|error| malformed(Rank::from_index(rank), error).into())
    };
    words.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ep_context::rendezvous::ThreadGroup;

    use super::*;

    #[test]
    fn words_of_another_type_name_their_rank_and_the_purpose() {
        const PURPOSE: &str = "numbers of ranks";
        let deadline = Duration::from_secs(30);
        let group = ThreadGroup::new(3).expect("a group");
        let gathered: Vec<_> = thread::scope(|scope| {
            let ranks: Vec<_> = group
                .into_iter()
                .map(|rank| {
                    scope.spawn(move || match rank.rank() {
                        // One byte, where the others tell a pair.
                        Rank(1) => rank.all_gather(PURPOSE, &[7], deadline).map(drop).err(),
                        Rank(own) => match gather(&rank, PURPOSE, &(own, own), deadline) {
                            Err(ContextError::Rendezvous(error)) => Some(error),
                            other => panic!("{other:?}"),
                        },
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        });
        for (rank, error) in gathered.iter().enumerate() {
            match (rank, error) {
                (1, None) => {}
                (_, Some(RendezvousError::Malformed { rank: Rank(1), purpose, .. })) => {
                    assert_eq!(purpose, PURPOSE);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

//! Every rank's word before a step is replayed.
//!
//! After an over-budget step each rank prepares on its own: it maps memory, runs the caller's hooks,
//! records again. Only when all ranks have said that they are ready does any of them replay; one
//! that cannot stops all, with the same error everywhere and nothing changed.

use std::time::Duration;

use ep_context::rendezvous::Rendezvous;
use ep_context::{ContextError, Rank};
use serde::{Deserialize, Serialize};

use crate::gather::gather;

/// What one rank can do about an over-budget step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Vote {
    /// Ready to replay.
    Replay,
    /// Cannot record, but can run the step eagerly.
    Eager(String),
    /// Cannot go on.
    Refuse(Refusal),
}

/// Why a rank cannot go on, and the numbers behind it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The reason, in that rank's words.
    pub reason: String,
    /// Rows that routing requires there.
    pub required: u32,
    /// Rows that it has.
    pub budget: u32,
    /// Rows that it may have.
    pub limit: u32,
}

/// What the group does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Every rank replays.
    Replay,
    /// Every rank runs the step eagerly.
    Eager,
    /// No rank goes on, because this one cannot: the lowest that refused.
    Refused(Rank, Refusal),
}

const PURPOSE: &str = "agreement on a replay";

/// Exchanges the votes of all ranks. Collective.
///
/// # Errors
///
/// As for [`gather`].
pub(crate) fn agree(
    rendezvous: &dyn Rendezvous,
    vote: &Vote,
    deadline: Duration,
) -> Result<Decision, ContextError> {
    let votes = gather(rendezvous, PURPOSE, vote, deadline)?;
    let mut decision = Decision::Replay;
    for (rank, vote) in votes.into_iter().enumerate() {
        let rank = Rank::from_index(rank);
        match vote {
            Vote::Replay => {}
            Vote::Eager(reason) => {
                tracing::warn!(rank = rank.0, %reason, "a rank cannot record again: running eagerly");
                decision = Decision::Eager;
            }
            Vote::Refuse(refusal) => return Ok(Decision::Refused(rank, refusal)),
        }
    }
    Ok(decision)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ep_context::rendezvous::ThreadGroup;

    use super::*;

    fn decide(votes: &[Vote]) -> Vec<Result<Decision, ContextError>> {
        let group = ThreadGroup::new(votes.len()).expect("a group");
        thread::scope(|scope| {
            let ranks: Vec<_> = group
                .into_iter()
                .zip(votes)
                .map(|(rank, vote)| {
                    scope.spawn(move || agree(&rank, vote, Duration::from_secs(30)))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn one_refusal_is_the_error_of_all() {
        let refusal =
            Refusal { reason: "out of memory".to_owned(), required: 7, budget: 5, limit: 6 };
        let votes = [Vote::Replay, Vote::Eager("x".to_owned()), Vote::Refuse(refusal.clone())];
        for result in decide(&votes) {
            match result {
                Ok(Decision::Refused(Rank(2), told)) => assert_eq!(told, refusal),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn one_rank_that_cannot_record_makes_all_run_eagerly() {
        let votes = [Vote::Replay, Vote::Eager("x".to_owned()), Vote::Replay];
        assert!(decide(&votes).iter().all(|vote| matches!(vote, Ok(Decision::Eager))));
        assert!(decide(&[Vote::Replay]).iter().all(|vote| matches!(vote, Ok(Decision::Replay))));
    }
}

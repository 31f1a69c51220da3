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
    /// It can go on.
    Ready {
        /// Why it cannot record, if it cannot: then the step runs eagerly on all ranks.
        unrecorded: Option<String>,
        /// Why it could not run the step eagerly, as far as is known before.
        no_eager: Option<Refusal>,
    },
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
    Ok(decide(gather(rendezvous, PURPOSE, vote, deadline)?))
}

/// What comes of the votes of all ranks: the same wherever they are read.
fn decide(votes: Vec<Vote>) -> Decision {
    let (mut eager, mut cannot) = (None, None);
    for (rank, vote) in votes.into_iter().enumerate() {
        let rank = Rank::from_index(rank);
        match vote {
            Vote::Ready { unrecorded, no_eager } => {
                if let Some(reason) = unrecorded {
                    tracing::warn!(rank = rank.0, %reason, "a rank cannot record again");
                    eager = eager.or(Some((rank, reason)));
                }
                cannot = cannot.or(no_eager.map(|refusal| (rank, refusal)));
            }
            Vote::Refuse(refusal) => return Decision::Refused(rank, refusal),
        }
    }
    match (eager, cannot) {
        (None, _) => Decision::Replay,
        (Some(_), None) => Decision::Eager,
        (Some((unrecorded, why)), Some((rank, refusal))) => {
            let reason = format!(
                "{}, which it has to since {unrecorded} cannot record: {why}",
                refusal.reason
            );
            Decision::Refused(rank, Refusal { reason, ..refusal })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ep_context::rendezvous::ThreadGroup;

    use super::*;

    fn decided(votes: &[Vote]) -> Vec<Result<Decision, ContextError>> {
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

    fn ready() -> Vote {
        Vote::Ready { unrecorded: None, no_eager: None }
    }

    fn refusal(reason: &str) -> Refusal {
        Refusal { reason: reason.to_owned(), required: 7, budget: 5, limit: 6 }
    }

    fn unrecorded(no_eager: Option<Refusal>) -> Vote {
        Vote::Ready { unrecorded: Some("x".to_owned()), no_eager }
    }

    #[test]
    fn one_refusal_is_the_error_of_all() {
        let votes = [ready(), unrecorded(None), Vote::Refuse(refusal("out of memory"))];
        for result in decided(&votes) {
            match result {
                Ok(Decision::Refused(Rank(2), told)) => assert_eq!(told, refusal("out of memory")),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn one_rank_that_cannot_record_makes_all_run_eagerly() {
        let votes = [ready(), unrecorded(None), ready()];
        assert!(decided(&votes).iter().all(|vote| matches!(vote, Ok(Decision::Eager))));
        assert!(decided(&[ready()]).iter().all(|vote| matches!(vote, Ok(Decision::Replay))));
    }

    #[test]
    fn a_rank_that_cannot_run_eagerly_refuses_only_where_all_would_have_to() {
        let cannot = Vote::Ready { unrecorded: None, no_eager: Some(refusal("too many rows")) };
        let replayed = decided(&[ready(), cannot.clone(), ready()]);
        assert!(replayed.iter().all(|vote| matches!(vote, Ok(Decision::Replay))));
        let own = unrecorded(Some(refusal("too many rows")));
        for (votes, unrecorded) in
            [([unrecorded(None), cannot, ready()], 0), ([ready(), own, ready()], 1)]
        {
            for result in decided(&votes) {
                let Ok(Decision::Refused(Rank(1), told)) = result else { panic!("{result:?}") };
                let parts = ["too many rows", &format!("rank {unrecorded}"), "x"];
                assert!(parts.iter().all(|part| told.reason.contains(part)), "{told:?}");
                assert_eq!((told.required, told.budget, told.limit), (7, 5, 6));
            }
        }
    }
}

//! A rendezvous over the exchange that the embedding engine has already.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{MAX_PAYLOAD, Rendezvous, RendezvousError, check_place, message};
use crate::Rank;
use crate::sync::lock;

/// How long a rank that gives up waits for the others to be told.
const ABORT: Duration = Duration::from_secs(5);

/// An engine's own way to exchange bytes between the ranks of the group.
///
/// A barrier is made of it too, since only what carries bytes can carry what it is for.
pub trait Exchange: Send + Sync {
    /// Gives `bytes` to every rank and returns those of all, in the order of ranks; lengths differ.
    /// All ranks make the same calls in the same order, one at a time. Blocks until all have, for at
    /// most `deadline`.
    ///
    /// # Errors
    ///
    /// Whatever the engine reports. The group is not used any more after that.
    fn all_gather(
        &self,
        bytes: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>>;
}

/// What a rank brings to a call.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Contribution<'a> {
    Payload {
        purpose: &'a str,
        #[serde(serialize_with = "message::as_bytes")]
        payload: &'a [u8],
    },
    TooLong {
        purpose: &'a str,
        bytes: u64,
    },
    Abort {
        reason: &'a str,
    },
}

/// One rank of a group whose messages an [`Exchange`] carries.
///
/// That a rank has died is for the exchange to report, or else its deadline: dropping this value
/// tells the others nothing. An abort takes part in the call in which they wait, or in their next one:
/// it waits for a call of another thread of this rank, which ends within its own deadline, and then
/// blocks for five seconds at most.
pub struct ExchangeRendezvous<E> {
    rank: Rank,
    world: usize,
    exchange: E,
    /// Held during a call; the failure that has ended the group.
    failure: Mutex<Option<RendezvousError>>,
}

impl<E: Exchange> ExchangeRendezvous<E> {
    /// The handle of `rank` in a group of `world` ranks.
    ///
    /// # Errors
    ///
    /// [`RendezvousError::World`] if `world` is zero or above [`MAX_WORLD`](super::MAX_WORLD),
    /// [`RendezvousError::Rank`] if `rank` is outside the group.
    pub fn new(rank: Rank, world: usize, exchange: E) -> Result<Self, RendezvousError> {
        check_place(rank, world)?;
        Ok(Self { rank, world, exchange, failure: Mutex::new(None) })
    }

    fn exchange(
        &self,
        purpose: &str,
        mine: &Contribution<'_>,
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let bytes = message::encode(mine, self.rank, purpose)?;
        let gathered = self.exchange.all_gather(&bytes, deadline).map_err(|source| {
            RendezvousError::Exchange { purpose: purpose.to_owned(), source: Arc::from(source) }
        })?;
        if gathered.len() != self.world {
            let source = WrongNumber { results: gathered.len(), world: self.world };
            let (purpose, source) = (purpose.to_owned(), Arc::new(source));
            return Err(RendezvousError::Exchange { purpose, source });
        }
        let contributions: Vec<Contribution<'_>> = message::decode_all(&gathered, purpose)?;
        self.judge(purpose, &contributions)?;
        if gathered.get(self.rank.index()) != Some(&bytes) {
            let reason = "the exchange has not returned what it was given".to_owned();
            return Err(message::malformed(self.rank, purpose, reason));
        }
        Ok(contributions
            .into_iter()
            .map(|contribution| match contribution {
                Contribution::Payload { payload, .. } => payload.to_vec(),
                Contribution::TooLong { .. } | Contribution::Abort { .. } => Vec::new(),
            })
            .collect())
    }

    /// The failure that lies in what the ranks have brought: the same on all of them.
    fn judge(&self, now: &str, all: &[Contribution<'_>]) -> Result<(), RendezvousError> {
        let mut reference: Option<(Rank, &str)> = None;
        for (rank, contribution) in all.iter().enumerate() {
            let rank = Rank::from_index(rank);
            if let Contribution::Abort { reason } = contribution {
                let (purpose, reason) = (now.to_owned(), (*reason).to_owned());
                return Err(RendezvousError::Aborted { rank, reason, purpose });
            }
        }
        for (rank, contribution) in all.iter().enumerate() {
            let rank = Rank::from_index(rank);
            let (Contribution::Payload { purpose, .. } | Contribution::TooLong { purpose, .. }) =
                contribution
            else {
                continue;
            };
            let (first, first_purpose) = *reference.get_or_insert((rank, *purpose));
            if first_purpose != *purpose {
                return Err(RendezvousError::Purpose {
                    first,
                    first_purpose: first_purpose.to_owned(),
                    second: rank,
                    second_purpose: (*purpose).to_owned(),
                });
            }
            if let Contribution::TooLong { purpose, bytes } = contribution {
                return Err(RendezvousError::Payload {
                    rank,
                    purpose: (*purpose).to_owned(),
                    bytes: usize::try_from(*bytes).unwrap_or(usize::MAX),
                });
            }
        }
        Ok(())
    }
}

/// An exchange returned results for another number of ranks.
#[derive(Debug, thiserror::Error)]
#[error("it has returned {results} results for a group of {world} ranks")]
struct WrongNumber {
    results: usize,
    world: usize,
}

impl<E: Exchange> Rendezvous for ExchangeRendezvous<E> {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn all_gather(
        &self,
        purpose: &str,
        payload: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let mut failure = match self.failure.try_lock() {
            Ok(failure) => failure,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(RendezvousError::Busy { rank: self.rank, purpose: purpose.to_owned() });
            }
        };
        if let Some(failure) = &*failure {
            return Err(failure.clone());
        }
        let mine = if payload.len() > MAX_PAYLOAD {
            Contribution::TooLong { purpose, bytes: payload.len() as u64 }
        } else {
            Contribution::Payload { purpose, payload }
        };
        self.exchange(purpose, &mine, deadline).inspect_err(|error| *failure = Some(error.clone()))
    }

    fn abort(&self, reason: &str) {
        // After a call of another thread, which ends within its own deadline.
        let mut failure = lock(&self.failure);
        if failure.is_none() {
            let told = self.exchange("giving up", &Contribution::Abort { reason }, ABORT);
            *failure = told.err();
        }
    }
}

impl<E> fmt::Debug for ExchangeRendezvous<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExchangeRendezvous")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::rendezvous::{MAX_WORLD, ThreadGroup, ThreadRendezvous};

    const LONG: Duration = Duration::from_secs(60);

    /// An engine that cannot tell one call from another.
    struct Engine(ThreadRendezvous);

    impl Exchange for Engine {
        fn all_gather(
            &self,
            bytes: &[u8],
            deadline: Duration,
        ) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> {
            Ok(self.0.all_gather("", bytes, deadline)?)
        }
    }

    fn on_all<T: Send>(
        world: usize,
        body: impl Fn(ExchangeRendezvous<Engine>) -> T + Sync,
    ) -> Vec<T> {
        let group = ThreadGroup::new(world).expect("a group");
        thread::scope(|scope| {
            let body = &body;
            let threads: Vec<_> = group
                .into_iter()
                .map(|rank| {
                    let adapter = ExchangeRendezvous::new(rank.rank(), world, Engine(rank));
                    let adapter = adapter.expect("a rank");
                    scope.spawn(move || body(adapter))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
        })
    }

    #[test]
    fn payloads_come_in_the_order_of_ranks() {
        for world in 1..=8 {
            let seen = on_all(world, |rank| {
                let mine = vec![7; rank.rank().index()];
                let all = rank.all_gather("state", &mine, LONG).expect("all come");
                rank.barrier("the end", LONG).expect("all come");
                all
            });
            let expected: Vec<_> = (0..world).map(|rank| vec![7; rank]).collect();
            assert_eq!(seen, vec![expected; world]);
        }
    }

    #[test]
    fn purposes_that_differ_are_named_everywhere_and_end_the_group() {
        let text = "rank 0 is at \"starting\" while rank 2 is at \"growing\"";
        let errors = on_all(4, |rank| {
            let purpose = if rank.rank() == Rank(2) { "growing" } else { "starting" };
            let error = rank.barrier(purpose, LONG).expect_err("they differ").to_string();
            assert_eq!(rank.barrier("later", LONG).expect_err("ended").to_string(), error);
            error
        });
        assert_eq!(errors, [text; 4]);
    }

    #[test]
    fn a_reason_to_give_up_and_a_long_payload_reach_all() {
        let errors = on_all(3, |rank| {
            if rank.rank() == Rank(1) {
                rank.abort("no memory");
                rank.abort("another reason");
            }
            rank.barrier("meeting", LONG).expect_err("one has given up")
        });
        for error in errors {
            assert!(
                matches!(&error, RendezvousError::Aborted { rank: Rank(1), reason, .. } if reason == "no memory"),
                "{error}"
            );
        }
        let errors = on_all(2, |rank| {
            let payload = vec![0; if rank.rank() == Rank(1) { MAX_PAYLOAD + 1 } else { 0 }];
            rank.all_gather("state", &payload, LONG).expect_err("too long").to_string()
        });
        let text = "state: rank 1 has a payload of 16777217 bytes, more than the 16777216 allowed";
        assert_eq!(errors, [text; 2]);
    }

    /// An engine that returns whatever it likes.
    struct Broken(Result<Vec<Vec<u8>>, &'static str>);

    impl Exchange for Broken {
        fn all_gather(
            &self,
            _: &[u8],
            _: Duration,
        ) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> {
            self.0.clone().map_err(Into::into)
        }
    }

    #[test]
    fn what_an_engine_gets_wrong_is_an_error() {
        let error = |result| {
            let rank = ExchangeRendezvous::new(Rank(0), 2, Broken(result)).expect("a rank");
            let error = rank.barrier("state", LONG).expect_err("broken");
            crate::error::chain(&error)
        };
        assert_eq!(error(Err("no route")), "state: the exchange failed: no route");
        let text = "state: the exchange failed: it has returned 3 results for a group of 2 ranks";
        assert_eq!(error(Ok(vec![vec![]; 3])), text);
        let text = error(Ok(vec![b"garbage".to_vec(); 2]));
        assert!(text.starts_with("state: the message of rank 0 cannot be read"), "{text}");
        let mine = Contribution::Payload { purpose: "state", payload: &[] };
        let mine = postcard::to_allocvec(&mine).expect("written");
        let text = error(Ok(vec![mine.clone(), [mine.clone(), vec![0]].concat()]));
        assert!(text.contains("rank 1 cannot be read (1 bytes follow its end)"), "{text}");
        let other = Contribution::Payload { purpose: "state", payload: b"x" };
        let other = postcard::to_allocvec(&other).expect("written");
        let text = error(Ok(vec![other, mine]));
        assert!(text.contains("has not returned what it was given"), "{text}");
    }

    #[test]
    fn a_place_that_cannot_be_is_refused_with_what_is_wrong() {
        let refused = |rank, world| {
            let place = ExchangeRendezvous::new(Rank(rank), world, Broken(Ok(vec![])));
            place.map(drop).expect_err("there is no such place").to_string()
        };
        for world in [0, MAX_WORLD + 1] {
            let text =
                format!("a group of {world} ranks: the number of ranks is outside 1 to 1024");
            assert_eq!(refused(0, world), text);
            assert_eq!(refused(u32::MAX, world), text);
        }
        for rank in [4, 7] {
            let text = "of a group of 4 ranks: ranks count from 0 to one less than that";
            assert_eq!(refused(rank, 4), format!("rank {rank} {text}"));
        }
    }
}

//! The rendezvous of ranks that are threads of one process.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{MAX_PAYLOAD, MAX_WORLD, Rendezvous, RendezvousError};
use crate::Rank;
use crate::sync::{lock, wait_at_most};

/// Makes groups of ranks that are threads of this process.
#[derive(Debug)]
pub struct ThreadGroup;

impl ThreadGroup {
    /// A group of `world` ranks: their handles in the order of ranks, one for each thread.
    ///
    /// # Errors
    ///
    /// [`RendezvousError::World`] if `world` is zero or above [`MAX_WORLD`].
    #[allow(clippy::new_ret_no_self, reason = "a group is nothing but its ranks")]
    pub fn new(world: usize) -> Result<Vec<ThreadRendezvous>, RendezvousError> {
        if world == 0 || world > MAX_WORLD {
            return Err(RendezvousError::World { world });
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                round: 0,
                arrived: 0,
                first: None,
                payloads: vec![None; world],
                inside: vec![false; world],
                finished: Arc::default(),
                failure: None,
            }),
            changed: Condvar::new(),
        });
        Ok((0..world)
            .map(|rank| ThreadRendezvous {
                rank: Rank::from_index(rank),
                world,
                shared: Arc::clone(&shared),
            })
            .collect())
    }
}

/// The handle of one rank of a [`ThreadGroup`]. Dropping it leaves the group.
#[derive(Debug)]
pub struct ThreadRendezvous {
    rank: Rank,
    world: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// One round is gathered while the one before may still be collected. There is never a third: a
/// round is complete only when every rank has come to it, and a rank comes after it has collected
/// the one before.
#[derive(Debug)]
struct State {
    /// The number of complete rounds, which is the number of the one being gathered.
    round: u64,
    /// How many ranks have come to it.
    arrived: usize,
    /// Who came first, and for what.
    first: Option<(Rank, String)>,
    payloads: Vec<Option<Vec<u8>>>,
    /// Which ranks are inside a call.
    inside: Vec<bool>,
    /// The last complete round.
    finished: Arc<Vec<Vec<u8>>>,
    failure: Option<Failure>,
}

#[derive(Clone, Debug)]
enum Failure {
    Left(Rank),
    Aborted(Rank, String),
    Call(RendezvousError),
}

impl Failure {
    fn error(&self, purpose: &str) -> RendezvousError {
        let purpose = purpose.to_owned();
        match self {
            Failure::Left(rank) => RendezvousError::Left { rank: *rank, purpose },
            Failure::Aborted(rank, reason) => {
                RendezvousError::Aborted { rank: *rank, reason: reason.clone(), purpose }
            }
            Failure::Call(error) => error.clone(),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Ends the group; the first failure stays.
    fn fail(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }
}

impl State {
    /// Puts a rank's payload into the round being gathered, and completes the round with the last.
    fn arrive(&mut self, rank: Rank, purpose: &str, payload: &[u8]) -> Result<(), RendezvousError> {
        if payload.len() > MAX_PAYLOAD {
            let (purpose, bytes) = (purpose.to_owned(), payload.len());
            return Err(RendezvousError::Payload { rank, purpose, bytes });
        }
        let (first, first_purpose) = self.first.get_or_insert_with(|| (rank, purpose.to_owned()));
        if first_purpose != purpose {
            return Err(RendezvousError::Purpose {
                first: *first,
                first_purpose: first_purpose.clone(),
                second: rank,
                second_purpose: purpose.to_owned(),
            });
        }
        self.payloads[rank.index()] = Some(payload.to_vec());
        self.arrived += 1;
        if self.arrived == self.payloads.len() {
            self.finished = Arc::new(self.payloads.iter_mut().filter_map(Option::take).collect());
            self.round += 1;
            self.arrived = 0;
            self.first = None;
        }
        Ok(())
    }

    fn missing(&self) -> Vec<Rank> {
        (0..self.payloads.len())
            .filter(|rank| self.payloads[*rank].is_none())
            .map(Rank::from_index)
            .collect()
    }
}

impl Rendezvous for ThreadRendezvous {
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
        let start = Instant::now();
        let mut state = self.shared.lock();
        if state.inside[self.rank.index()] {
            return Err(RendezvousError::Busy { rank: self.rank, purpose: purpose.to_owned() });
        }
        if let Some(failure) = &state.failure {
            return Err(failure.error(purpose));
        }
        let round = state.round;
        if let Err(error) = state.arrive(self.rank, purpose, payload) {
            state.failure = Some(Failure::Call(error.clone()));
            self.shared.changed.notify_all();
            return Err(error);
        }
        if state.round != round {
            self.shared.changed.notify_all();
        }
        state.inside[self.rank.index()] = true;
        let gathered = loop {
            // First: a round that was completed is collected even if the group has failed since.
            if state.round != round {
                break Ok(Arc::clone(&state.finished));
            }
            if let Some(failure) = &state.failure {
                break Err(failure.error(purpose));
            }
            let left = deadline.saturating_sub(start.elapsed());
            if left.is_zero() {
                let error = RendezvousError::Deadline {
                    purpose: purpose.to_owned(),
                    deadline,
                    missing: state.missing(),
                };
                state.failure = Some(Failure::Call(error.clone()));
                self.shared.changed.notify_all();
                break Err(error);
            }
            state = wait_at_most(&self.shared.changed, state, left);
        };
        state.inside[self.rank.index()] = false;
        // Copying up to 16 MiB a rank is done without the lock.
        drop(state);
        gathered.map(Arc::unwrap_or_clone)
    }

    fn abort(&self, reason: &str) {
        self.shared.fail(Failure::Aborted(self.rank, reason.to_owned()));
    }
}

impl Drop for ThreadRendezvous {
    fn drop(&mut self) {
        self.shared.fail(Failure::Left(self.rank));
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Runs `body` on one thread a rank and returns what each gives back.
    fn on_all<T: Send>(world: usize, body: impl Fn(ThreadRendezvous) -> T + Sync) -> Vec<T> {
        let group = ThreadGroup::new(world).expect("a group");
        thread::scope(|scope| {
            let body = &body;
            let threads: Vec<_> =
                group.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
        })
    }

    #[test]
    fn payloads_come_in_the_order_of_ranks_round_after_round() {
        for world in 1..=16 {
            on_all(world, |rank| {
                for round in 0..50 {
                    let mine = format!("{round} of {}", rank.rank()).into_bytes();
                    let purpose = format!("round {round}");
                    let all = rank.all_gather(&purpose, &mine, LONG).expect("all come");
                    let expected: Vec<_> = (0..world)
                        .map(|peer| format!("{round} of {}", Rank::from_index(peer)).into_bytes())
                        .collect();
                    assert_eq!(all, expected);
                }
                // Nobody leaves before the last one is through.
                rank.barrier("the end", LONG).expect("all come");
            });
        }
    }

    #[test]
    fn a_group_has_a_rank() {
        for world in [0, MAX_WORLD + 1, usize::MAX] {
            let error = ThreadGroup::new(world).expect_err("not a group");
            assert!(matches!(error, RendezvousError::World { world: w } if w == world));
        }
        let alone = ThreadGroup::new(1).expect("a group").remove(0);
        assert_eq!((alone.rank(), alone.world()), (Rank(0), 1));
        assert_eq!(alone.all_gather("x", b"y", Duration::ZERO).expect("all came"), [b"y"]);
    }

    #[test]
    fn differing_purposes_are_named_everywhere() {
        let errors = on_all(4, |rank| {
            let purpose = if rank.rank() == Rank(2) { "growing" } else { "starting" };
            rank.all_gather(purpose, b"", LONG).expect_err("purposes differ").to_string()
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert!(errors[0].contains("rank 2 is at \"growing\""), "{}", errors[0]);
        assert!(errors[0].contains("is at \"starting\""), "{}", errors[0]);
    }

    #[test]
    fn a_deadline_names_all_who_are_missing_and_ends_the_group() {
        let group = ThreadGroup::new(4).expect("a group");
        let text = "meeting: rank 0, rank 2, rank 3 did not come within 0ns";
        let error = group[1].barrier("meeting", Duration::ZERO).expect_err("alone");
        assert_eq!(error.to_string(), text);
        for rank in &group {
            let error = rank.barrier("another", LONG).expect_err("the group has failed");
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn a_rank_that_leaves_is_named_at_once() {
        let errors = on_all(3, |rank| {
            if rank.rank() == Rank(1) {
                return None;
            }
            Some(rank.barrier("meeting", Duration::MAX).expect_err("one has left").to_string())
        });
        let text = Some("meeting: rank 1 has left the group".to_owned());
        assert_eq!(errors, [text.clone(), None, text]);
    }

    #[test]
    fn a_rank_that_gives_up_says_why() {
        let reasons = on_all(3, |rank| {
            if rank.rank() == Rank(2) {
                rank.abort("no memory");
                rank.abort("another reason");
            }
            rank.barrier("meeting", Duration::MAX).expect_err("one has given up").to_string()
        });
        assert_eq!(reasons, ["meeting: rank 2 gave up: no memory"; 3]);
    }

    #[test]
    fn a_complete_round_is_not_lost_when_a_rank_leaves_after_it() {
        // The other may be inside the round, or complete it, when this one is gone.
        for _ in 0..200 {
            let seen = on_all(2, |rank| {
                let mine = rank.rank().0.to_string();
                rank.all_gather("once", mine.as_bytes(), LONG).expect("both came")
            });
            assert_eq!(seen[0], [b"0", b"1"]);
            assert_eq!(seen[0], seen[1]);
        }
    }

    #[test]
    fn a_payload_is_bounded() {
        let group = ThreadGroup::new(2).expect("a group");
        let error = group[1]
            .all_gather("state", &vec![0; MAX_PAYLOAD + 1], LONG)
            .expect_err("too long")
            .to_string();
        let text = "state: rank 1 has a payload of 16777217 bytes, more than the 16777216 allowed";
        assert_eq!(error, text);
        assert_eq!(group[0].barrier("state", LONG).expect_err("failed").to_string(), text);
    }

    #[test]
    fn a_second_call_of_one_rank_is_refused_and_changes_nothing() {
        let mut group = ThreadGroup::new(2).expect("a group");
        let (other, rank) = (group.remove(1), group.remove(0));
        thread::scope(|scope| {
            let call = || rank.all_gather("state", b"a", LONG);
            let calls = [scope.spawn(call), scope.spawn(call)];
            // One of the two is refused while the other waits for us.
            while !calls.iter().any(thread::ScopedJoinHandle::is_finished) {
                thread::yield_now();
            }
            assert_eq!(other.all_gather("state", b"b", LONG).expect("both came"), [b"a", b"b"]);
            let outcomes = calls.map(|call| call.join().expect("a thread"));
            assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
            assert!(
                outcomes.iter().any(|o| matches!(o, Err(RendezvousError::Busy { .. }))),
                "{outcomes:?}"
            );
        });
    }
}

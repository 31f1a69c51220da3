//! Ranks as threads that do the same work at the same time, so many times, and are timed.

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use graph_ep::ThreadGroup;
use graph_ep::ep_context::rendezvous::{RendezvousError, ThreadRendezvous};

/// Whatever went wrong on a rank.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The work of one rank: does it so many times and says how long what is measured took.
pub type Work = Box<dyn FnMut(u64) -> Result<Duration, Failure>>;

/// Makes the work of a rank from its place in the group.
pub type Make = fn(ThreadRendezvous) -> Result<Work, Failure>;

/// One thread for each rank of a group. Dropping it ends the threads.
pub struct Ranks {
    ranks: Vec<RankThread>,
}

struct RankThread {
    /// Taken to end the thread.
    orders: Option<Sender<u64>>,
    answers: Receiver<Result<Duration, String>>,
    thread: Option<JoinHandle<()>>,
}

impl Ranks {
    /// Starts `world` ranks. Each calls `make` with its place in the group, on its own thread, for
    /// the work that it will do. Returns before they are ready.
    ///
    /// # Errors
    ///
    /// There is no group of so many ranks.
    pub fn start(
        world: usize,
        make: impl Fn(ThreadRendezvous) -> Result<Work, Failure> + Clone + Send + 'static,
    ) -> Result<Self, RendezvousError> {
        let start = |rendezvous: ThreadRendezvous| {
            let (orders, incoming) = channel();
            let (outgoing, answers) = channel();
            let make = make.clone();
            let thread = std::thread::spawn(move || serve(make(rendezvous), &incoming, &outgoing));
            RankThread { orders: Some(orders), answers, thread: Some(thread) }
        };
        Ok(Self { ranks: ThreadGroup::new(world)?.into_iter().map(start).collect() })
    }

    /// Has every rank do its work `iterations` times, and returns the time of the one that took
    /// longest.
    ///
    /// # Panics
    ///
    /// If a rank fails: a benchmark of work that fails has no result.
    pub fn run(&self, iterations: u64) -> Duration {
        for orders in self.ranks.iter().filter_map(|rank| rank.orders.as_ref()) {
            // A thread that has ended answers below, by what it left.
            let _ = orders.send(iterations);
        }
        let time_of = |(rank, thread): (usize, &RankThread)| match thread.answers.recv() {
            Ok(Ok(time)) => time,
            Ok(Err(error)) => panic!("rank {rank}: {error}"),
            Err(_) => panic!("rank {rank} has ended"),
        };
        self.ranks.iter().enumerate().map(time_of).max().unwrap_or_default()
    }
}

/// The life of a rank's thread: until there are no more orders, or it has failed.
fn serve(
    work: Result<Work, Failure>,
    orders: &Receiver<u64>,
    answers: &Sender<Result<Duration, String>>,
) {
    let mut work = match work {
        Ok(work) => work,
        Err(error) => return drop(answers.send(Err(with_causes(error.as_ref())))),
    };
    for iterations in orders {
        let answer = work(iterations).map_err(|error| with_causes(error.as_ref()));
        let failed = answer.is_err();
        if answers.send(answer).is_err() || failed {
            return;
        }
    }
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |error| (*error).source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.orders = None;
        }
        for thread in self.ranks.iter_mut().filter_map(|rank| rank.thread.take()) {
            // A panic of a rank was reported on its thread.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks").field("world", &self.ranks.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_counts_and_orders_reach_every_rank() {
        let ranks = Ranks::start(3, |place| {
            use graph_ep::Rendezvous;
            let rank = place.rank().0;
            Ok(Box::new(move |n| Ok(Duration::from_secs(n) * rank)))
        })
        .unwrap();
        assert_eq!(ranks.run(5), Duration::from_secs(10));
        assert_eq!(ranks.run(1), Duration::from_secs(2));
    }

    #[test]
    #[should_panic(expected = "rank 1: no luck")]
    fn a_rank_that_fails_stops_the_benchmark() {
        let ranks = Ranks::start(2, |place| {
            use graph_ep::Rendezvous;
            if place.rank().0 == 1 {
                Err("no luck".into())
            } else {
                Ok(Box::new(|_| Ok(Duration::ZERO)))
            }
        })
        .unwrap();
        ranks.run(1);
    }
}

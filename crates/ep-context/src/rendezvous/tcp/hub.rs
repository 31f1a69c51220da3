//! The thread of rank 0 through which all ranks exchange their messages.
//!
//! Rank 0 itself is connected to it like the others, by a pair of sockets. The thread ends when that
//! connection does. It waits in one place, for all connections at once, so that none can delay
//! another.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::failure::Failure;
use super::link::{Inbox, Link, Received, TooLong, Until};
use super::pending::{Claim, Gate, Pending, Progress};
use super::round::{Arrival, Round};
use super::wire::{MESSAGE_LIMIT, ToHub, ToRank, decode, frame};

/// How many connections beyond the number of ranks may be about to join.
const STRANGERS: usize = 64;

/// How long ranks that read slowly are given when rank 0 leaves.
const FAREWELL: Duration = Duration::from_secs(1);

/// How long after that they may still speak, so that a message of theirs which crosses our last
/// ones does not make the system throw those away.
const LINGER: Duration = Duration::from_millis(100);

/// How long the listener rests when the system cannot give it a connection.
const REST: Duration = Duration::from_millis(10);

/// The place of a rank.
#[derive(Debug)]
enum Seat {
    Empty,
    Taken(Link),
    Left,
}

#[derive(Debug)]
pub(super) struct Hub {
    gate: Gate,
    /// Until all have joined.
    listener: Option<TcpListener>,
    /// Until then the listener rests.
    rest: Option<Instant>,
    /// The oldest first.
    pending: VecDeque<Pending>,
    seats: Vec<Seat>,
    /// Whether each rank has said that it leaves.
    leaving: Vec<bool>,
    round: Round,
    failure: Option<Failure>,
}

impl Hub {
    /// The hub of a group of `world` ranks, of which rank 0 is at the other end of `own`. There is
    /// no listener where nobody else is to come.
    pub(super) fn new(
        gate: Gate,
        world: usize,
        own: OwnedFd,
        listener: Option<TcpListener>,
    ) -> Self {
        let mut seats: Vec<Seat> = (0..world).map(|_| Seat::Empty).collect();
        if let Some(first) = seats.first_mut() {
            *first = Seat::Taken(Link::new(own));
        }
        let (round, pending) = (Round::new(world), VecDeque::new());
        let leaving = vec![false; world];
        Self { gate, listener, rest: None, pending, seats, leaving, round, failure: None }
    }

    /// Serves the group until rank 0 leaves.
    pub(super) fn run(mut self) {
        while matches!(self.seats.first(), Some(Seat::Taken(_))) {
            if let Err(errno) = self.wait() {
                tracing::error!(%errno, "the hub of the rendezvous cannot wait");
                break;
            }
            self.accept();
            self.admit();
            self.serve();
            if let Some(failure) = self.round.expired(Instant::now()) {
                self.fail(failure);
            }
            self.flush();
        }
        self.farewell();
    }

    /// Blocks until there is something to do.
    fn wait(&self) -> Result<(), rustix::io::Errno> {
        let until = [self.round.expiry().filter(|_| self.failure.is_none()), self.rest]
            .into_iter()
            .flatten()
            .chain(self.pending.iter().map(Pending::until))
            .min();
        let mut watched = Vec::new();
        if let Some(listener) = self.listener.as_ref().filter(|_| self.rest.is_none()) {
            watched.push(PollFd::new(listener, PollFlags::IN));
        }
        watched.extend(self.pending.iter().map(|pending| pending.link.watched()));
        watched.extend(self.seats.iter().filter_map(|seat| match seat {
            Seat::Taken(link) => Some(link.watched()),
            Seat::Empty | Seat::Left => None,
        }));
        Until(until).poll(&mut watched)
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        if self.rest.is_some_and(|rest| Instant::now() < rest) {
            return;
        }
        self.rest = None;
        // So many at a time that a flood cannot keep the hub from those that it has accepted.
        for _ in 0..STRANGERS {
            match listener.accept() {
                Ok((stream, _)) => {
                    let ready = stream.set_nonblocking(true).and(stream.set_nodelay(true));
                    if ready.is_err() {
                        continue;
                    }
                    // An honest rank says everything at once; the oldest of many is not one.
                    if self.pending.len() >= self.seats.len() + STRANGERS {
                        self.pending.pop_front();
                    }
                    self.pending.push_back(Pending::new(stream.into()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection to the rendezvous cannot be accepted");
                    self.pending.pop_front();
                    self.rest = Instant::now().checked_add(REST);
                    return;
                }
            }
        }
    }

    /// Hears those that are about to join.
    fn admit(&mut self) {
        for _ in 0..self.pending.len() {
            let Some(mut pending) = self.pending.pop_front() else { return };
            match pending.advance(&self.gate) {
                Progress::Waits => self.pending.push_back(pending),
                Progress::Joins(claim) => self.seat(claim, pending),
                Progress::Over(reason) => tracing::debug!(reason, "a stranger is turned away"),
            }
        }
        if !self.seats.iter().any(|seat| matches!(seat, Seat::Empty)) && self.failure.is_none() {
            self.listener = None;
            self.pending.clear();
        }
    }

    /// Gives a rank its place. One that cannot have it ends the group: whatever is wrong with the
    /// job's configuration, the others would wait in vain.
    fn seat(&mut self, claim: Claim, mut pending: Pending) {
        let Claim { rank, world } = claim;
        let expected = u32::try_from(self.seats.len()).unwrap_or(u32::MAX);
        let place = usize::try_from(rank).ok().and_then(|rank| self.seats.get_mut(rank));
        let failure = match (place, &self.failure) {
            (_, Some(failure)) => failure.clone(),
            (_, None) if world != expected => Failure::World {
                first: 0,
                first_world: expected,
                second: rank,
                second_world: world,
            },
            (Some(place @ Seat::Empty), None) => {
                *place = Seat::Taken(pending.link);
                return;
            }
            (Some(_), None) => Failure::Duplicate { rank },
            (None, None) => {
                let reason = "it is outside the group".to_owned();
                Failure::Malformed { rank, reason }
            }
        };
        pending.refuse(failure.clone());
        self.pending.push_back(pending);
        self.fail(failure);
    }

    /// Hears those that have joined.
    fn serve(&mut self) {
        for (index, rank) in (0..self.seats.len()).zip(0..) {
            let Seat::Taken(link) = &mut self.seats[index] else { continue };
            let received = link.receive();
            let (rounds, failure) =
                hear(rank, link, &mut self.leaving[index], &mut self.round, self.failure.is_some());
            for payload in rounds.iter().flatten() {
                self.tell_all(&ToRank::Gathered(payload));
            }
            if let Some(failure) = failure {
                self.fail(failure);
            }
            // After what it said before it left.
            if received == Received::End {
                self.seats[index] = Seat::Left;
                self.fail(Failure::Left { rank, orderly: self.leaving[index] });
            }
        }
    }

    /// Ends the group, if it has not ended before.
    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none() {
            tracing::debug!(?failure, "the group has ended");
            self.tell_all(&ToRank::Failed(failure.clone()));
            self.failure = Some(failure);
        }
    }

    /// Puts one message into the outboxes of all ranks, which share it.
    fn tell_all(&mut self, message: &ToRank<'_>) {
        let Ok(frame) = frame(message) else { return };
        let frame: Arc<[u8]> = frame.into();
        for link in self.links() {
            link.queue(Arc::clone(&frame));
        }
    }

    fn links(&mut self) -> impl Iterator<Item = &mut Link> {
        self.seats.iter_mut().filter_map(|seat| match seat {
            Seat::Taken(link) => Some(link),
            Seat::Empty | Seat::Left => None,
        })
    }

    fn flush(&mut self) {
        self.links().for_each(Link::flush);
    }

    /// Lets the ranks have what they were told, as far as they take it.
    fn farewell(mut self) {
        self.listener = None;
        self.pending.clear();
        let until = Until::after(FAREWELL);
        while self.links().any(|link| !link.is_flushed()) && self.discard(until) {
            self.flush();
        }
        self.links().for_each(|link| link.finish());
        let until = Until::after(LINGER);
        while self.links().next().is_some() && self.discard(until) {}
    }

    /// Waits and reads what nobody will answer any more; `false` once the time is over.
    fn discard(&mut self, until: Until) -> bool {
        let waited = {
            let mut watched: Vec<PollFd<'_>> = self.links().map(|link| link.watched()).collect();
            until.poll(&mut watched)
        };
        for seat in &mut self.seats {
            if let Seat::Taken(link) = seat {
                let received = link.receive();
                link.inbox = Inbox::default();
                if received == Received::End {
                    *seat = Seat::Left;
                }
            }
        }
        waited.is_ok() && !until.left().is_zero()
    }
}

/// Takes in what a rank has said: gives the rounds that it completes, and the failure in which it
/// ends. Where the group has ended before, nothing counts any more.
fn hear(
    rank: u32,
    link: &mut Link,
    leaving: &mut bool,
    round: &mut Round,
    ended: bool,
) -> (Vec<Vec<Vec<u8>>>, Option<Failure>) {
    let mut rounds = Vec::new();
    loop {
        let heard = match link.inbox.message(MESSAGE_LIMIT) {
            Ok(None) => return (rounds, None),
            Ok(Some(_)) if ended => continue,
            Ok(Some(message)) => decode(message),
            Err(TooLong(bytes)) => Err(format!("its length of {bytes} bytes is out of bounds")),
        };
        let outcome = match heard {
            Ok(ToHub::Arrive { purpose, deadline, left, payload }) => {
                let Until(until) = Until::after(left);
                round.arrive(&Arrival { rank, purpose, payload, deadline, until })
            }
            Ok(ToHub::TooLong { purpose, bytes }) => {
                Err(Failure::Payload { rank, purpose: purpose.to_owned(), bytes })
            }
            Ok(ToHub::Leave) => {
                *leaving = true;
                Ok(None)
            }
            Ok(ToHub::Abort { reason }) => {
                Err(Failure::Aborted { rank, reason: reason.to_owned() })
            }
            Err(reason) => Err(Failure::Malformed { rank, reason }),
        };
        match outcome {
            Ok(complete) => rounds.extend(complete),
            Err(failure) => return (rounds, Some(failure)),
        }
    }
}

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
use super::link::{Link, Received, Until};
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
        Self { gate, listener, rest: None, pending, seats, round, failure: None }
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
        let mut until = [self.round.expiry().filter(|_| self.failure.is_none()), self.rest]
            .into_iter()
            .flatten()
            .chain(self.pending.iter().map(Pending::until))
            .min();
        if self.failure.is_some() && self.pending.is_empty() && self.rest.is_none() {
            until = None;
        }
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
            (_, None) if world != expected => {
                Failure::World { first: 0, first_world: expected, second: rank, second_world: world }
            }
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
        for index in 0..self.seats.len() {
            // Taken out, so that what it says can be told to all the others.
            let Some(seat) = self.seats.get_mut(index) else { return };
            let Seat::Taken(mut link) = std::mem::replace(seat, Seat::Left) else {
                continue;
            };
            let rank = u32::try_from(index).unwrap_or(u32::MAX);
            let received = link.receive();
            let mut complete = Vec::new();
            let failure = self.hear(rank, &mut link, &mut complete);
            self.seats[index] = Seat::Taken(link);
            for frame in complete {
                self.tell_all(&frame);
            }
            if let Some(failure) = failure {
                self.fail(failure);
            }
            if received == Received::End {
                self.seats[index] = Seat::Left;
                self.fail(Failure::Left { rank });
            }
        }
    }
}

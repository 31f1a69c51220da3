//! The exchange of one file descriptor of every rank with every other rank.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::error::SymmetricError;
use super::mailbox::{Address, Delivery, Failed, Mailbox, Post, post};
use crate::Rank;
use crate::error::chain;
use crate::rendezvous::{Rendezvous, RendezvousError, gather_or_none};

/// How soon a full mailbox is tried again; nothing tells when it has room.
const RETRY: Duration = Duration::from_millis(1);

/// Gives `descriptor` to every other rank and returns theirs, indexed by rank, close-on-exec; `None`
/// in this rank's own place. Ranks may be threads or processes of one machine and one user.
///
/// Collective; blocks for at most twice `deadline`.
///
/// # Errors
///
/// Where a rank cannot begin, [`RendezvousError::Peer`] on every rank. A later failure is this
/// rank's alone, and what the others have received by then they keep: a caller who needs all or
/// nothing asks all ranks afterwards.
pub(super) fn exchange(
    rendezvous: &dyn Rendezvous,
    descriptor: BorrowedFd<'_>,
    purpose: &str,
    deadline: Duration,
) -> Result<Vec<Option<OwnedFd>>, SymmetricError> {
    Round::begin(rendezvous, descriptor, purpose, deadline)?.run(deadline)
}

/// One exchange on its way. Sending and receiving alternate in one loop, so that two ranks with full
/// mailboxes make room for each other.
struct Round<'a> {
    rank: Rank,
    purpose: &'a str,
    descriptor: BorrowedFd<'a>,
    mailbox: Mailbox,
    /// Peers that have no descriptor of ours yet.
    outgoing: Vec<(Rank, Address)>,
    /// By which peers have ours. They keep them until they have finished, so that one that hangs up
    /// and has not sent its own will never do so.
    sent: Vec<(Rank, OwnedFd)>,
    /// Connections that have brought nothing yet.
    connections: Vec<OwnedFd>,
    /// Connections that have brought a peer's descriptor, kept until the end.
    done: Vec<OwnedFd>,
    received: Vec<Option<OwnedFd>>,
}

impl<'a> Round<'a> {
    /// Opens a mailbox and learns where those of all ranks are.
    fn begin(
        rendezvous: &dyn Rendezvous,
        descriptor: BorrowedFd<'a>,
        purpose: &'a str,
        deadline: Duration,
    ) -> Result<Self, SymmetricError> {
        let mailbox = Mailbox::open(rendezvous.world()).map_err(|failed| os(purpose, failed));
        let own = mailbox.as_ref().map(|mailbox| mailbox.address().to_bytes());
        let outcome = match &own {
            Ok(bytes) => Ok(&bytes[..]),
            Err(error) => Err(chain(*error)),
        };
        let addresses = gather_or_none(rendezvous, purpose, outcome, deadline)?;
        let mailbox = mailbox?;
        let mut outgoing = Vec::with_capacity(addresses.len());
        for (rank, bytes) in addresses.iter().enumerate() {
            let rank = Rank::from_index(rank);
            let Some(address) = Address::from_bytes(bytes) else {
                return Err(RendezvousError::Malformed {
                    rank,
                    purpose: purpose.to_owned(),
                    reason: format!("{} bytes are no address", bytes.len()),
                }
                .into());
            };
            if rank != rendezvous.rank() {
                outgoing.push((rank, address));
            }
        }
        Ok(Round {
            rank: rendezvous.rank(),
            purpose,
            descriptor,
            mailbox,
            outgoing,
            sent: Vec::new(),
            connections: Vec::new(),
            done: Vec::new(),
            received: addresses.iter().map(|_| None).collect(),
        })
    }

    fn run(mut self, deadline: Duration) -> Result<Vec<Option<OwnedFd>>, SymmetricError> {
        let start = Instant::now();
        let mut hung_up = Vec::new();
        loop {
            self.send()?;
            // Also all that was sent by those that have hung up since.
            self.receive()?;
            let missing = self.missing();
            if missing.is_empty() && self.outgoing.is_empty() {
                return Ok(self.received);
            }
            // Where strangers take all the room, a descriptor may wait behind them.
            let gone = missing.iter().find(|rank| self.has_room() && hung_up.contains(*rank));
            if let Some(rank) = gone {
                let purpose = self.purpose.to_owned();
                return Err(SymmetricError::Gone { purpose, rank: *rank });
            }
            let left = deadline.saturating_sub(start.elapsed());
            if left.is_zero() {
                let purpose = self.purpose.to_owned();
                let unreached = self.outgoing.iter().map(|(rank, _)| *rank).collect();
                return Err(SymmetricError::Deadline { purpose, deadline, missing, unreached });
            }
            let at_most = if self.outgoing.is_empty() { left } else { left.min(RETRY) };
            hung_up = self.wait(&missing, at_most)?;
        }
    }

    fn send(&mut self) -> Result<(), SymmetricError> {
        let mut kept = Vec::new();
        for (peer, address) in self.outgoing.drain(..) {
            match post(&address, self.rank, self.descriptor) {
                Ok(Post::Sent(connection)) => self.sent.push((peer, connection)),
                Ok(Post::Full) => kept.push((peer, address)),
                Ok(Post::Closed) => {
                    let purpose = self.purpose.to_owned();
                    return Err(SymmetricError::Gone { purpose, rank: peer });
                }
                Err(failed) => return Err(os(self.purpose, failed)),
            }
        }
        self.outgoing = kept;
        Ok(())
    }

    /// Takes in all that is there, as long as there is room.
    fn receive(&mut self) -> Result<(), SymmetricError> {
        loop {
            let mut empty = false;
            while self.has_room() && !empty {
                match self.mailbox.accept().map_err(|failed| os(self.purpose, failed))? {
                    Some(connection) => self.connections.push(connection),
                    None => empty = true,
                }
            }
            self.collect()?;
            if empty || !self.has_room() {
                return Ok(());
            }
        }
    }

    fn collect(&mut self) -> Result<(), SymmetricError> {
        let mut kept = Vec::new();
        for connection in self.connections.drain(..) {
            match self.mailbox.collect(&connection).map_err(|failed| os(self.purpose, failed))? {
                Delivery::Pending => kept.push(connection),
                Delivery::Junk => {}
                Delivery::Letter(from, descriptor) => {
                    // The first from each rank counts; anything else is dropped, and so closed.
                    if from != self.rank
                        && let Some(place @ None) = self.received.get_mut(from.index())
                    {
                        *place = Some(descriptor);
                        self.done.push(connection);
                    }
                }
            }
        }
        self.connections = kept;
        Ok(())
    }

    /// Strangers who connect and say nothing must not use up the descriptors of this process.
    fn has_room(&self) -> bool {
        self.connections.len() < 2 * self.received.len()
    }

    fn missing(&self) -> Vec<Rank> {
        let places = self.received.iter().enumerate();
        places
            .filter(|(_, place)| place.is_none())
            .map(|(rank, _)| Rank::from_index(rank))
            .filter(|rank| *rank != self.rank)
            .collect()
    }

    /// Blocks until something has come, for at most `at_most`, and gives those of the `missing` that
    /// have hung up.
    fn wait(&self, missing: &[Rank], at_most: Duration) -> Result<Vec<Rank>, SymmetricError> {
        let hang_up: Vec<_> = self
            .sent
            .iter()
            .filter(|(rank, _)| self.has_room() && missing.contains(rank))
            .collect();
        let mut watched: Vec<PollFd<'_>> =
            hang_up.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::empty())).collect();
        watched.extend(self.connections.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        if self.has_room() {
            watched.push(PollFd::from_borrowed_fd(self.mailbox.as_fd(), PollFlags::IN));
        }
        let at_most = Timespec::try_from(at_most).ok();
        match poll(&mut watched, at_most.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(os(self.purpose, ("poll", errno))),
        }
        let ready = hang_up.iter().zip(&watched).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|((rank, _), _)| *rank).collect())
    }
}

fn os(purpose: &str, (call, errno): Failed) -> SymmetricError {
    SymmetricError::Os { purpose: purpose.to_owned(), call, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::thread;

    use super::super::mailbox::garbage;
    use super::*;
    use crate::rendezvous::{ThreadGroup, ThreadRendezvous};

    const LONG: Duration = Duration::from_secs(60);

    fn memory(text: &str) -> File {
        let fd = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(fd.expect("a memfd"));
        file.write_all_at(text.as_bytes(), 0).expect("written");
        file
    }

    fn on_all<R: Rendezvous>(
        world: usize,
        wrap: impl Fn(ThreadRendezvous) -> R,
        body: impl Fn(R) + Sync,
    ) {
        let group = ThreadGroup::new(world).expect("a group");
        thread::scope(|scope| {
            for rank in group {
                let (rank, body) = (wrap(rank), &body);
                scope.spawn(move || body(rank));
            }
        });
    }

    /// Exchanges memory that says whose it is, and checks that all ranks have that very memory.
    fn exchange_and_check(rank: &dyn Rendezvous) {
        let own = memory(&format!("{:4}", rank.rank().0));
        let files = exchange(rank, own.as_fd(), "memory", LONG).expect("exchanged");
        assert_eq!(files.len(), rank.world());
        for (peer, file) in files.into_iter().enumerate() {
            assert_eq!(file.is_none(), peer == rank.rank().index());
            let Some(file) = file.map(File::from) else { continue };
            let mut text = [0; 4];
            file.read_exact_at(&mut text, 0).expect("read");
            assert_eq!(text.as_slice(), format!("{peer:4}").as_bytes());
            let place = 4 + u64::from(rank.rank().0);
            file.write_all_at(b"!", place).expect("written");
        }
        rank.barrier("all have written", LONG).expect("all come");
        for peer in (0..rank.world()).filter(|peer| *peer != rank.rank().index()) {
            let mut mark = [0];
            own.read_exact_at(&mut mark, 4 + peer as u64).expect("read");
            assert_eq!(mark, *b"!", "{peer} writes to other memory");
        }
        rank.barrier("all have read", LONG).expect("all come");
    }

    #[test]
    fn every_rank_gets_the_memory_of_every_other() {
        for world in 1..=16 {
            on_all(world, |rank| rank, |rank| exchange_and_check(&rank));
        }
    }

    /// Sends garbage to every mailbox as soon as its address is known, before any rank sends.
    #[derive(Debug)]
    struct WithStrangers(ThreadRendezvous);

    impl Rendezvous for WithStrangers {
        fn rank(&self) -> Rank {
            self.0.rank()
        }

        fn world(&self) -> usize {
            self.0.world()
        }

        fn all_gather(
            &self,
            purpose: &str,
            payload: &[u8],
            deadline: Duration,
        ) -> Result<Vec<Vec<u8>>, RendezvousError> {
            let payloads = self.0.all_gather(purpose, payload, deadline)?;
            let addresses: Vec<Address> = payloads
                .iter()
                .filter_map(|bytes| postcard::from_bytes::<Result<&[u8], String>>(bytes).ok())
                .filter_map(|outcome| Address::from_bytes(outcome.ok()?))
                .collect();
            if self.rank() == Rank(0) && purpose == "memory" {
                assert_eq!(addresses.len(), self.world());
                addresses.iter().for_each(garbage);
            }
            self.0.barrier("strangers have been here", deadline)?;
            Ok(payloads)
        }

        fn abort(&self, reason: &str) {
            self.0.abort(reason);
        }
    }

    #[test]
    fn strangers_do_not_disturb() {
        on_all(4, WithStrangers, |rank| exchange_and_check(&rank));
    }

    #[test]
    fn a_rank_that_does_not_send_is_named() {
        on_all(
            2,
            |rank| rank,
            |rank| {
                let fd = memory("");
                let round = Round::begin(&rank, fd.as_fd(), "memory", LONG).expect("begun");
                // Its mailbox is open, but that is all the other rank does.
                if rank.rank() == Rank(0) {
                    let error = round.run(Duration::ZERO).expect_err("nothing was sent");
                    assert_eq!(
                        error.to_string(),
                        "memory: not done within 0ns; descriptors missing from: rank 1; not taken by: \
                         no rank"
                    );
                    rank.barrier("the end", LONG).expect("all come");
                } else {
                    rank.barrier("the end", LONG).expect("all come");
                    drop(round);
                }
            },
        );
    }

    #[test]
    fn a_rank_that_dies_before_it_sends_is_named_at_once() {
        on_all(
            3,
            |rank| rank,
            |rank| {
                let fd = memory("");
                let round = Round::begin(&rank, fd.as_fd(), "memory", LONG).expect("begun");
                if rank.rank() == Rank(1) {
                    // Whatever the others have sent it by now, or not.
                    drop(round);
                } else {
                    let error = round.run(Duration::MAX).expect_err("one is gone");
                    // One of the others may have given up for that reason before.
                    assert!(matches!(error, SymmetricError::Gone { .. }), "{error}");
                }
                rank.barrier("the end", LONG).expect("all come");
            },
        );
    }

    #[test]
    fn a_rank_that_stops_listening_is_named() {
        on_all(
            2,
            |rank| rank,
            |rank| {
                if rank.rank() == Rank(1) {
                    let address = Mailbox::open(2).expect("a mailbox").address().to_bytes();
                    gather_or_none(&rank, "memory", Ok(&address), LONG).expect("told");
                } else {
                    let error = exchange(&rank, memory("").as_fd(), "memory", LONG);
                    let error = error.expect_err("the other is gone");
                    assert_eq!(error.to_string(), "memory: rank 1 has given up");
                }
                rank.barrier("the end", LONG).expect("all come");
            },
        );
    }
}

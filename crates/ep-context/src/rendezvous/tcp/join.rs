//! How a rank finds rank 0 and joins.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use serde::Serialize;

use super::config::{TcpConfig, Unusable};
use super::error::{Obstacle, TcpError};
use super::link::{Inbox, Received, Until, Written, write};
use super::proof::{End, holds, nonce, prove};
use super::wire::{Foreign, Greeting, HANDSHAKE_LIMIT, Hello, Joining, Preface, decode, frame};

/// How long a listener may take to show that it is rank 0.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a rank waits before it looks at all places again, at first, and at most: many ranks may
/// wait for one that takes minutes to start.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// A connection to rank 0, by which this rank has joined.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) fd: OwnedFd,
    pub(super) inbox: Inbox,
}

/// Looks for rank 0 until it is found, or for at most `deadline`, which ends at `until`.
pub(super) fn join(
    config: &TcpConfig,
    deadline: Duration,
    until: Until,
) -> Result<Joined, TcpError> {
    let mut seen = Obstacle::Time;
    let (mut retry, longest) = RETRY;
    loop {
        match config.addresses() {
            Ok(addresses) => {
                for address in addresses {
                    if until.left().is_zero() {
                        break;
                    }
                    match attempt(config, address, until) {
                        Ok(joined) => return Ok(joined),
                        Err(Trouble::Own(error)) => return Err(error),
                        Err(Trouble::Place(obstacle)) => seen = telling(seen, obstacle),
                    }
                }
            }
            Err(Unusable::Unprotected) => {
                return Err(TcpError::Unprotected { host: config.host.clone() });
            }
            // Names of a cluster may appear after its processes have started.
            Err(Unusable::Unresolved(error)) => {
                seen = Obstacle::Unresolved { reason: error.to_string() };
            }
        }
        if until.left().is_zero() {
            let host = config.host.clone();
            return Err(TcpError::Unreachable { host, deadline, obstacle: seen });
        }
        thread::sleep(retry.min(until.left()));
        retry = (retry * 2).min(longest);
    }
}

/// Which of two obstacles to report: an empty place says less than one where something is.
fn telling(before: Obstacle, now: Obstacle) -> Obstacle {
    match (&before, &now) {
        (Obstacle::Time | Obstacle::Unresolved { .. } | Obstacle::Unconnected { .. }, _) => now,
        (_, Obstacle::Unconnected { .. }) => before,
        // A token that differs is the likeliest mistake where several groups are about.
        (Obstacle::Token { .. } | Obstacle::Version { .. }, _) => before,
        _ => now,
    }
}

enum Trouble {
    /// Rank 0 is not there, or not yet.
    Place(Obstacle),
    /// This rank cannot join anything.
    Own(TcpError),
}

impl From<Obstacle> for Trouble {
    fn from(obstacle: Obstacle) -> Self {
        Self::Place(obstacle)
    }
}

fn attempt(config: &TcpConfig, address: SocketAddr, until: Until) -> Result<Joined, Trouble> {
    let unconnected =
        |error: io::Error| Obstacle::Unconnected { address, reason: error.to_string() };
    let patience = PATIENCE.min(until.left()).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, patience).map_err(unconnected)?;
    // A port that nobody listens at can be the near end of its own connection.
    if stream.local_addr().map_err(unconnected)? == address {
        return Err(Obstacle::Foreign { address }.into());
    }
    stream.set_nodelay(true).map_err(unconnected)?;
    stream.set_nonblocking(true).map_err(unconnected)?;
    let nonce = nonce().map_err(|errno| Trouble::Own(TcpError::os("getrandom")(errno.into())))?;
    let world = u32::try_from(config.world).unwrap_or(u32::MAX);
    let (rank, group) = (config.rank.0, config.group.as_str());
    let hello = Hello { preface: Preface::OURS, group, rank, world, nonce };

    let mut place = Place {
        address,
        joined: Joined { fd: stream.into(), inbox: Inbox::default() },
        // How long a listener may take to show that it is rank 0: behind an address may be anything.
        until: Until::after(patience),
    };
    place.say(&hello)?;
    let greeting = place.greeting()?;
    let token = config.token.as_ref();
    if !holds(&greeting.proof, token, End::Hub, &hello, &greeting.nonce) {
        return Err(Obstacle::Token { address }.into());
    }
    let proof = prove(token, End::Rank, &hello, &greeting.nonce).map_err(|reason| {
        Trouble::Own(TcpError::os("proving the token")(io::Error::other(reason)))
    })?;
    place.say(&Joining { proof })?;
    Ok(place.joined)
}

/// A listener of which we do not know yet whether it is rank 0.
struct Place {
    address: SocketAddr,
    joined: Joined,
    until: Until,
}

impl Place {
    /// A first message is so short that a new connection has room for it.
    fn say<T: Serialize>(&self, message: &T) -> Result<(), Obstacle> {
        let address = self.address;
        let frame = frame(message).map_err(|_| Obstacle::Foreign { address })?;
        match write(self.joined.fd.as_fd(), &frame) {
            Written::Part(written) if written == frame.len() => Ok(()),
            _ => Err(Obstacle::Closed { address }),
        }
    }

    fn greeting(&mut self) -> Result<Greeting, Obstacle> {
        let address = self.address;
        let mut received = Received::Open;
        loop {
            let message = self.joined.inbox.message(HANDSHAKE_LIMIT);
            if let Some(message) = message.map_err(|_| Obstacle::Foreign { address })? {
                return match Preface::check(message) {
                    Ok(()) => decode(message).map_err(|_| Obstacle::Foreign { address }),
                    Err(Foreign::Version(version)) => Err(Obstacle::Version { address, version }),
                    Err(Foreign::Protocol) => Err(Obstacle::Foreign { address }),
                };
            }
            if received == Received::End {
                return Err(Obstacle::Closed { address });
            }
            if self.until.left().is_zero() {
                return Err(Obstacle::Silent { address });
            }
            let fd = &self.joined.fd;
            let waited = self.until.poll(&mut [PollFd::new(fd, PollFlags::IN)]);
            waited.map_err(|_| Obstacle::Silent { address })?;
            received = self.joined.inbox.receive(fd.as_fd());
        }
    }
}

//! The rendezvous of ranks that are processes, over TCP.
//!
//! Rank 0 listens, and runs a thread through which all messages go; the other ranks connect to it.
//! Both ends of a new connection prove that they hold the job's token before the rank has joined.
//! After that the connection is trusted as the network is: nothing on it is encrypted.

use std::fmt;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{Shutdown, shutdown};

use super::{Gone, MAX_PAYLOAD, Rendezvous, RendezvousError};
use crate::Rank;
use crate::sync::{lock, owned};

mod config;
mod error;
mod failure;
mod hub;
mod join;
mod link;
mod pending;
mod proof;
mod round;
mod watch;
mod wire;

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;

pub use config::TcpConfig;
pub use error::{Obstacle, TcpError};
pub use proof::Token;

use config::Unusable;
use failure::Failure;
use hub::Hub;
use join::{Joined, join};
use link::{Inbox, Received, Until, Written, write};
use pending::Gate;
use watch::{Watch, Wire};
use wire::{MESSAGE_LIMIT, ToHub, ToRank, cut, decode, frame};

/// What the first call of all ranks is for, by which they know that all have joined.
const MEETING: &str = "meeting";

/// How much longer than its deadline a rank waits to be told by rank 0 who is missing.
const GRACE: Duration = Duration::from_secs(3);

/// How long giving up may take where the connection is full.
const ABORT: Duration = Duration::from_secs(1);

/// The handle of one rank, a process or a part of one. Dropping it leaves the group.
///
/// A call ends within its deadline where rank 0 runs; where rank 0 hangs or its machine is gone it
/// ends three seconds after it, and names rank 0. Purposes and reasons are cut at 16 KiB.
///
/// Rank 0 has a thread for as long as its handle lives. Dropping its handle blocks while the others
/// are told, for little more than a second at most.
pub struct TcpRendezvous {
    rank: Rank,
    world: usize,
    wire: Arc<Wire>,
    /// Held while a message is written.
    writing: Mutex<()>,
    /// Reads between calls, if somebody wants to know of ranks that are gone.
    watch: Mutex<Option<Watch>>,
    /// Of rank 0.
    hub: Option<JoinHandle<()>>,
}

impl TcpRendezvous {
    /// Joins a group and waits until all of its ranks have. Blocks for at most `deadline` (see
    /// [`TcpRendezvous`] for what may come on top, and the system's resolver for names).
    ///
    /// Rank 0 listens until all have joined, and not after that. Whoever connects without being a
    /// rank of the group is turned away.
    ///
    /// # Errors
    ///
    /// [`TcpError`] says what this rank could not do; what concerns all of them, every rank that has
    /// joined is told: [`RendezvousError::Deadline`] names those that did not come,
    /// [`RendezvousError::Duplicate`] one that came twice, [`RendezvousError::OtherWorld`] one that
    /// was started as one of another number of ranks.
    pub fn meet(config: &TcpConfig, deadline: Duration) -> Result<Self, TcpError> {
        let until = Until::after(deadline);
        let rendezvous = if config.rank == Rank(0) {
            Self::lead(config)?
        } else {
            let joined = join(config, deadline, until)?;
            Self::new(config, joined, None)
        };
        rendezvous.gather(MEETING, &[], deadline, until)?;
        Ok(rendezvous)
    }

    /// Rank 0, with its thread.
    fn lead(config: &TcpConfig) -> Result<Self, TcpError> {
        let listener = if config.world > 1 { Some(listen(config)?) } else { None };
        let (own, hub) = UnixStream::pair().map_err(TcpError::os("socketpair"))?;
        let gate = Gate { group: config.group.clone(), token: config.token.clone() };
        let hub = Hub::new(gate, config.world, hub.into(), listener);
        let thread = thread::Builder::new().name("graph-ep-hub".to_owned());
        let thread = thread.spawn(|| hub.run()).map_err(TcpError::os("starting a thread"))?;
        let joined = Joined { fd: own.into(), inbox: Inbox::default() };
        Ok(Self::new(config, joined, Some(thread)))
    }

    fn new(config: &TcpConfig, joined: Joined, hub: Option<JoinHandle<()>>) -> Self {
        Self {
            rank: config.rank,
            world: config.world,
            wire: Arc::new(Wire::new(joined.fd, joined.inbox)),
            writing: Mutex::new(()),
            watch: Mutex::new(None),
            hub,
        }
    }

    fn gather(
        &self,
        purpose: &str,
        payload: &[u8],
        deadline: Duration,
        until: Until,
    ) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let purpose = cut(purpose);
        let Some(mut call) = self.wire.call() else {
            return Err(RendezvousError::Busy { rank: self.rank, purpose: purpose.to_owned() });
        };
        if let Some(failure) = &call.state.failure {
            return Err(failure.error(purpose));
        }
        let hub_is_late =
            || Failure::Deadline { purpose: purpose.to_owned(), deadline, missing: vec![0] };
        let message = if payload.len() > MAX_PAYLOAD {
            ToHub::TooLong { purpose, bytes: payload.len() as u64 }
        } else {
            ToHub::Arrive { purpose, deadline, left: until.left(), payload }
        };
        let until = until.and(GRACE);
        let gathered = match self.tell(&message, until) {
            // Also where nothing can be said any more: we may have been told why.
            Told::Yes | Told::Refused => self.collect(&mut call.state.inbox, until, &hub_is_late),
            Told::Late => Err(hub_is_late()),
        };
        gathered.map_err(|failure| {
            if let Failure::Deadline { .. } = failure {
                self.leave();
            }
            call.fail(&failure);
            failure.error(purpose)
        })
    }

    /// Writes a message. Blocks until `until` at most.
    fn tell(&self, message: &ToHub<'_>, until: Until) -> Told {
        let Ok(frame) = frame(message) else { return Told::Refused };
        let _writing = lock(&self.writing);
        let mut rest = &frame[..];
        loop {
            match write(self.wire.fd.as_fd(), rest) {
                Written::Refused => return Told::Refused,
                Written::Part(written) => rest = &rest[written..],
            }
            if rest.is_empty() {
                return Told::Yes;
            }
            let waited = until.poll(&mut [PollFd::new(&self.wire.fd, PollFlags::OUT)]);
            if until.left().is_zero() || waited.is_err() {
                // Half a message is worse than none.
                self.leave();
                return Told::Late;
            }
        }
    }

    /// Reads the payloads of a whole round. Blocks until `until` at most.
    fn collect(
        &self,
        inbox: &mut Inbox,
        until: Until,
        late: &dyn Fn() -> Failure,
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let malformed = |reason| Failure::Malformed { rank: 0, reason };
        let mut payloads = Vec::with_capacity(self.world);
        let mut received = Received::Open;
        loop {
            while let Some(message) = inbox.message(MESSAGE_LIMIT).map_err(|long| {
                malformed(format!("its length of {} bytes is out of bounds", long.0))
            })? {
                match decode(message).map_err(malformed)? {
                    ToRank::Gathered(payload) => payloads.push(payload.to_vec()),
                    ToRank::Failed(failure) => return Err(failure),
                }
                if payloads.len() == self.world {
                    return Ok(payloads);
                }
            }
            if received == Received::End {
                return Err(Failure::Left { rank: 0, orderly: false });
            }
            if until.left().is_zero() {
                return Err(late());
            }
            let waited = until.poll(&mut [PollFd::new(&self.wire.fd, PollFlags::IN)]);
            waited.map_err(|errno| malformed(errno.to_string()))?;
            received = inbox.receive(self.wire.fd.as_fd());
        }
    }

    /// Tells rank 0 that this rank is gone.
    fn leave(&self) {
        // Where that fails the connection is closed already.
        let _ = shutdown(&self.wire.fd, Shutdown::Write);
    }
}

/// How telling rank 0 something has gone.
enum Told {
    Yes,
    Refused,
    Late,
}

/// Listens at the first place that is free.
fn listen(config: &TcpConfig) -> Result<TcpListener, TcpError> {
    let failed = |source| TcpError::Listen {
        host: config.host.clone(),
        first_port: config.ports.first().copied().unwrap_or(0),
        last_port: config.ports.last().copied().unwrap_or(0),
        source,
    };
    let addresses = config.listening().map_err(|unusable| match unusable {
        Unusable::Unprotected => TcpError::Unprotected { host: config.host.clone() },
        Unusable::Unresolved(error) => failed(error),
    })?;
    let mut last = None;
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => {
                listener.set_nonblocking(true).map_err(failed)?;
                return Ok(listener);
            }
            Err(error) => last = Some(error),
        }
    }
    Err(failed(last.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into())))
}

impl Rendezvous for TcpRendezvous {
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
        self.gather(purpose, payload, deadline, Until::after(deadline))
    }

    fn watch(&self, gone: Gone) {
        let mut watch = lock(&self.watch);
        // The one before has ended before the next begins.
        *watch = None;
        match Watch::start(&self.wire, gone) {
            Ok(started) => *watch = Some(started),
            Err(error) => {
                tracing::warn!(%error, "ranks that end are noticed only when a deadline has passed");
            }
        }
    }

    fn abort(&self, reason: &str) {
        // Where it cannot be told, the connection ends, and that is told.
        self.tell(&ToHub::Abort { reason: cut(reason) }, Until::after(ABORT));
    }
}

impl Drop for TcpRendezvous {
    fn drop(&mut self) {
        *owned(&mut self.watch) = None;
        self.tell(&ToHub::Leave, Until::after(ABORT));
        self.leave();
        if let Some(hub) = self.hub.take() {
            // It does not panic; if it did, the others have seen their connections end.
            let _ = hub.join();
        }
    }
}

impl fmt::Debug for TcpRendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpRendezvous")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

//! A rank's end of its connection to rank 0, and the thread that watches it between calls.
//!
//! In a call the caller reads the connection. Between calls nothing is to come over it but the end of
//! the group, which nobody would read before the next call, however long the rank's device waits for a
//! peer that is gone. So once somebody wants to know, a thread reads it between calls.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags};

use super::failure::Failure;
use super::link::{Inbox, Received, Until};
use super::wire::{MESSAGE_LIMIT, ToRank, decode};
use crate::Rank;
use crate::rendezvous::Gone;
use crate::sync::lock;

/// The connection of a rank.
pub(super) struct Wire {
    pub(super) fd: OwnedFd,
    /// Whether a call is being made.
    calling: AtomicBool,
    /// Held during a call, and while the watch reads.
    state: Mutex<State>,
    gone: Mutex<Option<Arc<Gone>>>,
}

/// What has come over the connection.
pub(super) struct State {
    pub(super) inbox: Inbox,
    pub(super) failure: Option<Failure>,
}

/// A call that is being made.
pub(super) struct Call<'w> {
    wire: &'w Wire,
    pub(super) state: MutexGuard<'w, State>,
}

impl Wire {
    pub(super) fn new(fd: OwnedFd, inbox: Inbox) -> Self {
        Self {
            fd,
            calling: AtomicBool::new(false),
            state: Mutex::new(State { inbox, failure: None }),
            gone: Mutex::new(None),
        }
    }

    /// Begins a call, unless one is being made on another thread.
    pub(super) fn call(&self) -> Option<Call<'_>> {
        if self.calling.swap(true, Ordering::Acquire) {
            return None;
        }
        // The watch holds it for a moment at most.
        Some(Call { wire: self, state: lock(&self.state) })
    }

    /// Takes note of why the group has ended, for all calls from now on, and tells whoever wants to
    /// know if a rank is gone.
    fn end(&self, state: &mut State, failure: &Failure) {
        state.failure = Some(failure.clone());
        if let Failure::Left { rank, orderly: false } = failure
            && let Some(gone) = lock(&self.gone).clone()
        {
            gone(Rank(*rank));
        }
    }

    /// Reads what has come between two calls; `false` once nothing more is to come.
    fn look(&self) -> bool {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return false;
        }
        let received = state.inbox.receive(self.fd.as_fd());
        self.heed(&mut state, received)
    }

    /// Takes in what was read and is for no call; `false` once nothing more is to come.
    fn heed(&self, state: &mut State, received: Received) -> bool {
        let failure = match state.inbox.message(MESSAGE_LIMIT) {
            Ok(Some(message)) => match decode(message) {
                Ok(ToRank::Failed(failure)) => failure,
                Ok(ToRank::Gathered(_)) => {
                    let reason = "it answers a call that was not made".to_owned();
                    Failure::Malformed { rank: 0, reason }
                }
                Err(reason) => Failure::Malformed { rank: 0, reason },
            },
            Ok(None) if received == Received::Open => return true,
            Ok(None) => Failure::Left { rank: 0, orderly: false },
            Err(long) => {
                let reason = format!("its length of {} bytes is out of bounds", long.0);
                Failure::Malformed { rank: 0, reason }
            }
        };
        self.end(state, &failure);
        false
    }
}

impl Call<'_> {
    /// Ends the call, and the group.
    pub(super) fn fail(&mut self, failure: &Failure) {
        self.wire.end(&mut self.state, failure);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        // The end of the group may have come together with the answer: it is read then, and would wake
        // nobody who waits for the connection.
        if self.state.failure.is_none() {
            self.wire.heed(&mut self.state, Received::Open);
        }
        self.wire.calling.store(false, Ordering::Release);
    }
}

/// The thread that watches a connection. Dropping it ends the thread.
pub(super) struct Watch {
    /// Its end is what the thread waits for.
    alive: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `gone` once a rank is gone; at once where one is already.
    pub(super) fn start(wire: &Arc<Wire>, gone: Gone) -> std::io::Result<Self> {
        *lock(&wire.gone) = Some(Arc::new(gone));
        {
            let mut state = lock(&wire.state);
            if let Some(failure) = state.failure.clone() {
                wire.end(&mut state, &failure);
            }
        }
        let (alive, ended) = UnixStream::pair()?;
        let watched = Arc::clone(wire);
        let thread = thread::Builder::new()
            .name("graph-ep-watch".to_owned())
            .spawn(move || watch(&watched, &ended))?;
        Ok(Self { alive: Some(alive), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take() {
            // It does not panic, unless what it was to call did.
            let _ = thread.join();
        }
    }
}

/// Watches until the group or the watch has ended.
fn watch(wire: &Wire, ended: &UnixStream) {
    loop {
        let mut watched = [PollFd::new(&wire.fd, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        if Until(None).poll(&mut watched).is_err() {
            return;
        }
        let [wire_is_ready, has_ended] = watched.map(|one| !one.revents().is_empty());
        // During a call this waits for its end: what makes the connection ready is for the call.
        if has_ended || (wire_is_ready && !wire.look()) {
            return;
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc;

    use super::super::wire::frame;
    use super::*;

    /// The end of the group is read together with the answer to a call: nothing is left in the
    /// connection then that could wake the watch.
    #[test]
    fn an_end_that_comes_with_an_answer_is_told_after_the_call() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let wire = Arc::new(Wire::new(near.into(), Inbox::default()));
        let (tell, told) = mpsc::channel();
        let gone: Gone = Box::new(move |rank| tell.send(rank).expect("somebody listens"));
        let watch = Watch::start(&wire, gone).expect("a thread");

        let mut call = wire.call().expect("no other call");
        assert!(wire.call().is_none(), "one is being made");
        let answer = frame(&ToRank::Gathered(b"all")).expect("framed");
        let left = Failure::Left { rank: 3, orderly: false };
        let end = frame(&ToRank::Failed(left.clone())).expect("framed");
        far.write_all(&[answer, end].concat()).expect("written");
        let state = &mut *call.state;
        while state.inbox.message(MESSAGE_LIMIT).expect("short").is_none() {
            state.inbox.receive(wire.fd.as_fd());
        }
        assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(call);
        assert_eq!(told.recv(), Ok(Rank(3)));
        assert_eq!(wire.call().expect("no other call").state.failure, Some(left));
        drop(watch);
    }
}

//! What the harness and a worker say to each other, in turns, over a socket.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::harness::Verdict;
use crate::meeting::Meeting;

/// What the harness tells all workers alike.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// To run the check of this name.
    Run(String),
    /// To run the body that they ask for, as ranks that meet here.
    Meet(Meeting),
    /// To go on with what the ranks returned, of so many bytes each, which follow; or said.
    Results(Vec<Result<usize, String>>),
}

/// What a worker tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Told {
    /// It asks for ranks.
    Asks(Call),
    /// Its rank has returned what follows.
    Returned,
    /// Its rank has panicked, or left something behind, and said this.
    Said(String),
    /// It has no rank in this group.
    Waits,
    /// The check has ended.
    Ended { verdict: Verdict, on_fewer_ranks: bool },
}

/// A group that a check asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    /// How many groups the check has asked for before.
    pub(super) before: usize,
    /// Ranks.
    pub(super) world: usize,
    /// The type of the body, which names the function that it is written in.
    pub(super) body: String,
}

/// One end of the line between harness and worker.
#[derive(Debug)]
pub(super) struct Line {
    socket: UnixStream,
    /// What has come, up to the part of a message.
    come: Vec<u8>,
}

/// Two lengths, of what is known to the line and of what is not.
const HEAD: usize = 16;

impl Line {
    /// The ends of harness and worker. Nothing waits at that of the harness but what is told to.
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let (harness, worker) = UnixStream::pair()?;
        harness.set_nonblocking(true)?;
        Ok([harness, worker].map(|socket| Self { socket, come: Vec::new() }).into())
    }

    /// Sends a message, and `rest` with it.
    ///
    /// # Errors
    ///
    /// The other end is closed, or, at that of the harness, has not taken all of it at `deadline`.
    pub(super) fn send(
        &mut self,
        message: &impl Serialize,
        rest: &[u8],
        deadline: Option<Instant>,
    ) -> io::Result<()> {
        let known = postcard::to_allocvec(message).map_err(io::Error::other)?;
        let lengths = [known.len(), rest.len()].map(|length| (length as u64).to_le_bytes());
        for mut part in [lengths.as_flattened(), &known, rest] {
            while !part.is_empty() {
                match self.socket.write(part) {
                    Ok(bytes) => part = &part[bytes..],
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                            return Err(io::ErrorKind::TimedOut.into());
                        }
                        wait(&mut [PollFd::new(&self.socket, PollFlags::OUT)]);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Waits for a message: at the end of a worker, which is killed when the harness ends or loses patience.
    ///
    /// # Errors
    ///
    /// The other end is closed, or says what cannot be read.
    pub(super) fn receive<M: DeserializeOwned>(&mut self) -> io::Result<(M, Vec<u8>)> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            if !self.read()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Reads once, and says whether the other end is still open.
    pub(super) fn read(&mut self) -> io::Result<bool> {
        let mut part = [0; 1 << 16];
        let bytes = self.socket.read(&mut part)?;
        self.come.extend(&part[..bytes]);
        Ok(bytes > 0)
    }

    /// The message that has come, if all of it has.
    pub(super) fn take<M: DeserializeOwned>(&mut self) -> io::Result<Option<(M, Vec<u8>)>> {
        let Some((head, tail)) = self.come.split_first_chunk::<HEAD>() else { return Ok(None) };
        let (known, rest) = head.split_at(HEAD / 2);
        let [known, rest] = [known, rest]
            .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("half of the head")) as usize);
        if tail.len() < known + rest {
            return Ok(None);
        }
        let message = postcard::from_bytes(&tail[..known]).map_err(io::Error::other)?;
        let rest = tail[known..known + rest].to_vec();
        // They take turns, so that nothing is behind it.
        self.come.clear();
        Ok(Some((message, rest)))
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits for any of `lines`, or for a moment: that a process was stopped is only seen by looking.
pub(super) fn wait(lines: &mut [PollFd<'_>]) {
    let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    let _ = poll(lines, Some(&moment));
}

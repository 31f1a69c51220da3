//! One end of a connection that carries messages, and never blocks but where it says so.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::wire::PREFIX;

/// How much is read at once.
const CHUNK: usize = 64 << 10;

/// How often one connection is read before others have their turn.
const TURN: usize = 16;

/// A point in time, or never.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until(pub(super) Option<Instant>);

impl Until {
    /// The end of a wait that begins now. What overflows the clock is never.
    pub(super) fn after(deadline: Duration) -> Self {
        Self(Instant::now().checked_add(deadline))
    }

    /// How long it is until then.
    pub(super) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// That point, and some time more.
    pub(super) fn and(self, more: Duration) -> Self {
        Self(self.0.and_then(|at| at.checked_add(more)))
    }

    /// Blocks until one of `watched` is ready, for at most the time left; may return early.
    pub(super) fn poll(self, watched: &mut [PollFd<'_>]) -> Result<(), Errno> {
        let left = Timespec::try_from(self.left()).ok();
        match poll(watched, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

/// What has come of a connection and was not looked at yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    taken: usize,
}

/// A message is longer than it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLong(pub(super) usize);

/// What reading a connection has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Something, or nothing yet.
    Open,
    /// The end: nothing will come any more.
    End,
}

impl Inbox {
    /// The next whole message, of at most `limit` bytes. Room is made for what has come, never for
    /// what a length only promises.
    pub(super) fn message(&mut self, limit: usize) -> Result<Option<&[u8]>, TooLong> {
        let Some((prefix, rest)) = self.bytes[self.taken..].split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
        if length > limit {
            return Err(TooLong(length));
        }
        let message = rest.get(..length);
        if message.is_some() {
            self.taken += PREFIX + length;
        }
        Ok(message)
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        if self.bytes.is_empty() {
            // One long message is no reason to keep its room.
            self.bytes.shrink_to(4 * CHUNK);
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Reads what is there. Does not block.
    pub(super) fn receive(&mut self, from: BorrowedFd<'_>) -> Received {
        let mut chunk = [0; CHUNK];
        for _ in 0..TURN {
            match recv(from, &mut chunk[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Received::End,
                Ok((bytes, _)) => self.push(&chunk[..bytes.min(CHUNK)]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // Whatever has become of the other end, it will not speak any more.
                Err(_) => return Received::End,
            }
        }
        Received::Open
    }
}

/// How far writing has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// As far as the other end lets us.
    Part(usize),
    /// The other end does not take anything any more.
    Refused,
}

/// Writes what there is room for. Does not block.
pub(super) fn write(to: BorrowedFd<'_>, bytes: &[u8]) -> Written {
    let mut done = 0;
    while done < bytes.len() {
        match send(to, &bytes[done..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => done += sent,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            Err(_) => return Written::Refused,
        }
    }
    Written::Part(done)
}

/// A connection as the hub has many of them.
#[derive(Debug)]
pub(super) struct Link {
    fd: OwnedFd,
    pub(super) inbox: Inbox,
    outbox: VecDeque<Arc<[u8]>>,
    /// How much of the first message in the outbox is written.
    written: usize,
}

impl Link {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, inbox: Inbox::default(), outbox: VecDeque::new(), written: 0 }
    }

    pub(super) fn receive(&mut self) -> Received {
        self.inbox.receive(self.fd.as_fd())
    }

    /// Puts a message behind those that are not written yet.
    pub(super) fn queue(&mut self, frame: Arc<[u8]>) {
        self.outbox.push_back(frame);
    }

    /// Writes what there is room for. Does not block.
    pub(super) fn flush(&mut self) {
        while let Some(frame) = self.outbox.front() {
            match write(self.fd.as_fd(), &frame[self.written..]) {
                Written::Part(bytes) => self.written += bytes,
                // Reading will tell that it is closed, after what it has said before.
                Written::Refused => {
                    self.outbox.clear();
                    self.written = 0;
                    return;
                }
            }
            if self.written < frame.len() {
                return;
            }
            self.written = 0;
            self.outbox.pop_front();
        }
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Tells the other end that nothing follows.
    pub(super) fn finish(&self) {
        // It may be closed already, which is the same.
        let _ = shutdown(&self.fd, Shutdown::Write);
    }

    /// What to watch it for.
    pub(super) fn watched(&self) -> PollFd<'_> {
        let out = if self.is_flushed() { PollFlags::empty() } else { PollFlags::OUT };
        PollFd::new(&self.fd, PollFlags::IN | out)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::super::wire::frame;
    use super::*;

    #[test]
    fn messages_come_whole_however_they_are_cut() {
        let frames = [frame(&"first").expect("framed"), frame(&"second").expect("framed")].concat();
        for cut in 1..=frames.len() {
            let mut inbox = Inbox::default();
            let mut seen = Vec::new();
            for piece in frames.chunks(cut) {
                inbox.push(piece);
                while let Some(message) = inbox.message(100).expect("short") {
                    seen.push(message[1..].to_vec());
                }
            }
            assert_eq!(seen, [b"first".to_vec(), b"second".to_vec()]);
        }
    }

    #[test]
    fn a_promise_of_much_is_refused_at_once() {
        let mut inbox = Inbox::default();
        inbox.push(&u32::MAX.to_le_bytes());
        assert_eq!(inbox.message(1 << 20), Err(TooLong(u32::MAX as usize)));
        assert!(inbox.bytes.capacity() < 1024);
    }

    #[test]
    fn what_was_said_before_the_end_is_read() {
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let mut link = Link::new(far.into());
        assert_eq!(link.receive(), Received::Open);
        near.write_all(&frame(&7u32).expect("framed")).expect("written");
        drop(near);
        assert_eq!(link.receive(), Received::End);
        assert_eq!(link.inbox.message(9), Ok(Some(&[7][..])));
        link.queue(vec![0; 1 << 20].into());
        link.flush();
        assert!(link.is_flushed(), "nobody will take it");
    }

    #[test]
    fn writing_goes_on_where_it_stopped() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let mut sender = Link::new(near.into());
        let mut receiver = Link::new(far.into());
        let text = "x".repeat(3 << 20);
        sender.queue(frame(&text).expect("framed").into());
        sender.queue(frame(&"end").expect("framed").into());
        sender.flush();
        assert!(!sender.is_flushed(), "a socket holds less than that");
        let mut seen = Vec::new();
        while seen.len() < 2 {
            sender.flush();
            receiver.receive();
            while let Some(message) = receiver.inbox.message(4 << 20).expect("short") {
                seen.push(postcard::from_bytes::<String>(message).expect("read"));
            }
        }
        assert_eq!(seen, [text, "end".to_owned()]);
    }
}

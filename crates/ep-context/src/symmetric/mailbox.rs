//! A socket to which peers of the same machine send one descriptor each.
//!
//! It has an unguessable name in the abstract namespace, so that no file is left behind, and drops
//! what does not come from the same user, does not carry its key, or is not one descriptor.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::Rank;

const KEY: usize = 16;
/// The key of the receiver and the rank of the sender, little endian.
const LETTER: usize = KEY + size_of::<u32>();

/// A call that failed, and how.
pub(super) type Failed = (&'static str, Errno);

/// Where a mailbox is and what opens it. Only ranks of the group learn it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    name: [u8; KEY],
    key: [u8; KEY],
}

impl Address {
    /// The address as it is told to the other ranks.
    pub(super) fn to_bytes(self) -> [u8; 2 * KEY] {
        let mut bytes = [0; 2 * KEY];
        bytes[..KEY].copy_from_slice(&self.name);
        bytes[KEY..].copy_from_slice(&self.key);
        bytes
    }

    /// The address that `bytes` tell; `None` if their number is wrong.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (name, key) = bytes.split_at_checked(KEY)?;
        Some(Self { name: name.try_into().ok()?, key: key.try_into().ok()? })
    }

    fn socket(&self) -> Result<SocketAddrUnix, Failed> {
        let mut name = b"graph-ep/".to_vec();
        name.extend_from_slice(&self.name);
        SocketAddrUnix::new_abstract_name(&name).map_err(|errno| ("naming a socket", errno))
    }
}

/// A mailbox that listens until it is dropped.
#[derive(Debug)]
pub(super) struct Mailbox {
    listener: OwnedFd,
    address: Address,
}

/// What a connection to a mailbox has brought.
#[derive(Debug)]
pub(super) enum Delivery {
    /// A descriptor of this rank.
    Letter(Rank, OwnedFd),
    /// Nothing so far.
    Pending,
    /// Nothing of use, and it never will.
    Junk,
}

/// How sending has gone.
#[derive(Debug)]
pub(super) enum Post {
    /// The message is with the receiver, who will find it whatever becomes of the sender. The
    /// connection hangs up when the receiver drops its end, as it does when it dies.
    Sent(OwnedFd),
    /// The receiver has no room now.
    Full,
    /// The receiver has closed its mailbox.
    Closed,
}

impl Mailbox {
    /// Opens a mailbox in which `senders` connections can wait.
    pub(super) fn open(senders: usize) -> Result<Self, Failed> {
        let address = Address { name: random()?, key: random()? };
        let listener = socket()?;
        bind(&listener, &address.socket()?).map_err(|errno| ("bind", errno))?;
        // A full mailbox only delays, so a little room for strangers will do.
        let backlog = i32::try_from(senders.saturating_add(8)).unwrap_or(i32::MAX);
        listen(&listener, backlog).map_err(|errno| ("listen", errno))?;
        Ok(Self { listener, address })
    }

    pub(super) fn address(&self) -> Address {
        self.address
    }

    /// The next connection, if one waits. Does not block.
    pub(super) fn accept(&self) -> Result<Option<OwnedFd>, Failed> {
        loop {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(connection) if is_same_user(&connection) => return Ok(Some(connection)),
                Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(("accept", errno)),
            }
        }
    }

    /// What `connection` has brought. Does not block.
    pub(super) fn collect(&self, connection: &OwnedFd) -> Result<Delivery, Failed> {
        let mut bytes = [0; LETTER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(
                connection,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            ) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Delivery::Pending),
                // The far end is gone, which is no concern of ours.
                Err(_) => return Ok(Delivery::Junk),
                Ok(received) => break received,
            }
        };
        // Every descriptor that came is owned from here, and closed where it is not returned.
        let mut descriptors: Vec<OwnedFd> = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        let (key, rank) = bytes.split_at(KEY);
        if received.bytes != LETTER
            || received.flags.contains(ReturnFlags::TRUNC)
            || key != self.address.key
        {
            return Ok(Delivery::Junk);
        }
        let rank = rank.iter().rev().fold(0, |rank, byte| (rank << 8) | u32::from(*byte));
        if descriptors.is_empty() && received.flags.contains(ReturnFlags::CTRUNC) {
            // A peer did send one, and this process has no room for it in its table.
            return Err(("recvmsg", Errno::MFILE));
        }
        Ok(match (descriptors.pop(), descriptors.is_empty()) {
            (Some(descriptor), true) => Delivery::Letter(Rank(rank), descriptor),
            _ => Delivery::Junk,
        })
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Sends `descriptor` to the mailbox at `to`. Does not block.
pub(super) fn post(to: &Address, from: Rank, descriptor: BorrowedFd<'_>) -> Result<Post, Failed> {
    let mut letter = [0; LETTER];
    letter[..KEY].copy_from_slice(&to.key);
    letter[KEY..].copy_from_slice(&from.0.to_le_bytes());
    send(to, &letter, &[descriptor])
}

fn send(to: &Address, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<Post, Failed> {
    let socket = socket()?;
    let address = to.socket()?;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(Post::Full),
            Err(Errno::CONNREFUSED) => return Ok(Post::Closed),
            Err(errno) => return Err(("connect", errno)),
        }
    }
    // A name that was given up can be taken by anyone.
    if !is_same_user(&socket) {
        return Ok(Post::Closed);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
            // A message of this type of socket is sent whole or not at all.
            Ok(_) => return Ok(Post::Sent(socket)),
            Err(Errno::INTR) => {}
            // The last: more descriptors are under way than the user may have open.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => return Ok(Post::Full),
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Post::Closed),
            Err(errno) => return Err(("sendmsg", errno)),
        }
    }
}

/// A socket that keeps messages apart and never blocks.
fn socket() -> Result<OwnedFd, Failed> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|errno| ("socket", errno))
}

fn is_same_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == geteuid())
}

fn random() -> Result<[u8; KEY], Failed> {
    let mut bytes = [0; KEY];
    loop {
        match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
            // The kernel does not deliver so few bytes in part.
            Ok(_) => return Ok(bytes),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(("getrandom", errno)),
        }
    }
}

/// What a stranger who found the name may do: all that is no letter, and a forged one.
#[cfg(test)]
pub(super) fn garbage(to: &Address) {
    let file = rustix::fs::memfd_create("stranger", rustix::fs::MemfdFlags::CLOEXEC);
    let file = file.expect("a memfd");
    for bytes in [&b""[..], b"hello", &[0; LETTER], &[255; 4096]] {
        assert!(matches!(send(to, bytes, &[file.as_fd()]), Ok(Post::Sent(_))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> OwnedFd {
        rustix::fs::memfd_create("letter", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd")
    }

    fn delivered(mailbox: &Mailbox) -> Delivery {
        let connection = mailbox.accept().expect("accepts").expect("a connection waits");
        mailbox.collect(&connection).expect("collects")
    }

    #[test]
    fn a_letter_arrives_after_its_sender_is_gone() {
        let mailbox = Mailbox::open(1).expect("a mailbox");
        assert!(mailbox.accept().expect("accepts").is_none());
        let sent = post(&mailbox.address(), Rank(0x0102_0304), descriptor().as_fd());
        assert!(matches!(sent, Ok(Post::Sent(_))), "{sent:?}");
        let Delivery::Letter(rank, fd) = delivered(&mailbox) else { panic!("no letter") };
        assert_eq!(rank, Rank(0x0102_0304));
        let flags = rustix::io::fcntl_getfd(&fd).expect("an open descriptor");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn what_is_no_letter_is_junk() {
        let mailbox = Mailbox::open(8).expect("a mailbox");
        let to = mailbox.address();
        let (one, two) = (descriptor(), descriptor());
        let mut letter = [0; LETTER];
        letter[..KEY].copy_from_slice(&to.key);
        let mut forged = letter;
        forged[0] ^= 1;
        let long = [&letter[..], &[0]].concat();
        let attempts: [(&[u8], &[BorrowedFd<'_>]); 6] = [
            (&letter, &[]),
            (&letter, &[one.as_fd(), two.as_fd()]),
            (&forged, &[one.as_fd()]),
            (&letter[1..], &[one.as_fd()]),
            (&long, &[one.as_fd()]),
            (&[], &[]),
        ];
        for (bytes, descriptors) in attempts {
            assert!(matches!(send(&to, bytes, descriptors), Ok(Post::Sent(_))));
            assert!(matches!(delivered(&mailbox), Delivery::Junk), "{bytes:?} {descriptors:?}");
        }
        // One that has said nothing yet, and then hangs up.
        let silent = socket().expect("a socket");
        connect(&silent, &to.socket().expect("an address")).expect("connects");
        let connection = mailbox.accept().expect("accepts").expect("a connection waits");
        assert!(matches!(mailbox.collect(&connection), Ok(Delivery::Pending)));
        drop(silent);
        assert!(matches!(mailbox.collect(&connection), Ok(Delivery::Junk)));
    }

    #[test]
    fn a_full_mailbox_and_a_closed_one_say_so() {
        let mailbox = Mailbox::open(1).expect("a mailbox");
        let to = mailbox.address();
        let fd = descriptor();
        let mut posts = (0..100).map(|_| post(&to, Rank(0), fd.as_fd()));
        let outcome = posts.find(|outcome| !matches!(outcome, Ok(Post::Sent(_))));
        assert!(matches!(outcome, Some(Ok(Post::Full))), "{outcome:?}");
        assert!(matches!(delivered(&mailbox), Delivery::Letter(Rank(0), _)));
        assert!(matches!(post(&to, Rank(0), fd.as_fd()), Ok(Post::Sent(_))));
        drop(mailbox);
        assert!(matches!(post(&to, Rank(0), fd.as_fd()), Ok(Post::Closed)));
    }

    #[test]
    fn an_address_goes_through_bytes() {
        let address = Mailbox::open(1).expect("a mailbox").address();
        assert_ne!(address.name, address.key);
        assert_eq!(Address::from_bytes(&address.to_bytes()), Some(address));
        assert_eq!(Address::from_bytes(&[0; 2 * KEY - 1]), None);
        assert_eq!(Address::from_bytes(&[0; 2 * KEY + 1]), None);
        assert_eq!(Address::from_bytes(&[]), None);
    }
}

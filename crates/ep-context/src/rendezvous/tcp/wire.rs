//! The messages between rank 0 and the other ranks.
//!
//! Each is encoded by postcard and goes behind its length in four bytes, little endian. Before both
//! ends have proved that they belong together, messages are short.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::MAX_PAYLOAD;
use super::super::message::as_bytes;
pub(super) use super::super::message::decode;
use super::failure::Failure;

const MAGIC: [u8; 8] = *b"GRAPH-EP";
const VERSION: u32 = 1;

/// The length in front of each message.
pub(super) const PREFIX: usize = size_of::<u32>();

/// The longest message of a stranger.
pub(super) const HANDSHAKE_LIMIT: usize = 1024;

/// The longest message of a rank: a payload, and the words around it.
pub(super) const MESSAGE_LIMIT: usize = MAX_PAYLOAD + (64 << 10);

/// Longer words of a rank are cut, so that a message with two of them stays within its limit.
const WORDS_LIMIT: usize = 16 << 10;

pub(super) type Nonce = [u8; 32];
pub(super) type Proof = [u8; 32];

/// What begins the first message of either end, in every version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Preface {
    magic: [u8; 8],
    version: u32,
}

/// What a rank says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello<'a> {
    pub(super) preface: Preface,
    pub(super) group: &'a str,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) nonce: Nonce,
}

/// The answer of rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) preface: Preface,
    pub(super) nonce: Nonce,
    pub(super) proof: Proof,
}

/// What a rank sends when it has found the proof of rank 0 to be good. It has joined then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Joining {
    pub(super) proof: Proof,
}

/// What a rank that has joined says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToHub<'a> {
    /// It comes to the next round, and waits for all.
    Arrive {
        purpose: &'a str,
        /// How long it waits in all.
        deadline: Duration,
        /// What is left of that.
        left: Duration,
        #[serde(serialize_with = "as_bytes")]
        payload: &'a [u8],
    },
    /// Its payload is too long to be sent.
    TooLong { purpose: &'a str, bytes: u64 },
    /// It gives up.
    Abort { reason: &'a str },
    /// It leaves in order: the end of the connection, which follows, is none of its process.
    Leave,
}

/// What rank 0 says to a rank that has joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToRank<'a> {
    /// The payload of the next rank in a round that is complete.
    Gathered(#[serde(serialize_with = "as_bytes")] &'a [u8]),
    /// The end of the group.
    Failed(Failure),
}

/// Why a first message is none of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    Protocol,
    Version(u32),
}

impl Preface {
    pub(super) const OURS: Self = Self { magic: MAGIC, version: VERSION };

    /// Looks at the beginning of a first message, which is the same in every version.
    pub(super) fn check(message: &[u8]) -> Result<(), Foreign> {
        match postcard::take_from_bytes::<Self>(message) {
            Ok((Self::OURS, _)) => Ok(()),
            Ok((Self { magic: MAGIC, version }, _)) => Err(Foreign::Version(version)),
            _ => Err(Foreign::Protocol),
        }
    }
}

/// A message as it goes over the wire, behind its length. None can be too long for that: payloads,
/// words and groups are bounded.
pub(super) fn frame<T: Serialize>(message: &T) -> Result<Vec<u8>, postcard::Error> {
    let mut bytes = postcard::to_extend(message, vec![0; PREFIX])?;
    let length =
        u32::try_from(bytes.len() - PREFIX).map_err(|_| postcard::Error::SerializeBufferFull)?;
    bytes[..PREFIX].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}

/// As much of `words` as a message holds.
pub(super) fn cut(words: &str) -> &str {
    let mut end = words.len().min(WORDS_LIMIT);
    while !words.is_char_boundary(end) {
        end -= 1;
    }
    &words[..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn same<'a, T>(value: &T, frame: &'a [u8])
    where
        T: Deserialize<'a> + PartialEq + std::fmt::Debug,
    {
        let (length, message) = frame.split_at(PREFIX);
        assert_eq!(length, u32::try_from(message.len()).expect("short").to_le_bytes());
        assert_eq!(&decode::<T>(message).expect("read"), value);
        for end in 0..message.len() {
            assert!(decode::<T>(&message[..end]).is_err(), "{end} bytes are no message");
        }
    }

    #[test]
    fn first_messages_fit_their_limit_and_tell_their_version() {
        let group = "g".repeat(crate::rendezvous::tcp::config::GROUP_LIMIT);
        let preface = Preface::OURS;
        let (rank, world, nonce) = (u32::MAX, u32::MAX, [255; 32]);
        let hello = Hello { preface, group: &group, rank, world, nonce };
        let bytes = frame(&hello).expect("framed");
        assert!(bytes.len() - PREFIX <= HANDSHAKE_LIMIT);
        same(&hello, &bytes);
        assert_eq!(Preface::check(&bytes[PREFIX..]), Ok(()));

        let preface = Preface { version: 7, ..preface };
        let bytes = frame(&Greeting { preface, nonce, proof: [1; 32] }).expect("framed");
        assert_eq!(Preface::check(&bytes[PREFIX..]), Err(Foreign::Version(7)));
        assert_eq!(Preface::check(b"GET / HTTP/1.1\r\n"), Err(Foreign::Protocol));
        assert_eq!(Preface::check(b""), Err(Foreign::Protocol));
    }

    #[test]
    fn the_longest_message_of_a_rank_is_within_its_limit() {
        let words = "w".repeat(2 * WORDS_LIMIT);
        let payload = vec![1; MAX_PAYLOAD];
        let arrive = ToHub::Arrive {
            purpose: cut(&words),
            deadline: Duration::MAX,
            left: Duration::MAX,
            payload: &payload,
        };
        assert!(frame(&arrive).expect("framed").len() - PREFIX <= MESSAGE_LIMIT);
        let failure = Failure::Purpose {
            first: u32::MAX,
            first_purpose: cut(&words).to_owned(),
            second: u32::MAX,
            second_purpose: cut(&words).to_owned(),
        };
        assert!(frame(&ToRank::Failed(failure)).expect("framed").len() - PREFIX <= MESSAGE_LIMIT);
    }

    proptest! {
        #[test]
        fn reading_is_the_inverse_of_writing(
            purpose in ".{0,40}",
            payload in proptest::collection::vec(any::<u8>(), 0..60),
            deadline in any::<Duration>(),
        ) {
            let left = deadline / 2;
            let arrive =
                ToHub::Arrive { purpose: &purpose, deadline, left, payload: &payload };
            same(&arrive, &frame(&arrive).expect("framed"));
            let abort = ToHub::Abort { reason: &purpose };
            same(&abort, &frame(&abort).expect("framed"));
            same(&ToHub::Leave, &frame(&ToHub::Leave).expect("framed"));
            let gathered = ToRank::Gathered(&payload);
            same(&gathered, &frame(&gathered).expect("framed"));
            let failed = ToRank::Failed(Failure::Aborted { rank: 3, reason: purpose.clone() });
            same(&failed, &frame(&failed).expect("framed"));
        }

        #[test]
        fn words_are_cut_between_characters(words in "[aé漢]{0,9000}") {
            let cut = cut(&words);
            prop_assert!(words.starts_with(cut));
            prop_assert!(cut.len() == words.len() || cut.len() + 4 > WORDS_LIMIT);
            prop_assert!(cut.len() <= WORDS_LIMIT);
        }
    }
}

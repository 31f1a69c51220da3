//! Messages between ranks, as postcard writes them.

use serde::{Deserialize, Serialize, Serializer};

use super::RendezvousError;
use crate::Rank;

/// What `rank`, this one, has to say for `purpose`, in bytes.
pub(super) fn encode<T: Serialize + ?Sized>(
    message: &T,
    rank: Rank,
    purpose: &str,
) -> Result<Vec<u8>, RendezvousError> {
    postcard::to_allocvec(message).map_err(|error| malformed(rank, purpose, error.to_string()))
}

/// What every rank has said for `purpose`, in their order. Whatever the ranks then conclude, all come to
/// the same result: each has the same bytes.
pub(super) fn decode_all<'a, T: Deserialize<'a>>(
    gathered: &'a [Vec<u8>],
    purpose: &str,
) -> Result<Vec<T>, RendezvousError> {
    let of_rank = |(rank, bytes): (usize, &'a Vec<u8>)| {
        decode(bytes).map_err(|reason| malformed(Rank::from_index(rank), purpose, reason))
    };
    gathered.iter().enumerate().map(of_rank).collect()
}

/// What `message` says; an error in words if it is anything else, or more.
pub(super) fn decode<'a, T: Deserialize<'a>>(message: &'a [u8]) -> Result<T, String> {
    match postcard::take_from_bytes(message) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} bytes follow its end", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) fn malformed(rank: Rank, purpose: &str, reason: String) -> RendezvousError {
    RendezvousError::Malformed { rank, purpose: purpose.to_owned(), reason }
}

/// Writes a slice as a whole, which would be written element by element.
pub(super) fn as_bytes<S: Serializer>(bytes: &&[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

//! How two ends prove to each other that they hold the same token, without telling it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use sha2::Sha256;

use super::wire::{Hello, Nonce, Proof};

/// The secret of a job. Whoever has it can join the job's groups; it is never sent, nor printed.
///
/// It must be long and random, such as 32 hexadecimal digits: who listens to a rank that joins can
/// try out short ones.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl Token {
    /// The token with these bytes; `None` if there are none.
    pub fn new(secret: impl Into<Vec<u8>>) -> Option<Self> {
        Some(Self(secret.into())).filter(|token| !token.0.is_empty())
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Which end proves something. What one end has proved is of no use as the proof of the other.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) enum End {
    Hub,
    Rank,
}

/// The proof that `end` gives in a conversation that has begun like this; both ends contribute a
/// nonce to it, so that it proves nothing in another. Without a token it proves nothing at all.
fn mac(
    token: Option<&Token>,
    end: End,
    hello: &Hello<'_>,
    hub: &Nonce,
) -> Result<Hmac<Sha256>, String> {
    let said = postcard::to_allocvec(&(end, hello, hub)).map_err(|error| error.to_string())?;
    let key = token.map_or(&[][..], Token::bytes);
    let mac = Hmac::<Sha256>::new_from_slice(key).map_err(|error| error.to_string())?;
    Ok(mac.chain_update(said))
}

/// Makes the proof of `end`.
pub(super) fn prove(
    token: Option<&Token>,
    end: End,
    hello: &Hello<'_>,
    hub: &Nonce,
) -> Result<Proof, String> {
    Ok(mac(token, end, hello, hub)?.finalize().into_bytes().into())
}

/// Whether `proof` is that of `end`. Takes the same time wherever it differs.
pub(super) fn holds(
    proof: &Proof,
    token: Option<&Token>,
    end: End,
    hello: &Hello<'_>,
    hub: &Nonce,
) -> bool {
    mac(token, end, hello, hub).is_ok_and(|mac| mac.verify_slice(proof).is_ok())
}

/// Bytes that nobody has used before.
pub(super) fn nonce() -> Result<Nonce, Errno> {
    let mut nonce = Nonce::default();
    loop {
        match getrandom(&mut nonce[..], GetRandomFlags::empty()) {
            // The kernel does not deliver so few bytes in part.
            Ok(_) => return Ok(nonce),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Preface;
    use super::*;

    fn hello(rank: u32) -> Hello<'static> {
        Hello { preface: Preface::OURS, group: "job", rank, world: 4, nonce: [1; 32] }
    }

    #[test]
    fn a_proof_holds_for_one_token_end_and_conversation() {
        let (token, other) = (Token::new("secret"), Token::new("Secret"));
        let (token, other) = (token.as_ref(), other.as_ref());
        let hub = [2; 32];
        let proof = prove(token, End::Rank, &hello(1), &hub).expect("made");
        assert!(holds(&proof, token, End::Rank, &hello(1), &hub));
        assert!(!holds(&proof, other, End::Rank, &hello(1), &hub));
        assert!(!holds(&proof, None, End::Rank, &hello(1), &hub));
        assert!(!holds(&proof, token, End::Hub, &hello(1), &hub));
        assert!(!holds(&proof, token, End::Rank, &hello(2), &hub));
        assert!(!holds(&proof, token, End::Rank, &hello(1), &[3; 32]));
        let again = Hello { nonce: [4; 32], ..hello(1) };
        assert!(!holds(&proof, token, End::Rank, &again, &hub));
        assert_ne!(nonce().expect("random"), nonce().expect("random"));
    }

    #[test]
    fn a_token_is_not_empty_and_not_printed() {
        assert_eq!(Token::new(""), None);
        assert!(!format!("{:?}", Token::new("secret")).contains("secret"));
    }
}

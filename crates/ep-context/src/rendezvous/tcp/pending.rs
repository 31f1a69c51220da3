//! A connection whose far end has not proved yet that it is a rank of the group.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::failure::Failure;
use super::link::{Link, Received};
use super::proof::{End, Token, holds, nonce, prove};
use super::wire::{
    Foreign, Greeting, HANDSHAKE_LIMIT, Hello, Joining, Nonce, Preface, Proof, ToRank, decode,
    frame,
};

/// How long a stranger may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a rank must know to be let in.
#[derive(Debug)]
pub(super) struct Gate {
    pub(super) group: String,
    pub(super) token: Option<Token>,
}

/// Who has proved to belong to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) rank: u32,
    pub(super) world: u32,
}

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) link: Link,
    since: Instant,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// It has not said who it is.
    Unknown,
    /// It has to prove that it is who it said.
    Claims { claim: Claim, nonce: Nonce, hub: Nonce },
    /// It was told why it cannot join, and has only to read that.
    Refused,
}

/// What has become of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Waits,
    Joins(Claim),
    Over(&'static str),
}

impl Pending {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { link: Link::new(fd), since: Instant::now(), stage: Stage::Unknown }
    }

    /// When it is given up.
    pub(super) fn until(&self) -> Instant {
        self.since + PATIENCE
    }

    /// Reads and answers what has come. Does not block.
    pub(super) fn advance(&mut self, gate: &Gate) -> Progress {
        let received = self.link.receive();
        let progress = self.step(gate);
        self.link.flush();
        match progress {
            Progress::Waits if received == Received::End => Progress::Over("it hung up"),
            Progress::Waits if Instant::now() >= self.until() => Progress::Over("it took too long"),
            progress => progress,
        }
    }

    fn step(&mut self, gate: &Gate) -> Progress {
        loop {
            let Ok(message) = self.link.inbox.message(HANDSHAKE_LIMIT) else {
                return Progress::Over("its message is too long");
            };
            let Some(message) = message else { return Progress::Waits };
            match &self.stage {
                Stage::Unknown => match greet(gate, message) {
                    Ok((stage, greeting)) => {
                        self.link.queue(greeting.into());
                        self.stage = stage;
                    }
                    Err(reason) => return Progress::Over(reason),
                },
                Stage::Claims { claim, nonce, hub } => {
                    let Ok(Joining { proof }) = decode(message) else {
                        return Progress::Over("its proof cannot be read");
                    };
                    let (claim, hello) = (*claim, hello(gate, *claim, *nonce));
                    if !holds(&proof, gate.token.as_ref(), End::Rank, &hello, hub) {
                        return Progress::Over("it does not know the job token");
                    }
                    return Progress::Joins(claim);
                }
                Stage::Refused => {}
            }
        }
    }

    /// Tells it why it cannot join.
    pub(super) fn refuse(&mut self, failure: Failure) {
        if let Ok(frame) = frame(&ToRank::Failed(failure)) {
            self.link.queue(frame.into());
            self.link.flush();
        }
        self.link.finish();
        self.stage = Stage::Refused;
    }
}

fn hello(gate: &Gate, claim: Claim, nonce: Nonce) -> Hello<'_> {
    let Claim { rank, world } = claim;
    Hello { preface: Preface::OURS, group: &gate.group, rank, world, nonce }
}

/// What to answer to a first message, and what is expected then.
fn greet(gate: &Gate, message: &[u8]) -> Result<(Stage, Vec<u8>), &'static str> {
    match Preface::check(message) {
        Ok(()) => {}
        Err(Foreign::Protocol) => return Err("it speaks another protocol"),
        // The answer tells it our version, and is of no other use to it.
        Err(Foreign::Version(_)) => {
            return Ok((Stage::Refused, encode(&greeting([0; 32], [0; 32]))?));
        }
    }
    let hello: Hello<'_> = decode(message).map_err(|_| "its first message cannot be read")?;
    if hello.group != gate.group {
        return Err("it looks for another group");
    }
    let hub = nonce().map_err(|_| "the system has no random bytes")?;
    let proof = prove(gate.token.as_ref(), End::Hub, &hello, &hub)
        .map_err(|_| "no proof can be made for it")?;
    let claim = Claim { rank: hello.rank, world: hello.world };
    Ok((Stage::Claims { claim, nonce: hello.nonce, hub }, encode(&greeting(hub, proof))?))
}

fn greeting(nonce: Nonce, proof: Proof) -> Greeting {
    Greeting { preface: Preface::OURS, nonce, proof }
}

fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, &'static str> {
    frame(message).map_err(|_| "no answer can be written for it")
}

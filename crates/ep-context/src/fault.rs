//! What went wrong on a device: the phase, the culprit, and the word that carries both.
//!
//! A rank whose wait runs out, that is aborted, or that finds a peer out of step stores one 64-bit
//! word: into its own control block, where its host finds it, and into the poison word of every
//! peer, so that no peer waits for a rank that has given up. The first word stored wins; later ones
//! are consequences of it.

use std::fmt;

use crate::Rank;

/// The part of a step, or of the life of a group, in which something is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    /// Rendezvous, comparing configurations, mapping the memory of peers.
    Setup = 0,
    /// Waiting for the tokens of every rank.
    Dispatch = 1,
    /// Waiting for the partial sums of every rank.
    Combine = 2,
    /// The closing round of a step that ends in a dispatch.
    Acknowledge = 3,
    /// Waiting for every rank's word before a step is replayed, or before one that all have to record
    /// at once is launched.
    Agreement = 4,
    /// Mapping more memory behind a receive buffer.
    Growth = 5,
    /// Waiting for the published record of a step.
    Record = 6,
    /// Leaving the group.
    Shutdown = 7,
}

impl Phase {
    /// How many phases there are: the length of a table indexed by phase.
    pub const COUNT: usize = 8;

    /// Every phase, in the order of its index.
    pub const ALL: [Phase; Self::COUNT] = [
        Phase::Setup,
        Phase::Dispatch,
        Phase::Combine,
        Phase::Acknowledge,
        Phase::Agreement,
        Phase::Growth,
        Phase::Record,
        Phase::Shutdown,
    ];

    /// The phase's place in a table of [`Phase::COUNT`] entries.
    pub const fn index(self) -> usize {
        self as usize
    }

    fn from_index(index: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Setup => "set-up",
            Phase::Dispatch => "dispatch",
            Phase::Combine => "combine",
            Phase::Acknowledge => "acknowledgement",
            Phase::Agreement => "agreement",
            Phase::Growth => "growth",
            Phase::Record => "record",
            Phase::Shutdown => "shutdown",
        })
    }
}

/// Why a rank gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FaultKind {
    /// The culprit did not signal within the deadline of the phase.
    Timeout = 1,
    /// The host of the culprit asked for an end.
    Aborted = 2,
    /// The culprit signalled a step or dispatch other than the one waited for, or goes back along a handle that
    /// holds another dispatch than its backward pass was queued for.
    OutOfStep = 3,
    /// The culprit has more tokens or rows than there is memory for: more tokens to send than its dispatch may,
    /// or more of either in a handle than its combine or backward pass was queued for.
    TooManyTokens = 4,
    /// An operation of the culprit failed while it ran.
    Failed = 5,
    /// The culprit has fewer receive rows than a single token may need.
    NoProgress = 6,
    /// The process of the culprit ended without leaving the group.
    Gone = 7,
}

impl FaultKind {
    fn from_code(code: u64) -> Option<Self> {
        Some(match code {
            1 => FaultKind::Timeout,
            2 => FaultKind::Aborted,
            3 => FaultKind::OutOfStep,
            4 => FaultKind::TooManyTokens,
            5 => FaultKind::Failed,
            6 => FaultKind::NoProgress,
            7 => FaultKind::Gone,
            _ => return None,
        })
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultKind::Timeout => "did not signal within the deadline",
            FaultKind::Aborted => "was aborted by its host",
            FaultKind::OutOfStep => "is in another step or dispatch than its peers",
            FaultKind::TooManyTokens => "has more tokens or rows than it was given memory for",
            FaultKind::Failed => "failed while an operation ran",
            FaultKind::NoProgress => "has fewer receive rows than a single token needs",
            FaultKind::Gone => "ended without leaving the group",
        })
    }
}

/// A failure of the group: who caused it, where, and how.
///
/// Sticky: once a rank holds a fault, the rest of its step and all later steps move nothing until
/// the group is built again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// What was being waited for or done.
    pub phase: Phase,
    /// The rank that caused it.
    pub culprit: Rank,
    /// How it failed.
    pub kind: FaultKind,
}

impl Fault {
    /// The fault as one word: never zero, since zero says that there is none.
    pub const fn to_word(self) -> u64 {
        ((self.kind as u64) << 40) | ((self.phase as u64) << 32) | self.culprit.0 as u64
    }

    /// The fault that `word` carries; `None` for zero and for a word that no rank ever writes.
    pub fn from_word(word: u64) -> Option<Self> {
        let kind = FaultKind::from_code(word >> 40)?;
        let phase = Phase::from_index((word >> 32) & 0xff)?;
        Some(Self { phase, culprit: Rank((word & 0xffff_ffff) as u32), kind })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} (phase: {})", self.culprit, self.kind, self.phase)
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_carries_every_fault() {
        for phase in Phase::ALL {
            for code in 1..=7 {
                let kind = FaultKind::from_code(code).expect("known code");
                for culprit in [Rank(0), Rank(7), Rank(u32::MAX)] {
                    let fault = Fault { phase, culprit, kind };
                    assert_ne!(fault.to_word(), 0);
                    assert_eq!(Fault::from_word(fault.to_word()), Some(fault));
                }
            }
        }
        assert_eq!(Fault::from_word(0), None);
        assert_eq!(Fault::from_word(99 << 40), None);
        assert_eq!(Fault::from_word((1 << 40) | (8 << 32)), None);
    }
}

//! The end of a group, as it is told to every rank.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::RendezvousError;
use crate::Rank;

/// Why no rank can use the group any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Failure {
    /// `orderly` unless its connection ended without a word.
    Left {
        rank: u32,
        orderly: bool,
    },
    Aborted {
        rank: u32,
        reason: String,
    },
    Deadline {
        purpose: String,
        deadline: Duration,
        missing: Vec<u32>,
    },
    Purpose {
        first: u32,
        first_purpose: String,
        second: u32,
        second_purpose: String,
    },
    Payload {
        rank: u32,
        purpose: String,
        bytes: u64,
    },
    Malformed {
        rank: u32,
        reason: String,
    },
    Duplicate {
        rank: u32,
    },
    World {
        first: u32,
        first_world: u32,
        second: u32,
        second_world: u32,
    },
}

impl Failure {
    /// The error of a call for `purpose` that finds the group ended.
    pub(super) fn error(&self, purpose: &str) -> RendezvousError {
        let now = purpose.to_owned();
        match self.clone() {
            Self::Left { rank, .. } => RendezvousError::Left { rank: Rank(rank), purpose: now },
            Self::Aborted { rank, reason } => {
                RendezvousError::Aborted { rank: Rank(rank), reason, purpose: now }
            }
            Self::Deadline { purpose, deadline, missing } => RendezvousError::Deadline {
                purpose,
                deadline,
                missing: missing.into_iter().map(Rank).collect(),
            },
            Self::Purpose { first, first_purpose, second, second_purpose } => {
                let (first, second) = (Rank(first), Rank(second));
                RendezvousError::Purpose { first, first_purpose, second, second_purpose }
            }
            Self::Payload { rank, purpose, bytes } => RendezvousError::Payload {
                rank: Rank(rank),
                purpose,
                bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
            },
            Self::Malformed { rank, reason } => {
                RendezvousError::Malformed { rank: Rank(rank), purpose: now, reason }
            }
            Self::Duplicate { rank } => RendezvousError::Duplicate { rank: Rank(rank) },
            Self::World { first, first_world, second, second_world } => {
                let (first, second) = (Rank(first), Rank(second));
                RendezvousError::OtherWorld { first, first_world, second, second_world }
            }
        }
    }
}

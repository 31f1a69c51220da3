//! The position of a process or thread in an expert-parallel group.

use std::fmt;

/// A rank of an expert-parallel group, counted from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into per-rank arrays.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The rank at position `index` of a per-rank array.
    ///
    /// Groups are far smaller than 2³² ranks, so a larger index is a bug of the caller and saturates.
    pub fn from_index(index: usize) -> Self {
        Self(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

//! The exchange of one MoE layer, as an executable specification.
//!
//! Everything here is a pure function on plain vectors: no ranks that run, no memory that is shared,
//! no device. Each function is the shortest statement of its rule that still runs, so that whoever
//! doubts a result of the engine can read the rule instead of trusting a second implementation. It
//! shares no code with the engine, not even rounding to the number format, and is never on its path:
//! the engine is checked against it, not built on it.
//!
//! | module | rule |
//! |---|---|
//! | [`placement`] | which rank owns a token, which rank owns an expert |
//! | [`routing`] | which of a token's top-k ids count, and how many tokens each expert gets |
//! | [`required`] | receive rows: required by a rank, granted at first, needed at worst |
//! | [`window`] | what a receiver takes when its capacity is less than it requires |
//! | [`arithmetic`] | rounding to the number format |
//! | [`fp8`] | FP8 e4m3, and quantising rows to it |
//! | [`combine`] | the combined output, bit for bit, of every token |
//! | [`approximate`] | the same output in f64, with a bound on how far the exact one may lie from it |
//!
//! Counts, rows and indices are `usize`; an expert id, as the router gives it, is `i64` so that −1
//! (no expert) and any other value out of range can be written. Matrices are row-major slices.

pub mod approximate;
pub mod arithmetic;
pub mod combine;
pub mod exchange;
pub mod fp8;
pub mod placement;
pub mod required;
pub mod routing;
pub mod window;

pub use approximate::{Approximation, naive_f64, tolerance};
pub use arithmetic::Format;
pub use combine::exact;
pub use exchange::{Exchange, Source};
pub use placement::ExpertMap;
pub use routing::InvalidIds;
pub use window::{Item, Processed};

/// What a reference function refuses.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// A placement over no ranks.
    #[error("a placement needs at least one rank")]
    NoRanks,
    /// An explicit placement names a rank that is not in the group.
    #[error("expert {expert} is placed on rank {rank} of a group of {ranks}")]
    RankOutOfRange {
        /// The expert placed.
        expert: usize,
        /// The rank named.
        rank: usize,
        /// Ranks in the group.
        ranks: usize,
    },
    /// The number of sources, item lists or prefixes differs from the number of ranks.
    #[error("{found} {what} for a group of {ranks} ranks")]
    RankCount {
        /// What was counted.
        what: &'static str,
        /// How many were given.
        found: usize,
        /// Ranks in the group.
        ranks: usize,
    },
    /// A matrix of a source is not of the shape that the exchange gives it.
    #[error("rank {rank} brings {found} {what}, expected {expected}")]
    Shape {
        /// The source rank.
        rank: usize,
        /// Which matrix.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that tokens, top-k and hidden size give.
        expected: usize,
    },
    /// A token holds a value that its number format cannot represent.
    #[error("value {index} of rank {rank} is {value:e}, which is no {format:?} number")]
    NotOfFormat {
        /// The source rank.
        rank: usize,
        /// Position in that rank's values.
        index: usize,
        /// The value.
        value: f32,
        /// The number format.
        format: Format,
    },
    /// An expert returned a row of another width than it was given.
    #[error("expert {expert} returned {found} columns for a row of {expected}")]
    ExpertWidth {
        /// The expert.
        expert: usize,
        /// Columns returned.
        found: usize,
        /// Columns given.
        expected: usize,
    },
    /// One item needs more rows than the capacity: no number of windows would get past it.
    #[error("item {item} alone needs {rows} rows, the capacity is {capacity}")]
    ItemExceedsCapacity {
        /// Position of the item in the receiver's order.
        item: usize,
        /// Padded rows that it needs alone.
        rows: usize,
        /// The capacity.
        capacity: usize,
    },
    /// A prefix is longer than the list of items it is taken from.
    #[error("rank {rank} is said to have taken {taken} of {items} items")]
    PrefixTooLong {
        /// The receiver.
        rank: usize,
        /// Items said to be taken.
        taken: usize,
        /// Items that exist.
        items: usize,
    },
}

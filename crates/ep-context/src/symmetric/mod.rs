//! Memory that every rank of a group has and every other rank maps.

mod block;
mod descriptors;
mod error;
mod mailbox;

pub use block::SymmetricBlock;
pub use error::SymmetricError;

//! The words by which ranks wait for each other, and the waiting itself.
//!
//! A rank waits for a word in its own memory that a peer stores: an epoch that grows by one a round
//! and wraps. Next to the awaited word a wait looks at three others, so that it always ends: the
//! fault its rank holds already, the poison that a failing peer leaves, and the abort flag of its
//! host; and it has a deadline. Whoever changes any of these words rings the doorbell of the rank
//! that may be asleep on it.
//!
//! [`params`] is the layout, shared with kernels byte for byte. The protocol is in `wait`, generic
//! over atomics so that a model checker runs the very same code; [`HostWaiter`] is the protocol
//! over real memory, for kernel bodies that run on the host, and [`HostControl`] is the side of the
//! thread that owns the rank.

mod atomics;
mod control;
mod host;
#[cfg(test)]
mod model;
pub mod params;
mod wait;

pub use control::HostControl;
pub use host::HostWaiter;
pub use params::{AttentionBlock, ControlBlock, WaitParams};

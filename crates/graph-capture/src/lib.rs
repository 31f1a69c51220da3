//! Recording an MoE step into a graph and replaying it.
//!
//! A step is recorded by a closure ([`StepGraph::record`]): whatever it queues on the step's stream
//! becomes part of the graph, dispatches and combines of all layers as well as the caller's own
//! kernels. The graph owns what it captured, knows the receive capacity that its shapes were fixed
//! for, and refuses to be replayed once that has changed.
//!
//! An engine that captures graphs itself records steps into those ([`EmbeddedStep`]): a whole step, or
//! one that is spread over several of its graphs. It then launches them, and a stale one is found on the
//! device.

mod embedded;
mod error;
mod graph;
mod shapes;

pub use embedded::{EmbedOptions, EmbeddedStep, StepPieces};
pub use error::{BodyError, CaptureError};
pub use graph::StepGraph;

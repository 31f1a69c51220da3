//! What the benchmarks of GraphEP share: ranks as threads that are timed together, and a step of a
//! few MoE layers small enough for a laptop.
//!
//! Numbers of the host backend say how its parts compare with each other in one run on one machine
//! (replay against eager, a recovered step against clean ones). They say nothing about a GPU.

pub mod ranks;
pub mod step;

/// README's code is compiled and run as documentation tests of this item.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[derive(Debug)]
pub struct Readme;

/// The same for the page on embedding.
#[cfg(doctest)]
#[doc = include_str!("../../docs/embedding.md")]
#[derive(Debug)]
pub struct Embedding;

/// The same for the page on processes.
#[cfg(doctest)]
#[doc = include_str!("../../docs/processes.md")]
#[derive(Debug)]
pub struct Processes;

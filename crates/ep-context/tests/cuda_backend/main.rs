//! The CUDA backend on a real device. Where there is none every test says that it was skipped.
#![cfg(feature = "cuda")]

mod failures;
mod gpu;
mod graphs;
mod kernels;
mod loops;
mod marks;
mod memory;
mod order;
mod waits;

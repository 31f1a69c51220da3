//! Ranks on NVIDIA GPUs.
#![allow(dead_code)]

mod calls;
mod driver;

pub use driver::DriverCalls;

//! What every backend of GraphEP has to do, as a suite of named checks that is instantiated for each.
//!
//! - [`backend`]: what a backend brings to be tested, and how its ranks are run.
//! - [`case`](mod@case): the sizes and settings of one exchange; [`inputs`]: tokens, ids and weights
//!   for it, derived from a seed.
//! - [`oracle`]: what has to come out, from the pure functions of `token_dispatch::reference`.
//! - [`rig`]: one rank, built and fed from a case; [`program`]: its step; [`outcome`]: what it saw.
//! - [`engine`]: an engine that captures and launches graphs itself.
//! - [`payload`]: what experts read from a row; [`experts`]: those that read every payload and layout.
//! - [`grads`] and [`grad_oracle`]: backward passes, and what has to come of them.
//! - [`rows`]: what a receiver has to find; [`kernels`]: device operations that tests need.
//! - [`steady`]: a step whose load never overflows.
//! - [`lifecycle`]: operations on a group in any order, against a model.
//! - [`processes`]: ranks that are forked for each group; [`workers`]: processes that outlive checks, as on GPUs.
//! - [`checks`]: the suite, one module a theme; [`conformance_suite!`] makes a `#[test]` of each check.
//!
//! A check runs its ranks by [`TestBackend::on_ranks`] and judges what they return, which is plain
//! data: so it does not matter whether ranks are threads or processes.

pub mod backend;
mod belt;
pub mod case;
pub mod checks;
pub mod cuda;
pub mod cuda_processes;
pub mod deaths;
pub mod engine;
pub mod experts;
pub mod faults;
mod fork;
pub mod grad_oracle;
pub mod grads;
pub mod harness;
pub mod held;
pub mod inputs;
pub mod kernels;
pub mod leaks;
pub mod lifecycle;
pub mod meeting;
mod odd_engines;
pub mod oracle;
pub mod outcome;
pub mod payload;
pub mod processes;
pub mod program;
pub mod rig;
pub mod rows;
pub mod steady;
mod suite;
pub mod workers;

pub use backend::{HostPairs, HostThreads, HostThreadsPull, RankEnv, RankResult, TestBackend};
pub use case::{Case, Order, Skew};
pub use cuda::{CudaThreads, CudaThreadsPush};
pub use cuda_processes::CudaProcesses;
pub use outcome::RankRun;
pub use processes::HostProcesses;
pub use rig::Rig;
pub use workers::{CudaWorkers, HostWorkers};

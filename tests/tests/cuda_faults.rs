//! What ranks that are processes with a GPU each can be put through: killed, stopped or never started in
//! any phase, a kernel that faults, memory that is full. A check says that it is skipped where there are
//! too few GPUs. It forks, so it is its own harness.

use std::process::ExitCode;

use graph_ep_tests::{CudaProcesses, deaths, faults, harness};

fn main() -> ExitCode {
    let mut checks = faults::CHECKS.to_vec();
    checks.extend(deaths::checks::<CudaProcesses>());
    harness::main(&[("cuda_faults", checks)])
}

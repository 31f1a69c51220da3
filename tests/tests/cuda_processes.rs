//! The suite with ranks as processes that have a GPU each; a check says that it is skipped where there
//! are too few. It forks, so it is its own harness.

use std::process::ExitCode;

use graph_ep_tests::{CudaProcesses, harness};

fn main() -> ExitCode {
    let checks = graph_ep_tests::conformance_suite!(list CudaProcesses);
    harness::main(&[("cuda_processes", checks)])
}

//! The suite with ranks as processes that have a GPU each, and keep what they have made on it from check to
//! check; a check says that it is skipped where there are too few. It forks, so it is its own harness.

use std::process::ExitCode;

use graph_ep_tests::{CudaProcesses, CudaWorkers, conformance_suite, workers};

fn main() -> ExitCode {
    workers::main::<CudaProcesses>("cuda_processes", conformance_suite!(list CudaWorkers))
}

//! The suite with ranks as processes that outlive checks, as on GPUs, where such a process is slow to start.
//! It forks, so it is its own harness.

use std::process::ExitCode;

use graph_ep_tests::{HostProcesses, HostWorkers, conformance_suite, workers};

fn main() -> ExitCode {
    workers::main::<HostProcesses>("host_workers", conformance_suite!(list HostWorkers))
}

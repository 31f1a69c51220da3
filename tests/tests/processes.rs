//! The suite with ranks as processes, and what only processes can be put through. It forks, so it is
//! its own harness.

use std::process::ExitCode;

use graph_ep_tests::{HostProcesses, deaths, harness, leaks, workers};

fn main() -> ExitCode {
    let mut checks = graph_ep_tests::conformance_suite!(list HostProcesses);
    checks.extend(deaths::checks::<HostProcesses>());
    checks.extend(leaks::CHECKS);
    checks.extend(workers::checks::CHECKS);
    harness::main(&[("host_processes", checks)])
}

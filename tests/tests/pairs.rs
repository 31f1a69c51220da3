//! The suite with two ranks at most: which checks need no more, and that they hold so, before they run where
//! there are two GPUs. It is its own harness, which knows checks that are skipped half way.

use std::process::ExitCode;

use graph_ep_tests::{HostPairs, harness};

fn main() -> ExitCode {
    let checks = graph_ep_tests::conformance_suite!(list HostPairs);
    harness::main(&[("host_pairs", checks)])
}

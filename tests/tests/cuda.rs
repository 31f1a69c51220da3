//! The suite on the GPUs of this machine; every check says that it is skipped where there is none. It is its
//! own harness, which counts those that are skipped.

use std::process::ExitCode;

use graph_ep_tests::{CudaThreads, CudaThreadsPush, conformance_suite, harness};

fn main() -> ExitCode {
    harness::main(&[
        ("cuda_threads", conformance_suite!(list CudaThreads)),
        ("cuda_threads_push", conformance_suite!(list CudaThreadsPush)),
    ])
}

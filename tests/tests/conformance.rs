//! The suite on every backend and way of running ranks that this machine has.

graph_ep_tests::conformance_suite!(host_threads, graph_ep_tests::HostThreads);
graph_ep_tests::conformance_suite!(host_threads_pull, graph_ep_tests::HostThreadsPull);

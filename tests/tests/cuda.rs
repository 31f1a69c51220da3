//! The suite on the GPUs of this machine; every check says that it is skipped where there is none.

graph_ep_tests::conformance_suite!(cuda_threads, graph_ep_tests::CudaThreads);
graph_ep_tests::conformance_suite!(cuda_threads_push, graph_ep_tests::CudaThreadsPush);

//! MoE expert parallelism inside CUDA graphs: capture, replay, and recovery when routing overflows.

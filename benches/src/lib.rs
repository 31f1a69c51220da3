//! Benchmarks of GraphEP.

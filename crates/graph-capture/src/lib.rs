//! Recording an MoE step into a graph and replaying it: ownership, row limits, generations.

//! Conformance and integration tests of GraphEP.

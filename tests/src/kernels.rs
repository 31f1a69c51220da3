//! Device operations that tests need.

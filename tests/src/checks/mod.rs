//! The checks, one module a theme. Each is generic over the backend and panics where that is wrong.

pub mod modes;

//! The checks, one module a theme. Each is generic over the backend and panics where that is wrong.

pub mod capture;
pub mod epochs;
pub mod lanes;
pub mod modes;
pub mod run_ahead;
pub mod shapes;

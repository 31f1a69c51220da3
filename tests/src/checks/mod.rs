//! The checks, one module a theme. Each is generic over the backend and panics where that is wrong.

pub mod backward;
pub mod budgets;
pub mod capture;
pub mod embedded;
pub mod engines;
pub mod epochs;
pub mod everywhere;
pub mod failure;
pub mod halves;
pub mod kept;
pub mod lanes;
pub mod layouts;
pub mod maps;
pub mod modes;
pub mod payloads;
pub mod recovery;
pub mod refusal;
pub mod resize;
pub mod rounds;
pub mod run_ahead;
pub mod setup;
pub mod shapes;
pub mod stalls;
pub mod streams;
pub mod trust;
pub mod uneven;

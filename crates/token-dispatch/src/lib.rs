//! MoE dispatch and combine between the ranks of an expert-parallel group.
pub mod config;
pub mod dispatcher;
pub mod dtype;
pub mod error;
pub mod experts;
pub mod geometry;
pub mod handle;
mod kernels;
pub mod lane;
pub mod memory;
pub mod params;
pub mod record;
pub mod reference;
pub mod step;

pub use config::{DispatchConfig, DispatchConfigBuilder, RoutingDependence};
pub use dispatcher::TokenDispatcher;
pub use dtype::DType;
pub use error::DispatchError;
pub use experts::{ExpertHome, ExpertMap};
pub use geometry::worst_case_rows;
pub use handle::Handle;
pub use lane::{Combine, Dispatch, Lane, TokenCount, TopKIds};
pub use record::{Records, StepRecord};
pub use step::{RowShaping, Step, StepMode, StepOptions, StepSummary};

//! MoE dispatch and combine between the ranks of an expert-parallel group.
pub mod backward;
mod checks;
pub mod combine;
pub mod config;
pub mod dispatch;
pub mod dispatcher;
pub mod dtype;
pub mod error;
pub mod experts;
pub mod fp8;
pub mod geometry;
pub mod handle;
mod kernels;
pub mod lane;
mod launch;
pub mod memory;
pub mod params;
pub mod record;
pub mod reference;
mod rounds;
pub mod step;

pub use backward::{CombineBackward, DispatchBackward, RoundsBackward};
pub use combine::Combine;
pub use config::{
    DispatchConfig, DispatchConfigBuilder, Layout, Payload, RoutingDependence, Transfer, Weighting,
};
pub use dispatch::{Dispatch, TokenCount, TopKIds};
pub use dispatcher::TokenDispatcher;
pub use dtype::DType;
pub use error::DispatchError;
pub use experts::{ExpertHome, ExpertMap};
pub use geometry::worst_case_rows;
pub use handle::Handle;
pub use lane::Lane;
pub use record::{Counts, Follower, Records, StepRecord};
pub use step::{RowShaping, Step, StepMode, StepOptions, StepSummary};

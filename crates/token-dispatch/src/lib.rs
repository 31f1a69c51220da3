//! MoE dispatch and combine between the ranks of an expert-parallel group.
mod backward;
mod checks;
mod combine;
mod config;
mod dispatch;
mod dispatcher;
mod dtype;
mod error;
mod experts;
pub mod fp8;
mod geometry;
mod handle;
mod kernels;
mod lane;
mod launch;
mod launch_order;
pub mod memory;
mod params;
mod record;
pub mod reference;
mod rounds;
mod step;

pub use backward::{CombineBackward, DispatchBackward, RoundsBackward};
pub use combine::Combine;
pub use config::{
    DispatchConfig, DispatchConfigBuilder, LEAST_SMS, Layout, Payload, RoutingDependence, Transfer,
    Weighting,
};
pub use dispatch::{Dispatch, TokenCount, TopKIds};
pub use dispatcher::{TokenDispatcher, device_kernels};
pub use dtype::DType;
pub use error::DispatchError;
pub use experts::{ExpertHome, ExpertMap};
pub use geometry::worst_case_rows;
pub use handle::Handle;
pub use lane::Lane;
pub use launch_order::{LaunchOrder, Place};
pub use params::MAX_CHECKED_SETS;
pub use record::{Counts, Follower, Records, StepRecord};
pub use step::{RowShaping, Step, StepMode, StepOptions, StepSummary};

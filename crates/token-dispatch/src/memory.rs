//! What a dispatcher and its handles allocate, before they do.

use ep_context::Rank;
use ep_context::signal::params::AttentionBlock;

use crate::config::DispatchConfig;
use crate::geometry::Geometry;
use crate::handle::handle_bytes;
use crate::params::{ExpertHomeEntry, LaneState, RowRef, StepState, WindowItem};

/// Bytes of a receive row that each handle adds to its row set.
pub const HANDLE_ROW_MEMORY: &[(&str, usize)] =
    &[("window items", size_of::<WindowItem>()), ("row references", size_of::<RowRef>())];

/// Device memory of a rank that does not depend on routing: context, dispatcher, all lanes, one
/// handle, one row set.
pub fn fixed_memory(
    config: &DispatchConfig,
    rank: Rank,
    world: usize,
) -> Vec<(&'static str, usize)> {
    let geometry = Geometry::new(config, rank, world);
    let (lanes, slots) = (config.lanes, geometry.slots as usize);
    let lane = &geometry.lane;
    vec![
        ("signal words", size_of::<AttentionBlock>() + 8 * world),
        ("expert map", size_of::<ExpertHomeEntry>() * config.experts.experts()),
        ("step counters", size_of::<StepState>() + 4 * world + 4 * config.max_dispatches),
        ("lanes: signals and lists", lanes * lane.staging as usize),
        ("lanes: staging", lanes * (lane.landing - lane.staging) as usize),
        ("lanes: landing", lanes * (lane.bytes - lane.landing) as usize),
        (
            "lanes: tables and scratch",
            lanes * (8 * world + size_of::<LaneState>() + 4 * world * slots + 8 * world),
        ),
        ("handle", handle_bytes(&geometry)),
        ("capacity word", size_of::<u32>()),
    ]
}

//! What a dispatcher and its handles allocate, before they do.

use ep_context::Rank;
use ep_context::signal::params::AttentionBlock;
use smallvec::SmallVec;

use crate::config::{DispatchConfig, Layout, Weighting};
use crate::geometry::Geometry;
use crate::handle::handle_bytes;
use crate::lane::block_count_bytes;
use crate::params::{ExpertHomeEntry, LaneState, RowRef, StepState, WindowItem};

/// Bytes of a receive row that each handle adds to its row set on a rank that holds `local_experts`
/// experts: items, pairs, and, where the caller multiplies, weights and, in the flat layout, experts.
pub fn handle_row_memory(
    config: &DispatchConfig,
    local_experts: usize,
) -> SmallVec<[(&'static str, usize); 4]> {
    let flat = config.layout == Layout::Flat;
    let width = if flat { config.flat_width(local_experts) } else { 1 };
    let mut lists = SmallVec::new();
    lists.push(("window items", size_of::<WindowItem>()));
    lists.push(("window pairs", size_of::<RowRef>() * width));
    if config.weighting == Weighting::Caller {
        lists.push(("row weights", size_of::<f32>() * width));
    }
    if flat {
        lists.push(("row experts", size_of::<i32>() * width));
    }
    lists
}

/// Bytes that each handle has on a rank of a group of `world` ranks, besides those of
/// [`handle_row_memory`]. The first is part of [`fixed_memory`].
pub fn handle_memory(config: &DispatchConfig, rank: Rank, world: usize) -> usize {
    handle_bytes(&Geometry::new(config, rank, world))
}

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
        ("lanes: landing", lanes * (lane.pushed_items - lane.landing) as usize),
        ("lanes: pushed rows and lists", lanes * (lane.bytes - lane.pushed_items) as usize),
        (
            "lanes: tables and scratch",
            lanes
                * (8 * world
                    + size_of::<LaneState>()
                    + 4 * world * slots
                    + 8 * world
                    + block_count_bytes(&geometry)),
        ),
        ("handle", handle_bytes(&geometry)),
        ("shape of rows", size_of::<[u64; 2]>()),
    ]
}

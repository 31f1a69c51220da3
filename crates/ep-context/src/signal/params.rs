//! The words by which ranks wait for each other, as kernels see them.

use bytemuck::{Pod, Zeroable};

use crate::fault::Phase;

/// What a kernel needs to wait: part of the parameter block of every kernel that waits or signals.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct WaitParams {
    /// Address of this rank's [`ControlBlock`].
    pub control: u64,
    /// Address of a table of `world` addresses: the [`AttentionBlock`] of every rank, as mapped here.
    pub attention: u64,
    /// Address of this rank's own [`AttentionBlock`], which is looked at more often than any other.
    pub own: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks in the group.
    pub world: u32,
}

/// Host-mapped words between a rank's host and its device.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ControlBlock {
    /// Nonzero: the host asks every wait of this rank to end. 1 is its own wish; `r + 2` says that rank
    /// `r` is gone.
    pub abort: u32,
    /// Nonzero: deadlines do not count, for as long as it is set (warm-up, debugging).
    pub suspended: u32,
    /// The fault that this rank holds, as a word; zero if none. The first one stays.
    pub fault: u64,
    /// Deadline of each phase in milliseconds, indexed by phase.
    pub deadline_ms: [u32; Phase::COUNT],
}

/// Words of one rank that its peers write and it reads: part of the memory that all ranks map.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AttentionBlock {
    /// A fault that a peer tells this rank, as a word; zero if none. The first one stays.
    pub poison: u64,
    /// Raised whenever anything changes that a wait of this rank may look at.
    pub doorbell: u32,
    /// How many waits of this rank sleep until the doorbell moves.
    pub sleepers: u32,
}

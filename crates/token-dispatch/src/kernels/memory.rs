//! Device addresses as memory of this process: what the host bodies read and write.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytemuck::Pod;
use ep_context::host::pointer;
use ep_context::signal::HostWaiter;
use ep_context::{Fault, FaultKind, Phase, Rank};

use crate::geometry::Geometry;
use crate::params::{LaneParams, NONE, StepState};

/// Reads one value.
///
/// # Safety
///
/// `address` is aligned for `T`, valid for reads, and not written meanwhile.
pub(super) unsafe fn load<T: Pod>(address: u64) -> T {
    // SAFETY: as this function's contract says.
    unsafe { pointer::<T>(address).read() }
}

/// Writes one value.
///
/// # Safety
///
/// `address` is aligned for `T`, valid for writes, and not otherwise touched meanwhile.
pub(super) unsafe fn store<T: Pod>(address: u64, value: T) {
    // SAFETY: as this function's contract says.
    unsafe { pointer::<T>(address).write(value) }
}

/// `count` values that are only read for `'a`.
///
/// # Safety
///
/// `address` is aligned for `T`, valid for reads of `count` values, and nothing writes them in `'a`.
pub(super) unsafe fn table<'a, T: Pod>(address: u64, count: usize) -> &'a [T] {
    // SAFETY: any bit pattern is a T; the rest is this function's contract.
    unsafe { std::slice::from_raw_parts(pointer::<T>(address), count) }
}

/// `count` values that nothing else touches for `'a`.
///
/// # Safety
///
/// `address` is aligned for `T`, valid for reads and writes of `count` values, and nothing else
/// touches them in `'a`.
pub(super) unsafe fn table_mut<'a, T: Pod>(address: u64, count: usize) -> &'a mut [T] {
    // SAFETY: any bit pattern is a T; the rest is this function's contract.
    unsafe { std::slice::from_raw_parts_mut(pointer::<T>(address), count) }
}

/// `count` words that operations running at the same time may update.
///
/// # Safety
///
/// `address` is aligned, valid for reads and writes of `count` words, and only accessed atomically for
/// `'a`.
pub(super) unsafe fn atomics<'a>(address: u64, count: usize) -> &'a [AtomicU32] {
    // SAFETY: an atomic word has the layout of a word; the rest is this function's contract.
    unsafe { std::slice::from_raw_parts(pointer::<AtomicU32>(address), count) }
}

/// The address of row `row` of those at `base`.
pub(super) fn row_address(base: u64, row: usize, row_bytes: u32) -> u64 {
    base + row as u64 * u64::from(row_bytes)
}

/// The address of entry `number` of the list at `base`.
pub(super) fn entry_address<T>(base: u64, number: u32) -> u64 {
    row_address(base, number as usize, size_of::<T>() as u32)
}

/// Gives up, by a fault of this rank.
pub(super) fn raise(waiter: &HostWaiter, g: &Geometry, phase: Phase, kind: FaultKind) {
    waiter.fail(Fault { phase, culprit: Rank(g.rank), kind });
}

/// Says whether a loop over windows makes another trip; without a loop, nothing.
///
/// # Safety
///
/// `condition` is zero or the handle of a condition in the recording that runs.
pub(super) unsafe fn set_condition(condition: u64, again: bool) {
    if condition != 0 {
        // SAFETY: as this function's contract says.
        unsafe { ep_context::host::set_condition(condition, u32::from(again)) };
    }
}

/// The shared blocks of a lane, by rank.
#[derive(Clone, Copy)]
pub(super) struct LaneBlocks<'a> {
    blocks: &'a [u64],
    rank: usize,
}

impl LaneBlocks<'_> {
    /// # Safety
    ///
    /// `lane.blocks` is a table of `geometry.world` addresses that nothing writes while this lives.
    pub(super) unsafe fn new(lane: &LaneParams, geometry: &Geometry) -> Self {
        // SAFETY: as this function's contract says.
        let blocks = unsafe { table(lane.blocks, geometry.world as usize) };
        Self { blocks, rank: geometry.rank as usize }
    }

    /// The address at `offset` in the block of `rank`, as mapped here.
    pub(super) fn at(&self, rank: usize, offset: u64) -> u64 {
        self.blocks[rank] + offset
    }

    /// The address at `offset` in this rank's own block.
    pub(super) fn own(&self, offset: u64) -> u64 {
        self.blocks[self.rank] + offset
    }

    /// Every rank once, the next one first: so that ranks do not all turn to the same peer.
    pub(super) fn peers_first(&self) -> impl Iterator<Item = usize> + use<> {
        let (world, rank) = (self.blocks.len(), self.rank);
        (1..=world).map(move |step| (rank + step) % world)
    }

    /// Leaves `header` in this rank's place among the headers at `headers` in the block of `to`, and signals
    /// `epoch` by this rank's word among those at `words` there.
    ///
    /// # Safety
    ///
    /// The block of `to` has a header and a word of every rank at these offsets, and that rank is past
    /// the last header of this one.
    pub(super) unsafe fn tell<H: Pod>(
        &self,
        waiter: &HostWaiter,
        to: usize,
        (headers, header): (u64, H),
        words: u64,
        epoch: u32,
    ) {
        let own = |table: u64, size: usize| self.at(to, table) + (self.rank * size) as u64;
        // SAFETY: as this function's contract says; nobody else writes what is this rank's there.
        unsafe {
            store(own(headers, size_of::<H>()), header);
            waiter.signal(Rank::from_index(to), own(words, size_of::<u32>()), epoch);
        }
    }
}

/// The counters of a step. Lanes may update them at the same time, so every update is atomic.
#[derive(Clone, Copy)]
pub(super) struct StepView {
    state: *mut StepState,
}

macro_rules! field {
    ($view:expr, $atomic:ident, $name:ident) => {
        // SAFETY: the state is valid and aligned while the view lives (contract of `StepView::new`),
        // and its fields are only accessed atomically while several operations may run.
        unsafe { $atomic::from_ptr(&raw mut (*$view.state).$name) }
    };
}

impl StepView {
    /// # Safety
    ///
    /// `address` is that of a [`StepState`], valid while this lives, which other operations that may
    /// run at the same time access through a view of their own.
    pub(super) unsafe fn new(address: u64) -> Self {
        Self { state: pointer(address) }
    }

    pub(super) fn step(self) -> u32 {
        field!(self, AtomicU32, step).load(Ordering::Relaxed)
    }

    pub(super) fn first_over(self) -> u32 {
        field!(self, AtomicU32, first_over).load(Ordering::Relaxed)
    }

    pub(super) fn required(self) -> u32 {
        field!(self, AtomicU32, required).load(Ordering::Relaxed)
    }

    /// Whether a dispatch at `ordinal` moves nothing: the step drains, or, where routing depends on
    /// outputs, an earlier dispatch is known to be over budget.
    pub(super) fn is_silent(self, ordinal: u32, dependent: bool) -> bool {
        field!(self, AtomicU32, drained).load(Ordering::Relaxed) != 0
            || (dependent && self.first_over() < ordinal)
    }

    pub(super) fn note_over(self, ordinal: u32) {
        if ordinal != NONE {
            field!(self, AtomicU32, first_over).fetch_min(ordinal, Ordering::Relaxed);
        }
    }

    pub(super) fn note_required(self, rows: u32) {
        field!(self, AtomicU32, required).fetch_max(rows, Ordering::Relaxed);
    }

    pub(super) fn note_dispatch(self, ordinal: u32) {
        field!(self, AtomicU32, dispatches).fetch_max(ordinal + 1, Ordering::Relaxed);
    }

    pub(super) fn note_window(self, windows: u32, capacity: u32) {
        field!(self, AtomicU32, windows).fetch_max(windows, Ordering::Relaxed);
        field!(self, AtomicU32, capacity).fetch_min(capacity, Ordering::Relaxed);
    }

    pub(super) fn add_delivered(self, pairs: u64) {
        field!(self, AtomicU64, delivered).fetch_add(pairs, Ordering::Relaxed);
    }

    pub(super) fn add_dropped(self, pairs: u64) {
        field!(self, AtomicU64, dropped).fetch_add(pairs, Ordering::Relaxed);
    }

    pub(super) fn add_bad_ids(self, invalid: u64, repeated: u64) {
        field!(self, AtomicU64, invalid_ids).fetch_add(invalid, Ordering::Relaxed);
        field!(self, AtomicU64, repeated_ids).fetch_add(repeated, Ordering::Relaxed);
    }
}

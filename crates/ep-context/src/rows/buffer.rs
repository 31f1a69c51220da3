//! One buffer of a row set, and what is counted of its use.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::account::Charge;
use crate::backend::{Backend, GrowableMemory, Retained};
use crate::buffer::{DeviceSlice, RowsOf};
use crate::sync::lock;

/// Rows for which every column has memory that no plan may take back: slices cover them. Views are
/// made, and a trim looks whether there are any, while it is locked.
#[derive(Debug)]
pub(super) struct Settled(pub(super) Mutex<u32>);

impl Settled {
    pub(super) fn lock(&self) -> MutexGuard<'_, u32> {
        lock(&self.0)
    }
}

pub(super) struct Column<B: Backend> {
    pub(super) memory: B::Growable,
    pub(super) label: &'static str,
    pub(super) row_bytes: usize,
    pub(super) charge: Charge,
    /// Slices, queued work and graphs that may touch the rows.
    pub(super) views: AtomicUsize,
}

/// Counts as a view of its column until the last slice, operation or graph that holds it is gone.
struct View<B: Backend> {
    column: Arc<Column<B>>,
}

impl<B: Backend> View<B> {
    fn of(column: &Arc<Column<B>>) -> Arc<Self> {
        column.views.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { column: column.clone() })
    }
}

impl<B: Backend> Drop for View<B> {
    fn drop(&mut self) {
        // Release: what the view's work did comes before a trim that acquires the count.
        self.column.views.fetch_sub(1, Ordering::Release);
    }
}

/// Unmaps the pages of `column` behind `rows` rows and returns their charge.
///
/// # Safety
///
/// No queued, running or later work touches rows behind `rows`.
pub(super) unsafe fn shrink<B: Backend>(column: &Column<B>, rows: u32) {
    let bytes = column.row_bytes * rows as usize;
    // SAFETY: passed on to the caller.
    let trimmed = unsafe { column.memory.trim(bytes) };
    match trimmed {
        Ok(()) => column.charge.shrink_to(bytes as u64),
        // The pages stay mapped and charged: nothing is lost but memory.
        Err(error) => tracing::warn!(buffer = column.label, %error, "could not unmap rows"),
    }
}

/// One buffer of a row set. A clone is the same buffer.
pub struct RowBuffer<B: Backend> {
    pub(super) column: Arc<Column<B>>,
    pub(super) settled: Arc<Settled>,
    pub(super) set: u64,
    pub(super) max_rows: u32,
}

impl<B: Backend> RowBuffer<B> {
    /// The device address of row 0; it never changes.
    pub fn address(&self) -> u64 {
        self.column.memory.address()
    }

    /// The bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.column.row_bytes
    }

    /// The [`RowSet::id`](super::RowSet::id) of the set that it belongs to.
    pub fn set_id(&self) -> u64 {
        self.set
    }

    /// The rows for which addresses are reserved.
    pub fn max_rows(&self) -> u32 {
        self.max_rows
    }

    /// All reserved addresses as a slice that keeps the buffer alive. It [holds](DeviceSlice::held) the
    /// rows that have memory now, but for those of a growth that is only planned; a kernel may touch
    /// rows below the capacity that it finds on the device.
    pub fn slice(&self) -> DeviceSlice<'static, B> {
        let rows = RowsOf { set: self.set, row_bytes: self.column.row_bytes };
        let bytes = rows.row_bytes * self.max_rows as usize;
        let settled = self.settled.lock();
        let (owner, held) = (View::of(&self.column), rows.row_bytes * *settled as usize);
        drop(settled);
        // SAFETY: 1. the addresses belong to the column until it is dropped, and a view of it is the
        // owner. Settled rows have memory, which is unmapped by a trim only, and that is refused while
        // there is a view; one that came just before has lowered what is settled. 2. A capacity is
        // published once every column has memory for it, and what lies below it is not unmapped before
        // a lower one was published, in the order of all work that reads it, nor while there is a
        // view. 3. Is for whoever queues work on the slice.
        unsafe { DeviceSlice::of_rows(owner, self.address(), bytes, held, rows) }
    }

    /// What keeps the buffer alive, for queued work.
    pub fn retain(&self) -> Retained {
        let settled = self.settled.lock();
        let view = View::of(&self.column);
        drop(settled);
        view
    }
}

impl<B: Backend> Clone for RowBuffer<B> {
    fn clone(&self) -> Self {
        Self {
            column: self.column.clone(),
            settled: self.settled.clone(),
            set: self.set,
            max_rows: self.max_rows,
        }
    }
}

impl<B: Backend> fmt::Debug for RowBuffer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowBuffer")
            .field("label", &self.column.label)
            .field("row_bytes", &self.column.row_bytes)
            .field("max_rows", &self.max_rows)
            .finish()
    }
}

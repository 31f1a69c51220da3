//! Private buffers with a row dimension that grow together and in place.
//!
//! A row set is what routing sizes: received rows, their scales, expert outputs, the lists that lead
//! back to the tokens. Every buffer of a set has addresses reserved for the most rows and memory
//! for the present *capacity*, which is also a word in device memory. Capacity is logical: pages are
//! larger than rows, and what a page holds beyond the capacity is never used.
//!
//! What new rows hold is unspecified until they are written.
//!
//! Growing has two halves, so that ranks can agree in between. [`RowSet::plan`] maps memory and
//! changes nothing that a running graph can see; [`PlannedGrowth::commit`] makes the rows usable, in
//! stream order, and [`PlannedGrowth::cancel`] gives the memory back. Each change of capacity is a
//! new *generation*; a graph whose shapes were fixed by an older one is stale.

use std::fmt;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::{Pod, Zeroable};

use crate::account::{Charge, MemoryAccount};
use crate::backend::{Backend, BackendError, GrowableMemory, Retained};
use crate::buffer::{Buffer, DeviceSlice, RowsOf};
use crate::context::EpContext;
use crate::keepsake::reclaim;
use crate::queue::Queue;
use crate::sync::lock;

/// A [`RowShape`] as kernels read it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct ShapeWords {
    capacity: u32,
    reserved: u32,
    generation: u64,
}

/// Several growable buffers with one capacity in rows. A clone is the same set.
pub struct RowSet<B: Backend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: Backend> {
    backend: B,
    account: MemoryAccount,
    label: &'static str,
    id: u64,
    max_rows: u32,
    shape_words: Buffer<B>,
    settled: Arc<Settled>,
    /// Locked before `settled`.
    state: Mutex<State<B>>,
}

/// Rows for which every column has memory that no plan may take back: slices cover them. Views are
/// made, and a trim looks whether there are any, while it is locked.
#[derive(Debug)]
struct Settled(Mutex<u32>);

impl Settled {
    fn lock(&self) -> MutexGuard<'_, u32> {
        lock(&self.0)
    }
}

struct State<B: Backend> {
    capacity: u32,
    /// Rows for which every column has memory: at least the capacity, and more after it was lowered,
    /// until a trim. Work that was queued before may still touch them.
    mapped: u32,
    generation: u64,
    next_generation: u64,
    planned: Option<RowShape>,
    columns: Vec<Arc<Column<B>>>,
}

struct Column<B: Backend> {
    memory: B::Growable,
    label: &'static str,
    row_bytes: usize,
    charge: Charge,
    /// Slices, queued work and graphs that may touch the rows.
    views: AtomicUsize,
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

/// The number of rows for which something was shaped, and which change of capacity it followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// Rows.
    pub rows: u32,
    /// Counts the changes of capacity; never repeats within a set.
    pub generation: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl<B: Backend> RowSet<B> {
    /// A set without buffers. `capacity` rows are mapped for each buffer that is added, and addresses
    /// for `max_rows` reserved. Allocates a few device words, writes them on `stream` and waits for it.
    ///
    /// # Errors
    ///
    /// [`BackendError::Invalid`] if `capacity` is above `max_rows`; [`BackendError::OutOfMemory`];
    /// [`BackendError::Recording`] while `stream` records; the failure of earlier work on it.
    pub fn new(
        context: &EpContext<B>,
        stream: &B::Stream,
        label: &'static str,
        capacity: u32,
        max_rows: u32,
    ) -> Result<Self, BackendError> {
        if capacity > max_rows {
            return Err(BackendError::Invalid {
                what: "capacity in rows",
                value: u64::from(capacity),
                limit: format!("the {max_rows} rows that {label} can ever hold"),
            });
        }
        let set = Self {
            inner: Arc::new(Inner {
                backend: context.backend().clone(),
                account: context.account().clone(),
                label,
                id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
                max_rows,
                shape_words: context.allocate("shape of rows", size_of::<ShapeWords>())?,
                settled: Arc::new(Settled(Mutex::new(capacity))),
                state: Mutex::new(State {
                    capacity,
                    mapped: capacity,
                    generation: 1,
                    next_generation: 2,
                    planned: None,
                    columns: Vec::new(),
                }),
            }),
        };
        // SAFETY: nobody knows the words yet, and they are written when this returns.
        unsafe { set.publish(&Queue::direct(context.backend(), stream), set.shape()) }?;
        context.backend().synchronize(stream)?;
        Ok(set)
    }

    /// Adds a buffer of `row_bytes` bytes a row, mapped for the present capacity. What its rows hold is
    /// unspecified until they are written.
    ///
    /// # Errors
    ///
    /// [`BackendError::OutOfMemory`]; [`BackendError::Recording`] while a growth is planned. The set
    /// is then as before.
    pub fn add(&self, label: &'static str, row_bytes: usize) -> Result<RowBuffer<B>, BackendError> {
        let mut state = self.lock();
        if state.planned.is_some() {
            return Err(BackendError::Recording {
                operation: "adding a buffer to a row set",
                reason: format!("a growth of {} is planned", self.inner.label),
            });
        }
        let memory =
            self.inner.backend.reserve(bytes_of(row_bytes, self.inner.max_rows, label)?)?;
        let bytes = bytes_of(row_bytes, state.mapped, label)?;
        let charge = self.inner.account.charge(label, bytes as u64)?;
        memory.grow(bytes)?;
        let column =
            Arc::new(Column { memory, label, row_bytes, charge, views: AtomicUsize::new(0) });
        state.columns.push(column.clone());
        let (settled, max_rows) = (self.inner.settled.clone(), self.inner.max_rows);
        Ok(RowBuffer { column, settled, set: self.inner.id, max_rows })
    }

    /// The rows that may be used now.
    pub fn capacity(&self) -> u32 {
        self.lock().capacity
    }

    /// The rows for which addresses are reserved.
    pub fn max_rows(&self) -> u32 {
        self.inner.max_rows
    }

    /// The capacity and its generation.
    pub fn shape(&self) -> RowShape {
        let state = self.lock();
        RowShape { rows: state.capacity, generation: state.generation }
    }

    /// The shape for which to record: the planned one while a growth is planned.
    pub fn recording_shape(&self) -> RowShape {
        let state = self.lock();
        state.planned.unwrap_or(RowShape { rows: state.capacity, generation: state.generation })
    }

    /// A number that tells this set from every other of the process.
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    /// The bytes of one row over all buffers of the set.
    pub fn row_bytes(&self) -> usize {
        self.lock().columns.iter().map(|column| column.row_bytes).sum()
    }

    /// The device word that holds the capacity: u32.
    pub fn capacity_word(&self) -> DeviceSlice<'static, B> {
        self.word(offset_of!(ShapeWords, capacity), size_of::<u32>())
    }

    /// The device word that holds the generation of the capacity: u64. It changes with the capacity, in
    /// the order of the stream.
    pub fn generation_word(&self) -> DeviceSlice<'static, B> {
        self.word(offset_of!(ShapeWords, generation), size_of::<u64>())
    }

    fn word(&self, at: usize, bytes: usize) -> DeviceSlice<'static, B> {
        let words = self.inner.shape_words.slice();
        // A field lies inside its struct.
        words.get(at..at + bytes).unwrap_or(words)
    }

    /// Maps memory for `rows` rows behind every buffer; what new ones hold is unspecified until they are
    /// written. Nothing that queued or recorded work can see changes. Fewer rows than the capacity plan a
    /// smaller one and map nothing.
    ///
    /// # Errors
    ///
    /// [`BackendError::Invalid`] beyond [`RowSet::max_rows`], [`BackendError::OutOfMemory`], and
    /// [`BackendError::Recording`] if another change is planned already. The set is then as before.
    pub fn plan(&self, rows: u32) -> Result<PlannedGrowth<B>, BackendError> {
        let mut state = self.lock();
        if rows > self.inner.max_rows {
            return Err(BackendError::Invalid {
                what: "capacity in rows",
                value: u64::from(rows),
                limit: format!(
                    "the {} rows that {} can hold",
                    self.inner.max_rows, self.inner.label
                ),
            });
        }
        if state.planned.is_some() {
            return Err(BackendError::Recording {
                operation: "planning a growth",
                reason: format!("another growth of {} is planned", self.inner.label),
            });
        }
        let before = state.mapped;
        for (done, column) in state.columns.iter().enumerate() {
            if let Err(error) = self.extend(column, before, rows) {
                for grown in &state.columns[..done] {
                    // SAFETY: rows behind those that had memory were mapped a moment ago and never
                    // published.
                    unsafe { shrink(grown, before) };
                }
                return Err(error);
            }
        }
        state.mapped = before.max(rows);
        let shape = RowShape { rows, generation: state.next_generation };
        state.next_generation += 1;
        state.planned = Some(shape);
        Ok(PlannedGrowth { set: self.clone(), shape, mapped_before: before, settled: false })
    }

    /// Maps `column` up to `rows` rows and charges the difference.
    fn extend(&self, column: &Column<B>, before: u32, rows: u32) -> Result<(), BackendError> {
        let wanted = bytes_of(column.row_bytes, rows, column.label)?;
        let held = usize::try_from(column.charge.bytes()).unwrap_or(usize::MAX);
        if rows <= before || wanted <= held {
            return Ok(());
        }
        let charge = self.inner.account.charge(column.label, (wanted - held) as u64)?;
        column.memory.grow(wanted)?;
        column.charge.merge(charge);
        Ok(())
    }

    /// Unmaps the memory behind the capacity, where a smaller capacity left some.
    ///
    /// # Errors
    ///
    /// [`BackendError::Recording`] while a slice of one of its buffers, queued work or a graph exists
    /// that may touch its rows, or while a change of capacity is planned.
    pub fn trim(&self) -> Result<(), BackendError> {
        // Graphs of others that are gone may still hold views.
        reclaim();
        let mut state = self.lock();
        let refusal = |reason| BackendError::Recording { operation: "trimming a row set", reason };
        if state.planned.is_some() {
            return Err(refusal(format!("a growth of {} is planned", self.inner.label)));
        }
        let mut settled = self.inner.settled.lock();
        if let Some(held) = state.columns.iter().find(|c| c.views.load(Ordering::Acquire) > 0) {
            return Err(refusal(format!(
                "{} is still used by a slice, queued work or a graph",
                held.label
            )));
        }
        *settled = state.capacity;
        drop(settled);
        for column in &state.columns {
            // SAFETY: no slice, queued operation or graph held the column, as was just seen under the
            // lock under which new ones are made, and those hold no more than the capacity.
            unsafe { shrink(column, state.capacity) };
        }
        state.mapped = state.capacity;
        Ok(())
    }

    /// Writes the words of the shape in the order of `queue`.
    ///
    /// # Safety
    ///
    /// Work that reads them is ordered with this.
    unsafe fn publish(
        &self,
        queue: &Queue<'static, B>,
        shape: RowShape,
    ) -> Result<(), BackendError> {
        let words = ShapeWords { capacity: shape.rows, reserved: 0, generation: shape.generation };
        // SAFETY: the caller's promise; nothing but this writes the words.
        unsafe { queue.upload(&self.inner.shape_words.slice(), bytemuck::bytes_of(&words)) }
    }

    /// Ends a plan whose memory stays.
    fn settle(&self, state: &mut State<B>) {
        state.planned = None;
        *self.inner.settled.lock() = state.mapped;
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        lock(&self.inner.state)
    }
}

/// Unmaps the pages of `column` behind `rows` rows and returns their charge.
///
/// # Safety
///
/// No queued, running or later work touches rows behind `rows`.
unsafe fn shrink<B: Backend>(column: &Column<B>, rows: u32) {
    let bytes = column.row_bytes * rows as usize;
    // SAFETY: passed on to the caller.
    let trimmed = unsafe { column.memory.trim(bytes) };
    match trimmed {
        Ok(()) => column.charge.shrink_to(bytes as u64),
        // The pages stay mapped and charged: nothing is lost but memory.
        Err(error) => tracing::warn!(buffer = column.label, %error, "could not unmap rows"),
    }
}

fn bytes_of(row_bytes: usize, rows: u32, label: &'static str) -> Result<usize, BackendError> {
    row_bytes.checked_mul(rows as usize).ok_or_else(|| BackendError::OutOfMemory {
        what: label.to_owned(),
        requested: usize::MAX,
        limit: None,
    })
}

impl<B: Backend> Clone for RowSet<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<B: Backend> fmt::Debug for RowSet<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowSet")
            .field("label", &self.inner.label)
            .field("shape", &self.shape())
            .field("max_rows", &self.inner.max_rows)
            .finish()
    }
}

/// One buffer of a row set. A clone is the same buffer.
pub struct RowBuffer<B: Backend> {
    column: Arc<Column<B>>,
    settled: Arc<Settled>,
    set: u64,
    max_rows: u32,
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

    /// The [`RowSet::id`] of the set that it belongs to.
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

/// Memory that is mapped for a capacity that does not hold yet.
///
/// Settle it with [`commit`](Self::commit) or [`cancel`](Self::cancel). Merely dropped, the memory
/// stays mapped for a later growth and the capacity stays as it was.
#[must_use = "commit or cancel it"]
pub struct PlannedGrowth<B: Backend> {
    set: RowSet<B>,
    shape: RowShape,
    mapped_before: u32,
    settled: bool,
}

impl<B: Backend> PlannedGrowth<B> {
    /// The capacity and generation once committed.
    pub fn shape(&self) -> RowShape {
        self.shape
    }

    /// Makes the planned capacity hold: for the host at once, for the device in the order of `queue`.
    ///
    /// # Errors
    ///
    /// What the backend reports; the capacity then stays as it was and the memory mapped.
    ///
    /// # Safety
    ///
    /// Work that reads the capacity or the generation on the device is ordered with `queue`, before this
    /// or behind it: it runs on the same stream, or on one that [`Backend::order`] or the host has ordered
    /// with it. That is every step which receives into the set, and every replay of one. Work at the
    /// same time may read either capacity, and with the larger one touch rows that a trim has unmapped.
    pub unsafe fn commit(mut self, queue: &Queue<'static, B>) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { self.set.publish(queue, self.shape) }?;
        let mut state = self.set.lock();
        state.capacity = self.shape.rows;
        state.generation = self.shape.generation;
        self.set.settle(&mut state);
        drop(state);
        self.settled = true;
        Ok(())
    }

    /// Gives the memory back. What was recorded for the planned shape is stale for ever.
    pub fn cancel(mut self) {
        let mut state = self.set.lock();
        state.planned = None;
        state.mapped = self.mapped_before;
        for column in &state.columns {
            // SAFETY: the rows behind those that had memory before were neither published nor settled,
            // so that no work touches them and no slice holds them.
            unsafe { shrink(column, self.mapped_before) };
        }
        drop(state);
        self.settled = true;
    }
}

impl<B: Backend> Drop for PlannedGrowth<B> {
    fn drop(&mut self) {
        if !self.settled {
            self.set.settle(&mut self.set.lock());
        }
    }
}

impl<B: Backend> fmt::Debug for PlannedGrowth<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlannedGrowth").field("set", &self.set).field("shape", &self.shape).finish()
    }
}

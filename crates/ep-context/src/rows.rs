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

use crate::account::MemoryAccount;
use crate::backend::{Backend, BackendError, GrowableMemory};
use crate::buffer::{Buffer, DeviceSlice};
use crate::context::EpContext;
use crate::keepsake::reclaim;
use crate::queue::Queue;
use crate::sync::lock;

mod buffer;
mod growth;
mod steady;

pub use buffer::RowBuffer;
pub use growth::PlannedGrowth;
pub use steady::Reshaped;

use buffer::{Column, Settled, shrink};

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
    /// Held while the capacity changes, on the device and for the host, and by whoever has to have it as it
    /// is; locked before `state`.
    changing: Mutex<()>,
    /// Locked before `settled`.
    state: Mutex<State<B>>,
}

struct State<B: Backend> {
    capacity: u32,
    /// Rows for which every column has memory: at least the capacity, and more after it was lowered,
    /// until a trim. Work that was queued before may still touch them.
    mapped: u32,
    generation: u64,
    next_generation: u64,
    /// How often rows were given back.
    trims: u64,
    planned: Option<RowShape>,
    columns: Vec<Arc<Column<B>>>,
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
                changing: Mutex::new(()),
                state: Mutex::new(State {
                    capacity,
                    mapped: capacity,
                    generation: 1,
                    next_generation: 2,
                    trims: 0,
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

    /// How often [`RowSet::trim`] has given rows back: what those held is gone, also where there is memory in
    /// their place again.
    pub fn trims(&self) -> u64 {
        self.lock().trims
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

    /// Unmaps the memory behind the capacity, where a smaller capacity left some; [`RowSet::trims`] counts it.
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
        state.trims += u64::from(state.mapped > state.capacity);
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

//! Device memory as values: owned buffers, and slices of them or of memory that a caller owns.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::account::Charge;
use crate::backend::{Backend, Memory, Retained};
use crate::rows::RowSet;

/// Private device memory of a fixed size. A clone is the same memory; the last clone, slice, queued
/// operation or graph that holds it frees it.
pub struct Buffer<B: Backend> {
    inner: Arc<BufferInner<B>>,
}

struct BufferInner<B: Backend> {
    memory: B::Private,
    label: &'static str,
    _charge: Charge,
}

impl<B: Backend> Buffer<B> {
    pub(crate) fn new(memory: B::Private, label: &'static str, charge: Charge) -> Self {
        Self { inner: Arc::new(BufferInner { memory, label, _charge: charge }) }
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.inner.memory.address()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.inner.memory.bytes()
    }

    /// The whole buffer as a slice, which keeps the memory alive.
    pub fn slice(&self) -> DeviceSlice<'static, B> {
        DeviceSlice {
            address: self.address(),
            bytes: self.bytes(),
            held: self.bytes(),
            rows: None,
            owner: Some(self.inner.clone()),
            _lifetime: PhantomData,
        }
    }

    /// What keeps the memory alive, for queued work.
    pub fn retain(&self) -> Retained {
        self.inner.clone()
    }
}

impl<B: Backend> Clone for Buffer<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<B: Backend> fmt::Debug for Buffer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("label", &self.inner.label)
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.bytes())
            .finish()
    }
}

/// A range of device memory that outlives `'a`.
///
/// A slice of a [`Buffer`] owns a share of it and is `'static`. A slice of memory that a caller owns
/// is made by [`DeviceSlice::borrowed`]; a step or a graph that captured it cannot outlive what it was
/// borrowed from, but what they have queued may still be running then.
///
/// A slice of a [`RowBuffer`](crate::RowBuffer) is as long as the buffer can ever become, and only what
/// it [holds](DeviceSlice::held) has memory for sure.
pub struct DeviceSlice<'a, B: Backend> {
    address: u64,
    bytes: usize,
    /// Bytes from the start on that have memory for as long as this lives.
    held: usize,
    /// The rows at whose first byte this starts.
    rows: Option<RowsOf>,
    owner: Option<Retained>,
    _lifetime: PhantomData<Brand<'a, B>>,
}

/// Which rows a slice is one of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsOf {
    /// The number of their set.
    pub(crate) set: u64,
    pub(crate) row_bytes: usize,
}

/// A slice lives for `'a` and belongs to a device of `B`, but holds neither.
type Brand<'a, B> = (&'a (), fn() -> B);

impl<'a, B: Backend> DeviceSlice<'a, B> {
    /// A range of memory that the caller owns, borrowed from `_owner`: whatever frees the memory
    /// must need `_owner` by value or mutably.
    ///
    /// # Safety
    ///
    /// 1. `address` is a device address, on the device that `B` is used with, valid for reads and
    ///    writes of `bytes` bytes for as long as `_owner` is borrowed.
    /// 2. Other work that touches the range is ordered with the work that is given this slice.
    /// 3. All work that is given this slice has run before the borrow ends: what was queued, and every replay
    ///    of a graph that captured it. Queueing and replaying wait for nothing, and neither does dropping a
    ///    step, a graph or a stream, so the caller waits: for a record, or by
    ///    [`Backend::synchronize`].
    pub unsafe fn borrowed<T: ?Sized>(_owner: &'a T, address: u64, bytes: usize) -> Self {
        Self { address, bytes, held: bytes, rows: None, owner: None, _lifetime: PhantomData }
    }

    /// A range of memory that `owner` keeps alive.
    ///
    /// # Safety
    ///
    /// 1. `address` is a device address, on the device that `B` is used with, valid for reads and
    ///    writes of `bytes` bytes until `owner` is dropped.
    /// 2. Other work that touches the range is ordered with the work that is given this slice.
    pub unsafe fn owned_by(owner: Retained, address: u64, bytes: usize) -> Self {
        let owner = Some(owner);
        Self { address, bytes, held: bytes, rows: None, owner, _lifetime: PhantomData }
    }

    /// Addresses that `owner` keeps reserved, the start of `rows`, with memory for `held` bytes.
    ///
    /// # Safety
    ///
    /// 1. `address` is a device address, on the device that `B` is used with. `bytes` bytes there are
    ///    reserved until `owner` is dropped, and the first `held` of them, which are no more, are
    ///    valid for reads and writes as long.
    /// 2. Of rows of `rows.row_bytes` bytes from `address` on, those below the capacity of the set
    ///    `rows.set` are valid for reads and writes by work that reads that capacity from its word.
    /// 3. Other work that touches the range is ordered with the work that is given this slice.
    pub(crate) unsafe fn of_rows(
        owner: Retained,
        address: u64,
        bytes: usize,
        held: usize,
        rows: RowsOf,
    ) -> Self {
        let (rows, owner) = (Some(rows), Some(owner));
        Self { address, bytes, held, rows, owner, _lifetime: PhantomData }
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many bytes from the start on have memory for as long as the slice lives: all, but of a
    /// [`RowBuffer`](crate::RowBuffer) only rows that were there when the slice was taken. Rows that a
    /// growth brings later are held by slices that are taken then.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Whether there is memory for `rows` rows of `row_bytes` bytes, or for as many of them as `set`
    /// has capacity when work touches them: where the slice is the start of one of the set's buffers,
    /// whose rows are that long.
    pub fn has_rows(&self, set: &RowSet<B>, rows: u32, row_bytes: usize) -> bool {
        let Some(needed) = row_bytes.checked_mul(rows as usize) else { return false };
        let of_set = |of: RowsOf| of.set == set.id() && of.row_bytes >= row_bytes;
        needed <= self.held || (needed <= self.bytes && self.rows.is_some_and(of_set))
    }

    /// The bytes `range` of this slice, or `None` if it reaches beyond the end.
    pub fn get(&self, range: Range<usize>) -> Option<Self> {
        let bytes = range.end.checked_sub(range.start)?;
        (range.end <= self.bytes).then(|| Self {
            address: self.address + range.start as u64,
            bytes,
            held: self.held.saturating_sub(range.start).min(bytes),
            rows: self.rows.filter(|_| range.start == 0),
            owner: self.owner.clone(),
            _lifetime: PhantomData,
        })
    }

    /// What keeps the memory alive, where that is not the lifetime alone.
    pub fn retained(&self) -> Option<&Retained> {
        self.owner.as_ref()
    }
}

impl<B: Backend> Clone for DeviceSlice<'_, B> {
    fn clone(&self) -> Self {
        Self {
            address: self.address,
            bytes: self.bytes,
            held: self.held,
            rows: self.rows,
            owner: self.owner.clone(),
            _lifetime: PhantomData,
        }
    }
}

impl<B: Backend> fmt::Debug for DeviceSlice<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlice")
            .field("address", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .field("held", &self.held)
            .field("owned", &self.owner.is_some())
            .finish()
    }
}

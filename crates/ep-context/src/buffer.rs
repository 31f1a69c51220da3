//! Device memory as values: owned buffers, and slices of them or of memory that a caller owns.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::account::Charge;
use crate::backend::{Backend, Memory, Retained};

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
/// is made by [`DeviceSlice::borrowed`]; work that captured it, a graph included, cannot outlive
/// what it was borrowed from.
pub struct DeviceSlice<'a, B: Backend> {
    address: u64,
    bytes: usize,
    owner: Option<Retained>,
    _lifetime: PhantomData<Brand<'a, B>>,
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
    pub unsafe fn borrowed<T: ?Sized>(_owner: &'a T, address: u64, bytes: usize) -> Self {
        Self { address, bytes, owner: None, _lifetime: PhantomData }
    }

    /// A range of memory that `owner` keeps alive.
    ///
    /// # Safety
    ///
    /// 1. `address` is a device address, on the device that `B` is used with, valid for reads and
    ///    writes of `bytes` bytes until `owner` is dropped.
    /// 2. Other work that touches the range is ordered with the work that is given this slice.
    pub unsafe fn owned_by(owner: Retained, address: u64, bytes: usize) -> Self {
        Self { address, bytes, owner: Some(owner), _lifetime: PhantomData }
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes `range` of this slice, or `None` if it reaches beyond the end.
    pub fn get(&self, range: Range<usize>) -> Option<Self> {
        let bytes = range.end.checked_sub(range.start)?;
        (range.end <= self.bytes).then(|| Self {
            address: self.address + range.start as u64,
            bytes,
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
            .field("owned", &self.owner.is_some())
            .finish()
    }
}

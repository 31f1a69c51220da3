//! A range of this process's address space that unmaps itself.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::backend::BackendError;

/// Pages mapped by this process; dropping it unmaps them.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is a range of addresses, which belong to the process and to no thread. Nothing
// here reads or writes what lies behind them.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`. Through a shared reference the address can be had, and calls of the kernel can
// be made, which it orders: `commit` only adds access, whichever threads use the pages or commit them at
// the same time, and `release`, which takes it away, is unsafe.
unsafe impl Sync for Mapping {}

/// The size of a page in bytes.
pub(super) fn page_size() -> usize {
    rustix::param::page_size()
}

/// The pages that hold `bytes` bytes, in bytes. At least one page, so that an empty allocation has
/// an address of its own.
pub(super) fn whole_pages(what: &str, bytes: usize) -> Result<usize, BackendError> {
    bytes.max(1).checked_next_multiple_of(page_size()).ok_or_else(|| out_of_memory(what, bytes))
}

impl Mapping {
    /// Zeroed memory of whole pages that hold `bytes` bytes.
    pub(super) fn zeroed(what: &str, bytes: usize) -> Result<Self, BackendError> {
        Self::anonymous(what, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    /// Addresses for whole pages that hold `bytes` bytes, with no memory behind them.
    pub(super) fn reserved(what: &str, bytes: usize) -> Result<Self, BackendError> {
        // NORESERVE keeps addresses that may never be used from counting as committed memory.
        Self::anonymous(
            what,
            bytes,
            ProtFlags::empty(),
            MapFlags::PRIVATE.union(MapFlags::NORESERVE),
        )
    }

    fn anonymous(
        what: &str,
        bytes: usize,
        access: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, BackendError> {
        let length = whole_pages(what, bytes)?;
        // SAFETY: the kernel chooses the addresses (no MAP_FIXED), so no existing object is touched;
        // what is returned belongs to the new `Mapping` alone.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, access, flags) };
        Self::adopt(start.map_err(|errno| failure("mmap", what, bytes, errno))?, length, what)
    }

    /// The first `bytes` bytes of the object behind `descriptor`, shared with whoever else maps it.
    pub(super) fn shared(
        what: &str,
        descriptor: BorrowedFd<'_>,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let length = whole_pages(what, bytes)?;
        // SAFETY: as in `anonymous`. That the object keeps its length, so that the pages stay
        // readable, is a matter of its seals, which the callers set or check.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                descriptor,
                0,
            )
        };
        Self::adopt(start.map_err(|errno| failure("mmap", what, bytes, errno))?, length, what)
    }

    fn adopt(
        start: *mut std::ffi::c_void,
        length: usize,
        what: &str,
    ) -> Result<Self, BackendError> {
        // The kernel hands out page zero only to those who insist on it.
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| out_of_memory(what, length))?;
        Ok(Self { start, length })
    }

    /// The first byte.
    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The address of the first byte, as kernels get it: as a number, from which they make pointers.
    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Makes the pages of `length` bytes from `offset` on, both multiples of the page size and
    /// inside the mapping, readable and writable. On an error nothing has changed.
    pub(super) fn commit(
        &self,
        what: &str,
        offset: usize,
        length: usize,
    ) -> Result<(), BackendError> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range lies in this mapping; more access invalidates no reference.
        unsafe { rustix::mm::mprotect(self.at(offset, length).cast(), length, access) }
            .map_err(|errno| failure("mprotect", what, length, errno))
    }

    /// Gives the pages of `length` bytes from `offset` on back to the system and makes them
    /// inaccessible; they read as zero when they are committed again.
    ///
    /// # Safety
    ///
    /// Nothing touches the range, neither now nor before it is committed again.
    pub(super) unsafe fn release(
        &self,
        what: &str,
        offset: usize,
        length: usize,
    ) -> Result<(), BackendError> {
        let start = self.at(offset, length);
        // SAFETY: the range lies in this private anonymous mapping, and by the contract of this
        // function nobody relies on what it holds.
        unsafe { rustix::mm::madvise(start.cast(), length, Advice::LinuxDontNeed) }
            .map_err(|errno| failure("madvise", what, length, errno))?;
        // SAFETY: as above; nobody touches the range while it is inaccessible.
        unsafe { rustix::mm::mprotect(start.cast(), length, MprotectFlags::empty()) }
            .map_err(|errno| failure("mprotect", what, length, errno))
    }

    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        debug_assert!(offset + length <= self.length, "a range beyond its mapping");
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value and is unmapped once; whoever handed out its
        // address promised that nothing uses it any more. A failure leaks addresses and harms nothing.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// The error for a failed call; running out is told apart from everything else.
pub(super) fn failure(call: &'static str, what: &str, bytes: usize, errno: Errno) -> BackendError {
    match errno {
        Errno::NOMEM | Errno::NOSPC | Errno::FBIG | Errno::OVERFLOW => out_of_memory(what, bytes),
        other => BackendError::Os { call, what: what.to_owned(), source: io::Error::from(other) },
    }
}

pub(super) fn out_of_memory(what: &str, bytes: usize) -> BackendError {
    BackendError::OutOfMemory { what: what.to_owned(), requested: bytes, limit: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            for mapping in [Mapping::zeroed("a test", bytes), Mapping::reserved("a test", bytes)] {
                let error = mapping.expect_err("no machine has that much");
                assert!(
                    matches!(error, BackendError::OutOfMemory { requested, .. } if requested == bytes),
                    "{error}"
                );
            }
        }
    }
}

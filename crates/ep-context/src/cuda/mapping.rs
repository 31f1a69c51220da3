//! Addresses and the memory behind them, apart: the driver's virtual memory management.

use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{Driver, DriverError, ask};
use super::graveyard::Grave;
use crate::backend::BackendError;

/// Reserved addresses and what is mapped behind them. Dropping it leaves both to the graveyard.
#[derive(Debug)]
pub(super) struct Reservation {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
    /// Ranges, each mapped as a whole, in the order of their addresses.
    mapped: Vec<(u64, usize)>,
    /// An allocation that is kept to be exported.
    allocation: Option<u64>,
}

/// The kind of memory that is mapped: on this device, exportable as a descriptor or not.
pub(super) fn properties(device: &Device, exportable: bool) -> sys::CUmemAllocationProp {
    use sys::CUmemAllocationHandleType as H;
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if exportable {
            H::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            H::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        // The device was opened by this number, so it fits.
        id: i32::try_from(device.properties.ordinal).unwrap_or(i32::MAX),
    }
}

/// The size of a page of such memory.
pub(super) fn granularity(
    driver: &Driver,
    properties: &sys::CUmemAllocationProp,
) -> Result<usize, DriverError> {
    use sys::CUmemAllocationGranularity_flags as G;
    let minimum = G::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: both places are valid.
    ask(|bytes| unsafe {
        driver.cuMemGetAllocationGranularity(bytes, &raw const *properties, minimum)
    })
}

/// `bytes` in whole pages, at least one.
pub(super) fn whole_pages(what: &str, bytes: usize, page: usize) -> Result<usize, BackendError> {
    bytes.max(1).checked_next_multiple_of(page.max(1)).ok_or_else(|| BackendError::OutOfMemory {
        what: what.to_owned(),
        requested: bytes,
        limit: None,
    })
}

impl Reservation {
    /// Reserves addresses for `bytes` bytes, a multiple of the page size. The context is current.
    pub(super) fn new(
        device: &Arc<Device>,
        driver: &Driver,
        what: &str,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        // SAFETY: the place is valid; alignment and address are the driver's choice.
        let address = ask(|address| unsafe { driver.cuMemAddressReserve(address, bytes, 0, 0, 0) })
            .map_err(|error| error.allocating(what, bytes))?;
        Ok(Self { device: device.clone(), address, bytes, mapped: Vec::new(), allocation: None })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The allocation that is kept.
    pub(super) fn allocation(&self) -> Option<u64> {
        self.allocation
    }

    /// Maps new memory of `bytes` bytes at `offset`, both multiples of the page size, without access
    /// to it. On an error nothing is mapped.
    pub(super) fn map_new(
        &mut self,
        driver: &Driver,
        properties: &sys::CUmemAllocationProp,
        offset: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let handle =
            // SAFETY: the places are valid.
            ask(|handle| unsafe { driver.cuMemCreate(handle, bytes, &raw const *properties, 0) })?;
        let mapped = self.map(driver, handle, offset, bytes);
        // The mapping, if there is one, keeps the memory.
        // SAFETY: the handle was just made and is released once.
        let released = unsafe { driver.cuMemRelease(handle) };
        mapped.and(released)
    }

    /// Maps the first `bytes` bytes of an allocation at `offset` without access to it.
    fn map(
        &mut self,
        driver: &Driver,
        handle: sys::CUmemGenericAllocationHandle,
        offset: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        debug_assert!(offset + bytes <= self.bytes, "a mapping beyond its reservation");
        let start = self.address + offset as u64;
        // SAFETY: the range lies in this reservation, where nothing is mapped yet, by the contract
        // of the callers.
        unsafe { driver.cuMemMap(start, bytes, 0, handle, 0)? };
        self.mapped.push((start, bytes));
        Ok(())
    }

    /// Maps an allocation over the whole reservation and takes charge of its handle, also when it
    /// fails.
    pub(super) fn map_whole(
        &mut self,
        driver: &Driver,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Result<(), DriverError> {
        self.allocation = Some(handle);
        self.map(driver, handle, 0, self.bytes)
    }

    /// Lets this device read and write `bytes` bytes from `offset` on, all of which are mapped.
    pub(super) fn allow(
        &self,
        driver: &Driver,
        offset: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let access = sys::CUmemAccessDesc {
            location: location(&self.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let start = self.address + offset as u64;
        // SAFETY: the range is mapped, by the caller's word, and the description is valid.
        unsafe { driver.cuMemSetAccess(start, bytes, &raw const access, 1) }
    }

    /// Unmaps the last range if it starts at or behind `offset`; returns its length.
    ///
    /// # Safety
    ///
    /// No work touches the range, now or later.
    pub(super) unsafe fn unmap_last(
        &mut self,
        driver: &Driver,
        offset: usize,
    ) -> Result<Option<usize>, DriverError> {
        let Some(&(start, bytes)) = self.mapped.last() else { return Ok(None) };
        if start < self.address + offset as u64 {
            return Ok(None);
        }
        // SAFETY: a range that was mapped whole, and that nothing uses by the caller's word.
        unsafe { driver.cuMemUnmap(start, bytes)? };
        self.mapped.pop();
        Ok(Some(bytes))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::Reservation {
            address: self.address,
            bytes: self.bytes,
            mapped: std::mem::take(&mut self.mapped),
            allocation: self.allocation.take(),
        });
    }
}

//! Memory of one rank: private, and host memory that its device reaches.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{Handle, ask, ask_handle};
use super::graveyard::Grave;
use crate::account::{Charge, MemoryAccount};
use crate::backend::{BackendError, MappedMemory, Memory};

/// Zeroed private memory, aligned to at least 256 bytes.
#[derive(Debug)]
pub struct CudaMemory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
    _charge: Charge,
}

impl CudaMemory {
    pub(super) fn new(
        device: &Arc<Device>,
        account: &MemoryAccount,
        what: &str,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        // Even an empty allocation has an address of its own.
        let physical = bytes.max(1);
        let charge = account.charge(what, bytes as u64)?;
        let address = device.enter_beside_recordings(|driver| {
            // SAFETY: the place is valid.
            ask(|address| unsafe { driver.cuMemAlloc_v2(address, physical) })
                .map_err(|error| error.allocating(what, bytes))
        })?;
        let memory = Self { device: device.clone(), address, bytes, _charge: charge };
        device.zero(address, bytes)?;
        Ok(memory)
    }
}

impl Memory for CudaMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::Memory(self.address));
    }
}

/// Zeroed, page-locked memory of the host that every device reaches at its address.
#[derive(Debug)]
pub struct CudaMapped {
    device: Arc<Device>,
    start: Handle<c_void>,
    address: u64,
    bytes: usize,
}

impl CudaMapped {
    pub(super) fn new(
        device: &Arc<Device>,
        what: &str,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let start = allocate_host(device, what, bytes)?;
        // SAFETY: the memory was just allocated with at least this length, and nobody else knows it.
        unsafe { start.0.cast::<u8>().write_bytes(0, bytes) };
        let mut memory = Self { device: device.clone(), start, address: 0, bytes };
        memory.address = device.enter_beside_recordings(|driver| {
            // SAFETY: the place is valid, and the memory was allocated to be mapped.
            Ok(ask(|address| unsafe { driver.cuMemHostGetDevicePointer_v2(address, start.0, 0) })?)
        })?;
        Ok(memory)
    }
}

/// Page-locked memory that is mapped for every device.
pub(super) fn allocate_host(
    device: &Device,
    what: &str,
    bytes: usize,
) -> Result<Handle<c_void>, BackendError> {
    device.enter_beside_recordings(|driver| {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the place is valid.
        ask_handle(|start| unsafe { driver.cuMemHostAlloc(start, bytes.max(1), flags) })
            .map_err(|error| error.allocating(what, bytes))
    })
}

impl Memory for CudaMapped {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl MappedMemory for CudaMapped {
    fn host_address(&self) -> *mut u8 {
        self.start.0.cast()
    }
}

impl Drop for CudaMapped {
    fn drop(&mut self) {
        self.device.graveyard.bury(Grave::HostMemory(self.start));
    }
}

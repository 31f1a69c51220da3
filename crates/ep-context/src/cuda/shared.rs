//! Memory that peers map: exported as a descriptor, imported from one, the same between threads and
//! between processes.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{INVALID_VALUE, NOT_SUPPORTED, ask};
use super::mapping::{Reservation, granularity, properties, whole_pages};
use crate::account::{Charge, MemoryAccount};
use crate::backend::{BackendError, Memory, SharedMemory};

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Zeroed memory of this rank that can be exported to peers. It stays while anyone maps it, whatever
/// becomes of this rank.
#[derive(Debug)]
pub struct CudaShared {
    reservation: Reservation,
    bytes: usize,
    what: String,
    _charge: Charge,
}

impl CudaShared {
    pub(super) fn new(
        device: &Arc<Device>,
        account: &MemoryAccount,
        what: String,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let (reservation, charge) = device.enter_beside_recordings(|driver| {
            let properties = properties(device, true);
            let page = granularity(driver, &properties)?;
            let whole = whole_pages(&what, bytes, page)?;
            let charge = account.charge(&what, whole as u64)?;
            let failed = |error: super::driver::DriverError| error.allocating(&what, bytes);
            let mut reservation = Reservation::new(device, driver, &what, whole)?;
            // SAFETY: the places are valid.
            let handle = ask(|handle| unsafe {
                driver.cuMemCreate(handle, whole, &raw const properties, 0)
            })
            .map_err(failed)?;
            reservation.map_whole(driver, handle).map_err(failed)?;
            reservation.allow(driver, 0, whole).map_err(failed)?;
            device.zero(reservation.address(), whole)?;
            Ok((reservation, charge))
        })?;
        Ok(Self { reservation, bytes, what, _charge: charge })
    }
}

impl Memory for CudaShared {
    fn address(&self) -> u64 {
        self.reservation.address()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl SharedMemory for CudaShared {
    fn export(&self) -> Result<OwnedFd, BackendError> {
        let Some(handle) = self.reservation.allocation() else {
            return Err(BackendError::Unavailable {
                what: self.what.clone(),
                reason: "its allocation was never made".to_owned(),
            });
        };
        let descriptor = self.reservation.device().enter_beside_recordings(|driver| {
            let mut descriptor: RawFd = -1;
            let place = (&raw mut descriptor).cast::<c_void>();
            // SAFETY: for this kind of handle the place is that of a descriptor, and the allocation
            // was made to be exported as one.
            unsafe { driver.cuMemExportToShareableHandle(place, handle, DESCRIPTOR, 0)? };
            // SAFETY: the driver has opened the descriptor for the caller to close.
            Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
        })?;
        let flags = rustix::io::FdFlags::CLOEXEC;
        rustix::io::fcntl_setfd(&descriptor, flags).map_err(|errno| BackendError::Os {
            call: "fcntl(F_SETFD)",
            what: self.what.clone(),
            source: errno.into(),
        })?;
        Ok(descriptor)
    }
}

/// Memory of a peer, mapped for this device.
#[derive(Debug)]
pub struct CudaPeer {
    reservation: Reservation,
    bytes: usize,
}

impl CudaPeer {
    /// Maps what a peer exported with a length of `bytes` bytes. The driver tells no length of what a
    /// descriptor stands for, but it refuses to map more than there is.
    pub(super) fn new(
        device: &Arc<Device>,
        what: &str,
        descriptor: &OwnedFd,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let refused = |error: super::driver::DriverError| BackendError::Unavailable {
            what: what.to_owned(),
            reason: format!("{} of its descriptor failed with {}", error.call, error.text()),
        };
        let reservation = device.enter_beside_recordings(|driver| {
            let raw = descriptor.as_raw_fd() as usize;
            let place = std::ptr::without_provenance_mut::<c_void>(raw);
            // SAFETY: the place is valid, and for this kind of handle the second argument is the
            // number of a descriptor, which the driver duplicates and leaves open.
            let handle = ask(|handle| unsafe {
                driver.cuMemImportFromShareableHandle(handle, place, DESCRIPTOR)
            })
            .map_err(refused)?;
            let page = page_of(driver, device, handle);
            let reserved = page.and_then(|page| {
                let whole = whole_pages(what, bytes, page)?;
                Ok((Reservation::new(device, driver, what, whole)?, whole))
            });
            let (mut reservation, whole) = match reserved {
                Ok(reserved) => reserved,
                Err(error) => {
                    // SAFETY: the handle was just imported and nothing maps it.
                    let _ = unsafe { driver.cuMemRelease(handle) };
                    return Err(error);
                }
            };
            reservation.map_whole(driver, handle).map_err(|error| {
                // A longer mapping than the allocation: which of the two depends on the driver.
                if [INVALID_VALUE, NOT_SUPPORTED].contains(&error.code) {
                    BackendError::Invalid {
                        what: "length announced for a peer's memory in bytes",
                        value: bytes as u64,
                        limit: format!("what the descriptor of {what} stands for"),
                    }
                } else {
                    error.allocating(what, bytes)
                }
            })?;
            reservation.allow(driver, 0, whole).map_err(|error| BackendError::Unavailable {
                what: what.to_owned(),
                reason: format!(
                    "GPU {} cannot reach it: {}",
                    device.properties.ordinal,
                    error.text()
                ),
            })?;
            Ok(reservation)
        })?;
        Ok(Self { reservation, bytes })
    }
}

/// The size of a page of an imported allocation, which may lie on another device.
fn page_of(
    driver: &super::driver::Driver,
    device: &Device,
    handle: sys::CUmemGenericAllocationHandle,
) -> Result<usize, BackendError> {
    let mut kind = properties(device, true);
    // SAFETY: the place is valid, and the handle one that was just imported.
    unsafe { driver.cuMemGetAllocationPropertiesFromHandle(&raw mut kind, handle)? };
    Ok(granularity(driver, &kind)?)
}

impl Memory for CudaPeer {
    fn address(&self) -> u64 {
        self.reservation.address()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

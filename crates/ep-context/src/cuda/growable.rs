//! Private memory that grows in place.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::device::Device;
use super::mapping::{Reservation, granularity, properties, whole_pages};
use crate::account::{Charge, MemoryAccount};
use crate::backend::{BackendError, GrowableMemory};
use crate::sync::lock;

/// The largest piece of what is mapped where nothing is. Pieces are unmapped whole, so this is how finely
/// memory can be given back, against the number of calls that mapping a large buffer takes: nobody waits
/// for those at set-up. A step may wait for them where all was trimmed before; what comes and goes like
/// that is to be given back as finely too.
const PIECE: usize = 64 << 20;

/// The largest piece of what is mapped behind other memory, for which a step may wait: to map one of
/// 1 GiB takes hardly longer than one of 64 MiB, and calls of all threads of a process wait for each
/// other.
const LATER_PIECE: usize = 1 << 30;

/// Addresses reserved for the largest size, with memory behind the present one.
///
/// Every growth maps pieces of its own. Trimming unmaps whole pieces, so that a piece which holds a
/// byte that stays is kept; [`GrowableMemory::mapped`] says what is left.
#[derive(Debug)]
pub struct CudaGrowable {
    device: Arc<Device>,
    account: MemoryAccount,
    what: String,
    address: u64,
    reserved: usize,
    page: usize,
    /// Written under the lock of `state` only; readable without it.
    mapped: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    reservation: Reservation,
    charge: Option<Charge>,
}

impl CudaGrowable {
    pub(super) fn new(
        device: &Arc<Device>,
        account: &MemoryAccount,
        what: String,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let (reservation, page) = device.enter_beside_recordings(|driver| {
            let page = granularity(driver, &properties(device, false))?;
            let whole = whole_pages(&what, bytes, page)?;
            Ok((Reservation::new(device, driver, &what, whole)?, page))
        })?;
        Ok(Self {
            device: device.clone(),
            account: account.clone(),
            what,
            address: reservation.address(),
            reserved: bytes,
            page,
            mapped: AtomicUsize::new(0),
            state: Mutex::new(State { reservation, charge: None }),
        })
    }

    /// Maps the bytes from `from` to `to`, both whole pages; what was mapped of them when a call fails
    /// stays mapped. What they hold is whatever was there before.
    fn map(
        &self,
        reservation: &mut Reservation,
        from: usize,
        to: usize,
    ) -> Result<(), BackendError> {
        let failed = |error: super::driver::DriverError| error.allocating(&self.what, to - from);
        let piece = if from == 0 { PIECE } else { LATER_PIECE };
        // A whole number of pages, whatever the size of a page.
        let piece = piece.next_multiple_of(self.page);
        self.device.enter_beside_recordings(|driver| {
            let properties = properties(&self.device, false);
            let mut at = from;
            while at < to {
                let bytes = piece.min(to - at);
                reservation.map_new(driver, &properties, at, bytes).map_err(failed)?;
                at += bytes;
            }
            reservation.allow(driver, from, to - from).map_err(failed)
        })
    }

    /// Unmaps every piece that starts at or behind `from`, and counts in `unmapped` how many bytes
    /// went, also when a call fails.
    ///
    /// # Safety
    ///
    /// As for [`GrowableMemory::trim`].
    unsafe fn unmap(
        &self,
        reservation: &mut Reservation,
        from: usize,
        unmapped: &mut usize,
    ) -> Result<(), BackendError> {
        self.device.enter_beside_recordings(|driver| {
            // SAFETY: the caller's promise.
            while let Some(bytes) = unsafe { reservation.unmap_last(driver, from)? } {
                *unmapped += bytes;
            }
            Ok(())
        })
    }
}

impl GrowableMemory for CudaGrowable {
    fn address(&self) -> u64 {
        self.address
    }

    fn reserved(&self) -> usize {
        self.reserved
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Acquire)
    }

    fn granularity(&self) -> usize {
        self.page
    }

    fn grow(&self, bytes: usize) -> Result<(), BackendError> {
        if bytes > self.reserved {
            return Err(BackendError::Invalid {
                what: "size to grow to in bytes",
                value: bytes as u64,
                limit: format!("the {} bytes reserved for {}", self.reserved, self.what),
            });
        }
        let mut state = lock(&self.state);
        let mapped = self.mapped.load(Ordering::Relaxed);
        if bytes <= mapped {
            return Ok(());
        }
        let target = whole_pages(&self.what, bytes, self.page)?;
        // Counted first and given back by its drop if the memory cannot be had.
        let more = self.account.charge(&self.what, (target - mapped) as u64)?;
        if let Err(error) = self.map(&mut state.reservation, mapped, target) {
            // SAFETY: what was mapped by the failed call was told to nobody.
            if let Err(second) = unsafe { self.unmap(&mut state.reservation, mapped, &mut 0) } {
                tracing::warn!(%second, "unmapping after a failed growth failed");
            }
            return Err(error);
        }
        match &state.charge {
            Some(held) => held.merge(more),
            None => state.charge = Some(more),
        }
        self.mapped.store(target, Ordering::Release);
        Ok(())
    }

    unsafe fn trim(&self, bytes: usize) -> Result<(), BackendError> {
        let mut state = lock(&self.state);
        let before = self.mapped.load(Ordering::Relaxed);
        if bytes >= before {
            return Ok(());
        }
        let mut unmapped = 0;
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.unmap(&mut state.reservation, bytes, &mut unmapped) };
        let left = before - unmapped;
        self.mapped.store(left, Ordering::Release);
        if let Some(held) = &state.charge {
            held.shrink_to(left as u64);
        }
        outcome
    }
}

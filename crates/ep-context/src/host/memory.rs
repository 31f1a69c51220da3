//! Private memory of a host rank: fixed, mapped for the host, and growing in place.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::mapping::{Mapping, page_size, whole_pages};
use crate::account::{Charge, MemoryAccount};
use crate::backend::{BackendError, GrowableMemory, MappedMemory, Memory};
use crate::sync::lock;

/// Zeroed memory of this process, aligned to a page. It is [`MappedMemory`] as it stands, since on
/// the host backend every address is one of the host.
#[derive(Debug)]
pub struct HostMemory {
    mapping: Mapping,
    bytes: usize,
    _charge: Charge,
}

impl HostMemory {
    pub(super) fn new(
        what: &str,
        account: &MemoryAccount,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        let charge = account.charge(what, physical_bytes(what, bytes)? as u64)?;
        Ok(Self { mapping: Mapping::zeroed(what, bytes)?, bytes, _charge: charge })
    }
}

impl Memory for HostMemory {
    fn address(&self) -> u64 {
        self.mapping.address()
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl MappedMemory for HostMemory {
    fn host_address(&self) -> *mut u8 {
        self.mapping.start()
    }
}

/// What new pages of growing memory hold in a debug build, so that tests see who reads what nobody has
/// written: as a number of any format it is none.
const NOT_WRITTEN: u8 = 0xff;

/// Addresses reserved for the largest size, with pages behind the present one.
#[derive(Debug)]
pub struct HostGrowable {
    mapping: Mapping,
    what: String,
    reserved: usize,
    account: MemoryAccount,
    /// Written under the lock of `charge` only; readable without it.
    mapped: AtomicUsize,
    charge: Mutex<Option<Charge>>,
}

impl HostGrowable {
    pub(super) fn new(
        what: String,
        account: &MemoryAccount,
        bytes: usize,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            mapping: Mapping::reserved(&what, bytes)?,
            what,
            reserved: bytes,
            account: account.clone(),
            mapped: AtomicUsize::new(0),
            charge: Mutex::new(None),
        })
    }
}

impl GrowableMemory for HostGrowable {
    fn address(&self) -> u64 {
        self.mapping.address()
    }

    fn reserved(&self) -> usize {
        self.reserved
    }

    fn mapped(&self) -> usize {
        self.mapped.load(Ordering::Acquire)
    }

    fn granularity(&self) -> usize {
        page_size()
    }

    fn grow(&self, bytes: usize) -> Result<(), BackendError> {
        if bytes > self.reserved {
            return Err(BackendError::Invalid {
                what: "size to grow to in bytes",
                value: bytes as u64,
                limit: format!("the {} bytes reserved for {}", self.reserved, self.what),
            });
        }
        let mut charge = lock(&self.charge);
        let mapped = self.mapped.load(Ordering::Relaxed);
        if bytes <= mapped {
            return Ok(());
        }
        let target = whole_pages(&self.what, bytes)?;
        // Counted first and given back by its drop if the pages cannot be had.
        let more = self.account.charge(&self.what, (target - mapped) as u64)?;
        self.mapping.commit(&self.what, mapped, target - mapped)?;
        if cfg!(debug_assertions) {
            // SAFETY: the pages lie in the mapping, were just committed, and are told to nobody yet.
            unsafe {
                let start = self.mapping.start().add(mapped);
                start.write_bytes(NOT_WRITTEN, target - mapped);
            }
        }
        match charge.as_ref() {
            Some(held) => held.merge(more),
            None => *charge = Some(more),
        }
        self.mapped.store(target, Ordering::Release);
        Ok(())
    }

    unsafe fn trim(&self, bytes: usize) -> Result<(), BackendError> {
        let charge = lock(&self.charge);
        let mapped = self.mapped.load(Ordering::Relaxed);
        if bytes >= mapped {
            return Ok(());
        }
        let keep = physical_bytes(&self.what, bytes)?;
        if keep == mapped {
            return Ok(());
        }
        // SAFETY: the range starts at or behind `bytes`, where by the caller's promise nothing is
        // touched; it is handed out again only after `grow` has committed it.
        unsafe { self.mapping.release(&self.what, keep, mapped - keep)? };
        self.mapped.store(keep, Ordering::Release);
        if let Some(held) = charge.as_ref() {
            held.shrink_to(keep as u64);
        }
        Ok(())
    }
}

/// What `bytes` bytes occupy: whole pages, and none for nothing.
pub(super) fn physical_bytes(what: &str, bytes: usize) -> Result<usize, BackendError> {
    if bytes == 0 { Ok(0) } else { whole_pages(what, bytes) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::host::testing::{peek, poke};

    fn growable(limit: Option<u64>, bytes: usize) -> (HostGrowable, MemoryAccount) {
        let account = MemoryAccount::new(limit);
        let memory = HostGrowable::new("a test".to_owned(), &account, bytes).expect("addresses");
        (memory, account)
    }

    #[test]
    fn memory_is_zeroed_aligned_and_counted() {
        let account = MemoryAccount::new(None);
        let memory = HostMemory::new("a test", &account, 1000).expect("memory");
        assert_eq!((memory.bytes(), memory.address() % 256), (1000, 0));
        assert_eq!(memory.address(), memory.host_address().addr() as u64);
        assert!((0..1000).all(|at| peek(memory.address() + at) == 0));
        assert_eq!(account.used(), page_size() as u64);
        drop(memory);
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn an_empty_allocation_has_an_address_and_costs_nothing() {
        let account = MemoryAccount::new(Some(0));
        let memory = HostMemory::new("a test", &account, 0).expect("nothing is needed");
        assert_ne!(memory.address(), 0);
        assert_eq!((memory.bytes(), memory.address() % 256), (0, 0));
        let (empty, _) = growable(Some(0), 0);
        empty.grow(0).expect("nothing is needed");
        assert_eq!((empty.reserved(), empty.mapped()), (0, 0));
        empty.grow(1).expect_err("beyond what is reserved");
    }

    #[test]
    fn a_refused_allocation_is_not_counted() {
        let account = MemoryAccount::new(None);
        HostMemory::new("a test", &account, 1 << 60).expect_err("no machine has that much");
        HostMemory::new("a test", &account, usize::MAX).expect_err("not even pages of it");
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn growth_beyond_the_limit_changes_nothing() {
        let page = page_size();
        let (memory, account) = growable(Some(3 * page as u64), 16 * page);
        memory.grow(2 * page).expect("fits");
        poke(memory.address(), 7);
        let error = memory.grow(4 * page).expect_err("two pages more than fit");
        assert!(
            matches!(error, BackendError::OutOfMemory { limit: Some(left), .. } if left == page),
            "{error}"
        );
        assert_eq!((memory.mapped(), account.used()), (2 * page, 2 * page as u64));
        assert_eq!(peek(memory.address()), 7);
        let error = memory.grow(16 * page + 1).expect_err("beyond what is reserved");
        assert!(matches!(error, BackendError::Invalid { .. }), "{error}");
        memory.grow(3 * page).expect("fits exactly");
    }

    #[test]
    fn a_reservation_may_exceed_the_memory_of_the_machine() {
        let (memory, account) = growable(None, 1 << 42);
        memory.grow(1).expect("one page");
        assert_eq!((memory.mapped(), account.used()), (page_size(), page_size() as u64));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Grow(usize),
        Trim(usize),
    }

    proptest! {
        /// The bytes that stay mapped keep what they hold, those mapped anew hold nothing that anybody
        /// could rely on, and the account holds exactly the mapped pages.
        #[test]
        fn growing_and_trimming_keep_what_stays(
            steps in prop::collection::vec(
                (any::<bool>(), 0_usize..=9 * 4096).prop_map(|(grow, bytes)| {
                    if grow { Step::Grow(bytes) } else { Step::Trim(bytes) }
                }),
                1..24,
            )
        ) {
            let page = page_size();
            let limit = 7 * page;
            let (memory, account) = growable(Some(limit as u64), 8 * page);
            let start = memory.address();
            let mut mapped = 0;
            for step in steps {
                let before = mapped;
                match step {
                    Step::Grow(bytes) => {
                        let target = bytes.next_multiple_of(page);
                        let fits = bytes <= 8 * page && target.max(mapped) <= limit;
                        prop_assert_eq!(memory.grow(bytes).is_ok(), fits);
                        if fits {
                            mapped = mapped.max(target);
                        }
                    }
                    Step::Trim(bytes) => {
                        // SAFETY: the test touches mapped bytes only, on this thread.
                        unsafe { memory.trim(bytes) }.expect("the range is mapped");
                        mapped = mapped.min(bytes.next_multiple_of(page));
                    }
                }
                prop_assert_eq!((memory.mapped(), account.used()), (mapped, mapped as u64));
                prop_assert_eq!(memory.address(), start);
                for first in (0..mapped).step_by(page) {
                    let new = if cfg!(debug_assertions) { NOT_WRITTEN } else { 0 };
                    let held = if first < before { 1 + (first / page) as u8 } else { new };
                    prop_assert_eq!(peek(start + first as u64), held);
                    prop_assert_eq!(peek(start + (first + page - 1) as u64), held);
                    poke(start + first as u64, 1 + (first / page) as u8);
                    poke(start + (first + page - 1) as u64, 1 + (first / page) as u8);
                }
            }
        }
    }
}

//! Device memory of one rank, counted before it is allocated.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::BackendError;

/// Counts the device memory of one rank against a limit. A clone is the same account.
#[derive(Clone)]
pub struct MemoryAccount {
    inner: Arc<Inner>,
}

struct Inner {
    used: AtomicU64,
    peak: AtomicU64,
    limit: AtomicU64,
}

impl MemoryAccount {
    /// An account that refuses to exceed `limit` bytes; `None` counts without a limit.
    pub fn new(limit: Option<u64>) -> Self {
        Self {
            inner: Arc::new(Inner {
                used: AtomicU64::new(0),
                peak: AtomicU64::new(0),
                limit: AtomicU64::new(limit.unwrap_or(u64::MAX)),
            }),
        }
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.inner.used.load(Ordering::Relaxed)
    }

    /// The most bytes that were ever in use.
    pub fn peak(&self) -> u64 {
        self.inner.peak.load(Ordering::Relaxed)
    }

    /// The limit in bytes, if there is one.
    pub fn limit(&self) -> Option<u64> {
        let limit = self.inner.limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    /// Changes the limit. What is in use already stays, even above the new limit.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.inner.limit.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// A charge of nothing, for memory that is somebody else's.
    pub(crate) fn charge_nothing(&self) -> Charge {
        Charge { account: self.clone(), bytes: AtomicU64::new(0) }
    }

    /// Counts `bytes` for `what` until the returned charge is dropped.
    ///
    /// # Errors
    ///
    /// [`BackendError::OutOfMemory`] if the limit would be exceeded; nothing is counted then.
    pub fn charge(&self, what: &str, bytes: u64) -> Result<Charge, BackendError> {
        let limit = self.inner.limit.load(Ordering::Relaxed);
        let counted = self.inner.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|total| *total <= limit)
        });
        match counted {
            Ok(before) => {
                self.inner.peak.fetch_max(before + bytes, Ordering::Relaxed);
                Ok(Charge { account: self.clone(), bytes: AtomicU64::new(bytes) })
            }
            Err(used) => Err(BackendError::OutOfMemory {
                what: what.to_owned(),
                requested: usize::try_from(bytes).unwrap_or(usize::MAX),
                limit: Some(usize::try_from(limit.saturating_sub(used)).unwrap_or(usize::MAX)),
            }),
        }
    }
}

impl fmt::Debug for MemoryAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryAccount")
            .field("used", &self.used())
            .field("peak", &self.peak())
            .field("limit", &self.limit())
            .finish()
    }
}

/// Bytes counted in an account; dropping it gives them back.
#[derive(Debug)]
pub struct Charge {
    account: MemoryAccount,
    bytes: AtomicU64,
}

impl Charge {
    /// The bytes counted.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes over what `other` counts.
    pub(crate) fn merge(&self, other: Charge) {
        let bytes = other.bytes.swap(0, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives back all but `bytes`; a larger number changes nothing.
    pub(crate) fn shrink_to(&self, bytes: u64) {
        let before = self.bytes.fetch_min(bytes, Ordering::Relaxed);
        self.account.inner.used.fetch_sub(before.saturating_sub(bytes), Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.inner.used.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_holds_and_charges_come_back() {
        let account = MemoryAccount::new(Some(100));
        let first = account.charge("a", 60).expect("fits");
        let refused = account.charge("b", 41).expect_err("does not fit");
        assert!(
            matches!(refused, BackendError::OutOfMemory { requested: 41, limit: Some(40), .. }),
            "{refused}"
        );
        assert_eq!(account.used(), 60);
        first.merge(account.charge("c", 40).expect("fits exactly"));
        assert_eq!((account.used(), first.bytes()), (100, 100));
        first.shrink_to(30);
        assert_eq!(account.used(), 30);
        first.shrink_to(90);
        assert_eq!((account.used(), first.bytes()), (30, 30));
        drop(first);
        assert_eq!((account.used(), account.peak()), (0, 100));
        assert!(account.charge("d", u64::MAX).is_err());
    }
}

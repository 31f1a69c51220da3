//! Locks that a panic of another thread does not close: for critical sections that leave nothing half
//! done, which is all of them here.

use std::ptr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both locks, taken in an order that does not depend on which is given first: two threads may want the
/// same two in both directions. They are two.
pub(crate) fn lock_both<'l, T>(
    one: &'l Mutex<T>,
    other: &'l Mutex<T>,
) -> (MutexGuard<'l, T>, MutexGuard<'l, T>) {
    if ptr::from_ref(one) < ptr::from_ref(other) {
        let first = lock(one);
        (first, lock(other))
    } else {
        let first = lock(other);
        (lock(one), first)
    }
}

/// What is behind a lock that nobody else can have.
pub(crate) fn owned<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Lets others have the lock until `changed` is told, or for no reason.
pub(crate) fn wait<'l, T>(changed: &Condvar, locked: MutexGuard<'l, T>) -> MutexGuard<'l, T> {
    changed.wait(locked).unwrap_or_else(PoisonError::into_inner)
}

/// The same for at most so long.
pub(crate) fn wait_at_most<'l, T>(
    changed: &Condvar,
    locked: MutexGuard<'l, T>,
    at_most: Duration,
) -> MutexGuard<'l, T> {
    changed.wait_timeout(locked, at_most).unwrap_or_else(PoisonError::into_inner).0
}

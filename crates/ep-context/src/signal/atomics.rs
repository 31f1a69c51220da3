//! The operations on shared words that waiting needs, and their implementation by the machine.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// A 32-bit word that several threads or processes read and write.
pub(super) trait Word32: Debug {
    /// As [`AtomicU32::load`].
    fn load(&self, order: Ordering) -> u32;
    /// As [`AtomicU32::store`].
    fn store(&self, value: u32, order: Ordering);
    /// As [`AtomicU32::fetch_add`].
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// As [`AtomicU32::fetch_sub`].
    fn fetch_sub(&self, value: u32, order: Ordering) -> u32;
}

/// A 64-bit word that several threads or processes read and write.
pub(super) trait Word64: Debug {
    /// As [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// As [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
    /// Stores `value` if the word is zero. Returns what the word holds afterwards: `value`, or
    /// what was stored first. Acquires in either case and releases when it stores.
    fn set_once(&self, value: u64) -> u64;
}

/// Words, fences and sleeping. The protocol of [`crate::signal`] is written over this trait; a model
/// checker supplies another implementation.
pub(super) trait Atomics {
    /// A 32-bit word.
    type U32: Word32;
    /// A 64-bit word.
    type U64: Word64;

    /// How often a wait looks at its words before it gives the processor to another thread.
    const SPINS: u32;
    /// How often it then does that, before it sleeps.
    const YIELDS: u32;

    /// As [`std::sync::atomic::fence`].
    fn fence(order: Ordering);

    /// Tells the processor that the caller spins.
    fn spin();

    /// Lets another thread run.
    fn yield_now();

    /// Sleeps until [`Atomics::unpark_all`] is called for the same word, or for `at_most`.
    /// Returns at once if the word does not hold `seen`; may return without any reason.
    fn park(doorbell: &Self::U32, seen: u32, at_most: Duration);

    /// Wakes every thread, of any process, that sleeps on the word.
    fn unpark_all(doorbell: &Self::U32);
}

impl Word32 for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }

    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order);
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        AtomicU32::fetch_add(self, value, order)
    }

    fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        AtomicU32::fetch_sub(self, value, order)
    }
}

impl Word64 for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    fn set_once(&self, value: u64) -> u64 {
        match self.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => value,
            Err(first) => first,
        }
    }
}

/// The machine's atomics, and futexes to sleep on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Std;

// The words lie in memory that several processes map, or one process at several addresses: a
// process-private futex is found by its address and would miss such wake-ups.
const SHARED: futex::Flags = futex::Flags::empty();

impl Atomics for Std {
    type U32 = AtomicU32;
    type U64 = AtomicU64;

    // With more ranks than cores the awaited rank may need the very core this one spins on, so a
    // wait spins for about a microsecond only.
    const SPINS: u32 = 64;
    const YIELDS: u32 = 4;

    fn fence(order: Ordering) {
        std::sync::atomic::fence(order);
    }

    fn spin() {
        std::hint::spin_loop();
    }

    fn yield_now() {
        std::thread::yield_now();
    }

    fn park(doorbell: &AtomicU32, seen: u32, at_most: Duration) {
        sleep_on(doorbell, seen, at_most);
    }

    fn unpark_all(doorbell: &AtomicU32) {
        // The kernel reads the count as signed. The call can only fail for an address that is not
        // mapped, and a reference is.
        let _ = futex::wake(doorbell, SHARED, i32::MAX.unsigned_abs());
    }
}

/// Sleeps on the word; false if `at_most` ran out.
fn sleep_on(doorbell: &AtomicU32, seen: u32, at_most: Duration) -> bool {
    // A duration the kernel's type cannot hold is longer than any machine runs.
    let at_most = futex::Timespec::try_from(at_most).ok();
    // Every other outcome is a reason to look at the words again: rung (or woken for no reason),
    // EAGAIN (the word had moved already), EINTR.
    futex::wait(doorbell, SHARED, seen, at_most.as_ref()) != Err(rustix::io::Errno::TIMEDOUT)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::ptr;

    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::*;

    #[test]
    fn parking_returns_when_the_word_has_moved() {
        let word = AtomicU32::new(5);
        assert!(sleep_on(&word, 4, Duration::from_secs(600)));
    }

    #[test]
    fn parking_ends_by_itself() {
        let word = AtomicU32::new(5);
        assert!(!sleep_on(&word, 5, Duration::ZERO));
    }

    #[test]
    fn a_wake_up_reaches_another_mapping_of_the_word() {
        let file =
            rustix::fs::memfd_create("doorbell", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&file, 4096).expect("a page");
        let map = || {
            // SAFETY: A new mapping at an address of the kernel's choice; it replaces nothing.
            unsafe {
                mmap(
                    ptr::null_mut(),
                    4096,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    file.as_fd(),
                    0,
                )
            }
            .expect("a mapping")
        };
        let (here, there) = (map(), map());
        assert_ne!(here, there);
        // SAFETY: Both point to a mapped, page-aligned page that is unmapped below, after the last
        // use of the references; every access to it is atomic.
        let (near, far) = unsafe {
            (AtomicU32::from_ptr(here.cast::<u32>()), AtomicU32::from_ptr(there.cast::<u32>()))
        };
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| sleep_on(near, 0, Duration::from_secs(60)));
            // Ring until the sleeper is gone: it may not have gone to sleep yet. The word keeps the
            // value that it sleeps on, so nothing but a wake-up that reaches it ends its sleep.
            while !sleeper.is_finished() {
                Std::unpark_all(far);
                std::thread::yield_now();
            }
            assert!(sleeper.join().expect("the sleeper"), "slept until its time was over");
        });
        for mapping in [here, there] {
            // SAFETY: The mapping was made above with this length, and nothing uses it any more.
            unsafe { munmap(mapping, 4096) }.expect("unmapped");
        }
    }
}

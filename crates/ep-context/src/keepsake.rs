//! What a graph keeps alive that its owner made, and not this library.
//!
//! Such a graph is destroyed when its owner pleases: on whatever thread, that of the driver included,
//! where nothing may be called and nothing may be waited for. So whoever lets a keepsake go only hangs
//! it on a list, without a lock and without an allocation, and what it holds is dropped by
//! [`reclaim`], on a thread that asked for it.

use std::collections::HashSet;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};

use crate::backend::Retained;
use crate::sync::lock;

/// Keepsakes that nobody keeps any more, each pointing to the next.
static LET_GO: AtomicPtr<Keepsake> = AtomicPtr::new(ptr::null_mut());

/// Everything that one stretch of a recording uses.
pub(crate) struct Keepsake {
    held: Mutex<Held>,
    /// The next in the list; used once it is let go.
    next: AtomicPtr<Keepsake>,
}

/// What recorded work uses.
#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(crate) objects: Vec<Retained>,
    /// Their addresses: a buffer used by a thousand operations is held once.
    addresses: HashSet<usize>,
}

impl Held {
    /// Holds `retained` too.
    pub(crate) fn keep(&mut self, retained: &[Retained]) {
        for object in retained {
            if self.addresses.insert(Arc::as_ptr(object).cast::<()>().addr()) {
                self.objects.push(object.clone());
            }
        }
    }
}

impl Keepsake {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { held: Mutex::default(), next: AtomicPtr::new(ptr::null_mut()) })
    }

    /// Holds `retained` too.
    pub(crate) fn keep(&self, retained: &[Retained]) {
        lock(&self.held).keep(retained);
    }

    fn len(&self) -> usize {
        lock(&self.held).objects.len()
    }

    /// Hangs a keepsake on the list. Calls nobody, allocates nothing, takes no lock and does not panic.
    ///
    /// # Safety
    ///
    /// `this` came of [`Arc::into_raw`], and this reference is given up here.
    pub(crate) unsafe fn let_go(this: *const Self) {
        let this = this.cast_mut();
        let mut head = LET_GO.load(Ordering::Relaxed);
        loop {
            // SAFETY: the reference that is given up keeps it alive until `reclaim` takes it over.
            unsafe { &*this }.next.store(head, Ordering::Relaxed);
            // Release: whoever takes the list sees the link, and what was kept.
            match LET_GO.compare_exchange_weak(head, this, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

impl fmt::Debug for Keepsake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keepsake").field("held", &self.len()).finish()
    }
}

/// Lets its keepsake go when it is dropped: for recordings that hold objects of the language.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(crate) keepsake: Arc<Keepsake>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // SAFETY: a reference of its own, made here.
        unsafe { Keepsake::let_go(Arc::into_raw(self.keepsake.clone())) };
    }
}

/// Lets go what graphs of others kept alive that are gone by now, and returns how many objects that
/// were. Those that nothing else holds are dropped here.
///
/// Backends do this wherever they give back what was dropped, so that nobody has to: for an engine that
/// wants its memory back at a certain moment. Not for a thread that records by means of its own.
pub fn reclaim() -> usize {
    // The whole list at once, so that no link is looked at that another thread may take.
    let mut at = LET_GO.swap(ptr::null_mut(), Ordering::Acquire);
    let mut count = 0;
    while !at.is_null() {
        // SAFETY: in the list are references that were given up, each once; this is one of them.
        let keepsake = unsafe { Arc::from_raw(at) };
        at = keepsake.next.load(Ordering::Relaxed);
        count += keepsake.len();
    }
    count
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// Other tests of this process may take the list meanwhile, so only what becomes of the objects
    /// counts, not who drops them.
    fn gone(object: &std::sync::Weak<u8>) -> bool {
        reclaim();
        let start = Instant::now();
        while object.strong_count() > 0 && start.elapsed() < Duration::from_secs(60) {
            thread::yield_now();
        }
        object.strong_count() == 0
    }

    #[test]
    fn what_is_kept_lives_until_it_is_reclaimed() {
        let object = Arc::new(7_u8);
        let weak = Arc::downgrade(&object);
        let keepsake = Keepsake::new();
        keepsake.keep(&[object.clone(), object]);
        assert_eq!(keepsake.len(), 1, "held once");
        let keeper = Keeper { keepsake };
        assert!(weak.upgrade().is_some());
        drop(keeper);
        assert!(gone(&weak));
    }

    #[test]
    fn a_recording_that_goes_on_keeps_what_its_graph_let_go() {
        let object = Arc::new(7_u8);
        let weak = Arc::downgrade(&object);
        let keepsake = Keepsake::new();
        keepsake.keep(&[object]);
        drop(Keeper { keepsake: keepsake.clone() });
        reclaim();
        assert!(weak.upgrade().is_some(), "the other reference holds it");
        drop(keepsake);
        assert!(gone(&weak));
    }

    #[test]
    fn threads_let_go_and_reclaim_at_the_same_time() {
        let objects: Vec<_> = (0..400).map(|_| Arc::new(7_u8)).collect();
        let left: Vec<_> = objects.iter().map(Arc::downgrade).collect();
        thread::scope(|scope| {
            for objects in objects.chunks(100).map(<[_]>::to_vec) {
                scope.spawn(move || {
                    for object in objects {
                        let keepsake = Keepsake::new();
                        keepsake.keep(&[object]);
                        drop(Keeper { keepsake });
                        reclaim();
                    }
                });
            }
        });
        drop(objects);
        assert!(left.iter().all(gone));
    }
}

//! What was dropped and still has to be given back to the driver.
//!
//! A destructor calls no driver: it may run while its thread records, where such a call would break
//! the recording, or while a rank spins on the device, where a call that waits for the device would
//! wait for that rank. So what a destructor leaves is buried here, and the dead are given back by later
//! calls: memory, whose end waits for the device, by those that may wait for it anyway; see [`super`].

use std::ffi::c_void;
use std::mem;
use std::sync::Mutex;

use super::device::Device;
use super::driver::{Driver, DriverError, EventHandle, ExecHandle, GraphHandle, Handle};
use super::remains::Remains;
use crate::sync::lock;

/// Something of the driver's that nobody uses any more.
#[derive(Debug)]
pub(super) enum Grave {
    /// Memory of `cuMemAlloc`.
    Memory(u64),
    /// Memory of `cuMemHostAlloc`.
    HostMemory(Handle<c_void>),
    /// Reserved addresses, what is mapped behind them, and the handle of an allocation if one is held.
    Reservation { address: u64, bytes: usize, mapped: Vec<(u64, usize)>, allocation: Option<u64> },
    /// A graph that is not executable.
    Graph(GraphHandle),
    /// An executable graph.
    Exec(ExecHandle),
    /// An event that took times.
    Event(EventHandle),
    /// A stream, with what its queued work uses.
    Stream(Box<Remains>),
}

#[derive(Debug, Default)]
pub(super) struct Graveyard {
    graves: Mutex<Vec<Grave>>,
}

impl Graveyard {
    /// Leaves something to be given back later. Calls no driver and does not panic.
    pub(super) fn bury(&self, grave: Grave) {
        lock(&self.graves).push(grave);
    }

    /// How much waits to be given back.
    pub(super) fn len(&self) -> usize {
        lock(&self.graves).len()
    }

    /// Ends what streams recorded that this thread dropped while they did. All else stays where a thread
    /// that gives back finds it.
    pub(super) fn end_orphaned_recordings(&self, driver: &Driver) {
        let records =
            |grave: &mut Grave| matches!(grave, Grave::Stream(remains) if remains.is_recording());
        // Ending one buries its graph.
        let mut graves: Vec<_> = lock(&self.graves).extract_if(.., records).collect();
        for grave in &graves {
            if let Grave::Stream(remains) = grave {
                remains.end_recording(driver);
            }
        }
        lock(&self.graves).append(&mut graves);
    }

    /// Gives back what can be: everything but streams whose work still runs, and memory unless `memory` is
    /// asked for too. The context is current and the calling thread does not record; one thread at a time
    /// does this, since others would not find what it has in hand.
    pub(super) fn clear(&self, device: &Device, driver: &Driver, memory: bool) {
        let mut waiting = Vec::new();
        // What a stream's work used may be buried in turn when the stream goes.
        loop {
            let graves = mem::take(&mut *lock(&self.graves));
            if graves.is_empty() {
                break;
            }
            for grave in graves {
                if memory || !grave.is_memory() {
                    waiting.extend(grave.give_back(device, driver));
                } else {
                    waiting.push(grave);
                }
            }
        }
        lock(&self.graves).append(&mut waiting);
    }
}

impl Grave {
    /// Whether to give it back waits for all work of the device.
    fn is_memory(&self) -> bool {
        matches!(self, Grave::Memory(_) | Grave::HostMemory(_) | Grave::Reservation { .. })
    }

    /// Returns itself if its time has not come.
    fn give_back(self, device: &Device, driver: &Driver) -> Option<Self> {
        let outcome = match self {
            // SAFETY: the address is one of `cuMemAlloc`, freed once; its owner is gone, and so is
            // all work that retained it.
            Grave::Memory(address) => unsafe { driver.cuMemFree_v2(address) },
            // SAFETY: as above, of `cuMemHostAlloc`.
            Grave::HostMemory(start) => unsafe { driver.cuMemFreeHost(start.0) },
            Grave::Reservation { address, bytes, mapped, allocation } => {
                unmap(driver, address, bytes, &mapped, allocation)
            }
            // SAFETY: the handle's owner is gone; an executable graph does not need its source.
            Grave::Graph(graph) => unsafe { driver.cuGraphDestroy(graph.0) },
            // SAFETY: the handle's owner is gone, and so are all replays, which retained it.
            Grave::Exec(exec) => unsafe { driver.cuGraphExecDestroy(exec.0) },
            // SAFETY: the handle's owner is gone, and so are queued work and graphs, which retained it.
            Grave::Event(event) => unsafe { driver.cuEventDestroy_v2(event.0) },
            Grave::Stream(remains) => {
                return remains.settle(device, driver).map(Box::new).map(Grave::Stream);
            }
        };
        if let Err(error) = outcome {
            // There is nobody to tell, and what could not be given back is lost.
            tracing::warn!(call = error.call, code = error.code, "giving back a resource failed");
        }
        None
    }
}

fn unmap(
    driver: &Driver,
    address: u64,
    bytes: usize,
    mapped: &[(u64, usize)],
    allocation: Option<u64>,
) -> Result<(), DriverError> {
    for &(start, length) in mapped {
        // SAFETY: each is a range that was mapped whole, and no work uses it any more.
        unsafe { driver.cuMemUnmap(start, length)? };
    }
    if let Some(handle) = allocation {
        // SAFETY: the handle is released once; mappings of peers keep the memory alive.
        unsafe { driver.cuMemRelease(handle)? };
    }
    // SAFETY: the whole reservation, in which nothing is mapped now.
    unsafe { driver.cuMemAddressFree(address, bytes) }
}

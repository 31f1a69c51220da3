//! Taking part in a recording that somebody else began.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Driver, DriverError, GraphHandle, ask_handle};
use crate::keepsake::{Keeper, Keepsake};

/// What somebody else's recording keeps for this backend.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) keepsake: Arc<Keepsake>,
    /// Branches and conditions that there were when it came.
    pub(super) branches: usize,
    pub(super) conditions: usize,
}

/// Whose capture a recorder records into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capture {
    /// Its own, which it ends.
    Own,
    /// One of this number that was begun by other means, and is ended so.
    Foreign(u64),
}

/// Lets `graph` keep a keepsake, and every graph that is made of it. The context is current.
pub(super) fn keep_for(
    driver: &Driver,
    graph: GraphHandle,
    keepsake: &Arc<Keepsake>,
) -> Result<(), DriverError> {
    let held = Arc::into_raw(keepsake.clone()).cast_mut().cast::<c_void>();
    // The driver promises no order between the destructor and its own calls, and is told that nobody
    // waits for one.
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    let created = ask_handle(|object| {
        // SAFETY: the place is valid; the destructor takes what is given here, once.
        unsafe { driver.cuUserObjectCreate(object, held, Some(let_go), 1, flags) }
    });
    let object = match created {
        Ok(object) => object,
        Err(error) => {
            // SAFETY: the reference was made above, and the driver has not taken it.
            drop(unsafe { Arc::from_raw(held.cast::<Keepsake>().cast_const()) });
            return Err(error);
        }
    };
    let moved = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: both are valid; the reference of this call becomes the graph's.
    let retained = unsafe { driver.cuGraphRetainUserObject(graph.0, object.0, 1, moved) };
    if retained.is_err() {
        // SAFETY: the reference is still this call's, and the last: the destructor runs.
        let _ = unsafe { driver.cuUserObjectRelease(object.0, 1) };
    }
    retained
}

/// The destructor of the user object. It runs on a thread of the driver's, which must not be called
/// from here.
unsafe extern "C" fn let_go(held: *mut c_void) {
    // SAFETY: the driver gives the pointer that it was given, which is a reference's, once.
    unsafe { Keepsake::let_go(held.cast::<Keepsake>().cast_const()) };
}

/// Holds a keepsake for a recording of this backend's own.
pub(super) fn keeper(keepsake: &Arc<Keepsake>) -> Arc<Keeper> {
    Arc::new(Keeper { keepsake: keepsake.clone() })
}

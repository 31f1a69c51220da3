//! Where a stream stands in the graph that it records, as the driver says.

use std::ptr;

use cudarc::driver::sys;

use crate::backend::BackendError;
use crate::cuda::driver::{Driver, DriverError, GraphHandle, Handle, StreamHandle};
use crate::recording::refused;

/// Where a stream stands in the graph that it records.
pub(in crate::cuda) struct Position {
    /// Tells the capture from every other of the process.
    pub(in crate::cuda) capture: u64,
    pub(in crate::cuda) graph: GraphHandle,
    pub(in crate::cuda) dependencies: *const sys::CUgraphNode,
    pub(in crate::cuda) edges: *const sys::CUgraphEdgeData,
    pub(in crate::cuda) count: usize,
}

/// Where `stream` stands in what it records.
pub(in crate::cuda) fn position(
    driver: &Driver,
    stream: StreamHandle,
) -> Result<Position, BackendError> {
    let mut status = 0_u32;
    let mut id = 0;
    let mut graph = ptr::null_mut();
    let mut at = Position {
        capture: 0,
        graph: Handle(graph),
        dependencies: ptr::null(),
        edges: ptr::null(),
        count: 0,
    };
    // SAFETY: all places are valid, the first for the number behind the enum. The arrays are the
    // driver's, and last until the next call on the stream.
    unsafe {
        driver.cuStreamGetCaptureInfo_v3(
            stream.0,
            (&raw mut status).cast::<sys::CUstreamCaptureStatus>(),
            &raw mut id,
            &raw mut graph,
            &raw mut at.dependencies,
            &raw mut at.edges,
            &raw mut at.count,
        )?;
    }
    (at.capture, at.graph) = (id, Handle(graph));
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
        return Ok(at);
    }
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32 {
        return Err(refused("recording", "nobody records on the stream, or not any more"));
    }
    Err(refused("recording", "an earlier call has made the driver give up the recording"))
}

/// Makes what the stream records next depend on `node` alone.
pub(in crate::cuda) fn continue_behind(
    driver: &Driver,
    stream: StreamHandle,
    mut node: sys::CUgraphNode,
) -> Result<(), DriverError> {
    use sys::CUstreamUpdateCaptureDependencies_flags as F;
    let flags = F::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    // SAFETY: the stream records into the graph that the node was just added to; without edge data
    // the dependency is an ordinary one.
    unsafe {
        driver.cuStreamUpdateCaptureDependencies_v2(stream.0, &raw mut node, ptr::null(), 1, flags)
    }
}

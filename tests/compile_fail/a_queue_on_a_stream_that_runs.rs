//! Memory that a recording borrows may be gone when a stream that runs gets to it.

use graph_ep::{BodyError, DeviceSlice, HostBackend, Step};

type Stream = <HostBackend as graph_ep::Backend>::Stream;

fn mistake<'a>(
    step: &mut Step<'a, HostBackend>,
    runs: &Stream,
    to: &DeviceSlice<'a, HostBackend>,
    from: &DeviceSlice<'a, HostBackend>,
) -> Result<(), BodyError> {
    let queue = step.queue().with_stream(runs.clone());
    // SAFETY: never run.
    Ok(unsafe { queue.copy(to, from) }?)
}

fn main() {}

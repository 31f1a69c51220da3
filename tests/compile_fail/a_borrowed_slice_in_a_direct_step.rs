//! Work that runs directly outlives the call that queues it, so it takes no borrowed memory.

use graph_ep::{
    DeviceSlice, Dispatch, ExpertParallel, Handle, HostBackend, Lane, Queue, RowBuffer, Step,
    StepOptions, TokenCount, TopKIds,
};

fn mistake(
    group: &ExpertParallel<HostBackend>,
    lane: &Lane<HostBackend>,
    handle: &Handle<HostBackend>,
    rows: &RowBuffer<HostBackend>,
    ids: DeviceSlice<'static, HostBackend>,
) {
    let memory = vec![0u8; 64];
    let queue = Queue::direct(group.context().backend(), group.stream());
    let mut step = Step::begin(group.dispatcher(), queue, StepOptions::new()).unwrap();
    // SAFETY: never run.
    let tokens = unsafe { DeviceSlice::borrowed(&memory, memory.as_ptr() as u64, 64) };
    let dispatch = Dispatch::new(tokens, TokenCount::Fixed(1), TopKIds::I32(ids), rows, handle);
    lane.dispatch(&mut step, &dispatch).unwrap();
}

fn main() {}

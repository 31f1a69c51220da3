//! Memory that was borrowed for a recording cannot go while the graph lives.

use graph_ep::{DeviceSlice, ExpertParallel, HostBackend, StepGraph, StepOptions};

fn mistake(group: &ExpertParallel<HostBackend>) {
    let memory = vec![0u8; 64];
    // SAFETY: never run.
    let slice = unsafe { DeviceSlice::borrowed(&memory, memory.as_ptr() as u64, 64) };
    let graph =
        StepGraph::record(group.dispatcher(), group.stream(), StepOptions::new(), move |step| {
            // SAFETY: never run.
            unsafe { step.queue().copy(&slice, &slice) }?;
            Ok(())
        })
        .unwrap();
    drop(memory);
    graph.replay(group.stream()).unwrap();
}

fn main() {}

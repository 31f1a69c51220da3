//! A graph that borrowed cannot be returned to where the memory is gone.

use graph_ep::{DeviceSlice, ExpertParallel, HostBackend, StepGraph, StepOptions};

fn mistake(group: &ExpertParallel<HostBackend>) -> StepGraph<'static, HostBackend> {
    let memory = vec![0u8; 64];
    // SAFETY: never run.
    let slice = unsafe { DeviceSlice::borrowed(&memory, memory.as_ptr() as u64, 64) };
    StepGraph::record(group.dispatcher(), group.stream(), StepOptions::new(), move |step| {
        // SAFETY: never run.
        unsafe { step.queue().copy(&slice, &slice) }?;
        Ok(())
    })
    .unwrap()
}

fn main() {}

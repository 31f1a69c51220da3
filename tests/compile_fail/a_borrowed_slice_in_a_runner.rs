//! A runner keeps its body for later steps, so the body owns what it uses.

use graph_ep::{DeviceSlice, ExpertParallel, HostBackend, RecoverySettings};

fn mistake(group: &ExpertParallel<HostBackend>) {
    let memory = vec![0u8; 64];
    // SAFETY: never run.
    let slice = unsafe { DeviceSlice::borrowed(&memory, memory.as_ptr() as u64, 64) };
    let runner = group.runner(RecoverySettings::new(), move |step| {
        // SAFETY: never run.
        unsafe { step.queue().copy(&slice, &slice) }?;
        Ok(())
    });
    drop(runner);
}

fn main() {}

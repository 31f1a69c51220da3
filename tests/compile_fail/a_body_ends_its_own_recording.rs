//! Who is given a step has the stream, and not the key to the recording that the step is part of.

use graph_ep::{Backend, ExpertParallel, HostBackend, StepGraph, StepOptions};

fn mistake(group: &ExpertParallel<HostBackend>) {
    let graph = StepGraph::record(group.dispatcher(), group.stream(), StepOptions::new(), |step| {
        let queue = step.queue();
        let _stolen = queue.backend().end_recording(queue.stream())?;
        Ok(())
    });
    drop(graph);
}

fn main() {}

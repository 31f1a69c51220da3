//! A graph that was recorded again is gone; only what came of it can be replayed.

use graph_ep::{ExpertParallel, HostBackend, StepGraph};

fn mistake(group: &ExpertParallel<HostBackend>, graph: StepGraph<'static, HostBackend>) {
    let (_current, _update) = graph.record_again(group.stream(), |_step| Ok(())).unwrap();
    graph.replay(group.stream()).unwrap();
}

fn main() {}

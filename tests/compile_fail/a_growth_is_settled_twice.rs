//! A planned growth is committed or cancelled, and not both.

use graph_ep::ep_context::PlannedGrowth;
use graph_ep::{HostBackend, Queue};

fn mistake(growth: PlannedGrowth<HostBackend>, queue: &Queue<'static, HostBackend>) {
    // SAFETY: never run.
    unsafe { growth.commit(queue) }.unwrap();
    growth.cancel();
}

fn main() {}

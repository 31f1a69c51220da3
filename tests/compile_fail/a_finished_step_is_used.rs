//! A step that has ended takes nothing more.

use graph_ep::{Combine, HostBackend, Lane, Step};

fn mistake(
    lane: &Lane<HostBackend>,
    mut step: Step<'static, HostBackend>,
    combine: &Combine<'_, 'static, HostBackend>,
) {
    step.finish().unwrap();
    lane.combine(&mut step, combine).unwrap();
}

fn main() {}

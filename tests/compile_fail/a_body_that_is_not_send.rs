//! A runner may move to another thread, and its body with it.

use std::rc::Rc;

use graph_ep::{ExpertParallel, HostBackend, RecoverySettings};

fn mistake(group: &ExpertParallel<HostBackend>) {
    let shared = Rc::new(0);
    let runner = group.runner(RecoverySettings::new(), move |_step| {
        assert_eq!(*shared, 0);
        Ok(())
    });
    drop(runner);
}

fn main() {}

//! What a clean step asks of the CUDA driver: shown by counting the calls.

use graph_ep::ep_context::cuda::DriverCalls;
use graph_ep::{Outcome, RecoverySettings};
use graph_ep_tests::backend::say_skipped;
use graph_ep_tests::{CudaThreads, TestBackend, steady};

/// A step of several layers, replayed: on the launching thread no call that waits and none that
/// allocates, and no more calls that queue work than the launch itself.
#[test]
fn a_clean_step_makes_no_call_that_waits_or_allocates() {
    if let Some(why) = CudaThreads::missing() {
        return say_skipped("a_clean_step_makes_no_call_that_waits_or_allocates", &why);
    }
    let calls = CudaThreads::on_ranks(2, |env| {
        let mut runner = steady::runner(env, RecoverySettings::new());
        runner.run().expect("the first step, which records");
        let mut seen = Vec::new();
        for _ in 0..8 {
            let before = DriverCalls::of_this_thread();
            let report = runner.run().expect("a step");
            let after = DriverCalls::of_this_thread();
            assert_eq!(report.outcome, Outcome::Clean);
            seen.push((
                after.wait - before.wait,
                after.allocate - before.allocate,
                after.queue - before.queue,
            ));
        }
        seen
    });
    for (rank, steps) in calls.iter().enumerate() {
        for (step, (wait, allocate, queue)) in steps.iter().enumerate() {
            assert_eq!((*wait, *allocate), (0, 0), "rank {rank}, step {step}");
            assert!(*queue <= 2, "rank {rank}, step {step}: {queue} calls queue work");
        }
    }
}

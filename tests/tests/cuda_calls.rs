//! What a clean step asks of the CUDA driver: shown by counting the calls.

use graph_ep::ep_context::cuda::DriverCalls;
use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{ExpertParallel, MoeLayer, Outcome, RecoverySettings, Step, TokenCount, TopKIds};
use graph_ep_tests::backend::{PATIENCE, say_skipped};
use graph_ep_tests::{CudaThreads, TestBackend};

const TOKENS: usize = 16;
const HIDDEN: usize = 64;
const LAYERS: usize = 4;

/// A step of several layers, replayed: on the launching thread no call that waits and none that
/// allocates, and no more calls that queue work than the launch itself.
#[test]
fn a_clean_step_makes_no_call_that_waits_or_allocates() {
    if let Some(why) = CudaThreads::missing() {
        return say_skipped("a_clean_step_makes_no_call_that_waits_or_allocates", &why);
    }
    let calls = CudaThreads::on_ranks(2, |env| {
        let builder =
            ExpertParallel::<<CudaThreads as TestBackend>::Backend>::builder(HIDDEN, 8, 2, TOKENS)
                .capacity_factor(8.0);
        let group = env.build(&builder).expect("a group");
        let experts = SyntheticExperts::new(&group).expect("experts");
        let allocate = |bytes| group.allocate(bytes).expect("memory");
        let (tokens, output) = (allocate(TOKENS * HIDDEN * 2), allocate(TOKENS * HIDDEN * 2));
        let ids = allocate(TOKENS * 2 * 4);
        let routing: Vec<i32> = (0..TOKENS as i32).flat_map(|t| [t % 8, (t + 1) % 8]).collect();
        group.write(&ids, bytemuck::cast_slice(&routing)).expect("written");
        let layer = MoeLayer::new(
            tokens.slice(),
            TokenCount::Fixed(TOKENS),
            TopKIds::I32(ids.slice()),
            output.slice(),
        );
        let body = {
            let group = group.clone();
            move |step: &mut Step<'static, _>| {
                for _ in 0..LAYERS {
                    group.layer(step, &layer, |queue, received| experts.queue(queue, received))?;
                }
                Ok(())
            }
        };
        let mut runner = group.runner(RecoverySettings::new(), body).expect("a runner");
        // Nobody launches while another still allocates on a GPU that they may share.
        group.context().rendezvous().barrier("ready", PATIENCE).expect("all are ready");
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

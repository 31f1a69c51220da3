//! A step whose load never overflows, for what is shown of clean steps.

use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{ExpertParallel, MoeLayer, RecoverySettings, Step, StepRunner, TokenCount, TopKIds};

use crate::backend::{PATIENCE, RankEnv, TestBackend};

/// Layers of the step.
pub const LAYERS: usize = 4;

const TOKENS: usize = 16;
const HIDDEN: usize = 64;

/// Its runner, once every rank has one: nobody launches while another still allocates on a GPU that they may
/// share. Nothing is recorded yet.
pub fn runner<T: TestBackend>(
    env: RankEnv<T>,
    settings: RecoverySettings,
) -> StepRunner<T::Backend> {
    let builder = ExpertParallel::<T::Backend>::builder(HIDDEN, 8, 2, TOKENS).capacity_factor(8.0);
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
    let runner = group.runner(settings, body).expect("a runner");
    group.context().rendezvous().barrier("ready", PATIENCE).expect("all are ready");
    runner
}

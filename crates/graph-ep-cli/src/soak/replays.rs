//! One recorded step, replayed over and over.

use graph_ep::{Backend, BackendError, Phase, StepReport, StepRunner};

use super::SoakError;
use super::form::Draw;
use super::ranks::{gather, on_ranks};
use super::rig::Rig;
use super::sizes::Sizes;
use super::tally::Tally;
use crate::args::Mode;

/// Steps between two looks at the word of mismatches.
const LOOK_EVERY: usize = 1000;

/// Replays a step on every rank, until all are done or one finds a mismatch.
pub(super) fn run<B: Backend>(
    sizes: &Sizes,
    mode: Mode,
    replays: usize,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
) -> Result<Vec<Tally>, SoakError> {
    on_ranks(sizes.ranks, backend, &|backend, place| {
        let rig = Rig::new(backend, place, sizes)?;
        rig.or_abort(|| {
            let mut tally = Tally::default();
            let mut runner = rig.runner(mode)?;
            steps(&rig, sizes, mode, &mut runner, replays, &mut tally)?;
            Ok(tally)
        })
    })
}

/// Runs so many steps, or until a rank finds a mismatch. Collective.
pub(super) fn steps<B: Backend>(
    rig: &Rig<B>,
    sizes: &Sizes,
    mode: Mode,
    runner: &mut StepRunner<B>,
    steps: usize,
    tally: &mut Tally,
) -> Result<(), SoakError> {
    let context = rig.group.context();
    let rank = context.rank().0;
    let first = rig.state()?.step;
    for part in (0..steps).step_by(LOOK_EVERY) {
        let until = (part + LOOK_EVERY).min(steps);
        tally.timed(|tally| -> Result<(), SoakError> {
            for _ in part..until {
                tally.step(&one(runner, mode)?);
            }
            Ok(())
        })?;
        let drawn = |step| Draw::new(&rig.shape(), first + step as u64).tokens(rank);
        let tokens: u64 = (part..until).map(|step| u64::from(drawn(step))).sum();
        tally.expected += tokens * sizes.layers as u64;
        let state = rig.state()?;
        tally.state = Some(state);
        let deadline = context.deadlines().of(Phase::Setup);
        let all = gather(context.rendezvous(), "mismatches", [state.mismatches], deadline)?;
        if all.iter().any(|[mismatches]| *mismatches != 0) {
            return Ok(());
        }
    }
    Ok(())
}

fn one<B: Backend>(runner: &mut StepRunner<B>, mode: Mode) -> Result<StepReport, SoakError> {
    Ok(match mode {
        Mode::Eager => runner.run_eager()?,
        _ => runner.run()?,
    })
}

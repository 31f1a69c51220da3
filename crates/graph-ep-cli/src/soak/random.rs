//! Groups of random sizes and settings, whose modes and batch sizes change in random order.

use graph_ep::{
    Backend, BackendError, DType, Layout, Phase, RoutingDependence, Transfer, Weighting,
};

use super::SoakError;
use super::form::MOST_DROPPING;
use super::ranks::{gather, on_ranks};
use super::replays::steps;
use super::rig::Rig;
use super::sizes::Sizes;
use super::tally::Tally;
use crate::args::Mode;
use crate::workload::counter::{Counter, mix};

/// Hidden size, experts of a token and number format: few, since device code is compiled for each.
pub(super) const COMPILED: [(usize, usize, DType); 3] =
    [(256, 4, DType::Bf16), (512, 8, DType::Fp16), (128, 2, DType::Fp32)];

/// What is the same for all groups of a soak.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) ranks: usize,
    pub(super) episodes: usize,
    /// The most steps of an episode.
    pub(super) steps: usize,
    pub(super) seed: u64,
    /// Whether steps may recover. On a GPU that ranks share nothing may be allocated while one of them
    /// waits: there steps do not grow.
    pub(super) recover: bool,
    /// Bytes of a rank.
    pub(super) memory: Option<u64>,
}

/// A group and what it does.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) sizes: Sizes,
    pub(super) episodes: Vec<(Mode, usize)>,
}

/// Numbers without visible pattern.
struct Dice(Counter);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        (self.0.next() >> 32) as usize % limit.max(1)
    }

    fn one_of<T: Copy, const N: usize>(&mut self, choices: [T; N]) -> T {
        choices[self.below(N)]
    }
}

impl Plan {
    /// The group of this number.
    pub(super) fn draw(limits: &Limits, number: usize) -> Self {
        let mut dice = Dice(Counter::starting_at(mix(limits.seed ^ mix(number as u64 + 1)), &[]));
        // In turn, so that few groups have all of them.
        let (hidden, top_k, dtype) = COMPILED[number % COMPILED.len()];
        let ranks = limits.ranks;
        let of_rank = dice.one_of([1, 2, 4, 8]).max(top_k.div_ceil(ranks));
        let layers = 1 + dice.below(4);
        let lanes = 1 + dice.below(2);
        let sizes = Sizes {
            ranks,
            tokens: dice.one_of([1, 3, 8, 16, 32, 48]),
            experts: of_rank * ranks,
            top_k,
            hidden,
            layers,
            lanes,
            nested: lanes >= layers && layers > 1,
            dtype,
            layout: dice.one_of([Layout::ExpertGrouped, Layout::Flat]),
            weighting: dice.one_of([Weighting::Combine, Weighting::Caller]),
            alignment: dice.one_of([1, 1, 4, 16]),
            capacity_factor: dice.one_of([0.5, 0.75, 1.0, 1.5]),
            transfer: dice.one_of([Transfer::Auto, Transfer::Auto, Transfer::Pull]),
            routing: dice.one_of([RoutingDependence::Dependent, RoutingDependence::Independent]),
            burst: dice.one_of([4, 16, 64]),
            ragged: dice.below(4) != 0,
            seed: dice.0.next(),
            memory_limit: limits.memory,
        };
        // Flat rows come with their weights.
        let weighting = match sizes.layout {
            Layout::Flat => Weighting::Caller,
            Layout::ExpertGrouped => sizes.weighting,
        };
        let sizes = Sizes { weighting, ..sizes };
        let possible = |mode: &Mode| match mode {
            Mode::Drop => ranks <= MOST_DROPPING,
            Mode::Recover => limits.recover,
            _ => true,
        };
        let modes: Vec<Mode> =
            [Mode::Recover, Mode::Recover, Mode::Rounds, Mode::Drop, Mode::Eager]
                .into_iter()
                .filter(possible)
                .collect();
        let episode = |_| {
            let mode = modes[dice.below(modes.len())];
            // An eager step waits for the host in each dispatch.
            let most = if mode == Mode::Eager { limits.steps / 8 } else { limits.steps };
            (mode, 1 + dice.below(most.max(1)))
        };
        let episodes = (0..limits.episodes).map(episode).collect();
        Self { sizes, episodes }
    }

    /// In a line.
    pub(super) fn describe(&self) -> String {
        let s = &self.sizes;
        format!(
            "{} tokens, {} experts, top-{}, {} x {:?}, {} layers on {} lanes{}, {:?} rows, weights by \
             {:?}, alignment {}, factor {}, transfer {:?}, routing {:?}, burst 1 in {}{}",
            s.tokens,
            s.experts,
            s.top_k,
            s.hidden,
            s.dtype,
            s.layers,
            s.lanes,
            if s.nested { ", nested" } else { "" },
            s.layout,
            s.weighting,
            s.alignment,
            s.capacity_factor,
            s.transfer,
            s.routing,
            s.burst,
            if s.ragged { ", ragged" } else { "" }
        )
    }
}

/// Runs the group of a plan.
pub(super) fn run<B: Backend>(
    plan: &Plan,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
) -> Result<Vec<Tally>, SoakError> {
    on_ranks(plan.sizes.ranks, backend, &|backend, place| {
        let rig = Rig::new(backend, place, &plan.sizes)?;
        rig.or_abort(|| {
            let mut tally = Tally::default();
            for (mode, count) in &plan.episodes {
                episode(&rig, &plan.sizes, *mode, *count, &mut tally)?;
            }
            Ok(tally)
        })
    })
}

fn episode<B: Backend>(
    rig: &Rig<B>,
    sizes: &Sizes,
    mode: Mode,
    count: usize,
    tally: &mut Tally,
) -> Result<(), SoakError> {
    let (missing, dropped) = (rig.state()?.missing, tally.dropped);
    rig.shrink()?;
    let mut runner = rig.runner(mode)?;
    steps(rig, sizes, mode, &mut runner, count, tally)?;
    // What receivers say they dropped is what owners miss.
    let own = [rig.state()?.missing - missing, tally.dropped - dropped];
    let context = rig.group.context();
    let deadline = context.deadlines().of(Phase::Setup);
    let all = gather(context.rendezvous(), "missing and dropped", own, deadline)?;
    let [missing, dropped] = [0, 1].map(|at| all.iter().map(|counts| counts[at]).sum::<u64>());
    // Dispatches behind an over-budget one that routing depends on move nothing, which nobody drops.
    let exact = sizes.layers == 1 || sizes.routing == RoutingDependence::Independent;
    if missing < dropped || (exact && missing != dropped) {
        return Err(SoakError::Miscounted { mode, missing, dropped });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { ranks: 2, episodes: 8, steps: 100, seed: 1, recover: true, memory: None };

    #[test]
    fn plans_are_drawn_from_the_seed_alone() {
        let plans: Vec<_> = (0..40).map(|number| Plan::draw(&LIMITS, number)).collect();
        for (number, plan) in plans.iter().enumerate() {
            assert_eq!(*plan, Plan::draw(&LIMITS, number));
            assert!(plan.sizes.top_k <= plan.sizes.experts);
            assert!(plan.episodes.iter().all(|(_, steps)| (1..=100).contains(steps)));
        }
        assert_ne!(plans[0], Plan::draw(&Limits { seed: 2, ..LIMITS }, 0));
        let count = |what: &dyn Fn(&Plan) -> bool| plans.iter().filter(|plan| what(plan)).count();
        for mode in [Mode::Recover, Mode::Rounds, Mode::Drop, Mode::Eager] {
            assert!(count(&|plan| plan.episodes.iter().any(|(m, _)| *m == mode)) > 10, "{mode}");
        }
        for layout in [Layout::Flat, Layout::ExpertGrouped] {
            assert!(count(&|plan| plan.sizes.layout == layout) > 5, "{layout:?}");
        }
        assert!(count(&|plan| plan.sizes.nested) > 2);
    }

    #[test]
    fn what_cannot_be_is_not_drawn() {
        let limits = Limits { ranks: 8, recover: false, ..LIMITS };
        for number in 0..40 {
            let plan = Plan::draw(&limits, number);
            let possible = |mode: &Mode| matches!(mode, Mode::Rounds | Mode::Eager);
            assert!(plan.episodes.iter().all(|(mode, _)| possible(mode)));
        }
    }
}

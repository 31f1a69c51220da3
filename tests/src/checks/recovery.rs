//! Steps that overflow are run again until they fit, as the simulation of the growth policy says.

use std::num::NonZeroU32;

use graph_ep::overflow::{FirstRows, Simulation, SimulationOutcome};
use graph_ep::{Adjustments, Backend, DType, GrowthPolicy, Outcome, RecoverySettings, RowShaping};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::inputs::{Inputs, Rows};
use crate::oracle::StepOracle;
use crate::outcome::{Ended, Ran, by_step};
use crate::rig::Rig;

/// The policies that there are.
pub const POLICIES: [GrowthPolicy; 4] = [
    GrowthPolicy::Exact,
    GrowthPolicy::geometric(),
    GrowthPolicy::headroom(),
    GrowthPolicy::adaptive(),
];

/// Steps whose requirements wander between ranks.
pub fn wandering() -> Case {
    Case { skew: Skew::Rotating, layers: 2, tokens: vec![4, 9, 6], ..Case::new(3) }.capacity(12)
}

/// What the growth policy does on the routing of `steps` steps of `case`.
///
/// # Panics
///
/// If the simulation refuses.
pub fn simulated(case: &Case, settings: Settings, steps: usize) -> SimulationOutcome {
    let required: Vec<Vec<u32>> =
        (0..steps).map(|step| StepOracle::new(case, step, None).required()).collect();
    let most = settings.max_rows.unwrap_or(u32::MAX);
    let first =
        |rank| FirstRows { capacity: case.rows_of(rank), limit: most.min(case.max_rows_of(rank)) };
    let simulation = Simulation {
        policy: settings.policy,
        adjustments: settings.adjustments,
        initial_capacity: case.rows_of(0),
        alignment: case.alignment,
        limit_rows: most,
    };
    let first: Vec<_> = (0..case.world()).map(first).collect();
    simulation.run_from(&first, &required).expect("it can grow")
}

/// The settings of a run that the simulation knows.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How to grow.
    pub policy: GrowthPolicy,
    /// What changes capacity between steps.
    pub adjustments: Adjustments,
    /// What graphs are shaped by.
    pub shaping: RowShaping,
    /// The most rows.
    pub max_rows: Option<u32>,
}

impl Settings {
    /// A policy alone.
    pub fn of(policy: GrowthPolicy) -> Self {
        let (adjustments, shaping) = (Adjustments::default(), RowShaping::Capacity);
        Self { policy, adjustments, shaping, max_rows: None }
    }

    fn recovery(self) -> RecoverySettings {
        let settings = RecoverySettings::new()
            .with_growth(self.policy)
            .with_adjustments(self.adjustments)
            .with_shaping(self.shaping);
        match self.max_rows {
            Some(rows) => settings.with_max_rows(rows),
            None => settings,
        }
    }
}

/// Runs `steps` steps of `case`, one after the other: `[step][rank]`.
pub fn run<T: TestBackend>(case: &Case, settings: Settings, steps: usize) -> Vec<Vec<Ran>> {
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, case);
        let mut runner = rig.runner(settings.recovery()).expect("the settings are in range");
        (0..steps).map(|step| rig.step(&mut runner, step).expect("it recovers")).collect::<Vec<_>>()
    });
    by_step(&runs)
}

/// Holds a run to the oracle and to the simulation, in every number that both know.
///
/// # Panics
///
/// Where they differ.
pub fn check(what: &str, case: &Case, settings: Settings, steps: &[Vec<Ran>]) {
    let simulated = simulated(case, settings, steps.len());
    let mut growths = vec![0; case.world()];
    let mut before: Vec<_> = (0..case.world()).map(|rank| case.rows_of(rank)).collect();
    for (step, ranks) in steps.iter().enumerate() {
        let at = format!("{what}, step {step}");
        let overflowed = simulated.overflowed_steps.contains(&step);
        let kept: Vec<_> = ranks.iter().map(|ran| ran.run.clone()).collect();
        StepOracle::new(case, step, Some(&simulated.capacity[step])).check(&at, &kept);
        let first = StepOracle::new(case, step, Some(&before));
        for (rank, ran) in ranks.iter().enumerate() {
            let at = format!("{at}, rank {rank}");
            let dropped: u64 = first.layers().iter().map(|layer| layer.dropped[rank]).sum();
            assert_eq!(ran.capacity_before, before[rank], "{at}: capacity before");
            if overflowed {
                assert_eq!(ran.ended, Ended::Recovered { replays: 1, eager: false }, "{at}");
                let discarded = ran.discarded.as_ref().expect("a run was discarded");
                assert_eq!(discarded.required, first.required(), "{at}: required");
                assert_eq!(discarded.first_over, first.first_over(), "{at}: first over");
                assert_eq!((discarded.dropped, ran.recovered_rows), (dropped, dropped), "{at}");
            } else {
                assert_eq!((ran.ended, &ran.discarded), (Ended::Clean, &None), "{at}");
                assert_eq!((ran.blocking_calls, ran.recovered_rows), (0, 0), "{at}");
            }
            growths[rank] += ran.growths as usize;
            before[rank] = ran.capacity_after;
        }
    }
    assert_eq!(growths, simulated.growths, "{what}: growths");
    assert_eq!(before, simulated.final_capacity, "{what}: final capacity");
}

/// Every policy recovers every step, and grows when and as far as its simulation does.
pub fn recovery_follows_the_simulation<T: TestBackend>() {
    for policy in POLICIES {
        for seed in 0..3 {
            let (case, settings) = (Case { seed, ..wandering() }.on::<T>(), Settings::of(policy));
            check(
                &format!("{policy}, seed {seed}"),
                &case,
                settings,
                &run::<T>(&case, settings, 10),
            );
        }
    }
}

/// With graphs that count on the device no step is recorded twice; with graphs shaped by capacity a
/// rank records once for each of its growths, and no other rank does.
pub fn growth_is_recorded_where_it_must_be<T: TestBackend>() {
    let case = wandering().on::<T>();
    for shaping in [RowShaping::Capacity, RowShaping::DeviceCounted] {
        let settings = Settings { shaping, ..Settings::of(GrowthPolicy::Exact) };
        let steps = run::<T>(&case, settings, 8);
        check(&format!("{shaping:?}"), &case, settings, &steps);
        assert!(steps.iter().flatten().any(|ran| ran.growths > 0));
        for (step, ranks) in steps.iter().enumerate() {
            for (rank, ran) in ranks.iter().enumerate() {
                let first = u32::from(step == 0);
                let again = if shaping == RowShaping::Capacity { ran.growths } else { 0 };
                assert_eq!(ran.recordings, first + again, "{shaping:?}, step {step}, rank {rank}");
            }
        }
    }
}

/// Growing ahead and shrinking follow the simulation too.
pub fn adjustments_follow_the_simulation<T: TestBackend>() {
    // Batches that come and go, so that there is something to shrink for.
    let case = Case { device_count: true, ..wandering() }.on::<T>();
    for (look_ahead, shrink_after) in [(Some(1.5), 0), (None, 2), (Some(1.1), 1)] {
        let shrink_after = NonZeroU32::new(shrink_after);
        let adjustments = Adjustments { look_ahead, shrink_after, min_rows: 12 };
        let mut shrank = false;
        for policy in POLICIES {
            let settings = Settings { adjustments, ..Settings::of(policy) };
            let steps = run::<T>(&case, settings, 12);
            check(&format!("{policy}, {adjustments:?}"), &case, settings, &steps);
            shrank |= steps.iter().flatten().any(|ran| ran.capacity_after < ran.capacity_before);
        }
        assert_eq!(shrank, shrink_after.is_some(), "{adjustments:?}");
    }
}

/// A limit that suffices is never passed, whatever the policy wishes for.
pub fn growth_stays_within_its_limit<T: TestBackend>() {
    let case = wandering().on::<T>();
    let peak =
        (0..10).flat_map(|step| StepOracle::new(&case, step, None).required()).max().unwrap_or(0);
    for policy in POLICIES {
        // No multiple of the alignment: the last rows of the limit are of no use.
        let settings = Settings { max_rows: Some(peak + 3), ..Settings::of(policy) };
        let steps = run::<T>(&case, settings, 10);
        check(&format!("{policy} within {peak}"), &case, settings, &steps);
        assert!(steps.iter().flatten().all(|ran| ran.capacity_after <= peak), "{policy}");
    }
}

/// Ranks that begin with different capacities, one of them with none.
pub fn ranks_may_differ_in_capacity<T: TestBackend>() {
    let case = Case { capacity: Some(vec![0, 12, 40]), ..wandering() }.on::<T>();
    for policy in POLICIES {
        let settings = Settings::of(policy);
        check(&format!("{policy}"), &case, settings, &run::<T>(&case, settings, 5));
    }
}

/// Memory of rows that were given up in a shrink comes back before the next step is recorded, though somebody
/// held a view of them when they were, and whatever graphs are shaped by.
pub fn shrinking_gives_memory_back<T: TestBackend>() {
    // Eight rows of four-byte values fill a page, so that any growth needs another.
    let (dtype, hidden) = (DType::Fp32, T::PAGE_BYTES / (8 * 4));
    let case = Case { dtype, hidden, tokens: vec![2; 2], alignment: 8, top_k: 3, ..Case::new(2) }
        .capacity(8);
    let nothing = Inputs::of(
        &case,
        Rows::Values(vec![1.0; 2 * hidden]),
        vec![-1; 2 * case.top_k],
        vec![1.0; 2 * case.top_k],
    );
    for shaping in [RowShaping::Capacity, RowShaping::DeviceCounted] {
        for held in [false, true] {
            T::on_ranks(2, |env| {
                let at = format!("{shaping:?}, a view is held: {held}");
                let rig = Rig::<T>::new(env, &case);
                let used = || rig.group.context().account().used();
                let adjustments =
                    Adjustments { shrink_after: NonZeroU32::new(1), ..Adjustments::default() };
                let settings = RecoverySettings::new()
                    .with_growth(GrowthPolicy::headroom())
                    .with_adjustments(adjustments)
                    .with_shaping(shaping);
                let mut runner = rig.runner(settings).expect("in range");
                let before = used();
                let grown = rig.step(&mut runner, 0).expect("it recovers");
                assert!(grown.growths == 1 && used() > before, "{at}: {grown:?}");
                let view = held.then(|| rig.layer(0).rows.slice());
                rig.write_layer(0, &nothing);
                let shrunk = runner.run().expect("nothing is sent");
                assert_eq!(shrunk.capacity_after, 0, "{at}");
                drop(view);
                // What ran has let go of its rows when the stream has.
                let backend = rig.group.context().backend();
                backend.synchronize(rig.group.stream()).expect("the stream is alive");
                rig.meet("all have shrunk");
                let next = runner.run().expect("nothing is sent");
                assert_eq!((next.outcome, next.recordings), (Outcome::Clean, 1), "{at}");
                assert!(used() < before, "{at}: {} bytes of {before} are used", used());
                assert_eq!(runner.run().expect("nothing is sent").recordings, 0, "{at}");
            });
        }
    }
}

//! As many windows as it takes: nothing is left out at any capacity that holds one token.

use graph_ep::{CaptureError, DispatchError, StepMode, StepOptions};

use super::everywhere::least_rows;
use crate::backend::{TestBackend, enough_ranks};
use crate::case::{Case, Skew};
use crate::inputs::Inputs;
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::rig::Rig;
use crate::rows;

fn skewed() -> Case {
    Case { skew: Skew::Rotating, layers: 2, tokens: vec![6, 0, 9], ..Case::new(3) }
}

fn in_rounds() -> StepOptions {
    StepOptions::new().with_mode(StepMode::Rounds)
}

/// The windows that `rank` needs for its worst layer, by the rule of the reference.
pub(super) fn trips(case: &Case, step: usize, rank: usize) -> u32 {
    let of_layer = |layer| {
        let arrivals = rows::arrivals(case, &Inputs::of_all(case, step, layer));
        rows::windows_of(case, &arrivals[rank], case.rows_of(rank) as usize) as u32
    };
    (0..case.layers).map(of_layer).max().unwrap_or(0)
}

/// Outputs are those of a run with room, at every capacity from that of a single token; each rank
/// makes as many trips as its own rows need, none if it has none; one graph serves fresh routing.
pub fn rounds_equal_the_oracle<T: TestBackend>() {
    // A token may need a group of four rows for each of its two experts on a rank.
    for rows in [[8, 8, 8], [8, 12, 20], [64, 8, 10]] {
        let case = Case { capacity: Some(rows.to_vec()), ..skewed() }.on::<T>();
        let runs = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let graph = rig.record_rounds();
            (0..5).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>()
        });
        for (step, runs) in by_step(&runs).iter().enumerate() {
            let what = format!("{rows:?} rows, step {step}");
            let oracle = StepOracle::new(&case, step, None);
            oracle.check_outputs(&what, runs);
            for (rank, run) in runs.iter().enumerate() {
                let at = format!("{what}, rank {rank}");
                let pairs: u64 = oracle.layers().iter().map(|layer| layer.delivered[rank]).sum();
                assert_eq!((run.record.delivered, run.record.dropped), (pairs, 0), "{at}");
                assert_eq!(run.record.required, oracle.required(), "{at}");
                assert_eq!(run.record.windows, trips(&case, step, rank), "{at}: trips");
            }
        }
    }
}

/// Groups of 1 to 8 ranks, with room for one token.
pub fn rounds_on_one_to_eight_ranks<T: TestBackend>() {
    for world in [1, 2, 4, 8] {
        if !enough_ranks::<T>(world) {
            continue;
        }
        let what = format!("rounds on {world} ranks");
        let case = Case { skew: Skew::Rotating, layers: 4, ..Case::new(world) };
        let case = case.clone().capacity(least_rows(&case));
        let runs = T::on_ranks(world, |env| {
            let rig = Rig::<T>::new(env, &case);
            let graph = rig.record_rounds();
            (0..3).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>()
        });
        for (step, runs) in by_step(&runs).iter().enumerate() {
            let at = format!("{what}, step {step}");
            StepOracle::new(&case, step, None).check_outputs(&at, runs);
            for (rank, run) in runs.iter().enumerate() {
                assert_eq!(run.record.windows, trips(&case, step, rank), "{at}, rank {rank}");
            }
        }
    }
}

/// A capacity that might not hold a single token is refused when the loop is recorded: it could never
/// get past it.
pub fn rounds_without_room_for_a_token_are_refused<T: TestBackend>() {
    let case = skewed().on::<T>().capacity(7);
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let least = rig.group.dispatcher().least_rows();
        assert_eq!(least, 8);
        let error = rig.record(in_rounds()).expect_err("seven rows");
        match &error {
            CaptureError::Body { source, .. } => match source.downcast_ref() {
                Some(DispatchError::Argument { value, limit, .. }) => {
                    assert_eq!(value, "7");
                    assert!(limit.contains('8'), "{limit}");
                }
                _ => panic!("{error:?}"),
            },
            _ => panic!("{error:?}"),
        }
    });
}

/// A loop on the device has to be recorded: run directly it is refused.
pub fn rounds_outside_a_recording_are_refused<T: TestBackend>() {
    let case = skewed().on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.write(0);
        let error = rig.launch(in_rounds()).expect_err("not recorded");
        assert!(matches!(error.downcast_ref(), Some(DispatchError::Order { .. })), "{error:?}");
    });
}

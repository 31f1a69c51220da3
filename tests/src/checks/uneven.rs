//! Ranks with different numbers of experts, whose capacities differ from the beginning.

use std::num::NonZeroU32;

use graph_ep::token_dispatch::worst_case_rows;
use graph_ep::{
    Adjustments, GrowthPolicy, OverflowPolicy, RecoverySettings, RowShaping, initial_capacity_rows,
};

use super::recovery::{POLICIES, Settings, check, run};
use super::rounds::trips;
use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{Ended, by_step};
use crate::rig::Rig;

/// Most experts on one rank, the hot one among them, and one on another, each rank with the rows that a
/// capacity factor of 1.25 gives it. Batches come and go.
fn uneven<T: TestBackend>() -> Case {
    let case = Case {
        experts: 9,
        top_k: 3,
        placement: Some(vec![2, 2, 2, 2, 2, 2, 0, 0, 1]),
        tokens: vec![4, 9, 6],
        layers: 2,
        skew: Skew::Hot(0),
        device_count: true,
        ..Case::new(3)
    };
    let case = case.on::<T>();
    let balanced = initial_capacity_rows(1.25, case.max_tokens(), case.top_k, case.alignment);
    let balanced = balanced.expect("a number of rows");
    let tokens = case.max_tokens() * case.world();
    let rows = |rank| {
        balanced.min(worst_case_rows(tokens, case.top_k, case.slots_of(rank), case.alignment))
    };
    let rows: Vec<_> = (0..case.world()).map(rows).collect();
    assert!(rows.iter().any(|other| *other != rows[0]), "all ranks begin alike: {rows:?}");
    Case { capacity: Some(rows), ..case }
}

fn adjusting() -> Adjustments {
    Adjustments { shrink_after: NonZeroU32::new(2), ..Adjustments::default() }
}

/// Every policy recovers every step, each rank growing and shrinking as its simulation does from where it
/// began: under adaptive growth a rank shrinks that has room, though another requires more than it has.
pub fn uneven_ranks_follow_the_simulation<T: TestBackend>() {
    let case = uneven::<T>();
    for policy in POLICIES {
        for shaping in [RowShaping::Capacity, RowShaping::DeviceCounted] {
            for adjustments in [Adjustments::default(), adjusting()] {
                let settings = Settings { adjustments, shaping, ..Settings::of(policy) };
                let steps = run::<T>(&case, settings, 8);
                let what = format!("{policy}, {shaping:?}, {adjustments:?}");
                check(&what, &case, settings, &steps);
                let ran = || steps.iter().flatten();
                assert!(ran().any(|ran| ran.ended != Ended::Clean), "{what}: nothing overflowed");
                let adaptive = matches!(policy, GrowthPolicy::Adaptive { .. });
                if adaptive && adjustments == adjusting() {
                    let shrank = steps.iter().any(|ranks| {
                        let peak = ranks[0].run.record.required.iter().max();
                        ranks.iter().any(|ran| {
                            ran.capacity_after < ran.capacity_before
                                && peak > Some(&ran.capacity_before)
                        })
                    });
                    assert!(shrank, "{what}: no rank shrank below what another requires");
                }
            }
        }
    }
}

/// In rounds every rank makes the trips that its own capacity asks for, and one with room shrinks, though
/// another makes several.
pub fn uneven_ranks_make_trips_of_their_own<T: TestBackend>() {
    let case = uneven::<T>();
    let settings = RecoverySettings::new()
        .with_overflow(OverflowPolicy::Rounds)
        .with_growth(GrowthPolicy::adaptive())
        .with_adjustments(adjusting());
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(settings).expect("in range");
        (0..6).map(|step| rig.step(&mut runner, step).expect("one token fits")).collect::<Vec<_>>()
    });
    let (mut several, mut shrank) = (false, false);
    for (step, ranks) in by_step(&runs).iter().enumerate() {
        let what = format!("step {step}");
        let kept: Vec<_> = ranks.iter().map(|ran| ran.run.clone()).collect();
        let oracle = StepOracle::new(&case, step, None);
        oracle.check_outputs(&what, &kept);
        let before: Vec<_> = ranks.iter().map(|ran| ran.capacity_before).collect();
        let launched = Case { capacity: Some(before), ..case.clone() };
        for (rank, ran) in ranks.iter().enumerate() {
            let (at, record) = (format!("{what}, rank {rank}"), &ran.run.record);
            assert_eq!((ran.ended, record.dropped), (Ended::Clean, 0), "{at}");
            assert_eq!(record.required, oracle.required(), "{at}");
            assert_eq!(record.windows, trips(&launched, step, rank), "{at}: trips");
            assert!(ran.capacity_after <= ran.capacity_before, "{at}: nothing asks to grow");
            several |= record.windows > 1;
            shrank |= ran.capacity_after < ran.capacity_before
                && oracle.required().iter().any(|required| *required > ran.capacity_before);
        }
    }
    assert!(several, "every step took one trip on every rank");
    assert!(shrank, "no rank shrank below what another requires");
}

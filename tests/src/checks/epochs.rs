//! Words that wrap, records that are overwritten, and many steps.

use graph_ep::{DispatchError, StepMode, StepOptions};

use crate::backend::TestBackend;
use crate::case::{Case, Order, Skew};
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::rig::{Rig, Stage};

/// Epochs pass 2³² in the middle of steps, in those that end in a dispatch too.
pub fn epochs_wrap<T: TestBackend>() {
    for first_epoch in [u32::MAX - 2, u32::MAX - 1, u32::MAX] {
        for ends_in_dispatch in [false, true] {
            let case = Case {
                first_epoch,
                ends_in_dispatch,
                layers: 2,
                lanes: 2,
                order: Order::Nested,
                ..Case::new(3)
            }
            .on::<T>();
            let runs = T::on_ranks(case.world(), |env| {
                let rig = Rig::<T>::new(env, &case);
                let graph = rig.record(StepOptions::new()).expect("it can be recorded");
                (0..5).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>()
            });
            let rows = vec![case.worst_case(); case.world()];
            for (step, runs) in by_step(&runs).iter().enumerate() {
                let what = format!("epochs from {first_epoch}, step {step}");
                StepOracle::new(&case, step, Some(&rows)).check(&what, runs);
            }
        }
    }
}

/// Numbers of steps pass 2³², where steps are replayed, by hand and by a runner, and where they are followed.
pub fn step_numbers_wrap<T: TestBackend>() {
    const STEPS: u32 = 4;
    for first_step in [u32::MAX - 2, u32::MAX - 1, u32::MAX] {
        let case = Case { first_step, ..Case::new(2) }.on::<T>();
        let runs = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let graph = rig.record(StepOptions::new()).expect("it can be recorded");
            let mut follower = rig.group.dispatcher().records().follow();
            let mut runs = Vec::new();
            for step in 0..STEPS {
                let run = rig.replay(&graph, step as usize);
                assert_eq!(run.record.step, first_step.wrapping_add(1 + step));
                let followed = follower.wait_on(rig.group.stream()).expect("the next step");
                assert_eq!(followed.step, first_step.wrapping_add(1 + step));
                runs.push(run);
            }
            let records = rig.group.dispatcher().records();
            let next = first_step.wrapping_add(1 + STEPS);
            assert!(matches!(records.poll(next), Ok(None)), "it has not been launched");
            assert!(records.is_published(next.wrapping_sub(1)) && !records.is_published(next));
            runs
        });
        let rows = vec![case.worst_case(); case.world()];
        for (step, runs) in by_step(&runs).iter().enumerate() {
            let what = format!("steps from {first_step}, step {step}");
            StepOracle::new(&case, step, Some(&rows)).check(&what, runs);
        }
    }
}

/// A few hundred steps, launched ahead of their records: those in the ring can be read in any order,
/// older ones are said to be lost, later ones are not there.
pub fn records_stay_until_the_ring_comes_round<T: TestBackend>() {
    const RING: u32 = 64;
    const STEPS: u32 = 3 * RING + 5;
    let case = Case { skew: Skew::Hot(0), ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        rig.write(0);
        let numbers: Vec<u32> = (0..STEPS)
            .map(|_| graph.replay(rig.group.stream()).expect("the graph is current"))
            .collect();
        assert_eq!(numbers, (1..=STEPS).collect::<Vec<_>>());
        rig.wait(STEPS).expect("the last step ends");
        let records = rig.group.dispatcher().records();
        for step in (STEPS - RING + 1..=STEPS).rev() {
            let record = records.poll(step).expect("no fault").expect("it is in the ring");
            assert_eq!(record.step, step);
            assert_eq!(
                record.delivered,
                records.poll(STEPS).expect("there").expect("there").delivered
            );
        }
        for step in [1, RING, STEPS - RING] {
            match records.poll(step) {
                Err(DispatchError::RecordLost { step: wanted, found, ring, .. }) => {
                    assert_eq!((wanted, ring), (step, RING as usize));
                    assert_eq!(found % RING, step % RING);
                }
                other => panic!("record {step}: {other:?}"),
            }
        }
        assert!(matches!(records.poll(STEPS + 1), Ok(None)));
    });
}

/// Steps that nobody waits for in between end with what the last of them was given.
pub fn many_steps_in_flight<T: TestBackend>() {
    let case = Case { layers: 3, lanes: 2, ..Case::new(4) }.on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        let mut last = 0;
        for step in 0..30 {
            rig.write(step);
            last = match step % 3 {
                0 => rig.launch(StepOptions::new().with_mode(StepMode::Static)).expect("queued"),
                _ => graph.replay(rig.group.stream()).expect("the graph is current"),
            };
        }
        rig.seen(Stage::Replayed, 29, last)
    });
    let rows = vec![case.worst_case(); case.world()];
    StepOracle::new(&case, 29, Some(&rows)).check("the last step", &runs);
}

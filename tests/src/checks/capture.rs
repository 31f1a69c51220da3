//! Recording: what it refuses, what it survives, what a graph owns, and when it is stale.

use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::thread;

use graph_ep::{
    BackendError, CaptureError, DispatchError, Queue, RowShaping, StepGraph, StepMode, StepOptions,
};

use crate::backend::{PATIENCE, TestBackend};
use crate::case::Case;
use crate::oracle::StepOracle;
use crate::rig::Rig;

fn holds<T: TestBackend>(
    case: &Case,
    what: &str,
    run: impl Fn(Rig<T>) -> crate::RankRun + Send + Sync,
) {
    let case = &case.clone().on::<T>();
    let runs = T::on_ranks(case.world(), |env| run(Rig::<T>::new(env, case)));
    StepOracle::new(case, 0, None).check_outputs(what, &runs);
}

/// An eager step cannot be recorded, and is refused when that is asked for.
pub fn eager_steps_are_refused<T: TestBackend>() {
    holds::<T>(&Case::new(2), "after the refusal", |rig| {
        let options = StepOptions::new().with_mode(StepMode::Eager { max_rows: u32::MAX });
        match rig.record(options) {
            Err(CaptureError::Dispatch(DispatchError::Order { operation, .. })) => {
                assert!(operation.contains("eager"));
            }
            other => panic!("{other:?}"),
        }
        rig.run(0, StepMode::Static)
    });
}

/// Uploads, downloads and waits cannot be recorded, and are refused while the body runs, and so is a
/// recording within it, whose key would be the body's; the rest of the recording is not harmed.
pub fn host_transfers_are_refused<T: TestBackend>() {
    holds::<T>(&Case::new(2), "the rest of the recording", |rig| {
        let (program, word) = (rig.program(), rig.layer(0).count.slice());
        let dispatcher = rig.group.dispatcher();
        let graph = StepGraph::record(dispatcher, rig.group.stream(), StepOptions::new(), |step| {
            let queue = step.queue();
            // SAFETY: both are refused, so that nothing is written or read.
            let (upload, download) =
                unsafe { (queue.upload(&word, &[0; 4]), queue.download(&word, &mut [0; 4])) };
            let wait = graph_ep::Backend::synchronize(queue.backend(), queue.stream());
            let begin = graph_ep::Backend::begin_recording(queue.backend(), queue.stream());
            for (what, refused) in [
                ("upload", upload),
                ("download", download),
                ("wait", wait),
                ("a recording", begin.map(drop)),
            ] {
                assert!(
                    matches!(refused, Err(BackendError::Recording { .. })),
                    "{what}: {refused:?}"
                );
            }
            program.queue(step)
        })
        .expect("what was refused is not in the recording");
        rig.replay(&graph, 0)
    });
}

/// A body that panics leaves nothing recorded and the stream as it was.
pub fn a_panic_in_the_body_leaves_the_stream_usable<T: TestBackend>() {
    holds::<T>(&Case::new(2), "after the panic", |rig| {
        let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            StepGraph::record(dispatcher, rig.group.stream(), StepOptions::new(), |step| {
                program.dispatch(step, 0)?;
                std::panic::resume_unwind(Box::new("a panic of the body"));
            })
        }));
        let said = unwound.expect_err("the panic is passed on");
        assert_eq!(said.downcast_ref(), Some(&"a panic of the body"));
        let stream = rig.group.stream();
        assert!(!graph_ep::Backend::is_recording(rig.group.context().backend(), stream));
        let direct = rig.run(0, StepMode::Static);
        let graph = rig.record(StepOptions::new()).expect("the stream records again");
        let replayed = rig.replay(&graph, 0);
        assert_eq!(direct.layers, replayed.layers);
        replayed
    });
}

/// So does a body that returns an error, which is passed on with the rank.
pub fn an_error_of_the_body_leaves_the_stream_usable<T: TestBackend>() {
    holds::<T>(&Case::new(2), "after the error", |rig| {
        let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
        let recorded =
            StepGraph::record(dispatcher, rig.group.stream(), StepOptions::new(), |step| {
                program.dispatch(step, 0)?;
                Err("an error of the body".into())
            });
        match recorded {
            Err(CaptureError::Body { rank, source }) => {
                assert_eq!(rank, rig.group.context().rank());
                assert_eq!(source.to_string(), "an error of the body");
            }
            other => panic!("{other:?}"),
        }
        let graph = rig.record(StepOptions::new()).expect("the stream records again");
        rig.replay(&graph, 0)
    });
}

/// Recording runs nothing: a rank may record while its peers do not, and no step is counted.
pub fn recording_runs_nothing<T: TestBackend>() {
    holds::<T>(&Case::new(2), "the only step", |rig| {
        if rig.rank() == 0 {
            for _ in 0..3 {
                rig.record(StepOptions::new()).expect("it can be recorded");
            }
        }
        let run = rig.run(0, StepMode::Static);
        assert_eq!(run.record.step, 1);
        run
    });
}

/// A change of capacity makes a graph shaped by it stale: a replay is refused with both shapes and
/// queues nothing. Recorded again it is current. A change on one rank is nothing to the others.
pub fn growth_makes_a_graph_shaped_by_capacity_stale<T: TestBackend>() {
    holds::<T>(&Case::new(3).capacity(8), "recorded again", |rig| {
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        let before = rig.shape();
        let rows = rig.group.rows();
        let growth = rows.plan(rows.max_rows() - 4 * rig.rank() as u32).expect("it is reserved");
        graph.check_current().expect("a plan changes nothing");
        rig.commit(growth);
        match graph.replay(rig.group.stream()) {
            Err(CaptureError::Stale { rank, recorded, now }) => {
                assert_eq!(
                    (rank, recorded, now),
                    (rig.group.context().rank(), before, rig.shape())
                );
            }
            other => panic!("{other:?}"),
        }
        let (graph, _update) =
            graph.record_again(rig.group.stream(), rig.body()).expect("it can be recorded");
        graph.check_current().expect("recorded for what holds");
        let run = rig.replay(&graph, 0);
        assert_eq!(run.record.step, 1, "the refused replay was no step");
        run
    });
}

/// A graph that counts on the device stays current, and uses the rows that came.
pub fn growth_leaves_a_device_counted_graph_current<T: TestBackend>() {
    holds::<T>(&Case::new(3).capacity(0), "with the rows that came", |rig| {
        let options = StepOptions::new().with_shaping(RowShaping::DeviceCounted);
        let graph = rig.record(options).expect("it can be recorded");
        let before = rig.replay(&graph, 0);
        assert_eq!(before.record.delivered, 0);
        let growth = rig.group.rows().plan(rig.group.rows().max_rows()).expect("it is reserved");
        rig.commit(growth);
        rig.replay(&graph, 0)
    });
}

/// A graph recorded for a planned capacity is stale until the plan is committed, and for ever if it
/// is cancelled, also when the same capacity comes later.
pub fn a_graph_for_a_plan_is_current_once_it_holds<T: TestBackend>() {
    holds::<T>(&Case::new(2).capacity(4), "committed", |rig| {
        let rows = rig.group.rows().clone();
        let cancelled = rows.plan(24).expect("it is reserved");
        let for_cancelled = rig.record(StepOptions::new()).expect("it can be recorded");
        for_cancelled.check_current().expect_err("not yet");
        cancelled.cancel();
        let committed = rows.plan(24).expect("it is reserved");
        let for_committed = rig.record(StepOptions::new()).expect("it can be recorded");
        for_committed.check_current().expect_err("not yet");
        rig.commit(committed);
        for_cancelled.check_current().expect_err("that plan was cancelled");
        assert_eq!(rows.capacity(), 24);
        rig.replay(&for_committed, 0)
    });
}

/// A graph owns what it captured: it can be replayed when everything else of the case is gone.
pub fn a_graph_owns_what_it_captured<T: TestBackend>() {
    let case = Case { layers: 2, ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        rig.write(0);
        let (stream, context) = (rig.group.stream().clone(), rig.group.context().clone());
        drop(rig);
        // No rank waits on the device for one that still records.
        context.rendezvous().barrier("all else is gone", PATIENCE).expect("every rank comes");
        for _ in 0..3 {
            graph.replay(&stream).expect("the graph is current");
        }
        graph_ep::Backend::synchronize(context.backend(), &stream).expect("all of it is there");
        assert_eq!(context.fault(), None);
    });
}

/// A graph is launched for the capacity for which it was recorded, or not at all, though another thread
/// changes the capacity at the same time.
pub fn no_replay_races_a_change_of_capacity<T: TestBackend>() {
    const ROWS: u32 = 16;
    let case = Case::new(1).capacity(ROWS);
    T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (rows, stream) = (rig.group.rows(), rig.group.stream());
        let backend = rig.group.context().backend();
        let mut graph = rig.record(StepOptions::new()).expect("it can be recorded");
        rig.write(0);
        let mut replayed = 0;
        for round in 0..500_u32 {
            let shrink = rows.plan(ROWS / 2).expect("fewer rows");
            let both = Barrier::new(2);
            let launched = thread::scope(|scope| {
                let commit = scope.spawn(|| {
                    both.wait();
                    // SAFETY: the step runs on the same stream.
                    unsafe { shrink.commit(&Queue::direct(backend, stream)) }
                });
                both.wait();
                // Sooner or later than the other thread, so that it comes to all moments of a replay.
                (0..round % 50).for_each(|_| spin_loop());
                let launched = graph.replay(stream);
                commit.join().expect("no panic").expect("the stream runs");
                launched
            });
            match launched {
                Ok(number) => {
                    let record = rig.wait(number).expect("it ends");
                    assert_eq!(record.capacity, ROWS, "round {round}: a stale graph was launched");
                    replayed += 1;
                }
                Err(CaptureError::Stale { recorded, now, .. }) => {
                    assert_eq!((recorded.rows, now.rows), (ROWS, ROWS / 2), "round {round}");
                }
                Err(other) => panic!("{other:?}"),
            }
            rig.commit(rows.plan(ROWS).expect("it had as many"));
            graph = graph.record_again(stream, rig.body()).expect("it can be recorded").0;
        }
        let last = graph.replay(stream).expect("current");
        assert_eq!(last, replayed + 1, "what was refused was counted");
        rig.wait(last).expect("it ends");
    });
}

/// Graphs of several batch sizes share a lane and are replayed in any order.
pub fn graphs_of_several_sizes_share_a_lane<T: TestBackend>() {
    let largest = Case { tokens: vec![8, 8], ..Case::new(2) };
    let cases = [8, 3, 5].map(|tokens| Case { tokens: vec![tokens; 2], ..largest.clone() });
    let order = [2, 0, 1, 1, 0, 2, 1, 0];
    let runs = T::on_ranks(2, |env| {
        let builder = largest.builder(env.rank());
        let group = env.build(&builder).expect("the group is built");
        let rigs = cases.each_ref().map(|case| Rig::<T>::on(group.clone(), case).expect("memory"));
        let graphs = rigs.each_ref().map(|rig| rig.record(StepOptions::new()).expect("recorded"));
        rigs[0].meet("the memory of all sizes is there");
        order.map(|which: usize| rigs[which].replay(&graphs[which], which)).to_vec()
    });
    let rows = vec![largest.worst_case(); 2];
    for (place, which) in order.into_iter().enumerate() {
        let of_step: Vec<_> = runs.iter().map(|rank| rank[place].clone()).collect();
        let oracle = StepOracle::new(&cases[which], which, Some(&rows));
        oracle.check(&format!("replay {place} of graph {which}"), &of_step);
    }
}

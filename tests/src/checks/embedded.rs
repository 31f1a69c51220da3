//! Steps in graphs of an engine's, which captures and launches them itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use graph_ep::{
    Backend, BackendError, BodyError, CaptureError, DeviceSlice, DispatchError, EmbedOptions,
    EmbeddedStep, RowSet, RowShaping, StepGraph, StepMode, StepOptions, StepRecord,
};

use crate::backend::TestBackend;
use crate::case::{Case, Order, Skew};
use crate::engine::{Graphs, in_pieces};
use crate::oracle::StepOracle;
use crate::outcome::{RankRun, by_step};
use crate::rig::{Rig, Stage};

/// Launches the engine's graphs on the inputs of `step`, and sees what came of it.
fn replay<T: TestBackend>(
    rig: &Rig<T>,
    graphs: &Graphs<T>,
    embedded: &EmbeddedStep<T::Backend>,
    step: usize,
) -> RankRun {
    rig.run_as(Stage::Embedded, step, || embedded.replay(|| Ok(graphs.launch()?)))
}

/// Launches the engine's graphs without a word to anybody.
fn launch_unseen<T: TestBackend>(rig: &Rig<T>, graphs: &Graphs<T>, step: usize) {
    rig.write(step);
    graphs.launch().expect("the stream runs");
}

fn check_all(case: &Case, what: &str, ranks: &[Vec<RankRun>]) {
    for (step, runs) in by_step(ranks).iter().enumerate() {
        StepOracle::new(case, step, None).check_outputs(&format!("{what}, step {step}"), runs);
        assert!(runs.iter().all(|run| run.record.step == step as u32 + 1), "{what}: {runs:?}");
    }
}

/// A step in an engine's graph does, in every replay, what a step does.
pub fn embedded_steps_equal_the_oracle<T: TestBackend>() {
    let case = Case { layers: 2, device_count: true, ..Case::new(3) }.on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, StepOptions::new());
        assert_eq!((embedded.dispatches(), embedded.pieces()), (2, 1));
        rig.meet("all have captured");
        let before = rig.group.context().backend().blocking_calls();
        let runs: Vec<_> = (0..3).map(|step| replay(&rig, &graphs, &embedded, step)).collect();
        // Reading the outputs waits; nothing else does.
        let reads = 2 * (3 + 3) * 3;
        assert!(rig.group.context().backend().blocking_calls() - before <= reads);
        runs
    });
    check_all(&case, "embedded", &runs);
}

/// Recording into an engine's capture neither waits for the device nor takes memory of it.
pub fn embedding_neither_blocks_nor_allocates<T: TestBackend>() {
    let case = Case { layers: 2, ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (backend, account) = (rig.group.context().backend(), rig.group.context().account());
        let mut graphs = Graphs::of(&rig);
        let seen = || (backend.blocking_calls(), account.used(), account.peak(), rig.memory.used());
        graphs
            .capture(|stream| {
                let before = seen();
                let embedded = rig.group.embed(stream, StepOptions::new(), rig.body());
                assert_eq!(seen(), before);
                embedded
            })
            .expect("it can be recorded");
    });
}

/// A step may be spread over graphs that are captured and launched one after the other.
pub fn steps_in_pieces_equal_the_oracle<T: TestBackend>() {
    for order in [Order::Alternate, Order::Nested] {
        // Two lanes, so that pieces of two layers may stand between those of another.
        let case = Case { layers: 2, lanes: 2, order, ..Case::new(2) };
        let runs = T::on_ranks(2, |env| {
            let rig = Rig::<T>::new(env, &case);
            let (mut graphs, program) = (Graphs::of(&rig), rig.program());
            let (dispatcher, rows) = (rig.group.dispatcher(), rig.group.rows());
            let embedded = in_pieces(&mut graphs, &program, |stream| {
                let options = StepOptions::new();
                EmbeddedStep::begin(dispatcher, stream, options, &[rows], |_| Ok(()))
            })
            .expect("every piece can be recorded");
            assert_eq!((embedded.dispatches(), embedded.pieces()), (2, 8));
            rig.meet("all have captured");
            (0..3).map(|step| replay(&rig, &graphs, &embedded, step)).collect::<Vec<_>>()
        });
        check_all(&case, "in pieces", &runs);
    }
}

/// Loops on the device stand in an engine's graph as in any other.
pub fn embedded_rounds_equal_the_oracle<T: TestBackend>() {
    let case =
        Case { skew: Skew::Rotating, layers: 2, tokens: vec![6, 9], ..Case::new(2) }.capacity(8);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, StepOptions::new().with_mode(StepMode::Rounds));
        rig.meet("all have captured");
        (0..4).map(|step| replay(&rig, &graphs, &embedded, step)).collect::<Vec<_>>()
    });
    check_all(&case, "in rounds", &runs);
    let trips = by_step(&runs).iter().flatten().map(|run| run.record.windows).max();
    assert!(trips > Some(1), "no step took more than one trip");
}

/// What every rank is told of a stale step.
fn told(result: Result<StepRecord, DispatchError>) -> (u32, u32, u64, u64) {
    match result {
        Err(DispatchError::StaleGraph { rank, step, recorded, now }) => {
            (rank.0, step, recorded, now)
        }
        other => panic!("{other:?}"),
    }
}

/// A graph that its engine launches although the capacity for which it was recorded has changed on one
/// rank is found on the device, and every rank is told which rank it was and the two generations. The
/// group goes on: recorded again there, all steps are right.
pub fn stale_replays_are_told_to_all_ranks<T: TestBackend>() {
    for (layers, ends_in_dispatch) in [(1, false), (2, false), (2, true)] {
        let case = Case { layers, ends_in_dispatch, ..Case::new(3) }.on::<T>();
        let runs = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let mut graphs = Graphs::of(&rig);
            let embedded = graphs.embed(&rig, StepOptions::new());
            rig.meet("all have captured");
            let first = replay(&rig, &graphs, &embedded, 0);
            if rig.rank() == 1 {
                // Fewer rows, and then as many as before: the generation tells them apart.
                for rows in [4, first.record.capacity] {
                    let change = rig.group.rows().plan(rows).expect("it is reserved");
                    rig.commit(change);
                }
                match embedded.replay(|| panic!("a stale graph is launched")) {
                    Err(CaptureError::Stale { .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
            for step in 2..4 {
                launch_unseen(&rig, &graphs, 1);
                let number = embedded.replayed();
                assert_eq!(told(rig.wait(number)), (1, step, 1, 3));
            }
            assert_eq!(rig.group.context().fault(), None);
            if rig.rank() == 1 {
                graphs.clear();
                let embedded = graphs.embed(&rig, StepOptions::new());
                embedded.check_current().expect("recorded for what holds");
            }
            rig.meet("that rank has captured again");
            rig.write(1);
            graphs.launch().expect("the stream runs");
            (first, rig.seen(Stage::Embedded, 1, rig.group.dispatcher().count_step()))
        });
        let (first, second): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
        StepOracle::new(&case, 0, None).check_outputs("before", &first);
        StepOracle::new(&case, 1, None).check_outputs("recorded again", &second);
    }
}

/// A capacity that changes between the check of a replay and its launch is found on the device too. A step that
/// is launched while another is has no number, and is refused.
pub fn a_capacity_that_changes_within_a_launch_is_told_to_all_ranks<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, StepOptions::new());
        rig.meet("all have captured");
        rig.write(0);
        let number = embedded.replay(|| {
            match embedded.replay(|| panic!("two steps are launched at once")) {
                Err(CaptureError::Dispatch(DispatchError::Order {
                    operation: "launch", ..
                })) => {}
                other => panic!("{other:?}"),
            }
            rig.group.dispatcher().catch_up();
            if rig.rank() == 1 {
                rig.commit(rig.group.rows().plan(8).expect("it is reserved"));
            }
            Ok(graphs.launch()?)
        });
        assert_eq!(told(rig.wait(number.expect("it was current"))), (1, 1, 1, 2));
        if rig.rank() == 1 {
            rig.commit(rig.group.rows().plan(case.rows_of(1)).expect("it is reserved"));
            graphs.clear();
            graphs.embed(&rig, StepOptions::new());
        }
        rig.meet("that rank has captured again");
        let launch = || Ok::<_, DispatchError>(graphs.launch()?);
        rig.run_as(Stage::Embedded, 0, || rig.group.dispatcher().launch_step(launch))
    });
    StepOracle::new(&case, 0, None).check_outputs("recorded again", &runs);
    assert!(runs.iter().all(|run| run.record.step == 2), "{runs:?}");
}

/// The same in rounds, where a stale rank makes no trip.
pub fn stale_rounds_are_told_to_all_ranks<T: TestBackend>() {
    let case = Case { layers: 2, ..Case::new(2) }.capacity(8);
    let in_rounds = StepOptions::new().with_mode(StepMode::Rounds);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, in_rounds);
        let change = rig.group.rows().plan(12).expect("it is reserved");
        if rig.rank() == 0 {
            rig.commit(change);
        } else {
            change.cancel();
        }
        rig.meet("all have captured");
        launch_unseen(&rig, &graphs, 0);
        assert_eq!(told(rig.wait(embedded.replayed())), (0, 1, 1, 2));
        graphs.clear();
        let embedded = graphs.embed(&rig, in_rounds);
        rig.meet("all have captured again");
        replay(&rig, &graphs, &embedded, 0)
    });
    StepOracle::new(&case, 0, None).check_outputs("recorded again", &runs);
}

/// Where steps hold, those behind a stale one drain on all ranks until they are resumed.
pub fn steps_behind_a_stale_one_drain<T: TestBackend>() {
    let case = Case::new(3).on::<T>();
    let last = case.world() - 1;
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let options = StepOptions::new().with_hold_on_overflow(true);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, options);
        if rig.rank() == last {
            let change = rig.group.rows().plan(8).expect("it is reserved");
            rig.commit(change);
        }
        rig.meet("all have captured");
        rig.write(0);
        let numbers: Vec<u32> = (0..3)
            .map(|_| {
                graphs.launch().expect("the stream runs");
                embedded.replayed()
            })
            .collect();
        assert_eq!(told(rig.wait(numbers[0])), (last as u32, 1, 1, 2));
        for number in &numbers[1..] {
            let behind = rig.wait(*number).expect("it ends");
            assert!(behind.drained, "step {number} was not held back");
        }
        rig.group.dispatcher().resume(&rig.direct()).expect("the stream is alive");
        let most = rig.group.rows().max_rows();
        let change = rig.group.rows().plan(most).expect("it is reserved");
        rig.commit(change);
        graphs.clear();
        let embedded = graphs.embed(&rig, options);
        rig.meet("all have captured again");
        replay(&rig, &graphs, &embedded, 0)
    });
    StepOracle::new(&case, 0, None).check_outputs("resumed", &runs);
}

/// A graph that counts on the device is never stale, and uses the rows that came.
pub fn device_counted_steps_stay_current<T: TestBackend>() {
    let case = Case::new(2).capacity(4);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let options = StepOptions::new().with_shaping(RowShaping::DeviceCounted);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, options);
        let growth = rig.group.rows().plan(rig.group.rows().max_rows()).expect("it is reserved");
        rig.commit(growth);
        rig.meet("all have captured");
        replay(&rig, &graphs, &embedded, 0)
    });
    StepOracle::new(&case, 0, None).check_outputs("with the rows that came", &runs);
}

/// Steps that an engine launches without telling are numbered by the device: a follower reads them one
/// after the other, and steps that are launched through the library afterwards have the right numbers.
pub fn untold_replays_are_followed<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, StepOptions::new());
        rig.meet("all have captured");
        let mut follower = rig.group.dispatcher().records().follow();
        let mut runs = Vec::new();
        for step in 0..3 {
            assert!(follower.poll().expect("no fault").is_none());
            launch_unseen(&rig, &graphs, step);
            let record = follower.wait_on(rig.group.stream()).expect("it ends");
            runs.push(rig.seen_with(step, &record));
        }
        runs.push(rig.run(3, StepMode::Static));
        launch_unseen(&rig, &graphs, 4);
        follower.wait_on(rig.group.stream()).expect("the direct step");
        let record = follower.wait_on(rig.group.stream()).expect("it ends");
        runs.push(rig.seen_with(4, &record));
        runs.push(replay(&rig, &graphs, &embedded, 5));
        assert_eq!(follower.next_step(), 6);
        runs
    });
    check_all(&case, "followed", &runs);
}

/// A launch is counted once, though its record is there before the launch returns and somebody counts what is
/// published meanwhile.
pub fn a_launch_is_counted_once_whoever_looks_meanwhile<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut graphs = Graphs::of(&rig);
        let embedded = graphs.embed(&rig, StepOptions::new());
        rig.meet("all have captured");
        let dispatcher = rig.group.dispatcher();
        rig.write(0);
        let first = thread::scope(|scope| {
            let launch = || {
                graphs.launch()?;
                rig.wait(1)?;
                dispatcher.catch_up();
                let (looked, seen) = mpsc::channel();
                scope.spawn(move || {
                    dispatcher.catch_up();
                    // Nobody is there to be told when the launch has returned, as it should have.
                    let _gone = looked.send(());
                });
                // It waits for this launch, so there is nothing to wait for.
                let counted = seen.recv_timeout(Duration::from_millis(20));
                assert_eq!(counted, Err(RecvTimeoutError::Timeout), "it counted the launch");
                Ok(())
            };
            embedded.replay(launch).expect("it is current")
        });
        assert_eq!(first, 1);
        vec![rig.seen(Stage::Embedded, 0, first), replay(&rig, &graphs, &embedded, 1)]
    });
    check_all(&case, "looked at meanwhile", &runs);
}

/// What cannot be recorded into an engine's capture is refused when that is asked for, in words. Where
/// nothing was recorded the engine's capture is not harmed.
pub fn what_cannot_be_embedded_is_refused<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (dispatcher, rows) = (rig.group.dispatcher(), rig.group.rows());
        let mut graphs = Graphs::of(&rig);
        let says = |result: Result<EmbeddedStep<T::Backend>, CaptureError>, part: &str| {
            let error = result.expect_err(part);
            let text = graph_ep::ep_context::error::chain(&error);
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        };
        says(rig.group.embed(graphs.stream(), StepOptions::new(), rig.body()), "record");
        let embedded = graphs
            .capture(|stream| {
                let eager = StepOptions::new().with_mode(StepMode::Eager { max_rows: u32::MAX });
                says(rig.group.embed(stream, eager, rig.body()), "record a static step");
                let rounds = StepOptions::new().with_mode(StepMode::Rounds);
                let in_child = EmbedOptions::in_child_graph(rounds);
                says(rig.group.embed(stream, in_child, rig.body()), "graph within a graph");
                rig.group.embed(stream, StepOptions::new(), |step| {
                    let nested = rig.group.embed(stream, StepOptions::new(), |_| Ok(()));
                    says(nested, "takes part in the recording already");
                    let queue = step.queue();
                    let word = rig.layer(0).count.slice();
                    // SAFETY: both are refused, so that nothing is written or read.
                    let (upload, download) = unsafe {
                        (queue.upload(&word, &[0; 4]), queue.download(&word, &mut [0; 4]))
                    };
                    let wait = queue.backend().synchronize(queue.stream());
                    for refused in [upload, download, wait] {
                        assert!(matches!(refused, Err(BackendError::Recording { .. })));
                    }
                    rig.program().queue(step)
                })
            })
            .expect("the capture was not harmed");
        // Replayed into a capture, a graph of the library's would not be counted when it runs.
        let own = StepGraph::record(dispatcher, rig.group.stream(), StepOptions::new(), rig.body())
            .expect("it can be recorded");
        let mut others = Graphs::of(&rig);
        others
            .capture(|stream| match own.replay(stream) {
                Err(CaptureError::Dispatch(DispatchError::Order { reason, .. })) => {
                    assert!(reason.contains("EmbeddedStep"), "{reason}");
                    Ok::<(), CaptureError>(())
                }
                other => panic!("{other:?}"),
            })
            .expect("the capture was not harmed");
        let sets: Vec<&RowSet<T::Backend>> = vec![rows; 5];
        // Sets are counted before anything is recorded, where a step is shaped by their capacity.
        others
            .capture(|stream| {
                let options = StepOptions::new();
                let whole = EmbeddedStep::record(dispatcher, stream, options, &sets, rig.body());
                says(whole, "number of row sets");
                let begun = EmbeddedStep::begin(dispatcher, stream, options, &sets, |_| Ok(()));
                assert!(begun.is_err_and(|error| error.to_string().contains("number of row sets")));
                Ok::<(), CaptureError>(())
            })
            .expect("the capture was not harmed");
        let counted = StepOptions::new().with_shaping(RowShaping::DeviceCounted);
        others
            .capture(|stream| EmbeddedStep::record(dispatcher, stream, counted, &sets, rig.body()))
            .expect("it looks at no shape");
        let (error, ended) = others
            .capture(|stream| {
                let options = StepOptions::new();
                EmbeddedStep::record(dispatcher, stream, options, &[], rig.body())
            })
            .expect_err("refused");
        says(Err(error), "not named");
        assert!(matches!(ended, Err(BackendError::Recording { .. })), "{ended:?}");
        rig.meet("all have captured");
        replay(&rig, &graphs, &embedded, 0)
    });
    StepOracle::new(&case, 0, None).check_outputs("after the refusals", &runs);
}

/// A step that could not be recorded as a whole makes the engine's capture unusable, rather than leave a
/// part of a step in a graph; the next capture is a new one.
pub fn part_of_a_step_is_in_no_graph<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let program = rig.program();
        let mut graphs = Graphs::of(&rig);
        let (error, ended) = graphs
            .capture(|stream| {
                rig.group.embed(stream, StepOptions::new(), |step| -> Result<(), BodyError> {
                    program.dispatch(step, 0)?;
                    Err("an error of the body".into())
                })
            })
            .expect_err("the body fails");
        assert!(matches!(error, CaptureError::Body { .. }), "{error:?}");
        assert!(matches!(ended, Err(BackendError::Recording { .. })), "{ended:?}");
        let (panic, ended) = graphs
            .capture(|stream| {
                catch_unwind(AssertUnwindSafe(|| {
                    rig.group.embed(stream, StepOptions::new(), |step| {
                        program.dispatch(step, 0)?;
                        std::panic::resume_unwind(Box::new("a panic of the body"));
                    })
                }))
            })
            .expect_err("the body panics");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a panic of the body"));
        assert!(matches!(ended, Err(BackendError::Recording { .. })), "{ended:?}");
        // Nor does the recording end under a step.
        graphs
            .capture_by_key(|stream, key| {
                rig.group.embed(stream, StepOptions::new(), |step| {
                    let backend = step.queue().backend().clone();
                    backend.end_recording(key).expect_err("a step is being recorded");
                    backend.abandon_recording(key);
                    program.queue(step)
                })
            })
            .expect("the recording went on");
        graphs.clear();
        // A change of capacity between two pieces, and a piece behind one that failed.
        let (dispatcher, rows) = (rig.group.dispatcher(), rig.group.rows());
        let begin = |stream: &_| {
            EmbeddedStep::begin(dispatcher, stream, StepOptions::new(), &[rows], |_| Ok(()))
        };
        let mut pieces = graphs.capture(begin).expect("it can be begun");
        let change = rows.plan(rows.max_rows()).expect("it is reserved");
        rig.commit(change);
        let (error, ended) = graphs
            .capture(|stream| pieces.record(stream, |step| program.dispatch(step, 0)))
            .expect_err("the capacity has changed");
        assert!(error.to_string().contains("capacity has changed"), "{error}");
        ended.expect_err("no part of a step is in a graph");
        let (error, ended) =
            graphs.capture(|stream| pieces.end(stream, |_| Ok(()))).expect_err("it has no middle");
        assert!(error.to_string().contains("earlier piece"), "{error}");
        ended.expect("nothing was recorded");
        graphs.clear();
        let embedded = graphs.embed(&rig, StepOptions::new());
        rig.meet("all have captured");
        replay(&rig, &graphs, &embedded, 0)
    });
    StepOracle::new(&case, 0, None).check_outputs("after the failures", &runs);
}

/// The engine's graph keeps alive what the step uses when everybody else has dropped it, and what it kept
/// is given back when it is gone, by whoever asks for that.
pub fn the_engines_graph_keeps_what_it_uses<T: TestBackend>() {
    let case = Case { layers: 2, ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let owner = Arc::new([
            rig.group.allocate(64).expect("memory"),
            rig.group.allocate(64).expect("memory"),
        ]);
        let slices = owner.each_ref().map(|buffer| {
            // SAFETY: the range is the buffer's, which the owner holds; both are used by the step alone.
            unsafe { DeviceSlice::owned_by(owner.clone(), buffer.slice().address(), 64) }
        });
        let left = Arc::downgrade(&owner);
        drop(owner);
        let mut graphs = Graphs::of(&rig);
        let program = rig.program();
        let embedded = graphs
            .capture(|stream| {
                rig.group.embed(stream, StepOptions::new(), move |step| {
                    // SAFETY: the two are different memory, used by this operation alone.
                    unsafe { step.queue().copy(&slices[0], &slices[1]) }?;
                    program.queue(step)
                })
            })
            .expect("it can be recorded");
        rig.write(0);
        let context = rig.group.context().clone();
        rig.meet("all have captured");
        let device = rig.memory.clone();
        drop((embedded, rig));
        for _ in 0..3 {
            graphs.launch().expect("the stream runs");
        }
        context.backend().synchronize(graphs.stream()).expect("all of it is there");
        assert_eq!(context.fault(), None);
        assert!(left.strong_count() > 0 && device.used() > 0, "the graph keeps what it uses");
        context
            .rendezvous()
            .barrier("all have replayed", crate::backend::PATIENCE)
            .expect("all come");
        graphs.clear();
        T::collect(context.backend());
        graph_ep::ep_context::reclaim();
        // Ranks of one process reclaim for each other.
        context
            .rendezvous()
            .barrier("all have reclaimed", crate::backend::PATIENCE)
            .expect("all come");
        assert_eq!(left.strong_count(), 0, "what a graph kept that is gone");
    });
}

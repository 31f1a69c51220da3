//! Steps in graphs that cudarc captures, by its own API: an engine that knows nothing of this library
//! but a handle of its stream. Every test says that it is skipped where there is no GPU.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUgraphInstantiate_flags as Flags;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::{CudaContext, CudaGraph, CudaStream as TheirStream};
use graph_ep::ep_context::cuda::{CudaBackend, CudaStream, DriverCalls};
use graph_ep::{
    Backend, BackendError, BodyError, CaptureError, DeviceSlice, DispatchError, EmbeddedStep,
    EngineGraph, RecoverySettings, StepMode, StepOptions, StepSpec,
};
use graph_ep_tests::backend::{PATIENCE, say_skipped};
use graph_ep_tests::oracle::StepOracle;
use graph_ep_tests::outcome::{Ended, by_step};
use graph_ep_tests::program::Program;
use graph_ep_tests::{Case, CudaThreads, CudaThreadsPush, RankRun, Rig, Skew, TestBackend};

const MODES: [Mode; 3] = [
    Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
];

/// An engine on one rank: a stream of cudarc's, the same one as this library sees it, and graphs.
struct Engine {
    theirs: Arc<TheirStream>,
    ours: CudaStream,
    mode: Mode,
    graphs: Vec<Graph>,
}

struct Graph(CudaGraph);

// SAFETY: the driver lets any thread use its handles, and an engine is used by one at a time.
unsafe impl Send for Graph {}

impl Engine {
    fn of<T: TestBackend<Backend = CudaBackend>>(rig: &Rig<T>, mode: Mode) -> Self {
        let backend = rig.group.context().backend();
        let ordinal = backend.properties().ordinal as usize;
        let context = CudaContext::new(ordinal).expect("the primary context");
        let theirs = context.new_stream().expect("a stream");
        // SAFETY: the stream is one of the device's primary context, and lives as long as the engine.
        let ours = unsafe { backend.borrow_stream(theirs.cu_stream(), "cudarc") };
        Self { theirs, ours, mode, graphs: Vec::new() }
    }

    /// Captures in turn, rank after rank: in the global mode no thread of the process may do what an
    /// engine does when it makes a graph executable.
    fn capture_in_turn<T: TestBackend<Backend = CudaBackend>, R>(
        &mut self,
        rig: &Rig<T>,
        record: impl FnOnce(&CudaStream) -> Result<R, CaptureError>,
    ) -> R {
        let (mut record, mut recorded) = (Some(record), None);
        for turn in 0..rig.case.world() {
            rig.meet("the next to capture");
            if turn == rig.rank()
                && let Some(record) = record.take()
            {
                recorded = Some(self.capture(record).expect("it can be recorded"));
            }
        }
        rig.meet("all have captured");
        recorded.expect("every rank has a turn")
    }

    /// Captures one more graph of what `record` records.
    fn capture<R>(
        &mut self,
        record: impl FnOnce(&CudaStream) -> Result<R, CaptureError>,
    ) -> Result<R, CaptureError> {
        self.theirs.begin_capture(self.mode).expect("the stream runs");
        let recorded = record(&self.ours);
        let ended = self.theirs.end_capture(Flags(0));
        let value = recorded?;
        let graph = Graph(ended.expect("it is whole").expect("it is not empty"));
        // A first launch that has to do this by itself waits for ranks that share the device, now and then.
        graph.0.upload().expect("it is instantiated");
        self.graphs.push(graph);
        Ok(value)
    }

    fn launch(&self) {
        for graph in &self.graphs {
            graph.0.launch().expect("the stream runs");
        }
    }

    /// Launches on the inputs of `step`, and sees what came of it.
    fn replay<T: TestBackend<Backend = CudaBackend>>(
        &self,
        rig: &Rig<T>,
        embedded: &EmbeddedStep<CudaBackend>,
        step: usize,
    ) -> RankRun {
        self.write(rig, step);
        let number = embedded.replay(|| {
            self.launch();
            Ok(())
        });
        let record = rig.group.dispatcher().records().wait_on(number.expect("current"), &self.ours);
        self.theirs.synchronize().expect("nothing failed");
        rig.seen_with(step, &record.expect("the step ends"))
    }

    /// Inputs are written on the stream of the group.
    fn write<T: TestBackend<Backend = CudaBackend>>(&self, rig: &Rig<T>, step: usize) {
        rig.write(step);
        rig.group.context().backend().synchronize(rig.group.stream()).expect("nothing failed");
    }
}

/// Makes a test of `body` for ranks that pull and for ranks that push.
macro_rules! on_gpus {
    ($($(#[$doc:meta])* $name:ident: $body:ident;)*) => {
        $($(#[$doc])* #[test]
        fn $name() {
            if let Some(why) = CudaThreads::missing() {
                return say_skipped(stringify!($name), &why);
            }
            $body::<CudaThreads>();
            $body::<CudaThreadsPush>();
        })*
    };
}

on_gpus! {
    /// In every mode of capture a step that is embedded does what a step does, with other routing in every
    /// replay, and recording it neither waits nor allocates.
    captured_steps_equal_the_oracle: steps;
    /// Loops on the device stand in the graph, and make as many trips as there have to be.
    captured_rounds_equal_the_oracle: rounds;
    /// A step over four graphs.
    captured_pieces_equal_the_oracle: pieces;
    /// A stale graph is found on the device and told to every rank; the group goes on.
    stale_graphs_are_told_to_all_ranks: stale;
    /// A step that overflows is captured again by the engine, and replayed.
    overflow_is_recovered: overflow;
    /// The graph keeps what it uses, and what it kept is given back when it is gone.
    the_graph_keeps_what_it_uses: kept;
    /// What cannot be captured is refused in words, and part of a step makes the capture unusable.
    what_cannot_be_captured_is_refused: refused;
}

fn steps<T: TestBackend<Backend = CudaBackend>>() {
    let case = Case { layers: 2, ..Case::new(2) };
    for mode in MODES {
        let runs = T::on_ranks(2, |env| {
            let rig = Rig::<T>::new(env, &case);
            let mut engine = Engine::of(&rig, mode);
            let before = DriverCalls::of_this_thread();
            let embedded = engine.capture_in_turn(&rig, |stream| {
                let embedded = rig.group.embed(stream, StepOptions::new(), rig.body());
                let after = DriverCalls::of_this_thread();
                assert_eq!((after.allocate, after.wait), (before.allocate, before.wait));
                embedded
            });
            (0..4).map(|step| engine.replay(&rig, &embedded, step)).collect::<Vec<_>>()
        });
        for (step, runs) in by_step(&runs).iter().enumerate() {
            StepOracle::new(&case, step, None).check_outputs(&format!("{mode:?}, {step}"), runs);
            assert!(runs.iter().all(|run| run.record.step == step as u32 + 1));
        }
    }
}

fn rounds<T: TestBackend<Backend = CudaBackend>>() {
    let case =
        Case { skew: Skew::Rotating, layers: 2, tokens: vec![6, 9], ..Case::new(2) }.capacity(8);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut engine = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        let in_rounds = StepOptions::new().with_mode(StepMode::Rounds);
        let embedded =
            engine.capture_in_turn(&rig, |stream| rig.group.embed(stream, in_rounds, rig.body()));
        (0..4).map(|step| engine.replay(&rig, &embedded, step)).collect::<Vec<_>>()
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, step, None).check_outputs(&format!("rounds, {step}"), runs);
    }
    assert!(by_step(&runs).iter().flatten().any(|run| run.record.windows > 1));
}

fn pieces<T: TestBackend<Backend = CudaBackend>>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut engine = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let program = rig.program();
        rig.meet("streams are there");
        let embedded = in_pieces(&rig, &mut engine, &program).expect("every piece is recorded");
        assert_eq!((embedded.pieces(), engine.graphs.len()), (4, 4));
        rig.meet("all have captured");
        (0..3).map(|step| engine.replay(&rig, &embedded, step)).collect::<Vec<_>>()
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, step, None).check_outputs(&format!("pieces, {step}"), runs);
    }
}

fn in_pieces<T: TestBackend<Backend = CudaBackend>>(
    rig: &Rig<T>,
    engine: &mut Engine,
    program: &Program<T>,
) -> Result<EmbeddedStep<CudaBackend>, CaptureError> {
    let (dispatcher, rows) = (rig.group.dispatcher(), rig.group.rows());
    let mut pieces = engine.capture(|stream| {
        EmbeddedStep::begin(dispatcher, stream, StepOptions::new(), &[rows], |_| Ok(()))
    })?;
    engine.capture(|stream| pieces.record(stream, |step| program.dispatch(step, 0)))?;
    engine.capture(|stream| pieces.record(stream, |step| program.experts(step, 0)))?;
    engine.capture(|stream| pieces.end(stream, |step| program.combine(step, 0)))
}

fn stale<T: TestBackend<Backend = CudaBackend>>() {
    let case = Case { layers: 2, ..Case::new(2) };
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut engine = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        rig.meet("streams are there");
        let record = |engine: &mut Engine| {
            engine
                .capture(|stream| rig.group.embed(stream, StepOptions::new(), rig.body()))
                .expect("it can be recorded")
        };
        let embedded = record(&mut engine);
        if rig.rank() == 1 {
            for rows in [4, rig.group.rows().max_rows()] {
                let change = rig.group.rows().plan(rows).expect("it is reserved");
                rig.commit(change);
            }
        }
        rig.meet("the capacity has changed");
        for _ in 0..2 {
            engine.write(&rig, 0);
            engine.launch();
            match rig.group.dispatcher().records().wait_on(embedded.replayed(), &engine.ours) {
                Err(DispatchError::StaleGraph { rank, recorded, now, .. }) => {
                    assert_eq!((rank.0, recorded, now), (1, 1, 3));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(rig.group.context().fault(), None);
        engine.theirs.synchronize().expect("nothing failed");
        rig.meet("all have been told");
        engine.graphs.clear();
        let embedded = record(&mut engine);
        rig.meet("all have captured again");
        engine.replay(&rig, &embedded, 1)
    });
    StepOracle::new(&case, 1, None).check_outputs("captured again", &runs);
}

/// What a runner asks of the engine.
struct Recovering<T: TestBackend> {
    engine: Engine,
    program: Program<T>,
}

impl<T: TestBackend<Backend = CudaBackend>> EngineGraph<CudaBackend> for Recovering<T> {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, CudaBackend>,
    ) -> Result<EmbeddedStep<CudaBackend>, BodyError> {
        self.engine.graphs.clear();
        let program = &self.program;
        Ok(self.engine.capture(|stream| spec.record(stream, |step| program.queue(step)))?)
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.engine.launch();
        Ok(())
    }
}

fn overflow<T: TestBackend<Backend = CudaBackend>>() {
    let case = Case { skew: Skew::Hot(0), layers: 2, ..Case::new(2) }.capacity(8);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let engine = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let (stream, theirs) = (engine.ours.clone(), engine.theirs.clone());
        let recovering = Recovering { engine, program: rig.program() };
        let mut runner =
            rig.group.engine_runner(RecoverySettings::new(), stream, recovering).expect("in range");
        let mut runs = Vec::new();
        for step in 0..3 {
            rig.write(step);
            rig.group.context().backend().synchronize(rig.group.stream()).expect("idle");
            // Nobody captures while another still waits on a device that they may share.
            rig.meet("inputs are there");
            let report = runner.run().expect("it recovers");
            assert_eq!(report.record.dropped, 0);
            theirs.synchronize().expect("nothing failed");
            runs.push(graph_ep_tests::outcome::Ran::new(
                rig.seen_with(step, &report.record),
                &report,
            ));
        }
        assert_eq!(runs[0].ended, Ended::Recovered { replays: 1, eager: false });
        runs
    });
    for (step, ranks) in by_step(&runs).iter().enumerate() {
        let runs: Vec<_> = ranks.iter().map(|ran| ran.run.clone()).collect();
        StepOracle::new(&case, step, None).check_outputs(&format!("recovered, {step}"), &runs);
    }
}

fn kept<T: TestBackend<Backend = CudaBackend>>() {
    let case = Case { layers: 2, ..Case::new(2) };
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let allocate = || rig.group.allocate(64).expect("memory");
        let owner = Arc::new([allocate(), allocate()]);
        let slices = owner.each_ref().map(|buffer| {
            // SAFETY: the range is the buffer's, which the owner holds; the step alone uses it.
            unsafe { DeviceSlice::owned_by(owner.clone(), buffer.slice().address(), 64) }
        });
        let left = Arc::downgrade(&owner);
        drop(owner);
        let mut engine = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let program = rig.program();
        rig.meet("streams are there");
        let embedded = engine
            .capture(|stream| {
                rig.group.embed(stream, StepOptions::new(), move |step| {
                    // SAFETY: the two are different memory, used by this operation alone.
                    unsafe { step.queue().copy(&slices[0], &slices[1]) }?;
                    program.queue(step)
                })
            })
            .expect("it can be recorded");
        engine.write(&rig, 0);
        let context = rig.group.context().clone();
        rig.meet("all have captured");
        drop((embedded, rig));
        for _ in 0..3 {
            engine.launch();
        }
        engine.theirs.synchronize().expect("all of it is there");
        assert_eq!(context.fault(), None);
        graph_ep::ep_context::reclaim();
        assert!(left.strong_count() > 0, "the graph keeps what it uses");
        context.rendezvous().barrier("all have replayed", PATIENCE).expect("every rank comes");
        engine.graphs.clear();
        // The driver calls the destructor when it pleases, on a thread of its own.
        let start = Instant::now();
        while left.strong_count() > 0 && start.elapsed() < PATIENCE {
            graph_ep::ep_context::reclaim();
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(left.strong_count(), 0, "what a graph kept that is gone");
    });
}

fn refused<T: TestBackend<Backend = CudaBackend>>() {
    let case = Case::new(1).capacity(8);
    let runs = T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut engine = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        let backend = rig.group.context().backend().clone();
        let word = rig.layer(0).count.slice();
        let reason = |result: Result<(), BackendError>| match result {
            Err(BackendError::Recording { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        let program = rig.program();
        let embed = rig.group.embed(&engine.ours, StepOptions::new(), rig.body());
        assert!(matches!(embed, Err(CaptureError::Backend(BackendError::Recording { .. }))));
        let embedded = engine
            .capture(|stream| {
                // Outside of a step nothing of this library is recorded, and nothing breaks the capture.
                let queue = graph_ep::Queue::direct(&backend, stream);
                // SAFETY: refused, so that nothing is copied.
                let direct = unsafe { queue.copy(&word, &word) };
                assert!(reason(direct).contains("captured by others"));
                backend.check(stream).expect("nothing failed so far");
                rig.group.allocate(64).expect("memory, which concerns no capture");
                let embedded = rig.group.embed(stream, StepOptions::new(), |step| {
                    let queue = step.queue();
                    reason(backend.synchronize(queue.stream()));
                    // SAFETY: refused, so that nothing is read or written.
                    reason(unsafe { queue.download(&word, &mut [0; 4]) });
                    // SAFETY: the same.
                    reason(unsafe { queue.upload(&word, &[0; 4]) });
                    program.queue(step)
                });
                reason(backend.leave_recording(stream));
                embedded
            })
            .expect("the capture was not harmed");
        // An allocation that the driver records cannot stand in a loop.
        let in_rounds = StepOptions::new().with_mode(StepMode::Rounds);
        let allocates = |stream: &CudaStream| {
            rig.group.embed(stream, in_rounds, |step| -> Result<(), BodyError> {
                let layer = rig.layer(0);
                let arguments = program.arguments(0)?;
                let (results, output) = (layer.results.slice(), layer.output.slice());
                program.lane(0)?.rounds(step, &arguments, &results, &output, |step| {
                    let body = step.queue().stream().raw();
                    // SAFETY: the body's stream records.
                    unsafe { cudarc::driver::result::malloc_async(body, 64) }
                        .map_err(|error| -> BodyError { error.to_string().into() })?;
                    program.experts(step, 0)
                })
            })
        };
        let other = Engine::of(&rig, Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
        other.theirs.begin_capture(other.mode).expect("the stream runs");
        let error = allocates(&other.ours).expect_err("the driver allows no such body");
        // Found when the body ends, unless the driver refuses it at once.
        let text = graph_ep::ep_context::error::chain(&error);
        assert!(text.contains("an allocation") || text.contains("DriverError"), "{text}");
        assert!(other.theirs.end_capture(Flags(0)).is_err(), "a loop without its end");
        // Neither is part of a step.
        other.theirs.begin_capture(other.mode).expect("the stream runs again");
        let part =
            rig.group.embed(&other.ours, StepOptions::new(), |step| -> Result<(), BodyError> {
                program.dispatch(step, 0)?;
                Err("an error of the body".into())
            });
        assert!(matches!(part, Err(CaptureError::Body { .. })), "{part:?}");
        assert!(other.theirs.end_capture(Flags(0)).is_err(), "part of a step is in no graph");
        // A capture that ends under a step is found out.
        let theirs = other.theirs.clone();
        theirs.begin_capture(other.mode).expect("the stream runs again");
        let ended =
            rig.group.embed(&other.ours, StepOptions::new(), |step| -> Result<(), BodyError> {
                drop(theirs.end_capture(Flags(0)));
                program.dispatch(step, 0)
            });
        assert!(matches!(ended, Err(CaptureError::Body { .. })), "{ended:?}");
        // One that is begun in its place takes nothing of the step either.
        let key = backend.begin_recording(rig.group.stream()).expect("the stream runs");
        // SAFETY: recorded, and never replayed.
        unsafe {
            rig.direct().copy(&word.get(0..2).expect("short"), &word.get(2..4).expect("short"))
        }
        .expect("recorded");
        let small = backend.end_recording(&key).expect("it is whole");
        let small = backend.instantiate(small).expect("it has no loops");
        theirs.begin_capture(other.mode).expect("the stream runs again");
        let replaced =
            rig.group.embed(&other.ours, StepOptions::new(), |step| -> Result<(), BodyError> {
                let stream = step.queue().stream().clone();
                let condition = backend.condition(&stream)?;
                drop(theirs.end_capture(Flags(0)));
                theirs.begin_capture(other.mode).expect("the stream runs again");
                for refused in [
                    backend.condition(&stream).map(drop),
                    backend.begin_while(&stream, condition).map(drop),
                    backend.replay(&stream, &small),
                ] {
                    assert!(reason(refused).contains("has ended"));
                }
                program.dispatch(step, 0)
            });
        assert!(matches!(replaced, Err(CaptureError::Body { .. })), "{replaced:?}");
        theirs.end_capture(Flags(0)).expect("nobody has touched it");
        engine.replay(&rig, &embedded, 0)
    });
    StepOracle::new(&case, 0, Some(&[8])).check_outputs("after the refusals", &runs);
}

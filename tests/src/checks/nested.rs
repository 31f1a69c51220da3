//! Recordings within recordings, whose bodies have two steps of one type and can exchange them.

use std::mem;

use graph_ep::{
    Backend, BackendError, BodyError, CaptureError, DispatchError, EmbeddedStep, OverflowError,
    RecoverySettings, Step, StepGraph, StepMode, StepOptions,
};

use crate::backend::TestBackend;
use crate::case::Case;
use crate::engine::Graphs;
use crate::oracle::StepOracle;
use crate::rig::Rig;

type Stream<T> = <<T as TestBackend>::Backend as Backend>::Stream;

fn exchanged(error: &DispatchError) {
    match error {
        DispatchError::Order { operation: "body of a step", reason, .. } => {
            assert!(reason.contains("in the place of the one that it was given"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

fn of_capture<R: std::fmt::Debug>(result: Result<R, CaptureError>) {
    match result {
        Err(CaptureError::Dispatch(error)) => exchanged(&error),
        other => panic!("{other:?}"),
    }
}

/// Leaves the step of a recording on `other`, which is refused for that, in the place of `step`.
fn exchange<'a, T: TestBackend>(rig: &Rig<T>, other: &Stream<T>, step: &mut Step<'a, T::Backend>) {
    let record = |inner: &mut Step<'a, T::Backend>| -> Result<(), BodyError> {
        mem::swap(inner, step);
        Ok(())
    };
    let dispatcher = rig.group.dispatcher();
    of_capture(StepGraph::record(dispatcher, other, StepOptions::new(), record));
}

/// Steps that the bodies of two recordings have exchanged are in no graph. What is left of the inner one takes
/// nothing when its recording has ended and the stream runs again, where it would run beyond what was borrowed
/// for it. Bodies that change them back do no harm.
pub fn exchanged_steps_are_in_no_graph<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (program, context) = (rig.program(), rig.group.context());
        let other = context.stream("other").expect("streams are left");
        let (dispatcher, stream) = (rig.group.dispatcher(), rig.group.stream());
        let (word, target) = (rig.layer(0).count.slice(), rig.layer(0).ids.slice());
        let options = StepOptions::new();
        of_capture(StepGraph::record(dispatcher, stream, options, |step| {
            program.dispatch(step, 0)?;
            exchange(&rig, &other, step);
            assert!(!context.backend().is_recording(&other), "the inner recording has ended");
            // SAFETY: it is refused, so that nothing is written.
            let copied = unsafe { step.queue().copy(&target, &word) };
            assert!(matches!(copied, Err(BackendError::Recording { .. })), "{copied:?}");
            let queued =
                program.queue(step).expect_err("nothing of the library's is queued either");
            assert!(queued.to_string().contains("has ended"), "{queued}");
            Ok(())
        }));
        for stream in [stream, &other] {
            assert!(!context.backend().is_recording(stream), "nothing records any more");
        }
        let mut within = None;
        let graph = StepGraph::record(dispatcher, stream, options, |step| {
            within = Some(StepGraph::record(dispatcher, &other, options, |inner| {
                mem::swap(inner, step);
                program.dispatch(inner, 0)?;
                mem::swap(inner, step);
                Ok(())
            })?);
            program.experts(step, 0)?;
            program.combine(step, 0)
        });
        let (graph, within) = (graph.expect("each has its own"), within.expect("recorded"));
        assert_eq!((graph.dispatches(), within.dispatches()), (1, 0));
        rig.replay(&graph, 0)
    });
    StepOracle::new(&case, 0, None).check_outputs("changed back", &runs);
}

/// The same in the captures of engines, as a whole and in pieces, which are of no use then.
pub fn exchanged_steps_spoil_the_capture_of_an_engine<T: TestBackend>() {
    let case = Case::new(2);
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let other = rig.group.context().stream("other").expect("streams are left");
        let (dispatcher, rows) = (rig.group.dispatcher(), rig.group.rows());
        let mut graphs = Graphs::of(&rig);
        let refused = |error: CaptureError, ended: Result<(), BackendError>| {
            of_capture(Err::<(), _>(error));
            assert!(matches!(ended, Err(BackendError::Recording { .. })), "{ended:?}");
        };
        let options = StepOptions::new();
        let body = |step: &mut Step<'static, T::Backend>| -> Result<(), BodyError> {
            exchange(&rig, &other, step);
            Ok(())
        };
        let (error, ended) = graphs
            .capture(|stream| EmbeddedStep::record(dispatcher, stream, options, &[rows], body))
            .expect_err("the steps were exchanged");
        refused(error, ended);
        graphs.clear();
        let begin =
            |stream: &_| EmbeddedStep::begin(dispatcher, stream, options, &[rows], |_| Ok(()));
        let mut pieces = graphs.capture(begin).expect("it can be begun");
        let (error, ended) = graphs
            .capture(|stream| pieces.record(stream, body))
            .expect_err("the steps were exchanged");
        refused(error, ended);
        let (error, _) =
            graphs.capture(|stream| pieces.end(stream, |_| Ok(()))).expect_err("it has no middle");
        assert!(error.to_string().contains("earlier piece"), "{error}");
        let pieces = graphs.capture(begin).expect("it can be begun");
        let (error, ended) = graphs
            .capture(|stream| pieces.end(stream, body))
            .expect_err("the steps were exchanged");
        refused(error, ended);
        rig.run(0, StepMode::Static)
    });
    StepOracle::new(&case, 0, None).check_outputs("after the refusals", &runs);
}

/// A runner says so of its body, recorded and eager.
pub fn a_runner_whose_body_exchanges_its_step_is_told<T: TestBackend>() {
    let case = Case::new(1);
    T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let group = rig.group.clone();
        let other = group.context().stream("other").expect("streams are left");
        let body = move |step: &mut Step<'static, T::Backend>| -> Result<(), BodyError> {
            exchange(&rig, &other, step);
            Ok(())
        };
        let mut runner = group.runner(RecoverySettings::new(), body).expect("in range");
        match runner.run() {
            Err(OverflowError::Capture(CaptureError::Dispatch(error))) => exchanged(&error),
            other => panic!("{other:?}"),
        }
        match runner.run_eager() {
            Err(OverflowError::Dispatch(error)) => exchanged(&error),
            other => panic!("{other:?}"),
        }
    });
}

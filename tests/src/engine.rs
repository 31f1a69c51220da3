//! An engine that captures and launches graphs itself, as far as the traits of a backend go: it records,
//! instantiates and replays without a word to the library that it tests.

use std::fmt;
use std::sync::{Arc, Mutex};

use graph_ep::token_dispatch::Step;
use graph_ep::{
    Backend, BackendError, BodyError, CaptureError, EmbedOptions, EmbeddedStep, EngineGraph,
    StepSpec,
};

use crate::backend::TestBackend;
use crate::program::Program;
use crate::rig::Rig;

/// Graphs of an engine's, launched one after the other.
pub struct Graphs<T: TestBackend> {
    backend: T::Backend,
    stream: <T::Backend as Backend>::Stream,
    executables: Vec<<T::Backend as Backend>::Executable>,
}

impl<T: TestBackend> Graphs<T> {
    /// No graph yet. They are launched on the stream of the group, where inputs are written.
    pub fn of(rig: &Rig<T>) -> Self {
        let backend = rig.group.context().backend().clone();
        Self { backend, stream: rig.group.stream().clone(), executables: Vec::new() }
    }

    /// The stream on which the engine captures.
    pub fn stream(&self) -> &<T::Backend as Backend>::Stream {
        &self.stream
    }

    /// Captures one more graph of what `record` records; on an error of `record` the capture is
    /// ended, and what comes of that returned too.
    ///
    /// # Errors
    ///
    /// What `record` returns, and how the capture ended.
    ///
    /// # Panics
    ///
    /// If the engine cannot capture.
    pub fn capture<R, E>(
        &mut self,
        record: impl FnOnce(&<T::Backend as Backend>::Stream) -> Result<R, E>,
    ) -> Result<R, (E, Result<(), graph_ep::BackendError>)> {
        self.capture_by_key(|stream, _| record(stream))
    }

    /// The same for a `record` that is given the right to end the capture.
    ///
    /// # Errors
    ///
    /// As for [`Graphs::capture`].
    ///
    /// # Panics
    ///
    /// If the engine cannot capture.
    pub fn capture_by_key<R, E>(
        &mut self,
        record: impl FnOnce(
            &<T::Backend as Backend>::Stream,
            &<T::Backend as Backend>::RecordingKey,
        ) -> Result<R, E>,
    ) -> Result<R, (E, Result<(), graph_ep::BackendError>)> {
        let key = self.backend.begin_recording(&self.stream).expect("the stream runs");
        match record(&self.stream, &key) {
            Ok(value) => {
                let recording = self.backend.end_recording(&key).expect("it is whole");
                let executable = self.backend.instantiate(recording).expect("it can be replayed");
                self.executables.push(executable);
                Ok(value)
            }
            Err(error) => Err((error, self.backend.end_recording(&key).map(drop))),
        }
    }

    /// Captures a step of the rig.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn embed(
        &mut self,
        rig: &Rig<T>,
        options: impl Into<EmbedOptions>,
    ) -> EmbeddedStep<T::Backend> {
        let body = rig.body();
        self.capture(|stream| rig.group.embed(stream, options, body))
            .unwrap_or_else(|(error, _)| panic!("{error:?}"))
    }

    /// Launches every graph once, in their order.
    ///
    /// # Errors
    ///
    /// The stream has failed.
    pub fn launch(&self) -> Result<(), BackendError> {
        for executable in &self.executables {
            self.backend.replay(&self.stream, executable)?;
        }
        Ok(())
    }

    /// Drops all graphs.
    pub fn clear(&mut self) {
        self.executables.clear();
    }
}

impl<T: TestBackend> fmt::Debug for Graphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graphs").field("graphs", &self.executables.len()).finish()
    }
}

/// What an engine was asked for, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To capture.
    Capture,
    /// To launch.
    Launch,
    /// To drop its graphs.
    Discard,
    /// To run eagerly.
    Eager,
}

/// The engine of a runner: captures the step of a rig, whole or in pieces.
pub struct Engine<T: TestBackend> {
    pub(crate) graphs: Graphs<T>,
    pub(crate) program: Program<T>,
    /// Each operation in a graph of its own.
    pub in_pieces: bool,
    /// How often it still fails to capture.
    pub failures: u32,
    /// Whether it runs eagerly when it is asked to.
    pub eager: bool,
    /// What it was asked for.
    pub asked: Arc<Mutex<Vec<Asked>>>,
}

impl<T: TestBackend> Engine<T> {
    /// An engine that captures the step of the rig as a whole.
    pub fn of(rig: &Rig<T>) -> Self {
        let (graphs, program) = (Graphs::of(rig), rig.program());
        Self { graphs, program, in_pieces: false, failures: 0, eager: false, asked: Arc::default() }
    }

    fn note(&self, asked: Asked) {
        self.asked.lock().expect("no panic").push(asked);
    }
}

impl<T: TestBackend> fmt::Debug for Engine<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("graphs", &self.graphs).finish_non_exhaustive()
    }
}

/// Records a step over as many graphs as it has operations.
///
/// # Errors
///
/// What a piece is refused for.
pub fn in_pieces<T: TestBackend>(
    graphs: &mut Graphs<T>,
    program: &Program<T>,
    begin: impl FnOnce(
        &<T::Backend as Backend>::Stream,
    ) -> Result<graph_ep::StepPieces<T::Backend>, CaptureError>,
) -> Result<EmbeddedStep<T::Backend>, CaptureError> {
    let plain = |(error, _): (CaptureError, _)| error;
    let mut pieces = graphs.capture(begin).map_err(plain)?;
    for layer in 0..program.case.layers {
        graphs
            .capture(|stream| pieces.record(stream, |step| program.dispatch(step, layer)))
            .map_err(plain)?;
        graphs
            .capture(|stream| pieces.record(stream, |step| program.experts(step, layer)))
            .map_err(plain)?;
        graphs
            .capture(|stream| pieces.record(stream, |step| program.combine(step, layer)))
            .map_err(plain)?;
    }
    graphs.capture(|stream| pieces.end(stream, |_| Ok(()))).map_err(plain)
}

impl<T: TestBackend> EngineGraph<T::Backend> for Engine<T> {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, T::Backend>,
    ) -> Result<EmbeddedStep<T::Backend>, BodyError> {
        self.note(Asked::Capture);
        if self.failures > 0 {
            self.failures -= 1;
            return Err("the engine has no graph to give".into());
        }
        self.graphs.clear();
        let program = &self.program;
        if self.in_pieces {
            return Ok(in_pieces(&mut self.graphs, program, |stream| {
                spec.begin(stream, |_| Ok(()))
            })?);
        }
        self.graphs
            .capture(|stream| spec.record(stream, |step| program.queue(step)))
            .map_err(|(error, _)| error.into())
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.note(Asked::Launch);
        Ok(self.graphs.launch()?)
    }

    fn discard(&mut self) {
        self.note(Asked::Discard);
        self.graphs.clear();
    }

    fn runs_eagerly(&self) -> bool {
        self.eager
    }

    fn queue_eagerly(&mut self, step: &mut Step<'static, T::Backend>) -> Result<(), BodyError> {
        self.note(Asked::Eager);
        self.program.queue(step)
    }
}

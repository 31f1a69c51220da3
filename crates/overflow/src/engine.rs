//! What an engine that owns its graphs does for a runner.

use ep_context::{Backend, RowSet};
use graph_capture::{BodyError, CaptureError, EmbedOptions, EmbeddedStep, StepPieces};
use token_dispatch::{Step, StepOptions, TokenDispatcher};

/// The graph of a step as an engine has it: captured, instantiated, launched and dropped by the engine,
/// when a [`StepRunner`](crate::StepRunner) asks for it. So recovery is the same whoever owns the graph.
pub trait EngineGraph<B: Backend>: Send {
    /// Captures the step anew, by [`StepSpec::record`] or [`StepSpec::begin`] within a capture of the
    /// engine's, and makes it ready to be launched in place of an earlier one. Called before the first
    /// step, and when the receive capacity for which it was captured changes: on this rank alone or on
    /// several, between steps, while no rank waits on the device.
    ///
    /// Ready is a graph that is instantiated and, where ranks share a device, uploaded (`cuGraphUpload`, on
    /// the stream of the launch): what is left to the first launch takes a device on which another rank may
    /// wait for this one by then. Where steps run in rounds besides, ranks that have to capture are in here
    /// [while all others wait](crate::StepRunner#in-rounds-on-a-shared-device), and none launches before all
    /// have returned. Call nothing collective: there may be ranks that do not capture.
    ///
    /// A step with other options than those of `spec`, of another dispatcher or into another row set is
    /// refused, with [`DispatchError::Order`](token_dispatch::DispatchError::Order), and discarded.
    ///
    /// # Errors
    ///
    /// Whatever keeps the engine from it. Nothing is launched then.
    fn capture(&mut self, spec: &StepSpec<'_, B>) -> Result<EmbeddedStep<B>, BodyError>;

    /// Launches what was captured last, once, in the order of the runner's stream: one graph, or all that
    /// the step is spread over. Waits neither for it nor for a thread that launches another step of the
    /// dispatcher, which would wait for this launch.
    ///
    /// # Errors
    ///
    /// Whatever the launch reports; nothing was launched then.
    fn launch(&mut self) -> Result<(), BodyError>;

    /// The capture is of no use any more.
    fn discard(&mut self) {}

    /// Whether the engine can run a step without a graph, for when it cannot be captured again or does
    /// not fit after the last replay. The same on all ranks. Without that such a step is refused.
    fn runs_eagerly(&self) -> bool {
        false
    }

    /// Queues the body of an eager step, if [`EngineGraph::runs_eagerly`].
    ///
    /// # Errors
    ///
    /// Whatever keeps the engine from it; that ends the group.
    fn queue_eagerly(&mut self, step: &mut Step<'static, B>) -> Result<(), BodyError> {
        let _ = step;
        Err("the engine does not run steps eagerly".into())
    }
}

/// How a runner wants a step to be captured.
#[derive(Debug)]
pub struct StepSpec<'r, B: Backend> {
    pub(crate) dispatcher: &'r TokenDispatcher<B>,
    pub(crate) rows: &'r RowSet<B>,
    pub(crate) options: StepOptions,
}

impl<B: Backend> StepSpec<'_, B> {
    /// Records the step into what the engine is capturing on `stream`, see [`EmbeddedStep::record`].
    ///
    /// # Errors
    ///
    /// As for [`EmbeddedStep::record`].
    pub fn record(
        &self,
        stream: &B::Stream,
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<EmbeddedStep<B>, CaptureError> {
        let options = EmbedOptions::new(self.options);
        EmbeddedStep::record(self.dispatcher, stream, options, &[self.rows], body)
    }

    /// Records the beginning of a step that is spread over several graphs, see [`EmbeddedStep::begin`].
    ///
    /// # Errors
    ///
    /// As for [`EmbeddedStep::begin`].
    pub fn begin(
        &self,
        stream: &B::Stream,
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<StepPieces<B>, CaptureError> {
        let options = EmbedOptions::new(self.options);
        EmbeddedStep::begin(self.dispatcher, stream, options, &[self.rows], body)
    }

    /// In what a captured step is not what was asked for, if in anything.
    pub(crate) fn differs(&self, captured: &EmbeddedStep<B>) -> Option<&'static str> {
        if !captured.dispatcher().is(self.dispatcher) {
            return Some("dispatcher");
        }
        if let Some(option) = captured.options().differs(&self.options) {
            return Some(option);
        }
        let mut sets = captured.shapes().iter().map(|(set, _)| set.id());
        let receives = captured.dispatches() > 0;
        (receives && !sets.any(|set| set == self.rows.id())).then_some("row set")
    }

    /// The row set that the step receives into.
    pub fn rows(&self) -> &RowSet<B> {
        self.rows
    }

    /// How the step runs.
    pub fn options(&self) -> &StepOptions {
        &self.options
    }
}

//! Where a runner gets its step from: a body that it records itself, or a graph of the engine's.

use ep_context::Backend;
use ep_context::error::chain;
use graph_capture::{BodyError, CaptureError, EmbeddedStep, StepGraph};
use token_dispatch::{DispatchError, Step};

use crate::engine::{EngineGraph, StepSpec};
use crate::runner::StepBody;

/// A step, and its graph if there is one.
pub(crate) enum Source<B: Backend> {
    /// A body of the caller's, and the graph that this library makes of it.
    Own { body: StepBody<B>, graph: Option<StepGraph<'static, B>> },
    /// A graph that the engine makes.
    Engine { engine: Box<dyn EngineGraph<B>>, step: Option<EmbeddedStep<B>> },
}

impl<B: Backend> Source<B> {
    pub(crate) fn own(body: StepBody<B>) -> Self {
        Self::Own { body, graph: None }
    }

    pub(crate) fn engine(engine: Box<dyn EngineGraph<B>>) -> Self {
        Self::Engine { engine, step: None }
    }

    /// Whether there is a graph.
    pub(crate) fn is_recorded(&self) -> bool {
        match self {
            Self::Own { graph, .. } => graph.is_some(),
            Self::Engine { step, .. } => step.is_some(),
        }
    }

    /// Whether there is a graph that may be replayed.
    pub(crate) fn is_current(&self) -> bool {
        match self {
            Self::Own { graph, .. } => graph.as_ref().is_some_and(|g| g.check_current().is_ok()),
            Self::Engine { step, .. } => step.as_ref().is_some_and(|s| s.check_current().is_ok()),
        }
    }

    /// Drops the graph.
    pub(crate) fn discard(&mut self) {
        match self {
            Self::Own { graph, .. } => *graph = None,
            Self::Engine { engine, step } => {
                *step = None;
                engine.discard();
            }
        }
    }

    /// Records for the capacity that holds, or that is planned. On an error there is no graph.
    pub(crate) fn record(
        &mut self,
        spec: &StepSpec<'_, B>,
        stream: &B::Stream,
    ) -> Result<(), CaptureError> {
        match self {
            Self::Own { body, graph } => {
                *graph = Some(match graph.take() {
                    Some(graph) => graph.record_again(stream, body)?.0,
                    None => StepGraph::record(spec.dispatcher, stream, spec.options, body)?,
                });
            }
            Self::Engine { engine, step } => {
                *step = None;
                let rank = spec.dispatcher.context().rank();
                let captured =
                    engine.capture(spec).map_err(|source| CaptureError::Body { rank, source })?;
                if let Some(differs) = spec.differs(&captured) {
                    drop(captured);
                    engine.discard();
                    let reason = format!(
                        "the engine has recorded a step with another {differs} than it was asked for; \
                         record it by StepSpec::record or StepSpec::begin"
                    );
                    return Err(DispatchError::Order { operation: "capture", rank, reason }.into());
                }
                *step = Some(captured);
            }
        }
        Ok(())
    }

    /// Launches the graph and returns the number of the step.
    pub(crate) fn replay(
        &mut self,
        spec: &StepSpec<'_, B>,
        stream: &B::Stream,
    ) -> Result<u32, CaptureError> {
        match self {
            Self::Own { graph: Some(graph), .. } => graph.replay(stream),
            Self::Engine { engine, step: Some(step) } => step.replay(|| engine.launch()),
            _ => Err(CaptureError::Dispatch(DispatchError::Order {
                operation: "replay",
                rank: spec.dispatcher.context().rank(),
                reason: "no graph is recorded".to_owned(),
            })),
        }
    }

    /// Why a step cannot run without a graph, if it cannot.
    pub(crate) fn refuses_eager(&self) -> Option<&'static str> {
        match self {
            Self::Engine { engine, .. } if !engine.runs_eagerly() => {
                Some("the engine does not run steps eagerly")
            }
            _ => None,
        }
    }

    /// Queues the body of an eager step.
    pub(crate) fn queue_eagerly(&mut self, step: &mut Step<'static, B>) -> Result<(), BodyError> {
        match self {
            Self::Own { body, .. } => body(step),
            Self::Engine { engine, .. } => engine.queue_eagerly(step),
        }
    }
}

/// What a rank says that could not record.
pub(crate) fn why_not_recorded(error: &crate::OverflowError, eager: Option<&str>) -> String {
    match eager {
        Some(reason) => format!("{}, and {reason}", chain(error)),
        None => chain(error),
    }
}

//! A step in a graph of the engine's.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ep_context::{Backend, Queue, QueueScope, RowSet, RowShape};
use smallvec::SmallVec;
use token_dispatch::{DispatchError, RowShaping, Step, StepMode, StepOptions, TokenDispatcher};

use crate::error::{BodyError, CaptureError};
use crate::shapes;

/// How a step is recorded into a graph of the engine's.
#[derive(Clone, Copy, Debug)]
pub struct EmbedOptions {
    step: StepOptions,
    in_child_graph: bool,
}

impl EmbedOptions {
    /// A step with these options, in a graph that is launched by itself.
    pub fn new(step: StepOptions) -> Self {
        Self { step, in_child_graph: false }
    }

    /// A step with these options, in a graph that the engine will make a node of another, which nobody can
    /// see while it is recorded: what cannot stand there, a loop on the device, is refused at once. Of a
    /// step that was not [said](Self::new) to be in one it is the driver that refuses the node later.
    pub fn in_child_graph(step: StepOptions) -> Self {
        Self { step, in_child_graph: true }
    }

    fn check<B: Backend>(
        &self,
        dispatcher: &TokenDispatcher<B>,
        sets: &[&RowSet<B>],
    ) -> Result<(), CaptureError> {
        Step::check_embeddable(dispatcher, &self.step, sets)?;
        if self.in_child_graph && self.step.mode() == StepMode::Rounds {
            return Err(order(
                dispatcher,
                "a step in rounds is a loop on the device, which cannot stand in a graph within a \
                 graph; record a static step there, or launch the graph by itself",
            ));
        }
        Ok(())
    }
}

impl From<StepOptions> for EmbedOptions {
    fn from(step: StepOptions) -> Self {
        Self::new(step)
    }
}

/// A step recorded into a graph that an engine captured itself, and instantiates, launches and drops
/// as it pleases.
///
/// The engine's graph keeps alive what the step uses, by the means of the backend (a user object, on a
/// GPU), so this value may be dropped before it, as may everything else. What was kept is dropped by
/// [`ep_context::reclaim`], or by the next call that gives things back, once the graph is gone.
///
/// # Numbers
///
/// The device numbers the steps that it runs, and the host counts along. So a launch of the engine's goes
/// through [`EmbeddedStep::replay`], or is told at once by [`EmbeddedStep::replayed`]; both return the
/// number by which the record is found. An engine that can do neither reads records by
/// [`Records::follow`](token_dispatch::Records::follow), in the order in which the device publishes them.
///
/// # Staleness
///
/// A step that is shaped by capacity is stale when that has changed. [`EmbeddedStep::replay`] refuses it
/// then. If the engine launches it all the same, the step itself finds out on the device: it moves
/// nothing on that rank, and its record is [`DispatchError::StaleGraph`] on every rank. The group goes on;
/// what the step wrote on any rank is worth nothing. Where the step
/// [holds](StepOptions::with_hold_on_overflow), later ones drain until
/// [`TokenDispatcher::resume`].
pub struct EmbeddedStep<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    options: StepOptions,
    shapes: SmallVec<[(RowSet<B>, RowShape); 2]>,
    dispatches: u32,
    pieces: u32,
}

impl<B: Backend> EmbeddedStep<B> {
    /// Records one step into what the engine is capturing on `stream`: its beginning, what `body` queues,
    /// its end. The capture goes on afterwards, and is the engine's to end. `sets` are the row sets into
    /// which the step receives.
    ///
    /// Allocates no device memory and waits for nothing. `body` queues on [`Step::queue`], whose stream is
    /// the engine's, or the body of a loop; it may queue the engine's own kernels on the handle of that
    /// stream. It gets no pool to allocate from since nothing is allocated in a step: what has a row
    /// dimension belongs into the row set, so that it grows with it, and everything else is there before.
    /// An allocation that the driver records is refused in a loop.
    ///
    /// Local: ranks need not record at the same time, but all of them replay the same dispatches and
    /// combines in the same order. Engines whose ranks share a device upload every graph before they first
    /// launch it (`cuGraphUpload`). Whoever instantiates a graph with loops takes the device for it, on which
    /// no rank may wait for another meanwhile: there such a graph is instantiated and uploaded on all ranks,
    /// which meet, and only then launch it.
    ///
    /// # Errors
    ///
    /// [`CaptureError::Dispatch`] for an eager step, for a loop in a
    /// [child graph](EmbedOptions::in_child_graph) and for too many sets, and
    /// [`CaptureError::Backend`] if nobody captures on the stream: nothing was recorded then. Any other error, of
    /// `body` as [`CaptureError::Body`], and [`CaptureError::Dispatch`] for a `body` that has put another step in
    /// the place of its own, leaves a part of a step in the engine's graph; so the capture is
    /// made unusable, and ending it is an error.
    ///
    /// # Panics
    ///
    /// If `body` panics, with its panic, as after an error.
    pub fn record(
        dispatcher: &TokenDispatcher<B>,
        stream: &B::Stream,
        options: impl Into<EmbedOptions>,
        sets: &[&RowSet<B>],
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<Self, CaptureError> {
        let options = options.into();
        options.check(dispatcher, sets)?;
        piece(dispatcher, stream, |queue| {
            let mut step = Step::begin_embedded(dispatcher, queue, options.step, sets)?;
            run(dispatcher, &mut step, body)?;
            Self::of(dispatcher, step, 1)
        })
    }

    /// Begins a step that is spread over several graphs of the engine's, each captured by itself, on
    /// whatever streams: records the beginning and what `body` queues. Every replay of the step launches all
    /// of them, one after the other.
    ///
    /// # Errors
    ///
    /// As for [`EmbeddedStep::record`].
    ///
    /// # Panics
    ///
    /// If `body` panics, with its panic.
    pub fn begin(
        dispatcher: &TokenDispatcher<B>,
        stream: &B::Stream,
        options: impl Into<EmbedOptions>,
        sets: &[&RowSet<B>],
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<StepPieces<B>, CaptureError> {
        let options = options.into();
        options.check(dispatcher, sets)?;
        let step = piece(dispatcher, stream, |queue| {
            let mut step = Step::begin_embedded(dispatcher, queue, options.step, sets)?;
            run(dispatcher, &mut step, body)?;
            Ok(step)
        })?;
        Ok(StepPieces { dispatcher: dispatcher.clone(), step: Some(step), pieces: 1 })
    }

    fn of(
        dispatcher: &TokenDispatcher<B>,
        step: Step<'static, B>,
        pieces: u32,
    ) -> Result<Self, CaptureError> {
        let summary = step.finish()?;
        Ok(Self {
            dispatcher: dispatcher.clone(),
            options: summary.options,
            shapes: summary.shapes,
            dispatches: summary.dispatches,
            pieces,
        })
    }

    /// Replays the step once: calls `launch`, which launches the engine's graph, or all that the step is
    /// spread over, once and in order. Returns the number of the step, by which its record is found.
    ///
    /// Threads that launch steps of one dispatcher do so one after the other, this way too: `launch` waits for
    /// none of them. A capacity that another thread changes between the check and the launch is found by the
    /// step itself, see [above](EmbeddedStep#staleness). Takes no place in the
    /// [`LaunchOrder`](token_dispatch::LaunchOrder), as for [`StepGraph::replay`](crate::StepGraph::replay).
    ///
    /// # Errors
    ///
    /// [`CaptureError::Stale`] if the capacity that it was shaped for has changed, with nothing launched;
    /// [`CaptureError::Launch`] with what `launch` returned, which means that nothing was;
    /// [`CaptureError::Dispatch`] within the launch of another step of the dispatcher.
    pub fn replay(
        &self,
        launch: impl FnOnce() -> Result<(), BodyError>,
    ) -> Result<u32, CaptureError> {
        self.check_current()?;
        let rank = self.dispatcher.context().rank();
        let launch = || launch().map_err(|source| CaptureError::Launch { rank, source });
        self.dispatcher.launch_step(launch)
    }

    /// Counts one launch that the engine has made by itself, and returns the number of its step. To be
    /// called once for each, in their order, before anything else of the group is launched, by any thread.
    pub fn replayed(&self) -> u32 {
        self.dispatcher.count_step()
    }

    /// Whether the step may still be replayed.
    ///
    /// # Errors
    ///
    /// [`CaptureError::Stale`] with the two shapes.
    pub fn check_current(&self) -> Result<(), CaptureError> {
        if self.options.shaping() == RowShaping::DeviceCounted {
            return Ok(());
        }
        shapes::check_current(&self.dispatcher, &self.shapes)
    }

    /// The dispatcher whose step it is.
    pub fn dispatcher(&self) -> &TokenDispatcher<B> {
        &self.dispatcher
    }

    /// How it runs.
    pub fn options(&self) -> &StepOptions {
        &self.options
    }

    /// The capacities for which the step is shaped, with the sets that have them.
    pub fn shapes(&self) -> &[(RowSet<B>, RowShape)] {
        &self.shapes
    }

    /// How many dispatches the step has.
    pub fn dispatches(&self) -> u32 {
        self.dispatches
    }

    /// Over how many graphs it is spread.
    pub fn pieces(&self) -> u32 {
        self.pieces
    }
}

/// A step that is being spread over several graphs of the engine's. It is a whole when
/// [`StepPieces::end`] has returned; merely dropped, it leaves a beginning without an end, whose graphs
/// must not be launched.
#[must_use = "a step without its end must not be replayed"]
pub struct StepPieces<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    /// Gone when a piece could not be recorded.
    step: Option<Step<'static, B>>,
    pieces: u32,
}

impl<B: Backend> StepPieces<B> {
    /// Records what `body` queues into what the engine is capturing on `stream` now.
    ///
    /// # Errors
    ///
    /// [`CaptureError::Dispatch`] if the capacity has changed since the step was begun, or an earlier
    /// piece was not recorded; otherwise as for [`EmbeddedStep::record`].
    ///
    /// # Panics
    ///
    /// If `body` panics, with its panic.
    pub fn record(
        &mut self,
        stream: &B::Stream,
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<(), CaptureError> {
        let mut step = self.take()?;
        let step = piece(&self.dispatcher, stream, |queue| {
            step.continue_on(queue)?;
            run(&self.dispatcher, &mut step, body)?;
            Ok(step)
        })?;
        self.step = Some(step);
        self.pieces += 1;
        Ok(())
    }

    /// Records what `body` queues, and the end of the step, into what the engine is capturing on `stream`
    /// now.
    ///
    /// # Errors
    ///
    /// As for [`StepPieces::record`].
    ///
    /// # Panics
    ///
    /// If `body` panics, with its panic.
    pub fn end(
        mut self,
        stream: &B::Stream,
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<EmbeddedStep<B>, CaptureError> {
        let mut step = self.take()?;
        let pieces = self.pieces + 1;
        piece(&self.dispatcher, stream, |queue| {
            step.continue_on(queue)?;
            run(&self.dispatcher, &mut step, body)?;
            EmbeddedStep::of(&self.dispatcher, step, pieces)
        })
    }

    fn take(&mut self) -> Result<Step<'static, B>, CaptureError> {
        self.step.take().ok_or_else(|| {
            order(&self.dispatcher, "an earlier piece of the step could not be recorded")
        })
    }
}

/// Records into what others capture on `stream`, all or nothing that could be used.
fn piece<B: Backend, T>(
    dispatcher: &TokenDispatcher<B>,
    stream: &B::Stream,
    record: impl FnOnce(Queue<'static, B>) -> Result<T, CaptureError>,
) -> Result<T, CaptureError> {
    let backend = dispatcher.context().backend();
    backend.enter_recording(stream)?;
    let scope = QueueScope::new();
    let recorded = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: what is queued may run at any time, and uses nothing borrowed.
        record(unsafe { Queue::recording(backend, stream, &scope) })
    }));
    drop(scope);
    match recorded {
        Ok(Ok(value)) => {
            backend.leave_recording(stream)?;
            Ok(value)
        }
        Ok(Err(error)) => {
            backend.spoil_recording(stream);
            Err(error)
        }
        Err(panic) => {
            backend.spoil_recording(stream);
            resume_unwind(panic)
        }
    }
}

fn run<B: Backend>(
    dispatcher: &TokenDispatcher<B>,
    step: &mut Step<'static, B>,
    body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
) -> Result<(), CaptureError> {
    let rank = dispatcher.context().rank();
    step.queue_with(|step| body(step).map_err(|source| CaptureError::Body { rank, source }))
}

fn order<B: Backend>(dispatcher: &TokenDispatcher<B>, reason: &str) -> CaptureError {
    let (rank, reason) = (dispatcher.context().rank(), reason.to_owned());
    DispatchError::Order { operation: "embedded step", rank, reason }.into()
}

impl<B: Backend> fmt::Debug for EmbeddedStep<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedStep")
            .field("dispatcher", &self.dispatcher)
            .field("options", &self.options)
            .field("shapes", &self.shapes)
            .field("dispatches", &self.dispatches)
            .field("pieces", &self.pieces)
            .finish()
    }
}

impl<B: Backend> fmt::Debug for StepPieces<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepPieces")
            .field("step", &self.step)
            .field("pieces", &self.pieces)
            .finish_non_exhaustive()
    }
}

//! A recorded step.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ep_context::backend::Update;
use ep_context::{Backend, Queue, QueueScope, RowSet, RowShape};
use smallvec::SmallVec;
use token_dispatch::{DispatchError, RowShaping, Step, StepOptions, TokenDispatcher};

use crate::error::{BodyError, CaptureError};
use crate::shapes;

/// A step recorded into a graph, ready to be replayed.
///
/// The graph owns what its operations use: lanes, handles and row buffers, and everything that the
/// slices given to them own. Memory that was only borrowed for `'a` outlives it by the borrow. So
/// there is nothing that a caller can drop under a graph. Dropping a graph waits for none of its replays: what
/// it owns stays until they have run, and that what it borrowed does is the promise of
/// [`DeviceSlice::borrowed`](ep_context::DeviceSlice::borrowed).
///
/// A graph shaped by capacity ([`RowShaping::Capacity`]) is *stale* once that capacity has changed:
/// [`StepGraph::replay`] refuses it, and [`StepGraph::record_again`] makes a current one of it.
pub struct StepGraph<'a, B: Backend> {
    dispatcher: TokenDispatcher<B>,
    executable: B::Executable,
    options: StepOptions,
    shapes: SmallVec<[(RowSet<B>, RowShape); 2]>,
    dispatches: u32,
    // Covariant: a graph may be used for less long than what it borrowed.
    _borrowed: PhantomData<&'a ()>,
}

impl<'a, B: Backend> StepGraph<'a, B> {
    /// Records one step: its beginning, what `body` queues, its end. While `body` runs, `stream`
    /// records instead of running; it ends when `body` returns, fails or panics.
    ///
    /// Local: ranks need not record at the same time, but all of them replay the same dispatches and
    /// combines in the same order. May allocate and synchronise. In rounds this takes the device, on which
    /// no rank may wait for another meanwhile: ranks that share one meet between recording and the first
    /// replay.
    ///
    /// # Errors
    ///
    /// [`CaptureError::Body`] with what `body` returned; [`CaptureError::Dispatch`] for an eager step,
    /// which cannot be recorded, and for a `body` that has put another step, of a recording around or within
    /// this one, in the place of its own. The stream is then as before.
    ///
    /// # Panics
    ///
    /// If `body` panics, with its panic.
    pub fn record(
        dispatcher: &TokenDispatcher<B>,
        stream: &B::Stream,
        options: StepOptions,
        body: impl FnOnce(&mut Step<'a, B>) -> Result<(), BodyError>,
    ) -> Result<Self, CaptureError> {
        let recorded = Recorded::new(dispatcher, stream, options, body)?;
        let executable = dispatcher.context().backend().instantiate(recorded.recording)?;
        Ok(Self {
            dispatcher: dispatcher.clone(),
            executable,
            options,
            shapes: recorded.shapes,
            dispatches: recorded.dispatches,
            _borrowed: PhantomData,
        })
    }

    /// Records the step again, into this graph: in place where the backend can do so. Consumes the
    /// graph, so that a stale one cannot be replayed by mistake.
    ///
    /// # Errors
    ///
    /// As for [`StepGraph::record`]; the graph is then gone.
    ///
    /// # Panics
    ///
    /// If `body` panics, with its panic.
    pub fn record_again(
        mut self,
        stream: &B::Stream,
        body: impl FnOnce(&mut Step<'a, B>) -> Result<(), BodyError>,
    ) -> Result<(Self, Update), CaptureError> {
        let recorded = Recorded::new(&self.dispatcher, stream, self.options, body)?;
        let backend = self.dispatcher.context().backend();
        let update = backend.update(&mut self.executable, recorded.recording)?;
        self.shapes = recorded.shapes;
        self.dispatches = recorded.dispatches;
        Ok((self, update))
    }

    /// Queues one replay and returns the number of the step, by which its record is found. Waits for
    /// nothing and allocates no device memory; threads that replay steps of one dispatcher at the same time
    /// do so one after the other.
    ///
    /// A graph that is stale is never launched: from the check on until the replay is queued, another thread
    /// that [commits](ep_context::PlannedGrowth::commit) a change of the capacity waits. The device itself
    /// checks only steps in graphs of others ([`EmbeddedStep`](crate::EmbeddedStep)), which are launched
    /// unseen.
    ///
    /// A replay takes no place among the steps that are to be launched again when one before them has overflowed:
    /// beside runners that is for the caller to do, see [`LaunchOrder`](token_dispatch::LaunchOrder).
    ///
    /// # Errors
    ///
    /// [`CaptureError::Stale`] if the capacity it was shaped for has changed, and
    /// [`CaptureError::Dispatch`] on a stream that records: the step would run in replays that nobody
    /// counts, which is what an [`EmbeddedStep`](crate::EmbeddedStep) is for. Nothing is queued then.
    pub fn replay(&self, stream: &B::Stream) -> Result<u32, CaptureError> {
        let context = self.dispatcher.context();
        if context.backend().is_recording(stream) {
            return Err(CaptureError::Dispatch(DispatchError::Order {
                operation: "replay",
                rank: context.rank(),
                reason: "the stream records; record the step itself there, as an EmbeddedStep"
                    .to_owned(),
            }));
        }
        let replay = || context.backend().replay(stream, &self.executable);
        self.dispatcher.launch_step(|| {
            Ok(shapes::while_current(&self.dispatcher, self.shaped_for(), replay)??)
        })
    }

    /// Whether the graph may still be replayed.
    ///
    /// # Errors
    ///
    /// [`CaptureError::Stale`] with the two shapes.
    pub fn check_current(&self) -> Result<(), CaptureError> {
        shapes::check_current(&self.dispatcher, self.shaped_for())
    }

    /// The capacities that have to hold for a replay.
    fn shaped_for(&self) -> &[(RowSet<B>, RowShape)] {
        match self.options.shaping() {
            RowShaping::DeviceCounted => &[],
            RowShaping::Capacity => &self.shapes,
        }
    }

    /// How many operations a replay runs, those of loop bodies counted once.
    pub fn node_count(&self) -> usize {
        self.dispatcher.context().backend().node_count(&self.executable)
    }

    /// How many dispatches the step has.
    pub fn dispatches(&self) -> u32 {
        self.dispatches
    }
}

/// A step recorded and not yet executable.
struct Recorded<B: Backend> {
    recording: B::Recording,
    shapes: SmallVec<[(RowSet<B>, RowShape); 2]>,
    dispatches: u32,
}

impl<B: Backend> Recorded<B> {
    fn new<'a>(
        dispatcher: &TokenDispatcher<B>,
        stream: &B::Stream,
        options: StepOptions,
        body: impl FnOnce(&mut Step<'a, B>) -> Result<(), BodyError>,
    ) -> Result<Self, CaptureError> {
        let backend = dispatcher.context().backend();
        let rank = dispatcher.context().rank();
        let key = backend.begin_recording(stream)?;
        let scope = QueueScope::new();
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the stream records until the scope is dropped, since `body` has no key to the
            // recording; and the graph that comes of it carries 'a: no replay can be queued beyond it.
            let queue: Queue<'a, B> = unsafe { Queue::recording(backend, stream, &scope) };
            let mut step = Step::begin(dispatcher, queue, options)?;
            step.queue_with(|step| {
                body(step).map_err(|source| CaptureError::Body { rank, source })
            })?;
            Ok(step.finish()?)
        }));
        // A body that records within another has had two steps, and may have left either there.
        drop(scope);
        match recorded {
            Ok(Ok(summary)) => Ok(Self {
                recording: backend.end_recording(&key)?,
                shapes: summary.shapes,
                dispatches: summary.dispatches,
            }),
            Ok(Err(error)) => {
                backend.abandon_recording(&key);
                Err(error)
            }
            Err(panic) => {
                backend.abandon_recording(&key);
                resume_unwind(panic)
            }
        }
    }
}

impl<B: Backend> fmt::Debug for StepGraph<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepGraph")
            .field("dispatcher", &self.dispatcher)
            .field("options", &self.options)
            .field("shapes", &self.shapes)
            .field("dispatches", &self.dispatches)
            .finish_non_exhaustive()
    }
}

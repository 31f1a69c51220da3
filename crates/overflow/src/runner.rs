//! Runs a step, and runs it again when routing overflows.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use ep_context::{Backend, RowSet};
use graph_capture::{BodyError, EmbeddedStep, StepGraph};
use token_dispatch::{DispatchError, Step, StepMode, StepOptions, StepRecord, TokenDispatcher};

use crate::engine::{EngineGraph, StepSpec};
use crate::error::OverflowError;
use crate::growth::{Adjustments, BetweenSteps};
use crate::hooks::{NoHooks, RecoveryHooks};
use crate::policy::{OverflowPolicy, RecoverySettings};
use crate::report::{StepReport, StepTimes};
use crate::source::Source;

mod eager;
mod flight;
mod meeting;
mod recovery;
mod settle;

pub use flight::Launched;
use flight::{Flight, InFlight};
use meeting::Meeting;

/// What a step does: queues its dispatches, experts and combines. Called once for every recording,
/// and for every eager run.
pub type StepBody<B> =
    Box<dyn FnMut(&mut Step<'static, B>) -> Result<(), BodyError> + Send + 'static>;

/// Runs one kind of step over and over: recorded once, replayed, recovered when it overflows. The graph
/// is made of a body by this library, or is the engine's own ([`StepRunner::for_engine`]).
///
/// Every rank has its own runner, with the same settings, and all of them run the same steps in the
/// same order. Inputs lie in device memory that the body captured; write new ones before each
/// [`run`](StepRunner::run), and leave them until it returns.
///
/// # In rounds on a shared device
///
/// A graph with loops cannot be made ready on a device on which a rank waits for another. Where ranks of
/// the group [share a device](TokenDispatcher::shares_devices), steps in rounds are therefore recorded by
/// all ranks at once: they meet before the first launch, and at the next one after [`StepRunner::run_eager`]
/// and [`StepRunner::invalidate`], after a step that any of them ran from a [stale
/// graph](DispatchError::StaleGraph), and after one behind which the capacity of any of them changes. No
/// other launch waits for another rank, and none does where each rank has a device of its own, but to launch
/// steps again that moved nothing because of one before them, where [`StepRunner::settle`] could not.
///
/// So all ranks launch and settle in the same order there. A rank that has to record at another time,
/// since its row set was changed by others than this runner, does so by itself, and if the device is not
/// given to it, its peers' deadline ends the step. Call [`StepRunner::invalidate`] on all ranks after such a change.
pub struct StepRunner<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    stream: B::Stream,
    rows: RowSet<B>,
    settings: RecoverySettings,
    /// What changes this rank's capacity, unless the meeting does for all.
    between: BetweenSteps,
    /// Where all ranks record at once.
    meeting: Option<Meeting>,
    source: Source<B>,
    flight: Flight,
    /// Rows were given up whose memory is still there.
    trim_due: bool,
    hooks: Box<dyn RecoveryHooks>,
}

/// Counts of one step while it runs.
#[derive(Debug, Default)]
struct Tally {
    growths: u32,
    recordings: u32,
    recovered_rows: u64,
    times: StepTimes,
}

impl Tally {
    /// Counts what was done for the step elsewhere.
    fn add(&mut self, other: &Tally) {
        self.growths += other.growths;
        self.recordings += other.recordings;
        self.recovered_rows += other.recovered_rows;
        self.times.recording += other.times.recording;
        self.times.growing += other.times.growing;
    }
}

impl<B: Backend> StepRunner<B> {
    /// A runner of `body` on `stream`, whose dispatches receive into `rows`. Nothing is recorded yet.
    /// Collective: settings that decide what ranks do together are compared. The capacity of `rows`
    /// changes in the order of `stream`, with which other steps that receive into it are to be ordered.
    ///
    /// # Errors
    ///
    /// [`OverflowError::Growth`] for a factor out of range; on every rank, a setting that differs.
    pub fn new(
        dispatcher: &TokenDispatcher<B>,
        stream: B::Stream,
        rows: RowSet<B>,
        settings: RecoverySettings,
        body: StepBody<B>,
    ) -> Result<Self, OverflowError> {
        Self::with(dispatcher, stream, rows, settings, Source::own(body))
    }

    /// A runner of a step whose graph is the engine's: captured, launched and dropped by `engine`. `stream`
    /// is where the engine launches it, or one that is ordered with that; the runner changes capacity
    /// there. Otherwise as [`StepRunner::new`].
    ///
    /// # Errors
    ///
    /// As for [`StepRunner::new`].
    pub fn for_engine(
        dispatcher: &TokenDispatcher<B>,
        stream: B::Stream,
        rows: RowSet<B>,
        settings: RecoverySettings,
        engine: Box<dyn EngineGraph<B>>,
    ) -> Result<Self, OverflowError> {
        Self::with(dispatcher, stream, rows, settings, Source::engine(engine))
    }

    fn with(
        dispatcher: &TokenDispatcher<B>,
        stream: B::Stream,
        rows: RowSet<B>,
        settings: RecoverySettings,
        source: Source<B>,
    ) -> Result<Self, OverflowError> {
        let settings = match settings.overflow() {
            OverflowPolicy::Rounds => {
                // With fewer a window may hold no token, and no step could be recorded any more.
                let asked = settings.adjustments();
                let min_rows = dispatcher.least_rows().max(asked.min_rows);
                settings.with_adjustments(Adjustments { min_rows, ..asked })
            }
            _ => settings,
        };
        let rank = dispatcher.context().rank().index();
        let between = BetweenSteps::new(settings.growth(), settings.adjustments(), rank)?;
        let between = match settings.overflow() {
            OverflowPolicy::Recover => between,
            _ => between.only_as_asked(),
        };
        let mut fields = settings.fields();
        fields.push(("runs_eagerly", source.refuses_eager().is_none().to_string()));
        dispatcher.context().agree("recovery settings", &fields)?;
        let loops = settings.overflow() == OverflowPolicy::Rounds;
        Ok(Self {
            dispatcher: dispatcher.clone(),
            stream,
            rows,
            settings,
            between,
            meeting: (loops && dispatcher.shares_devices()).then(|| Meeting::new(rank)),
            source,
            flight: Flight::new(Arc::clone(dispatcher.launch_order())),
            trim_due: false,
            hooks: Box::new(NoHooks),
        })
    }

    /// Sets the hooks that put back what a discarded step has changed.
    #[must_use]
    pub fn hooks(mut self, hooks: impl RecoveryHooks + 'static) -> Self {
        self.hooks = Box::new(hooks);
        self
    }

    /// The stream on which steps run: inputs are written here, or ordered with it.
    pub fn stream(&self) -> &B::Stream {
        &self.stream
    }

    /// The row set that steps receive into.
    pub fn rows(&self) -> &RowSet<B> {
        &self.rows
    }

    /// The graph that the next step replays, if it is recorded and this library's.
    pub fn graph(&self) -> Option<&StepGraph<'static, B>> {
        match &self.source {
            Source::Own { graph, .. } => graph.as_ref(),
            Source::Engine { .. } => None,
        }
    }

    /// The step in the engine's graph that the next step replays, if it is captured.
    pub fn embedded(&self) -> Option<&EmbeddedStep<B>> {
        match &self.source {
            Source::Own { .. } => None,
            Source::Engine { step, .. } => step.as_ref(),
        }
    }

    /// Drops the recorded graph; the next step records a new one. For when the body would queue
    /// something else now: settle what is in flight before, since it might have to be launched again. On
    /// all ranks between the same steps
    /// [where they record at once](StepRunner#in-rounds-on-a-shared-device).
    pub fn invalidate(&mut self) {
        self.source.discard();
        self.meeting.iter_mut().for_each(Meeting::call);
    }

    /// Runs one step to its end: replays the graph, waits for the record, and recovers the step if it
    /// overflowed; steps that are in flight are [settled](StepRunner::settle) before. Collective in that
    /// every rank runs it. A clean step makes no blocking call to the device: it polls for the record.
    ///
    /// # Errors
    ///
    /// As for [`StepRunner::launch`] and [`StepRunner::settle`].
    pub fn run(&mut self) -> Result<StepReport, OverflowError> {
        let launched = self.launch()?;
        self.settle(launched)
    }

    /// The first half of [`StepRunner::run`]: records if that is needed, and launches. Waits for nothing
    /// on the device but what recording waits for. More steps may be launched before the first is settled,
    /// as many, over all runners, as the
    /// [record ring](token_dispatch::DispatchConfigBuilder::record_ring) holds; under
    /// [`OverflowPolicy::Recover`] those behind one that overflows move nothing, until it is settled.
    ///
    /// # Errors
    ///
    /// What keeps the step from being recorded or launched, and [`DispatchError::Order`] for more steps in
    /// flight than the record ring holds, and where steps of another runner have to be
    /// [launched again](StepRunner::settle) first; nothing was launched then. Where ranks [record at
    /// once](StepRunner#in-rounds-on-a-shared-device), [`OverflowError::Context`] too: with
    /// [`RendezvousError::Peer`](ep_context::rendezvous::RendezvousError::Peer) if another could not
    /// record, which leaves the group as it was, able to record again; with the ranks that did not come
    /// within the deadline of [`Phase::Agreement`](ep_context::Phase::Agreement), which ends it. The same
    /// where steps in flight have to be launched again first, because an earlier call could not.
    pub fn launch(&mut self) -> Result<Launched, OverflowError> {
        let most = self.dispatcher.config().record_ring();
        if self.flight.of_all() >= most {
            return Err(self.order(
                "launch",
                &format!(
                    "{most} steps are in flight, and the record ring holds no more; settle the oldest"
                ),
            ));
        }
        let mut tally = Tally::default();
        self.launch_held(&mut tally)?;
        if self.flight.waits_for_others() {
            return Err(self.behind_others("launch"));
        }
        self.trim();
        let capacity_before = self.rows.capacity();
        self.make_current(&mut tally)?;
        let backend = self.dispatcher.context().backend().clone();
        let calls_before = backend.blocking_calls();
        let start = Instant::now();
        let step = self.replay()?;
        self.flight.push(InFlight {
            launched: step,
            number: step,
            place: self.flight.enter(),
            capacity_before,
            blocking_calls: backend.blocking_calls() - calls_before,
            start,
            tally,
        });
        Ok(Launched { step })
    }

    /// Whether the record of a launched step is there, so that settling it does not wait for the device,
    /// unless it overflowed, or one that was launched before it and is not settled.
    pub fn is_done(&self, launched: &Launched) -> bool {
        // One that was settled with a later step is not waited for.
        let number = self.flight.number_of(launched.step);
        number.is_none_or(|number| self.dispatcher.records().is_published(number))
    }

    fn own_required(&self, record: &StepRecord) -> u32 {
        record.required.get(self.dispatcher.context().rank().index()).copied().unwrap_or(0)
    }

    fn limit(&self) -> u32 {
        self.settings.max_rows().unwrap_or(u32::MAX).min(self.rows.max_rows())
    }

    fn shaped_by_capacity(&self) -> bool {
        self.settings.shaping() == token_dispatch::RowShaping::Capacity
    }

    fn options(&self) -> StepOptions {
        options(&self.settings)
    }

    /// Sees to it that there is a graph to launch: with all ranks where they are to meet.
    fn make_current(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        if self.meeting.as_ref().is_some_and(Meeting::is_due) {
            self.record_together(tally)
        } else if !self.source.is_current() {
            self.record(tally)
        } else {
            Ok(())
        }
    }

    /// Records the step for the capacity that holds, or that is planned.
    fn record(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        let started = Instant::now();
        self.source.record(&spec(&self.dispatcher, &self.rows, &self.settings), &self.stream)?;
        tally.recordings += 1;
        tally.times.recording += started.elapsed();
        Ok(())
    }

    /// Launches the graph and returns the number of the step.
    fn replay(&mut self) -> Result<u32, OverflowError> {
        let spec = spec(&self.dispatcher, &self.rows, &self.settings);
        Ok(self.source.replay(&spec, &self.stream)?)
    }

    /// Waits for the record of a step.
    fn record_of(&mut self, step: u32) -> Result<StepRecord, OverflowError> {
        let record = self.dispatcher.records().wait_on(step, &self.stream);
        if let Err(DispatchError::StaleGraph { .. }) = record {
            // Every rank sees it, and holds back what is behind it.
            self.meeting.iter_mut().for_each(Meeting::call);
            self.resume()?;
        }
        Ok(record?)
    }

    /// The same of a step that nothing may have held back.
    fn record_of_run(
        &mut self,
        operation: &'static str,
        step: u32,
    ) -> Result<StepRecord, OverflowError> {
        let record = self.record_of(step)?;
        match record.drained {
            true => Err(self.drained(operation)),
            false => Ok(record),
        }
    }
}

fn options(settings: &RecoverySettings) -> StepOptions {
    StepOptions::new()
        .with_mode(match settings.overflow() {
            OverflowPolicy::Rounds => StepMode::Rounds,
            _ => StepMode::Static,
        })
        .with_shaping(settings.shaping())
        .with_hold_on_overflow(settings.overflow() == OverflowPolicy::Recover)
}

/// How the steps of a runner are recorded.
fn spec<'r, B: Backend>(
    dispatcher: &'r TokenDispatcher<B>,
    rows: &'r RowSet<B>,
    settings: &RecoverySettings,
) -> StepSpec<'r, B> {
    StepSpec { dispatcher, rows, options: options(settings) }
}

impl<B: Backend> fmt::Debug for StepRunner<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepRunner")
            .field("dispatcher", &self.dispatcher)
            .field("rows", &self.rows)
            .field("settings", &self.settings)
            .field("recorded", &self.source.is_recorded())
            .finish_non_exhaustive()
    }
}

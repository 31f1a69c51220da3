//! Runs a step, and runs it again when routing overflows.

use std::fmt;
use std::time::Instant;

use ep_context::error::chain;
use ep_context::{Backend, BackendError, Phase, PlannedGrowth, Queue, Rank, RowSet};
use graph_capture::{BodyError, StepGraph};
use token_dispatch::{Step, StepMode, StepOptions, StepRecord, TokenDispatcher};

use crate::agreement::{Decision, Refusal, Vote, agree};
use crate::error::OverflowError;
use crate::growth::{BetweenSteps, GrowthInput, StepSummary};
use crate::hooks::{NoHooks, RecoveryHooks};
use crate::policy::{OverflowPolicy, RecoverySettings};
use crate::report::{Outcome, StepReport, StepTimes};

/// What a step does: queues its dispatches, experts and combines. Called once for every recording,
/// and for every eager run.
pub type StepBody<B> =
    Box<dyn FnMut(&mut Step<'static, B>) -> Result<(), BodyError> + Send + 'static>;

/// Runs one kind of step over and over: recorded once, replayed, recovered when it overflows.
///
/// Every rank has its own runner, with the same settings, and all of them run the same steps in the
/// same order. Inputs lie in device memory that the body captured; write new ones before each
/// [`run`](StepRunner::run), and leave them until it returns.
pub struct StepRunner<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    stream: B::Stream,
    rows: RowSet<B>,
    settings: RecoverySettings,
    between: BetweenSteps,
    body: StepBody<B>,
    hooks: Box<dyn RecoveryHooks>,
    graph: Option<StepGraph<'static, B>>,
}

/// Memory and a graph made ready for a replay, with nothing changed yet.
struct Prepared<B: Backend> {
    growth: Option<PlannedGrowth<B>>,
    recorded: bool,
}

/// What came of an over-budget step.
enum Recovery {
    /// A later run fitted.
    Done(StepRecord, Outcome),
    /// A rank cannot go on.
    Refused(Rank, Refusal),
}

/// Counts of one step while it runs.
#[derive(Default)]
struct Tally {
    growths: u32,
    recordings: u32,
    recovered_rows: u64,
    times: StepTimes,
}

impl<B: Backend> StepRunner<B> {
    /// A runner of `body` on `stream`, whose dispatches receive into `rows`. Nothing is recorded yet.
    /// Collective: settings that decide what ranks do together are compared.
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
        let rank = dispatcher.context().rank().index();
        let between = BetweenSteps::new(settings.growth, settings.adjustments, rank)?;
        let between = match settings.overflow {
            OverflowPolicy::Recover => between,
            _ => between.only_as_asked(),
        };
        dispatcher.context().agree("recovery settings", &settings.fields())?;
        Ok(Self {
            dispatcher: dispatcher.clone(),
            stream,
            rows,
            settings,
            between,
            body,
            hooks: Box::new(NoHooks),
            graph: None,
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

    /// The graph that the next step replays, if it is recorded.
    pub fn graph(&self) -> Option<&StepGraph<'static, B>> {
        self.graph.as_ref()
    }

    /// Drops the recorded graph; the next step records a new one. For when the body would queue
    /// something else now.
    pub fn invalidate(&mut self) {
        self.graph = None;
    }

    /// Runs one step to its end: replays the graph, waits for the record, and recovers the step if it
    /// overflowed. Collective in that every rank runs it. A clean step makes no blocking call to the
    /// device: it polls for the record.
    ///
    /// # Errors
    ///
    /// [`OverflowError::Overflow`] under [`OverflowPolicy::Fail`] and [`OverflowError::Refused`] leave
    /// the group as it was, able to run the next step. A fault ends the group.
    pub fn run(&mut self) -> Result<StepReport, OverflowError> {
        let mut tally = Tally::default();
        let capacity_before = self.rows.capacity();
        self.record_if_needed(&mut tally)?;
        let backend = self.dispatcher.context().backend().clone();
        let calls_before = backend.blocking_calls();
        let start = Instant::now();
        let first = self.replay()?;
        tally.times.first_run = start.elapsed();
        let blocking_calls = backend.blocking_calls() - calls_before;
        let (mut kept, mut refused) = (first.clone(), None);
        let outcome = match (first.first_over, self.settings.overflow) {
            // Rounds leave nothing over.
            (None, _) | (Some(_), OverflowPolicy::Rounds) => Outcome::Clean,
            (Some(_), OverflowPolicy::Drop) => Outcome::Dropped,
            (Some(_), OverflowPolicy::Fail) => Outcome::Failed,
            (Some(_), OverflowPolicy::Recover) => match self.recover(&first, &mut tally)? {
                Recovery::Done(record, outcome) => {
                    kept = record;
                    outcome
                }
                Recovery::Refused(rank, refusal) => {
                    refused = Some((rank, refusal));
                    Outcome::Failed
                }
            },
        };
        tally.times.total = start.elapsed();
        if outcome != Outcome::Failed {
            self.adjust(&kept, first.overflowed(), &mut tally)?;
        }
        let report = StepReport {
            outcome,
            discarded: (kept != first).then_some(first),
            record: kept,
            capacity_before,
            capacity_after: self.rows.capacity(),
            growths: tally.growths,
            recordings: tally.recordings,
            recovered_rows: tally.recovered_rows,
            blocking_calls,
            times: tally.times,
        };
        match (outcome, refused) {
            (_, Some((rank, refusal))) => {
                Err(OverflowError::Refused { rank, refusal, report: Box::new(report) })
            }
            (Outcome::Failed, None) => Err(OverflowError::Overflow { report: Box::new(report) }),
            _ => Ok(report),
        }
    }

    /// Runs one step eagerly: nothing is recorded, and every dispatch waits for its count and takes
    /// the rows it needs. Collective.
    ///
    /// # Errors
    ///
    /// [`OverflowError::Dispatch`] when the rows exceed
    /// [`RecoverySettings::eager_max_rows`]; that ends the group.
    pub fn run_eager(&mut self) -> Result<StepReport, OverflowError> {
        let mut tally = Tally::default();
        let capacity_before = self.rows.capacity();
        let backend = self.dispatcher.context().backend().clone();
        let calls_before = backend.blocking_calls();
        let start = Instant::now();
        let record = self.eager()?;
        tally.times.first_run = start.elapsed();
        tally.times.total = tally.times.first_run;
        let capacity_after = self.rows.capacity();
        Ok(StepReport {
            outcome: Outcome::Eager,
            record,
            discarded: None,
            capacity_before,
            capacity_after,
            growths: u32::from(capacity_after > capacity_before),
            recordings: 0,
            recovered_rows: 0,
            blocking_calls: backend.blocking_calls() - calls_before,
            times: tally.times,
        })
    }

    /// Grows, records again and replays until the step fits; at last runs it eagerly.
    fn recover(
        &mut self,
        first: &StepRecord,
        tally: &mut Tally,
    ) -> Result<Recovery, OverflowError> {
        let context = self.dispatcher.context().clone();
        let direct = Queue::direct(context.backend(), &self.stream);
        let deadline = context.deadlines().of(Phase::Agreement);
        let mut last = first.clone();
        let mut replays = 0;
        while last.overflowed() {
            tally.recovered_rows += last.dropped;
            self.between.note(&last.required);
            let attempt = replays + 1;
            let exhausted = attempt > self.settings.max_replays;
            let prepared = if exhausted {
                self.prepare_eager(&last, attempt)
            } else {
                self.prepare(&last, attempt, tally)
            };
            let (vote, prepared) = match prepared {
                Ok((vote, prepared)) => (vote, prepared),
                Err(refusal) => (Vote::Refuse(refusal), Prepared { growth: None, recorded: false }),
            };
            let decision = agree(context.rendezvous(), &vote, deadline);
            // Steps behind this one may run again, whatever comes of it.
            self.dispatcher.resume(&direct)?;
            if let Ok(Decision::Replay) = decision {
                if let Some(growth) = prepared.growth {
                    growth.commit(&direct)?;
                    tally.growths += 1;
                }
            } else {
                if let Some(growth) = prepared.growth {
                    growth.cancel();
                }
                if prepared.recorded {
                    // It was recorded for the growth that does not come.
                    self.graph = None;
                }
            }
            let decision = decision?;
            if let Decision::Refused(rank, refusal) = decision {
                return Ok(Recovery::Refused(rank, refusal));
            }
            tracing::info!(
                rank = context.rank().0,
                step = first.step,
                attempt,
                required = last.peak(),
                capacity = self.rows.capacity(),
                ?decision,
                "recovering an over-budget step"
            );
            if exhausted || decision == Decision::Eager {
                let before = self.rows.capacity();
                let record = self.eager()?;
                tally.growths += u32::from(self.rows.capacity() > before);
                return Ok(Recovery::Done(record, Outcome::Recovered { replays, eager: true }));
            }
            replays += 1;
            last = self.replay()?;
        }
        Ok(Recovery::Done(last, Outcome::Recovered { replays, eager: false }))
    }

    /// This rank's part of making a replay possible: map memory, let the engine restore its state,
    /// record again. Changes nothing that a refusal would have to undo on the device.
    fn prepare(
        &mut self,
        record: &StepRecord,
        attempt: u32,
        tally: &mut Tally,
    ) -> Result<(Vote, Prepared<B>), Refusal> {
        let capacity = self.rows.capacity();
        let (required, limit) = (self.own_required(record), self.limit());
        let refuse = |reason: String| Refusal { reason, required, budget: capacity, limit };
        let wanted = self
            .settings
            .growth
            .next_capacity(GrowthInput {
                own_capacity: capacity,
                own_required: required,
                global_peak_required: record.peak(),
                expected: self.between.expected(),
                over: required > capacity,
                alignment: self.dispatcher.config().alignment(),
                limit_rows: limit,
            })
            .map_err(|refusal| refuse(refusal.to_string()))?;
        let started = Instant::now();
        let growth = self.plan_growth(wanted, required).map_err(|error| refuse(chain(&error)))?;
        tally.times.growing += started.elapsed();
        if let Err(error) = self.hooks.before_replay(record, attempt) {
            if let Some(growth) = growth {
                growth.cancel();
            }
            return Err(refuse(format!("its hook failed: {}", chain(error.as_ref()))));
        }
        let stale = growth.is_some() && self.shaped_by_capacity();
        if !stale && self.graph.is_some() {
            return Ok((Vote::Replay, Prepared { growth, recorded: false }));
        }
        match self.record(tally) {
            Ok(()) => Ok((Vote::Replay, Prepared { growth, recorded: true })),
            Err(error) => Ok((Vote::Eager(chain(&error)), Prepared { growth, recorded: true })),
        }
    }

    /// Maps memory for `wanted` rows or, if there is not so much, for those that are required.
    fn plan_growth(
        &self,
        wanted: u32,
        required: u32,
    ) -> Result<Option<PlannedGrowth<B>>, BackendError> {
        let capacity = self.rows.capacity();
        let exact = required.next_multiple_of(self.dispatcher.config().alignment());
        if wanted <= capacity {
            return Ok(None);
        }
        match self.rows.plan(wanted) {
            Err(error) if exact < wanted => {
                tracing::warn!(%error, wanted, exact, "no room for headroom: growing to what is required");
                match exact <= capacity {
                    true => Ok(None),
                    false => self.rows.plan(exact).map(Some),
                }
            }
            planned => planned.map(Some),
        }
    }

    /// The same before an eager run, which needs no graph.
    fn prepare_eager(
        &mut self,
        record: &StepRecord,
        attempt: u32,
    ) -> Result<(Vote, Prepared<B>), Refusal> {
        let required = self.own_required(record);
        let limit = self.eager_limit();
        let refuse = |reason| Refusal { reason, required, budget: self.rows.capacity(), limit };
        if required > limit {
            return Err(refuse("an eager run would need too many rows".to_owned()));
        }
        if let Err(error) = self.hooks.before_replay(record, attempt) {
            return Err(refuse(format!("its hook failed: {}", chain(error.as_ref()))));
        }
        Ok((Vote::Replay, Prepared { growth: None, recorded: false }))
    }

    /// Grows ahead of need or shrinks between steps, where the policy does or that is asked for. Concerns no peer; what
    /// cannot be had now is left.
    ///
    /// `kept` is the run that counts: the first run of a step that overflowed knew nothing of the
    /// dispatches behind its first over-budget one.
    fn adjust(
        &mut self,
        kept: &StepRecord,
        overflowed: bool,
        tally: &mut Tally,
    ) -> Result<(), OverflowError> {
        let capacity = self.rows.capacity();
        let wanted = self.between.after_step(StepSummary {
            own_capacity: capacity,
            required: &kept.required,
            overflowed: overflowed || kept.peak() > capacity,
            alignment: self.dispatcher.config().alignment(),
            limit_rows: self.limit(),
        });
        if wanted == capacity {
            return Ok(());
        }
        let started = Instant::now();
        let growth = match self.rows.plan(wanted) {
            Ok(growth) => growth,
            Err(error) => {
                tracing::warn!(%error, wanted, capacity, "could not change capacity between steps");
                return Ok(());
            }
        };
        let direct = Queue::direct(self.dispatcher.context().backend(), &self.stream);
        growth.commit(&direct)?;
        tally.times.growing += started.elapsed();
        tally.growths += u32::from(wanted > capacity);
        if self.shaped_by_capacity() {
            self.graph = None;
        }
        if wanted < capacity {
            // Queued work may still hold views of the rows for a moment; memory comes back when none
            // does, at the latest at the next change.
            if let Err(error) = self.rows.trim() {
                tracing::debug!(%error, "rows stay mapped for now");
            }
        }
        Ok(())
    }

    fn own_required(&self, record: &StepRecord) -> u32 {
        record.required.get(self.dispatcher.context().rank().index()).copied().unwrap_or(0)
    }

    fn limit(&self) -> u32 {
        self.settings.max_rows.unwrap_or(u32::MAX).min(self.rows.max_rows())
    }

    fn eager_limit(&self) -> u32 {
        self.settings.eager_max_rows.unwrap_or(u32::MAX).min(self.rows.max_rows())
    }

    fn shaped_by_capacity(&self) -> bool {
        self.settings.shaping == token_dispatch::RowShaping::Capacity
    }

    fn options(&self) -> StepOptions {
        StepOptions::new()
            .mode(match self.settings.overflow {
                OverflowPolicy::Rounds => StepMode::Rounds,
                _ => StepMode::Static,
            })
            .shaping(self.settings.shaping)
            .hold_on_overflow(self.settings.overflow == OverflowPolicy::Recover)
    }

    fn record_if_needed(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        match &self.graph {
            Some(graph) if graph.check_current().is_ok() => Ok(()),
            _ => self.record(tally),
        }
    }

    /// Records the step for the capacity that holds, or that is planned.
    fn record(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        let started = Instant::now();
        let options = self.options();
        let recorded = match self.graph.take() {
            Some(graph) => {
                graph.record_again(&self.stream, &mut self.body).map(|(graph, _update)| graph)
            }
            None => StepGraph::record(&self.dispatcher, &self.stream, options, &mut self.body),
        };
        self.graph = Some(recorded?);
        tally.recordings += 1;
        tally.times.recording += started.elapsed();
        Ok(())
    }

    fn replay(&mut self) -> Result<StepRecord, OverflowError> {
        let graph = self.graph.as_ref().ok_or_else(|| token_dispatch::DispatchError::Order {
            operation: "replay",
            rank: self.dispatcher.context().rank(),
            reason: "no graph is recorded".to_owned(),
        })?;
        let step = graph.replay(&self.stream)?;
        Ok(self.dispatcher.records().wait_on(step, &self.stream)?)
    }

    fn eager(&mut self) -> Result<StepRecord, OverflowError> {
        let context = self.dispatcher.context();
        let queue = Queue::direct(context.backend(), &self.stream);
        let options = self.options().mode(StepMode::Eager { max_rows: self.eager_limit() });
        let mut step = Step::begin(&self.dispatcher, queue, options)?;
        (self.body)(&mut step)
            .map_err(|source| OverflowError::Body { rank: context.rank(), source })?;
        let summary = step.finish()?;
        let number = summary.number.unwrap_or_default();
        Ok(self.dispatcher.records().wait_on(number, &self.stream)?)
    }
}

impl<B: Backend> fmt::Debug for StepRunner<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepRunner")
            .field("dispatcher", &self.dispatcher)
            .field("rows", &self.rows)
            .field("settings", &self.settings)
            .field("recorded", &self.graph.is_some())
            .finish_non_exhaustive()
    }
}

//! What every rank does about a step that overflowed: prepare, agree, commit, replay.

use std::time::Instant;

use ep_context::error::chain;
use ep_context::{Backend, BackendError, Phase, PlannedGrowth, Queue, Rank};
use token_dispatch::StepRecord;

use super::{StepRunner, Tally};
use crate::agreement::{Decision, Refusal, Vote, agree};
use crate::error::OverflowError;
use crate::growth::GrowthInput;
use crate::report::Outcome;
use crate::source::why_not_recorded;

/// Memory and a graph made ready for a replay, with nothing changed yet.
struct Prepared<B: Backend> {
    growth: Option<PlannedGrowth<B>>,
    recorded: bool,
}

/// What came of an over-budget step.
pub(super) enum Recovery {
    /// A later run fitted.
    Done(StepRecord, Outcome),
    /// A rank cannot go on.
    Refused(Rank, Refusal),
}

impl<B: Backend> StepRunner<B> {
    /// Grows, records again and replays until the step fits; at last runs it eagerly.
    pub(super) fn recover(
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
            let exhausted = attempt > self.settings.max_replays();
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
            self.resume()?;
            if let Ok(Decision::Replay) = decision {
                if let Some(growth) = prepared.growth {
                    // SAFETY: steps of this runner run in the order of its stream, and others that
                    // receive into its rows are ordered with it.
                    unsafe { growth.commit(&direct) }?;
                    tally.growths += 1;
                }
            } else {
                if let Some(growth) = prepared.growth {
                    growth.cancel();
                }
                if prepared.recorded {
                    // It was recorded for the growth that does not come.
                    self.source.discard();
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
            let step = self.replay()?;
            last = self.record_of_run("replay", step)?;
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
            .growth()
            .next_capacity(GrowthInput {
                own_capacity: capacity,
                own_required: required,
                global_peak_required: record.peak(),
                expected: self.between.expected(),
                over: required > capacity,
                alignment: self.dispatcher.config().alignment(),
                limit_rows: limit,
            })
            .map_err(|_| refuse("growth is limited".to_owned()))?;
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
        // Another rank may not be able to record: all of them run eagerly then, or none.
        let no_eager = self.beyond_eager(record);
        if !stale && self.source.is_recorded() {
            let vote = Vote::Ready { unrecorded: None, no_eager };
            return Ok((vote, Prepared { growth, recorded: false }));
        }
        let ready = |unrecorded| Vote::Ready { unrecorded, no_eager };
        match self.record(tally) {
            Ok(()) => Ok((ready(None), Prepared { growth, recorded: true })),
            Err(error) => match self.source.refuses_eager() {
                None => Ok((ready(Some(chain(&error))), Prepared { growth, recorded: true })),
                eager => {
                    self.source.discard();
                    if let Some(growth) = growth {
                        growth.cancel();
                    }
                    Err(refuse(why_not_recorded(&error, eager)))
                }
            },
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

    /// Why an eager run of the step is known to take more rows than this rank may have, if it is: a dispatch
    /// behind the first that was over budget may need more, which only the run itself finds out.
    fn beyond_eager(&self, record: &StepRecord) -> Option<Refusal> {
        let (required, limit) = (self.own_required(record), self.eager_limit());
        let reason = "an eager run would need too many rows".to_owned();
        let budget = self.rows.capacity();
        (required > limit).then_some(Refusal { reason, required, budget, limit })
    }

    /// The same before an eager run, which needs no graph.
    fn prepare_eager(
        &mut self,
        record: &StepRecord,
        attempt: u32,
    ) -> Result<(Vote, Prepared<B>), Refusal> {
        let (required, limit) = (self.own_required(record), self.eager_limit());
        let refuse = |reason| Refusal { reason, required, budget: self.rows.capacity(), limit };
        if let Some(reason) = self.source.refuses_eager() {
            return Err(refuse(format!("{} replays did not suffice, and {reason}", attempt - 1)));
        }
        if let Some(refusal) = self.beyond_eager(record) {
            return Err(refusal);
        }
        if let Err(error) = self.hooks.before_replay(record, attempt) {
            return Err(refuse(format!("its hook failed: {}", chain(error.as_ref()))));
        }
        let vote = Vote::Ready { unrecorded: None, no_eager: None };
        Ok((vote, Prepared { growth: None, recorded: false }))
    }
}

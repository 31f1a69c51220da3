//! What becomes of a step that was launched, and what is changed before the next.

use std::time::Instant;

use ep_context::{Backend, Queue};
use token_dispatch::{DispatchError, StepRecord};

use super::flight::{InFlight, Launched};
use super::recovery::Recovery;
use super::{StepRunner, Tally};
use crate::error::OverflowError;
use crate::growth::EndedStep;
use crate::policy::OverflowPolicy;
use crate::report::{Outcome, StepReport};

impl<B: Backend> StepRunner<B> {
    /// The second half of [`StepRunner::run`]: waits for the record, and recovers the step if it overflowed.
    /// Every rank settles its steps in the order in which they were launched. Steps launched before this one
    /// and not settled yet, as when their [`Launched`] was dropped, are settled first, and nobody is told
    /// more of them than an error.
    ///
    /// Steps that moved nothing because they were launched behind one that overflows are launched again when
    /// that has been recovered or refused, before this returns: in their order, and before any that is
    /// launched later. All ranks meet for that. What keeps a rank from it is the error of the next call, which
    /// tries again. Each finds what those before it left, and the inputs that lie in memory now.
    ///
    /// So it is with several runners of a dispatcher: each launches its own steps again, when those of others
    /// that were launched before have been, which is when they are settled. Until then it launches no others.
    ///
    /// # Errors
    ///
    /// [`OverflowError::Overflow`] under [`OverflowPolicy::Fail`], [`OverflowError::Refused`] and
    /// [`DispatchError::StaleGraph`] leave the group as it was, able to run the next step: steps in flight run,
    /// on what the failed one left. [`DispatchError::Order`] for a step that is not in flight; for one before
    /// which steps of another runner have to be settled, this one staying in flight; and for one that
    /// [`TokenDispatcher::resume`](token_dispatch::TokenDispatcher::resume) has let a later step pass. A
    /// fault ends the group. Where steps have to be launched again, as for [`StepRunner::launch`].
    pub fn settle(&mut self, launched: Launched) -> Result<StepReport, OverflowError> {
        let Some(before) = self.flight.before(launched.step) else {
            return Err(self.order(
                "settle",
                "the step was not launched by this runner, or was settled with a later one",
            ));
        };
        for _ in 0..before {
            let report = self.settle_oldest()?;
            let (step, outcome) = (report.record.step, report.outcome);
            tracing::warn!(step, ?outcome, "a step was settled with a later one");
        }
        self.settle_oldest()
    }

    fn settle_oldest(&mut self) -> Result<StepReport, OverflowError> {
        let settled = self.settle_landed();
        if let Err(OverflowError::Dispatch(DispatchError::StaleGraph { .. })) = settled {
            self.go_on(&mut Tally::default());
        }
        self.flight.settled();
        settled
    }

    /// Launches again what is in flight behind a step that has been settled.
    fn go_on(&mut self, tally: &mut Tally) {
        if let Err(error) = self.launch_held(tally) {
            tracing::warn!(%error, "steps in flight could not be launched again yet");
        }
    }

    fn settle_landed(&mut self) -> Result<StepReport, OverflowError> {
        let backend = self.dispatcher.context().backend().clone();
        let calls_before = backend.blocking_calls();
        let (step, first) = self.land()?;
        let InFlight { capacity_before, mut blocking_calls, start, mut tally, .. } = step;
        tally.times.first_run = start.elapsed();
        blocking_calls += backend.blocking_calls() - calls_before;
        let (mut kept, mut refused) = (first.clone(), None);
        let outcome = match (first.first_over, self.settings.overflow()) {
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
        self.go_on(&mut tally);
        // After a refusal all is as it was.
        if refused.is_none() {
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

    /// Grows ahead of need or shrinks between steps, where the policy does or that is asked for.
    /// Concerns no peer; what cannot be had now is left.
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
        let alignment = self.dispatcher.config().alignment();
        let limit_rows = self.limit();
        let wanted = match &mut self.meeting {
            Some(meeting) => meeting.follow(capacity, kept, overflowed, alignment),
            None => self.between.after_step(EndedStep {
                own_capacity: capacity,
                required: &kept.required,
                overflowed,
                alignment,
                limit_rows,
            }),
        };
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
        // SAFETY: steps of this runner run in the order of its stream, and others that receive into its
        // rows are ordered with it.
        unsafe { growth.commit(&direct) }?;
        tally.times.growing += started.elapsed();
        tally.growths += u32::from(wanted > capacity);
        let shrunk = wanted < capacity;
        // A graph that counts on the device stays valid, but holds views of the rows that are given up.
        if shrunk || self.shaped_by_capacity() {
            self.source.discard();
        }
        self.trim_due |= shrunk;
        self.trim();
        Ok(())
    }

    /// Gives the memory of rows back that a shrink has left, if no graph of this runner holds views of
    /// them. Queued work and others may hold some yet: then it is tried again before the next recording.
    pub(super) fn trim(&mut self) {
        if !self.trim_due || self.source.is_recorded() {
            return;
        }
        match self.rows.trim() {
            Ok(()) => self.trim_due = false,
            Err(error) => tracing::debug!(%error, "rows stay mapped for now"),
        }
    }
}

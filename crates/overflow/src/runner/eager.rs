//! A step without a graph: the fallback of a recovery, and for whoever asks for it.

use std::time::Instant;

use ep_context::{Backend, Phase, Queue};
use token_dispatch::{DispatchError, Step, StepMode, StepRecord};

use super::meeting::Meeting;
use super::{StepRunner, Tally};
use crate::error::OverflowError;
use crate::report::{Outcome, StepReport};

impl<B: Backend> StepRunner<B> {
    /// Runs one step eagerly: nothing is recorded, and every dispatch waits for its count and takes
    /// the rows it needs. Collective.
    ///
    /// # Errors
    ///
    /// [`OverflowError::Dispatch`] with [`DispatchError::EagerLimit`] when the rows exceed
    /// [`eager_max_rows`](crate::RecoverySettings::with_eager_max_rows), or what else a dispatch says, and
    /// [`OverflowError::Body`] with whatever else the body fails with; each ends the group, and its other
    /// ranks are told at once.
    /// [`DispatchError::Order`] if the engine does not run steps eagerly, and if steps are in flight, which
    /// might have to be launched again behind this one, or are to be launched again by another runner; nothing
    /// was queued then.
    pub fn run_eager(&mut self) -> Result<StepReport, OverflowError> {
        if let Some(reason) = self.source.refuses_eager() {
            return Err(self.order("eager step", reason));
        }
        if self.flight.len() > 0 {
            return Err(self.order("eager step", "steps are in flight; settle them first"));
        }
        if self.flight.waits_for_others() {
            return Err(self.behind_others("eager step"));
        }
        // Any rank may grow on the way.
        self.meeting.iter_mut().for_each(Meeting::call);
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

    pub(super) fn eager_limit(&self) -> u32 {
        self.settings.eager_max_rows().unwrap_or(u32::MAX).min(self.rows.max_rows())
    }

    /// Runs the step eagerly. What keeps this rank from queueing it ends the group.
    pub(super) fn eager(&mut self) -> Result<StepRecord, OverflowError> {
        match self.queue_eagerly() {
            Ok(step) => self.record_of_run("eager step", step),
            Err(error) => {
                self.give_up();
                Err(error)
            }
        }
    }

    fn queue_eagerly(&mut self) -> Result<u32, OverflowError> {
        let context = self.dispatcher.context();
        let queue = Queue::direct(context.backend(), &self.stream);
        let options = self.options().with_mode(StepMode::Eager { max_rows: self.eager_limit() });
        let mut step = Step::begin(&self.dispatcher, queue, options)?;
        let rank = context.rank();
        step.queue_with(|step| {
            self.source.queue_eagerly(step).map_err(|source| {
                // The body passes on what its dispatches say.
                match source.downcast::<DispatchError>() {
                    Ok(error) => OverflowError::Dispatch(*error),
                    Err(source) => OverflowError::Body { rank, source },
                }
            })
        })?;
        let number = step.finish()?.number;
        number.ok_or_else(|| self.order("eager step", "the stream records"))
    }

    /// Tells the other ranks, which wait for what this one does not queue.
    fn give_up(&self) {
        let context = self.dispatcher.context();
        if context.fault().is_some() {
            return;
        }
        let direct = Queue::direct(context.backend(), &self.stream);
        if let Err(error) = self.dispatcher.abandon(&direct, Phase::Dispatch) {
            tracing::warn!(%error, "the other ranks find out at their deadline");
        }
    }
}

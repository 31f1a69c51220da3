//! Steps that were launched and are not settled yet, and how they keep their order when one overflows.
//!
//! What was launched behind a step that overflows moves nothing. Once that is recovered or given up, all of it
//! is launched again, oldest first, before anything else is: so steps run in the order in which they were
//! launched, whatever happens to one of them. All ranks know the same of it, without asking: which steps they
//! launched, and by the records which of them moved nothing.

use std::collections::VecDeque;
use std::time::Instant;

use ep_context::{Backend, Queue};
use token_dispatch::{DispatchError, StepRecord};

use super::meeting::Meeting;
use super::{StepRunner, Tally};
use crate::error::OverflowError;
use crate::policy::OverflowPolicy;

/// A step that was launched and not yet [settled](StepRunner::settle).
#[derive(Debug)]
#[must_use = "a step that overflowed is recovered when it is settled"]
pub struct Launched {
    pub(super) step: u32,
}

impl Launched {
    /// The number of the step when it was launched, by which its record is found, unless it had to be
    /// launched again since: [`StepReport::record`](crate::StepReport::record) has the number under which it
    /// ran.
    pub fn step(&self) -> u32 {
        self.step
    }
}

/// What a runner knows of a step in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    /// Its number when it was launched first.
    pub(super) launched: u32,
    /// Its number when it was launched last.
    pub(super) number: u32,
    /// It moved nothing then, and is to be launched again.
    pub(super) held: bool,
    pub(super) capacity_before: u32,
    pub(super) blocking_calls: u64,
    pub(super) start: Instant,
    pub(super) tally: Tally,
}

/// The steps in flight, oldest first.
#[derive(Debug, Default)]
pub(super) struct Flight {
    steps: VecDeque<InFlight>,
}

impl Flight {
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn push(&mut self, step: InFlight) {
        self.steps.push_back(step);
    }

    fn take_oldest(&mut self) -> Option<InFlight> {
        self.steps.pop_front()
    }

    /// How many are older than the step that was launched as `step`; `None` if that is not in flight.
    pub(super) fn before(&self, step: u32) -> Option<usize> {
        self.steps.iter().position(|other| other.launched == step)
    }

    /// The present number of the step that was launched as `step`.
    pub(super) fn number_of(&self, step: u32) -> Option<u32> {
        self.steps.get(self.before(step)?).map(|other| other.number)
    }

    /// None of them has moved anything.
    fn hold(&mut self) {
        self.steps.iter_mut().for_each(|step| step.held = true);
    }

    fn any_held(&self) -> bool {
        self.steps.iter().any(|step| step.held)
    }
}

impl<B: Backend> StepRunner<B> {
    /// Lets steps run again that were held back behind an over-budget or a stale one: those in flight are to
    /// be launched again.
    pub(super) fn resume(&mut self) -> Result<(), OverflowError> {
        let direct = Queue::direct(self.dispatcher.context().backend(), &self.stream);
        self.dispatcher.resume(&direct)?;
        // Where steps hold nothing back, those behind have run.
        if self.settings.overflow == OverflowPolicy::Recover {
            self.flight.hold();
        }
        Ok(())
    }

    /// Launches again what is held back. Collective where there is any: what held them may have changed the
    /// capacity of any rank or left it without a graph, and if one cannot record none launches.
    ///
    /// What keeps them from it leaves them held, for the next launch or settlement.
    pub(super) fn launch_held(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        if !self.flight.any_held() {
            return Ok(());
        }
        self.meeting.iter_mut().for_each(Meeting::call);
        self.record_together(tally)?;
        for at in 0..self.flight.len() {
            if self.flight.steps[at].held {
                let number = self.replay()?;
                let step = &mut self.flight.steps[at];
                (step.number, step.held) = (number, false);
            }
        }
        Ok(())
    }

    /// Waits for the oldest step and takes it out of the flight, with its record.
    pub(super) fn land(&mut self) -> Result<(InFlight, StepRecord), OverflowError> {
        let mut tally = Tally::default();
        for again in [false, true] {
            self.launch_held(&mut tally)?;
            let Some(mut oldest) = self.flight.take_oldest() else { break };
            let record = self.record_of(oldest.number)?;
            if !record.drained {
                oldest.tally.add(&tally);
                return Ok((oldest, record));
            }
            // A step of others held it back: what is behind it is to have moved nothing either.
            if !again {
                self.check_held()?;
            }
            self.flight.steps.push_front(oldest);
            self.flight.hold();
        }
        Err(self.drained("settle"))
    }

    /// Fails if a step in flight has run, though one before it has not.
    fn check_held(&mut self) -> Result<(), OverflowError> {
        for at in 0..self.flight.len() {
            let number = self.flight.steps[at].number;
            if !self.record_of(number)?.drained {
                return Err(self.order(
                    "settle",
                    "the step moved nothing, being behind one of another runner that overflowed, and a \
                     step that was launched behind it has run since; settle the steps of all runners in \
                     the order in which they were launched, before more are launched",
                ));
            }
        }
        Ok(())
    }

    /// The error of a step that moved nothing where it should have.
    pub(super) fn drained(&self, operation: &'static str) -> OverflowError {
        self.order(
            operation,
            "the step moved nothing, being behind one that overflowed and is not recovered; settle that \
             first, with the runner that launched it, or call TokenDispatcher::resume; until then it stays \
             in flight",
        )
    }

    pub(super) fn order(&self, operation: &'static str, reason: &str) -> OverflowError {
        let (rank, reason) = (self.dispatcher.context().rank(), reason.to_owned());
        DispatchError::Order { operation, rank, reason }.into()
    }
}

//! Steps that were launched and are not settled yet, and how they keep their order when one overflows.
//!
//! What was launched behind a step that overflows moves nothing. Once that is recovered or given up, all of it
//! is launched again, oldest first, before anything else is: so steps run in the order in which they were
//! launched, whatever happens to one of them, and those of several runners too: none passes a step that another
//! has still to launch again. All ranks know the same of it, without asking: which steps they launched, and by
//! the records which of them moved nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ep_context::{Backend, Queue};
use token_dispatch::{DispatchError, LaunchOrder, Place, StepRecord};

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
    /// Its place among the steps of all runners.
    pub(super) place: Place,
    pub(super) capacity_before: u32,
    pub(super) blocking_calls: u64,
    pub(super) start: Instant,
    pub(super) tally: Tally,
}

/// The steps of a runner that are in flight, oldest first.
#[derive(Debug)]
pub(super) struct Flight {
    steps: VecDeque<InFlight>,
    /// The steps of all runners of the dispatcher.
    order: Arc<LaunchOrder>,
    /// The step that is being settled.
    settling: Option<Place>,
}

impl Flight {
    pub(super) fn new(order: Arc<LaunchOrder>) -> Self {
        Self { steps: VecDeque::new(), order, settling: None }
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// How many steps all runners have in flight.
    pub(super) fn of_all(&self) -> usize {
        self.order.in_flight()
    }

    /// A place for a step that has been launched.
    pub(super) fn enter(&self) -> Place {
        self.order.enter()
    }

    pub(super) fn push(&mut self, step: InFlight) {
        self.steps.push_back(step);
    }

    /// Takes the oldest out, which is being settled.
    fn take_oldest(&mut self) -> Option<InFlight> {
        let oldest = self.steps.pop_front()?;
        self.settling = Some(oldest.place);
        Some(oldest)
    }

    /// Puts it back, to be launched again.
    fn put_back(&mut self, oldest: InFlight) {
        self.order.hold(oldest.place);
        self.steps.push_front(oldest);
        self.settling = None;
    }

    /// What was taken out has an outcome, or is given up.
    pub(super) fn settled(&mut self) {
        if let Some(place) = self.settling.take() {
            self.order.leave(place);
        }
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
    fn hold(&self) {
        self.steps.iter().for_each(|step| self.order.hold(step.place));
    }

    /// No step behind the one that is being settled has moved anything, whoever launched it.
    fn hold_behind(&self) {
        if let Some(place) = self.settling {
            self.order.hold_behind(place);
        }
    }

    /// Whether a step of others is to be launched before any new one.
    pub(super) fn waits_for_others(&self) -> bool {
        self.order.any_held_before(None)
    }

    /// The next step of this runner that is to be launched again, if none of others is before it.
    fn next_held(&self) -> Option<usize> {
        let next = self.steps.iter().position(|step| self.order.is_held(step.place))?;
        let place = self.steps.get(next)?.place;
        (!self.order.any_held_before(Some(place))).then_some(next)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.settled();
        self.steps.iter().for_each(|step| self.order.leave(step.place));
    }
}

impl<B: Backend> StepRunner<B> {
    /// Lets steps run again that were held back behind the over-budget or stale one that is being settled:
    /// all of them are to be launched again.
    pub(super) fn resume(&mut self) -> Result<(), OverflowError> {
        let direct = Queue::direct(self.dispatcher.context().backend(), &self.stream);
        self.dispatcher.resume(&direct)?;
        // Where steps hold nothing back, those behind have run.
        if self.settings.overflow() == OverflowPolicy::Recover {
            self.flight.hold_behind();
        }
        Ok(())
    }

    /// Launches again what is held back, up to a step of another runner that has to be launched before.
    /// Collective where there is any: what held them may have changed the capacity of any rank or left it
    /// without a graph, and if one cannot record none launches.
    ///
    /// What keeps them from it leaves them held, for the next launch or settlement.
    pub(super) fn launch_held(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        if self.flight.next_held().is_none() {
            return Ok(());
        }
        self.meeting.iter_mut().for_each(Meeting::call);
        self.record_together(tally)?;
        while let Some(next) = self.flight.next_held() {
            let number = self.replay()?;
            let step = &mut self.flight.steps[next];
            step.number = number;
            self.flight.order.release(step.place);
        }
        Ok(())
    }

    /// Waits for the oldest step and takes it out of the flight, with its record.
    pub(super) fn land(&mut self) -> Result<(InFlight, StepRecord), OverflowError> {
        let mut tally = Tally::default();
        for again in [false, true] {
            self.launch_held(&mut tally)?;
            let Some(mut oldest) = self.flight.take_oldest() else { break };
            if self.flight.order.is_held(oldest.place) {
                self.flight.put_back(oldest);
                return Err(self.behind_others("settle"));
            }
            let record = self.record_of(oldest.number)?;
            if !record.drained {
                oldest.tally.add(&tally);
                return Ok((oldest, record));
            }
            // A step that was launched by hand held it back: what is behind it is to have moved nothing
            // either.
            if !again {
                self.check_held()?;
            }
            self.flight.put_back(oldest);
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
                    "the step moved nothing, being behind one that overflowed, and a step that was launched \
                     behind it has run since: TokenDispatcher::resume was called between the two, when the \
                     first was not launched again yet",
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

    /// The error of a step that would pass those of other runners.
    pub(super) fn behind_others(&self, operation: &'static str) -> OverflowError {
        self.order(
            operation,
            "steps of another runner that were launched before, behind one that overflowed, are to be \
             launched again first; settle them",
        )
    }

    pub(super) fn order(&self, operation: &'static str, reason: &str) -> OverflowError {
        let (rank, reason) = (self.dispatcher.context().rank(), reason.to_owned());
        DispatchError::Order { operation, rank, reason }.into()
    }
}

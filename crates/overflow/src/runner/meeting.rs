//! How ranks that share a device record loops: at once, while none of them waits on the device.
//!
//! To make a graph with loops ready takes the device, and kernels that wait there for another rank do not
//! give it away. So all ranks meet before any of them records, when whatever was launched ends by itself,
//! and again before any launches what was recorded. No rank says when that has to be: each follows the
//! capacities of all, its own in the same way as those of the others, so that all come to the same.

use std::cmp::Ordering;

use ep_context::rendezvous::all_or_none;
use ep_context::{Backend, ContextError, Phase};
use serde::{Deserialize, Serialize};
use token_dispatch::StepRecord;

use super::{StepRunner, Tally};
use crate::error::OverflowError;
use crate::gather::gather;
use crate::growth::{Adjustments, BetweenSteps, EndedStep};
use crate::policy::RecoverySettings;

const BEFORE: &str = "before a step is recorded";
const AFTER: &str = "the recording of a step";

/// Whether all ranks meet at the next launch.
#[derive(Debug)]
pub(super) struct Meeting {
    due: bool,
    /// This rank.
    rank: usize,
    /// By rank, as told when they last met; none where no step changes a capacity.
    members: Vec<Member>,
}

/// What decides when a rank has to record again.
#[derive(Debug)]
struct Member {
    between: BetweenSteps,
    /// What all think that it has: what it told, or wanted since.
    capacity: u32,
    limit: u32,
}

/// What a rank says of itself when all meet.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Told {
    capacity: u32,
    limit: u32,
    min_rows: u32,
}

impl Meeting {
    /// Before the first launch, which is the first recording of all.
    pub(super) fn new(rank: usize) -> Self {
        Self { due: true, rank, members: Vec::new() }
    }

    pub(super) fn is_due(&self) -> bool {
        self.due
    }

    /// Something that all ranks did may have left any of them without a graph.
    pub(super) fn call(&mut self) {
        self.due = true;
    }

    /// Works out what every rank makes of a step that has ended: they meet if the capacity of any changes.
    /// Returns the capacity for the next step of this rank, which has `capacity`: less than others think
    /// where it could not be had, and another where somebody else has changed it, until they meet.
    pub(super) fn follow(
        &mut self,
        capacity: u32,
        record: &StepRecord,
        overflowed: bool,
        alignment: u32,
    ) -> u32 {
        let mut own = capacity;
        for (rank, member) in self.members.iter_mut().enumerate() {
            let wanted = member.between.after_step(EndedStep {
                own_capacity: member.capacity,
                required: &record.required,
                overflowed,
                alignment,
                limit_rows: member.limit,
            });
            self.due |= wanted != member.capacity;
            if rank == self.rank {
                own = match wanted.cmp(&member.capacity) {
                    Ordering::Less => wanted.min(capacity),
                    Ordering::Equal => capacity,
                    Ordering::Greater => wanted.max(capacity),
                };
            }
            member.capacity = wanted;
        }
        own
    }

    /// All have met. What was known of members that are known already goes on, but for their capacities,
    /// which somebody else may have changed as well.
    fn held(&mut self, told: &[Told], settings: &RecoverySettings) -> Result<(), OverflowError> {
        let followed = if settings.adjustments().any() { told } else { &[] };
        for (rank, told) in followed.iter().enumerate() {
            if let Some(member) = self.members.get_mut(rank) {
                (member.capacity, member.limit) = (told.capacity, told.limit);
                continue;
            }
            let adjustments = Adjustments { min_rows: told.min_rows, ..settings.adjustments() };
            let between = BetweenSteps::new(settings.growth(), adjustments, rank)?.only_as_asked();
            let (capacity, limit) = (told.capacity, told.limit);
            self.members.push(Member { between, capacity, limit });
        }
        self.due = false;
        Ok(())
    }
}

impl<B: Backend> StepRunner<B> {
    /// Records what has to be recorded anew, on all ranks before any goes on. Collective; if one cannot,
    /// none goes on, and all meet again at the next launch.
    pub(super) fn record_together(&mut self, tally: &mut Tally) -> Result<(), OverflowError> {
        let context = self.dispatcher.context().clone();
        let own = Told {
            capacity: self.rows.capacity(),
            limit: self.limit(),
            min_rows: self.settings.adjustments().min_rows,
        };
        let deadline = context.deadlines().of(Phase::Agreement);
        let told = gather(context.rendezvous(), BEFORE, &own, deadline)?;
        let recorded = match self.source.is_current() {
            true => Ok(()),
            false => self.record(tally),
        };
        let outcome = recorded.as_ref().copied();
        if let Err(failed) = all_or_none(context.rendezvous(), AFTER, outcome, deadline) {
            return Err(recorded.err().unwrap_or_else(|| ContextError::from(failed).into()));
        }
        match &mut self.meeting {
            Some(meeting) => meeting.held(&told, &self.settings),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::growth::GrowthPolicy;
    use crate::policy::OverflowPolicy;

    fn record(required: &[u32]) -> StepRecord {
        StepRecord {
            step: 1,
            drained: false,
            first_over: None,
            required: required.to_vec().into(),
            required_by_dispatch: Vec::new().into(),
            capacity: 0,
            windows: 1,
            delivered: 0,
            dropped: 0,
            invalid_ids: 0,
            repeated_ids: 0,
        }
    }

    fn told(capacity: u32, min_rows: u32) -> Told {
        Told { capacity, limit: 1000, min_rows }
    }

    fn settings(adjustments: Adjustments) -> RecoverySettings {
        RecoverySettings::new()
            .with_overflow(OverflowPolicy::Rounds)
            .with_growth(GrowthPolicy::Exact)
            .with_adjustments(adjustments)
    }

    /// That of `rank`, after the first.
    fn meeting(rank: usize, adjustments: Adjustments, told: &[Told]) -> Meeting {
        let mut meeting = Meeting::new(rank);
        assert!(meeting.is_due(), "all record before the first step");
        meeting.held(told, &settings(adjustments)).expect("the factor is in range");
        assert!(!meeting.is_due());
        meeting
    }

    fn capacities(meeting: &Meeting) -> Vec<u32> {
        meeting.members.iter().map(|member| member.capacity).collect()
    }

    #[test]
    fn all_meet_where_one_grows() {
        let ahead = Adjustments { look_ahead: Some(1.0), ..Adjustments::default() };
        let mut meeting = meeting(1, ahead, &[told(40, 0), told(40, 0), told(80, 0)]);
        assert_eq!(meeting.follow(40, &record(&[40, 8, 80]), false, 4), 40);
        assert!(!meeting.is_due(), "nobody required more than it had");
        assert_eq!(meeting.follow(40, &record(&[40, 48, 80]), true, 4), 48);
        assert!(meeting.is_due());
        assert_eq!(capacities(&meeting), [40, 48, 80]);
        // Rank 1 had no memory for more.
        meeting.held(&[told(40, 0); 3], &settings(ahead)).expect("the factor is in range");
        assert_eq!((meeting.is_due(), capacities(&meeting)), (false, vec![40; 3]));
    }

    #[test]
    fn all_meet_where_one_shrinks_and_not_where_it_may_not() {
        let shrinking = Adjustments { shrink_after: NonZeroU32::new(2), ..Adjustments::default() };
        for (least, shrinks) in [(0, true), (80, false)] {
            let mut meeting = meeting(1, shrinking, &[told(8, 0), told(80, least)]);
            assert_eq!(meeting.follow(80, &record(&[8, 8]), false, 4), 80);
            assert!(!meeting.is_due());
            let next = meeting.follow(80, &record(&[8, 8]), false, 4);
            assert_eq!((next, meeting.is_due()), (if shrinks { 12 } else { 80 }, shrinks));
        }
    }

    #[test]
    fn a_capacity_of_which_the_others_do_not_know_changes_only_the_way_that_they_think() {
        let adjustments =
            Adjustments { look_ahead: Some(1.0), shrink_after: NonZeroU32::new(1), min_rows: 0 };
        // What the rank has, what is required of it, and what it then takes; all think that it has 40.
        for (capacity, required, next) in [
            (24, 48, 48), // could not grow before, and is to grow
            (64, 48, 64), // was grown by somebody else
            (24, 40, 24), // what it has is thought to be enough
            (64, 8, 12),
            (8, 8, 8),
        ] {
            let mut meeting = meeting(0, adjustments, &[told(40, 0)]);
            assert_eq!(meeting.follow(capacity, &record(&[required]), false, 4), next);
            assert_eq!(meeting.is_due(), required != 40, "{capacity} rows, {required} required");
        }
    }

    #[test]
    fn nobody_is_followed_where_nothing_changes() {
        let mut meeting = meeting(0, Adjustments::default(), &[told(8, 0); 4]);
        for required in [8, 400, 0] {
            assert_eq!(meeting.follow(8, &record(&[required; 4]), required > 8, 4), 8);
            assert!(!meeting.is_due() && meeting.members.is_empty());
        }
        meeting.call();
        assert!(meeting.is_due());
    }
}

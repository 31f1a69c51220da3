//! How ranks that share a device record loops: at once, while none of them waits on the device.
//!
//! To make a graph with loops ready takes the device, and kernels that wait there for another rank do not
//! give it away. So all ranks meet before any of them records, when whatever was launched ends by itself,
//! and again before any launches what was recorded. No rank says when that has to be: each follows the
//! capacities of all.

use ep_context::rendezvous::{RendezvousError, all_or_none};
use ep_context::{Backend, ContextError, EpContext, Phase, Rank};
use serde::{Deserialize, Serialize};
use token_dispatch::StepRecord;

use super::{StepRunner, Tally};
use crate::error::OverflowError;
use crate::growth::{Adjustments, BetweenSteps, StepSummary};
use crate::policy::RecoverySettings;

const BEFORE: &str = "before a step is recorded";
const AFTER: &str = "the recording of a step";

/// Whether all ranks meet at the next launch.
#[derive(Debug)]
pub(super) struct Meeting {
    due: bool,
    /// By rank, as told when they last met.
    members: Vec<Member>,
}

/// What decides when a rank has to record again.
#[derive(Debug)]
struct Member {
    between: BetweenSteps,
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
    pub(super) fn new() -> Self {
        Self { due: true, members: Vec::new() }
    }

    pub(super) fn is_due(&self) -> bool {
        self.due
    }

    /// Something that all ranks did may have left any of them without a graph.
    pub(super) fn call(&mut self) {
        self.due = true;
    }

    /// Works out what every rank makes of a step that has ended, as each of them does for itself: they
    /// meet if the capacity of any changes.
    pub(super) fn follow(&mut self, record: &StepRecord, overflowed: bool, alignment: u32) {
        for member in &mut self.members {
            let wanted = member.between.after_step(StepSummary {
                own_capacity: member.capacity,
                required: &record.required,
                overflowed: overflowed || record.peak() > member.capacity,
                alignment,
                limit_rows: member.limit,
            });
            self.due |= wanted != member.capacity;
            member.capacity = wanted;
        }
    }

    /// All have met. What was known of members that are known already goes on, but for their capacities,
    /// which somebody else may have changed as well.
    fn held(&mut self, told: &[Told], settings: &RecoverySettings) -> Result<(), OverflowError> {
        for (rank, told) in told.iter().enumerate() {
            if let Some(member) = self.members.get_mut(rank) {
                (member.capacity, member.limit) = (told.capacity, told.limit);
                continue;
            }
            let adjustments = Adjustments { min_rows: told.min_rows, ..settings.adjustments };
            let between = BetweenSteps::new(settings.growth, adjustments, rank)?.only_as_asked();
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
            min_rows: self.settings.adjustments.min_rows,
        };
        let told = gather(&context, own)?;
        let recorded = match self.source.is_current() {
            true => Ok(()),
            false => self.record(tally),
        };
        let deadline = context.deadlines().of(Phase::Agreement);
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

/// Waits for all ranks, and learns what each says.
fn gather<B: Backend>(context: &EpContext<B>, own: Told) -> Result<Vec<Told>, ContextError> {
    let malformed = |rank, error: postcard::Error| RendezvousError::Malformed {
        rank,
        purpose: BEFORE.to_owned(),
        reason: error.to_string(),
    };
    let mine = postcard::to_allocvec(&own).map_err(|error| malformed(context.rank(), error))?;
    let deadline = context.deadlines().of(Phase::Agreement);
    let words = context.rendezvous().all_gather(BEFORE, &mine, deadline)?;
    let read = |(rank, word): (usize, &Vec<u8>)| {
        postcard::from_bytes(word).map_err(|error| malformed(Rank::from_index(rank), error).into())
    };
    words.iter().enumerate().map(read).collect()
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

    fn meeting(adjustments: Adjustments, told: &[Told]) -> Meeting {
        let settings = RecoverySettings::new()
            .overflow(OverflowPolicy::Rounds)
            .growth(GrowthPolicy::Exact)
            .adjustments(adjustments);
        let mut meeting = Meeting::new();
        assert!(meeting.is_due(), "all record before the first step");
        meeting.held(told, &settings).expect("the factor is in range");
        assert!(!meeting.is_due());
        meeting
    }

    #[test]
    fn all_meet_where_one_grows() {
        let ahead = Adjustments { look_ahead: Some(1.0), ..Adjustments::default() };
        let mut meeting = meeting(ahead, &[told(40, 0), told(40, 0), told(80, 0)]);
        meeting.follow(&record(&[40, 8, 80]), false, 4);
        assert!(!meeting.is_due(), "nobody required more than it had");
        meeting.follow(&record(&[40, 48, 80]), true, 4);
        assert!(meeting.is_due());
        let capacities = |meeting: &Meeting| -> Vec<u32> {
            meeting.members.iter().map(|member| member.capacity).collect()
        };
        assert_eq!(capacities(&meeting), [40, 48, 80]);
        // Rank 1 had no memory for more.
        meeting.held(&[told(40, 0); 3], &RecoverySettings::new()).expect("the factor is in range");
        assert_eq!((meeting.is_due(), capacities(&meeting)), (false, vec![40; 3]));
    }

    #[test]
    fn all_meet_where_one_shrinks_and_not_where_it_may_not() {
        let shrinking = Adjustments { shrink_after: NonZeroU32::new(2), ..Adjustments::default() };
        for (least, shrinks) in [(0, true), (80, false)] {
            let mut meeting = meeting(shrinking, &[told(8, 0), told(80, least)]);
            meeting.follow(&record(&[8, 8]), false, 4);
            assert!(!meeting.is_due());
            meeting.follow(&record(&[8, 8]), false, 4);
            assert_eq!(meeting.is_due(), shrinks, "not below {least}");
        }
    }

    #[test]
    fn nobody_meets_where_nothing_changes() {
        let mut meeting = meeting(Adjustments::default(), &[told(8, 0); 4]);
        for required in [8, 400, 0] {
            meeting.follow(&record(&[required; 4]), required > 8, 4);
            assert!(!meeting.is_due());
        }
        meeting.call();
        assert!(meeting.is_due());
    }
}

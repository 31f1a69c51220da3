//! The life of a group in any order: create, run, record, replay, overflow, grow, trim, resize,
//! invalidate, abort, drop, on one to three ranks, against a model.

mod model;
mod ranks;

use std::fmt;
use std::marker::PhantomData;

use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use proptest_state_machine::StateMachineTest;

use crate::backend::TestBackend;
use crate::oracle::StepOracle;
use crate::outcome::RankRun;

pub use model::{Answer, Group, Model, Operation};
pub use ranks::{Failure, Ranks, Reply};

/// Lives of groups of threads on one backend, for `prop_state_machine!`.
pub struct Lives<T>(PhantomData<T>);

impl<T> fmt::Debug for Lives<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lives")
    }
}

impl<T: TestBackend<Rendezvous = ThreadRendezvous>> StateMachineTest for Lives<T> {
    type SystemUnderTest = Ranks<T>;
    type Reference = Model;

    fn init_test(model: &Model) -> Ranks<T> {
        Ranks::new(model.world())
    }

    fn apply(ranks: Ranks<T>, model: &Model, operation: Operation) -> Ranks<T> {
        let step = match &model.answer {
            Answer::Step { step, .. } | Answer::Rounds { step } => *step,
            _ => 0,
        };
        let ask = matches!((&model.answer, &operation), (Answer::Refused(_), Operation::Replay));
        let replies = ranks.tell(&operation, step, &model.case(), ask);
        judge(model, &operation, &replies);
        if let (Answer::Refused(_), Operation::Record { .. }) = (&model.answer, &operation) {
            // Some could record it, which is of no use to them.
            ranks.tell(&Operation::Forget, 0, &model.case(), false);
        }
        ranks
    }

    fn teardown(ranks: Ranks<T>, _: Model) {
        ranks.end();
    }
}

/// Holds what the ranks said to what the model expects of them.
fn judge(model: &Model, operation: &Operation, replies: &[Reply]) {
    let what = format!("{operation:?}");
    for (rank, reply) in replies.iter().enumerate() {
        let at = format!("{what}, rank {rank}");
        match (&model.answer, &reply.result) {
            (Answer::Fault(culprit), Err(Failure::Fault(named))) => {
                assert_eq!(named, culprit, "{at}")
            }
            (Answer::Refused(ranks), Err(Failure::Refused(why))) => {
                assert!(ranks[rank], "{at}: {why}")
            }
            (Answer::Refused(ranks), Ok(_)) => assert!(!ranks[rank], "{at} was not refused"),
            (Answer::Done, Ok(None)) => {}
            (Answer::Step { .. } | Answer::Rounds { .. }, Ok(Some(_))) => {}
            (answer, reply) => panic!("{at}: {reply:?} rather than {answer:?}"),
        }
        match &model.group {
            Some(group) => assert_eq!(reply.capacity, Some(group.capacity[rank]), "{at}: capacity"),
            None => assert_eq!((reply.capacity, reply.used), (None, 0), "{at}: memory"),
        }
        if let (Operation::Trim, Answer::Done) = (operation, &model.answer) {
            assert_eq!(reply.spare, 0, "{at}: bytes behind the capacity");
        }
    }
    let seen = || -> (Vec<RankRun>, Vec<u32>) {
        replies.iter().filter_map(|reply| reply.result.as_ref().ok()?.clone()).unzip()
    };
    let case = model.case();
    match &model.answer {
        Answer::Step { step, capacity, recordings } => {
            let (runs, recorded) = seen();
            StepOracle::new(&case, *step, capacity.as_deref()).check(&what, &runs);
            if let Some(recordings) = recordings {
                assert_eq!(&recorded, recordings, "{what}: recordings");
                assert!(runs.iter().all(|run| run.record.dropped == 0), "{what}: rows were lost");
            }
        }
        Answer::Rounds { step } => {
            let (runs, _) = seen();
            StepOracle::new(&case, *step, None).check_outputs(&what, &runs);
            assert!(runs.iter().all(|run| run.record.dropped == 0), "{what}: rows were lost");
        }
        Answer::Done | Answer::Refused(_) | Answer::Fault(_) => {}
    }
}

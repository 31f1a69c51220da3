//! What a group of ranks is expected to be after any sequence of operations.

use graph_ep::RowShaping;
use proptest::prelude::*;
use proptest_state_machine::ReferenceStateMachine;

use crate::case::{Case, Skew};
use crate::checks::everywhere::least_rows;
use crate::oracle::StepOracle;

/// The most ranks of a group.
pub(super) const MOST_RANKS: usize = 3;

/// An operation on all ranks, or on some.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Build a group with so many receive rows on each rank.
    Create {
        /// Receive rows.
        capacity: u32,
    },
    /// Drop everything.
    Drop,
    /// Run a step directly within the capacity.
    Static,
    /// Run a step eagerly.
    Eager,
    /// Record the step, in rounds or not.
    Record {
        /// Whether in rounds.
        rounds: bool,
        /// What it is shaped by.
        shaping: RowShaping,
    },
    /// Replay the recorded step; where it is stale anywhere, only ask.
    Replay,
    /// Run a step that recovers from overflow.
    Recover,
    /// Let the runner forget its graph.
    Invalidate,
    /// Drop the recorded step.
    Forget,
    /// Plan another capacity on the ranks of a mask, and commit or cancel it.
    Change {
        /// A bit for each rank.
        ranks: u8,
        /// The capacity.
        rows: u32,
        /// Whether it is to hold.
        commit: bool,
    },
    /// Give back what lies behind the capacity.
    Trim,
    /// Make the group again for other numbers of tokens.
    Resize {
        /// The most tokens of any rank.
        tokens: usize,
    },
    /// Give up on one rank, and run a step that may or may not get to the end on the others.
    Abort {
        /// The rank.
        rank: usize,
    },
}

/// What the ranks have to answer to the last operation.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Nothing went wrong.
    Done,
    /// The oracle's step.
    Step {
        /// Its number.
        step: usize,
        /// The capacities that it is held to, if it is held to any.
        capacity: Option<Vec<u32>>,
        /// For a runner, how often each rank had to record.
        recordings: Option<Vec<u32>>,
    },
    /// Outputs as with room for all.
    Rounds {
        /// The step's number.
        step: usize,
    },
    /// These ranks refuse.
    Refused(Vec<bool>),
    /// The group has failed because of this rank.
    Fault(usize),
}

/// A group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its case.
    pub case: Case,
    /// Receive rows of each rank.
    pub capacity: Vec<u32>,
    /// Counts changes of capacity on each rank.
    shapes: Vec<u32>,
    graph: Option<Recorded>,
    /// The shapes that the runner's graph was recorded for, if there are runner and graph.
    runner: Option<Option<Vec<u32>>>,
    failed: Option<usize>,
}

#[derive(Clone, Debug)]
struct Recorded {
    rounds: bool,
    shaping: RowShaping,
    shapes: Vec<u32>,
}

/// The ranks, as a model.
#[derive(Clone, Debug)]
pub struct Model {
    base: Case,
    /// The group that there is.
    pub group: Option<Group>,
    step: usize,
    /// What the last operation is answered with.
    pub answer: Answer,
}

impl Group {
    fn stale(&self) -> Option<Vec<bool>> {
        let graph = self.graph.as_ref()?;
        let differs = graph.shapes.iter().zip(&self.shapes).map(|(then, now)| then != now);
        Some(match graph.shaping {
            RowShaping::Capacity => differs.collect(),
            RowShaping::DeviceCounted => vec![false; self.shapes.len()],
        })
    }

    /// Grows every rank to what `step` requires; says which had to.
    fn grow(&mut self, step: usize) -> Vec<bool> {
        let required = StepOracle::new(&self.case, step, None).required();
        let ranks = self.capacity.iter_mut().zip(&mut self.shapes).zip(required);
        ranks
            .map(|((capacity, shape), required)| {
                let grows = required > *capacity;
                *capacity = required.max(*capacity);
                *shape += u32::from(grows);
                grows
            })
            .collect()
    }

    fn holds_rows(&self) -> bool {
        self.graph.is_some() || matches!(self.runner, Some(Some(_)))
    }

    fn has_room_for_rounds(&self) -> bool {
        self.capacity.iter().all(|rows| *rows >= least_rows(&self.case))
    }
}

fn with_tokens(base: &Case, tokens: usize) -> Case {
    let of_rank = |rank| if rank % 2 == 0 { tokens } else { tokens.saturating_sub(1) };
    Case { tokens: (0..base.world()).map(of_rank).collect(), ..base.clone() }
}

impl Model {
    /// Ranks.
    pub fn world(&self) -> usize {
        self.base.world()
    }

    /// The case of the group that there is, or of the next.
    pub fn case(&self) -> Case {
        self.group.as_ref().map_or(self.base.clone(), |group| group.case.clone())
    }
}

impl ReferenceStateMachine for Model {
    type State = Model;
    type Transition = Operation;

    fn init_state() -> BoxedStrategy<Model> {
        (1_usize..=MOST_RANKS, 0_u32..3, any::<u64>())
            .prop_map(|(world, alignment, seed)| {
                let base = Case::new(world);
                let base = Case {
                    experts: 2 * world + 1,
                    alignment: 1 << alignment,
                    skew: Skew::Rotating,
                    layers: 2,
                    seed,
                    ..base
                };
                Model { base: with_tokens(&base, 4), group: None, step: 0, answer: Answer::Done }
            })
            .boxed()
    }

    fn transitions(model: &Model) -> BoxedStrategy<Operation> {
        let create =
            (0_u32..10).prop_map(|groups| Operation::Create { capacity: 4 * groups }).boxed();
        let Some(group) = &model.group else { return create };
        if group.failed.is_some() {
            return prop_oneof![
                2 => Just(Operation::Static),
                1 => Just(Operation::Recover),
                2 => Just(Operation::Drop),
            ]
            .boxed();
        }
        let shaping = prop_oneof![Just(RowShaping::Capacity), Just(RowShaping::DeviceCounted)];
        let most = group.case.max_rows_of(0) + 8;
        prop_oneof![
            4 => Just(Operation::Static),
            2 => Just(Operation::Eager),
            4 => (any::<bool>(), shaping)
                .prop_map(|(rounds, shaping)| Operation::Record { rounds, shaping }),
            6 => Just(Operation::Replay),
            4 => Just(Operation::Recover),
            1 => Just(Operation::Invalidate),
            1 => Just(Operation::Forget),
            4 => (1_u8..8, 0..most, any::<bool>())
                .prop_map(|(ranks, rows, commit)| Operation::Change { ranks, rows, commit }),
            2 => Just(Operation::Trim),
            1 => (1_usize..9).prop_map(|tokens| Operation::Resize { tokens }),
            1 => (0..group.case.world()).prop_map(|rank| Operation::Abort { rank }),
            1 => Just(Operation::Drop),
        ]
        .boxed()
    }

    fn preconditions(model: &Model, operation: &Operation) -> bool {
        let Some(group) = &model.group else {
            return matches!(operation, Operation::Create { .. });
        };
        match operation {
            Operation::Create { .. } => false,
            Operation::Static | Operation::Recover | Operation::Drop => true,
            _ if group.failed.is_some() => false,
            // Shrunk below what one token may need, a loop that counts on the device can get stuck.
            Operation::Replay => group
                .graph
                .as_ref()
                .is_some_and(|graph| !graph.rounds || group.has_room_for_rounds()),
            Operation::Invalidate => group.runner.is_some(),
            Operation::Abort { rank } => *rank < group.case.world(),
            _ => true,
        }
    }

    fn apply(mut model: Model, operation: &Operation) -> Model {
        model.answer = Answer::Done;
        let world = model.base.world();
        if let Operation::Create { capacity } = operation {
            let case = model.base.clone().capacity(*capacity);
            let capacity = vec![*capacity; world];
            let shapes = vec![0; world];
            let (graph, runner, failed) = (None, None, None);
            model.group = Some(Group { case, capacity, shapes, graph, runner, failed });
            return model;
        }
        if let Operation::Drop = operation {
            model.group = None;
            return model;
        }
        let Some(group) = &mut model.group else { return model };
        let runs = matches!(
            operation,
            Operation::Static | Operation::Eager | Operation::Replay | Operation::Recover
        );
        let step = model.step;
        model.step += usize::from(runs);
        if let (true, Some(rank)) = (runs, group.failed) {
            model.answer = Answer::Fault(rank);
            return model;
        }
        model.answer = match operation {
            Operation::Create { .. } | Operation::Drop => Answer::Done,
            Operation::Static => {
                Answer::Step { step, capacity: Some(group.capacity.clone()), recordings: None }
            }
            Operation::Eager => {
                group.grow(step);
                Answer::Step { step, capacity: None, recordings: None }
            }
            Operation::Record { rounds, shaping } => {
                let least = |rank| {
                    let slots = group.case.slots_of(rank);
                    group.case.top_k.min(slots) as u32 * group.case.alignment
                };
                let refuses: Vec<bool> =
                    (0..world).map(|rank| *rounds && group.capacity[rank] < least(rank)).collect();
                let refused = refuses.contains(&true);
                let (rounds, shaping, shapes) = (*rounds, *shaping, group.shapes.clone());
                group.graph = (!refused).then_some(Recorded { rounds, shaping, shapes });
                if refused { Answer::Refused(refuses) } else { Answer::Done }
            }
            Operation::Replay => match group.stale() {
                Some(stale) if stale.contains(&true) => Answer::Refused(stale),
                _ if group.graph.as_ref().is_some_and(|graph| graph.rounds) => {
                    Answer::Rounds { step }
                }
                _ => {
                    Answer::Step { step, capacity: Some(group.capacity.clone()), recordings: None }
                }
            },
            Operation::Recover => {
                let before = group.runner.take().flatten();
                let current = |rank: usize| {
                    before.as_ref().is_some_and(|shapes| shapes[rank] == group.shapes[rank])
                };
                let mut recordings: Vec<u32> =
                    (0..world).map(|rank| u32::from(!current(rank))).collect();
                for (recordings, grew) in recordings.iter_mut().zip(group.grow(step)) {
                    *recordings += u32::from(grew);
                }
                group.runner = Some(Some(group.shapes.clone()));
                let capacity = Some(group.capacity.clone());
                Answer::Step { step, capacity, recordings: Some(recordings) }
            }
            Operation::Invalidate => {
                group.runner = Some(None);
                Answer::Done
            }
            Operation::Forget => {
                group.graph = None;
                Answer::Done
            }
            Operation::Change { ranks, rows, commit } => {
                let asked = |rank: usize| ranks >> rank & 1 == 1;
                let refuses: Vec<bool> = (0..world)
                    .map(|rank| asked(rank) && *rows > group.case.max_rows_of(rank))
                    .collect();
                for rank in (0..world).filter(|rank| *commit && asked(*rank) && !refuses[*rank]) {
                    group.capacity[rank] = *rows;
                    group.shapes[rank] += 1;
                }
                if refuses.contains(&true) { Answer::Refused(refuses) } else { Answer::Done }
            }
            Operation::Trim => match group.holds_rows() {
                true => Answer::Refused(vec![true; world]),
                false => Answer::Done,
            },
            Operation::Resize { tokens } => {
                let case = with_tokens(&model.base, *tokens);
                group.case = Case { capacity: Some(group.capacity.clone()), ..case };
                (group.graph, group.runner) = (None, None);
                Answer::Done
            }
            Operation::Abort { rank } => {
                group.failed = Some(*rank);
                Answer::Done
            }
        };
        model
    }
}

//! The ranks themselves: a thread each, which does what it is told and says what came of it.

use std::marker::PhantomData;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{
    Backend, CaptureError, DispatchError, GrowthPolicy, OverflowError, RecoverySettings, StepGraph,
    StepMode, StepOptions, StepRunner, ThreadGroup,
};

use super::model::Operation;
use crate::backend::{RankEnv, TestBackend};
use crate::case::Case;
use crate::outcome::RankRun;
use crate::rig::Rig;

/// What one rank says.
#[derive(Debug)]
pub struct Reply {
    /// What it saw, if it ran a step, and how often a runner recorded.
    pub result: Result<Option<(RankRun, u32)>, Failure>,
    /// Its capacity, if it is in a group.
    pub capacity: Option<u32>,
    /// Bytes that its rows are charged for beyond its capacity's.
    pub spare: u64,
    /// Bytes of its device in use.
    pub used: u64,
}

/// Why a rank did not do what it was told.
#[derive(Debug)]
pub enum Failure {
    /// The group has failed because of this rank.
    Fault(usize),
    /// Refused, in words.
    Refused(String),
}

impl From<DispatchError> for Failure {
    fn from(error: DispatchError) -> Self {
        match error {
            DispatchError::Fault(fault) => Self::Fault(fault.culprit.index()),
            other => Self::Refused(other.to_string()),
        }
    }
}

impl From<CaptureError> for Failure {
    fn from(error: CaptureError) -> Self {
        Self::Refused(error.to_string())
    }
}

impl From<OverflowError> for Failure {
    fn from(error: OverflowError) -> Self {
        match error {
            OverflowError::Dispatch(error) => error.into(),
            other => Self::Refused(other.to_string()),
        }
    }
}

#[derive(Debug)]
struct Command {
    operation: Operation,
    step: usize,
    /// The case of a group that is made or resized.
    case: Case,
    /// The place in a group that is made.
    rendezvous: Option<ThreadRendezvous>,
    /// Whether only to ask if the graph is current.
    ask: bool,
}

/// All ranks.
#[derive(Debug)]
pub struct Ranks<T> {
    ranks: Vec<(Sender<Command>, Receiver<Reply>, JoinHandle<()>)>,
    backend: PhantomData<T>,
}

impl<T: TestBackend<Rendezvous = ThreadRendezvous>> Ranks<T> {
    /// Ranks that are in no group yet.
    pub fn new(world: usize) -> Self {
        let rank = |_| {
            let (commands, todo) = channel();
            let (done, replies) = channel();
            (commands, replies, thread::spawn(move || serve::<T>(&todo, &done)))
        };
        Self { ranks: (0..world).map(rank).collect(), backend: PhantomData }
    }

    /// Tells all ranks and waits for all.
    ///
    /// # Panics
    ///
    /// If a rank has panicked.
    pub fn tell(&self, operation: &Operation, step: usize, case: &Case, ask: bool) -> Vec<Reply> {
        let mut places = Vec::new();
        if let Operation::Create { .. } = operation {
            places.extend(ThreadGroup::new(self.ranks.len()).expect("a group"));
        }
        let mut places = places.into_iter();
        for (commands, ..) in &self.ranks {
            let (operation, case, rendezvous) = (operation.clone(), case.clone(), places.next());
            let command = Command { operation, step, case, rendezvous, ask };
            commands.send(command).expect("the rank is there");
        }
        let replies = self.ranks.iter().map(|(_, replies, _)| replies.recv());
        replies.map(|reply| reply.expect("the rank has not panicked")).collect()
    }

    /// Lets all ranks end.
    ///
    /// # Panics
    ///
    /// If a rank has panicked.
    pub fn end(self) {
        for (commands, _, thread) in self.ranks {
            drop(commands);
            thread.join().expect("no panic");
        }
    }
}

/// What a rank has. Its graph and runner go before its group.
struct Alive<T: TestBackend> {
    graph: Option<StepGraph<'static, T::Backend>>,
    runner: Option<StepRunner<T::Backend>>,
    rig: Rig<T>,
    /// Bytes that do not depend on the capacity.
    fixed: u64,
}

impl<T: TestBackend> Alive<T> {
    fn new(rig: Rig<T>) -> Self {
        // What a group before it held is given back when nothing queued holds it any more.
        wait(&rig);
        let rows = rig.group.rows();
        let held = rows.row_bytes() as u64 * u64::from(rows.capacity());
        let fixed = rig.group.context().account().used() - held;
        Self { graph: None, runner: None, rig, fixed }
    }

    fn spare(&self) -> u64 {
        let rows = self.rig.group.rows();
        let held = rows.row_bytes() as u64 * u64::from(rows.capacity());
        self.rig.group.context().account().used() - self.fixed - held
    }

    fn run(&self, step: usize, number: u32) -> Result<Option<(RankRun, u32)>, Failure> {
        let record = self.rig.wait(number)?;
        Ok(Some((self.rig.seen_with(step, &record), 0)))
    }
}

/// Waits until nothing is queued and what nobody uses any more is given back. No rank runs a step.
fn wait<T: TestBackend>(rig: &Rig<T>) {
    let (backend, stream) = (rig.group.context().backend(), rig.group.stream());
    backend.synchronize(stream).expect("nothing has failed");
    T::collect(backend);
}

fn serve<T>(todo: &Receiver<Command>, done: &Sender<Reply>)
where
    T: TestBackend<Rendezvous = ThreadRendezvous>,
{
    let mut alive: Option<Alive<T>> = None;
    let memory = MemoryAccount::new(None);
    let mut backend = None;
    for command in todo {
        let result = obey(&mut alive, command, &memory);
        if let Some(alive) = &alive {
            backend = Some(alive.rig.group.context().backend().clone());
        }
        // What this operation dropped is given back now, and not in the middle of the next, when
        // a rank on the same device may wait for this one. Nobody waits for this one here.
        backend.iter().for_each(T::collect);
        let (capacity, spare) = match &alive {
            Some(alive) => (Some(alive.rig.group.rows().capacity()), alive.spare()),
            None => (None, 0),
        };
        let reply = Reply { result, capacity, spare, used: memory.used() };
        if done.send(reply).is_err() {
            return;
        }
    }
}

fn obey<T: TestBackend<Rendezvous = ThreadRendezvous>>(
    place: &mut Option<Alive<T>>,
    command: Command,
    memory: &MemoryAccount,
) -> Result<Option<(RankRun, u32)>, Failure> {
    let Command { operation, step, case, rendezvous, ask } = command;
    if let Some(rendezvous) = rendezvous {
        let rig = Rig::new(RankEnv { rendezvous, memory: memory.clone() }, &case);
        *place = Some(Alive::new(rig));
        return Ok(None);
    }
    let Some(alive) = place else { return Err(Failure::Refused("no group".to_owned())) };
    let rank = alive.rig.rank();
    let refused = |error: &dyn std::error::Error| Failure::Refused(error.to_string());
    match operation {
        Operation::Create { .. } => {}
        Operation::Drop => {
            // Work that is queued holds what it uses, and on a failed group some may be.
            wait(&alive.rig);
            *place = None;
        }
        Operation::Static | Operation::Eager => {
            alive.rig.write(step);
            let mode = match operation {
                Operation::Static => StepMode::Static,
                _ => StepMode::Eager { max_rows: u32::MAX },
            };
            let launched = alive.rig.launch(StepOptions::new().with_mode(mode));
            return alive.run(step, launched.map_err(|error| refused(error.as_ref()))?);
        }
        Operation::Record { rounds, shaping } => {
            alive.graph = None;
            let mode = if rounds { StepMode::Rounds } else { StepMode::Static };
            alive.graph =
                Some(alive.rig.record(StepOptions::new().with_mode(mode).with_shaping(shaping))?);
        }
        Operation::Replay => {
            let graph = alive.graph.as_ref().expect("it was recorded");
            graph.check_current()?;
            if !ask {
                alive.rig.write(step);
                return alive.run(step, graph.replay(alive.rig.group.stream())?);
            }
        }
        Operation::Recover => {
            if alive.runner.is_none() {
                let settings = RecoverySettings::new().with_growth(GrowthPolicy::Exact);
                alive.runner = Some(alive.rig.runner(settings)?);
            }
            let runner = alive.runner.as_mut().expect("it was made");
            let ran = alive.rig.step(runner, step)?;
            return Ok(Some((ran.run, ran.recordings)));
        }
        Operation::Invalidate => {
            alive.runner.iter_mut().for_each(StepRunner::invalidate);
        }
        Operation::Forget => alive.graph = None,
        Operation::Change { ranks, rows, commit } => {
            if ranks >> rank & 1 == 1 {
                let planned = alive.rig.group.rows().plan(rows).map_err(|error| refused(&error))?;
                match commit {
                    true => alive.rig.commit(planned),
                    false => planned.cancel(),
                }
            }
        }
        Operation::Trim => {
            wait(&alive.rig);
            alive.rig.group.rows().trim().map_err(|error| refused(&error))?;
        }
        Operation::Resize { .. } => {
            let tokens = case.max_tokens();
            let group = alive.rig.group.resize_tokens(tokens).expect("there is memory");
            *place = None;
            *place = Some(Alive::new(Rig::on(group, &case).expect("there is memory")));
        }
        Operation::Abort { rank: culprit } => {
            if rank == culprit {
                alive.rig.group.context().abort();
            }
            // A device looks at what its host says now and then, at the latest when a step ends. So
            // others may get through this step, if they need not wait; through no later one.
            alive.rig.write(step);
            let launched = alive.rig.launch(StepOptions::new());
            let number = launched.map_err(|error| refused(error.as_ref()))?;
            match alive.rig.wait(number).map_err(Failure::from) {
                Err(Failure::Fault(named)) if named == culprit => {}
                Err(other) => return Err(other),
                Ok(_) if rank == culprit => {
                    return Err(Failure::Refused("the step of a rank that gave up ran".to_owned()));
                }
                Ok(_) => {}
            }
        }
    }
    Ok(None)
}

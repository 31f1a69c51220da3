//! The ranks of a run as threads, and the thread that listens to them.

use std::sync::mpsc;
use std::thread;

use graph_ep::{Backend, BackendError, ExpertParallel, Phase, Queue, Rendezvous, ThreadGroup};

use super::collect::Collector;
use super::interrupt::{self, Second};
use super::processes::ProcessError;
use super::rank::{self, Interrupted, Overflowed, RankError, Refused};
use super::step::StepDone;
use super::{Plan, RunError, line};
use crate::args::Mode;
use crate::progress::Progress;
use crate::report::Report;

/// How one rank ended.
pub(super) struct RankEnd {
    rank: usize,
    /// Bytes that it held at the end.
    pub(super) bytes: u64,
    result: Result<(), RankFailure>,
}

/// Why one rank ended early.
enum RankFailure {
    /// The group could not be made.
    Setup(RunError),
    /// Something failed on the way.
    Step(RankError),
}

enum Message {
    Step(Box<StepDone>),
    End(RankEnd),
}

/// Runs the plan with ranks as threads, each on the device that `backend` makes for it.
pub(super) fn run<B: Backend>(
    plan: &Plan,
    backend: impl Fn(usize) -> Result<B, BackendError> + Sync,
) -> Result<Report, RunError> {
    let ranks = plan.args.ranks;
    interrupt::listen(Second::Ends).map_err(RunError::Interrupt)?;
    // A second group runs beside, eagerly, to be compared with.
    let main = ThreadGroup::new(ranks).map_err(setup)?;
    let beside = ThreadGroup::new(ranks).map_err(setup)?;
    let progress = Progress::new(plan.routing.steps());
    let mut collector = Collector::new(plan, &progress, B::NAME);
    let (sender, receiver) = mpsc::channel();
    let ends = thread::scope(|scope| {
        for (rank, (main, beside)) in main.into_iter().zip(beside).enumerate() {
            let (sender, backend) = (sender.clone(), &backend);
            thread::Builder::new()
                .name(format!("rank-{rank}"))
                .spawn_scoped(scope, move || {
                    let built = backend(rank)
                        .map_err(|error| RunError::Setup(error.into()))
                        .and_then(|backend| build(plan, backend, main, || Ok(beside)));
                    let end = match built {
                        Ok(groups) => run_rank(plan, rank, &groups, |done| {
                            let _ = sender.send(Message::Step(Box::new(done)));
                            Ok(())
                        }),
                        Err(error) => {
                            RankEnd { rank, bytes: 0, result: Err(RankFailure::Setup(error)) }
                        }
                    };
                    // Nobody listens any more only if the main thread is unwinding.
                    let _ = sender.send(Message::End(end));
                })
                .map_err(|source| RunError::Thread { rank, source })?;
        }
        drop(sender);
        let mut ends = Vec::new();
        for message in receiver {
            match message {
                Message::Step(done) => collector.take(*done),
                Message::End(end) => ends.push(end),
            }
        }
        Ok::<_, RunError>(ends)
    })?;
    let bytes = ends.iter().map(|end| end.bytes).max().unwrap_or(0);
    let failure = first_failure(ends)?;
    Ok(collector.finish(failure, bytes))
}

/// The groups that a rank is part of.
pub(super) struct Groups<B: Backend> {
    pub(super) main: ExpertParallel<B>,
    /// Runs eagerly beside, to be compared with. None where rows are dropped on purpose, which are
    /// held against the reference instead.
    eager: Option<ExpertParallel<B>>,
}

/// Builds the groups of one rank: the second meets only after the first is whole.
pub(super) fn build<B: Backend, R: Rendezvous + 'static>(
    plan: &Plan,
    backend: B,
    main: R,
    beside: impl FnOnce() -> Result<R, RunError>,
) -> Result<Groups<B>, RunError> {
    let limited = plan.group().memory_limit(plan.args.memory_limit);
    let main = limited.build(backend.clone(), main).map_err(RunError::Setup)?;
    let eager = match plan.args.mode {
        Mode::Drop => None,
        _ => Some(plan.group().build(backend, beside()?).map_err(RunError::Setup)?),
    };
    Ok(Groups { main, eager })
}

/// Runs every step of one rank, and tells the others if that ends early.
pub(super) fn run_rank<B: Backend>(
    plan: &Plan,
    rank: usize,
    groups: &Groups<B>,
    done: impl FnMut(StepDone) -> Result<(), ProcessError>,
) -> RankEnd {
    let result = rank::run(plan, &groups.main, groups.eager.as_ref(), done);
    if let Err(error) = &result {
        tracing::debug!(rank, error = %line(error.as_ref()), "the rank stops");
        if !is_collective(error) {
            for group in [Some(&groups.main), groups.eager.as_ref()].into_iter().flatten() {
                give_up(group, error);
            }
        }
    }
    RankEnd {
        rank,
        bytes: groups.main.context().account().used(),
        result: result.map_err(RankFailure::Step),
    }
}

/// Whether every rank stops at the same place with the same error, so that nobody waits for another.
fn is_collective(error: &RankError) -> bool {
    error.is::<Refused>() || error.is::<Overflowed>() || error.is::<Interrupted>()
}

/// Tells the other ranks, on the device and on the host, that this one is gone.
fn give_up<B: Backend>(group: &ExpertParallel<B>, error: &RankError) {
    let queue = Queue::direct(group.context().backend(), group.stream());
    if let Err(error) = group.dispatcher().abandon(&queue, Phase::Shutdown) {
        tracing::debug!(error = %line(&error), "could not tell the other ranks");
    }
    group.context().rendezvous().abort(&line(error.as_ref()));
}

/// Why the run ended early: what the rank says that was not told by another.
pub(super) fn first_failure(mut ends: Vec<RankEnd>) -> Result<Option<String>, RunError> {
    ends.sort_by_key(|end| end.rank);
    let mut told = None;
    for end in ends {
        match end.result {
            Ok(()) => {}
            Err(RankFailure::Setup(error)) => return Err(error),
            Err(RankFailure::Step(error)) => {
                if is_collective(&error) {
                    return Ok(Some(line(error.as_ref())));
                }
                told.get_or_insert_with(|| {
                    let line = line(error.as_ref());
                    let named = line.starts_with("rank ");
                    if named { line } else { format!("rank {}: {line}", end.rank) }
                });
            }
        }
    }
    Ok(told)
}

fn setup(error: graph_ep::ep_context::rendezvous::RendezvousError) -> RunError {
    RunError::Setup(graph_ep::Error::Context(error.into()))
}

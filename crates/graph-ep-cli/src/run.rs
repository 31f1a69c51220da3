//! The main job, from arguments to a verdict.
//!
//! Every rank records and runs the steps (`rank`) and checks what came out (`verify`). Ranks are
//! threads that tell the main thread of each step (`group`), or processes that tell rank 0
//! (`processes`), which shows it and adds it up (`collect`).

mod collect;
pub(crate) mod device;
mod group;
mod interrupt;
mod processes;
mod rank;
mod step;
mod tensors;
mod verify;

use std::error::Error;

use device::Devices;
use graph_ep::{Backend, BackendError, HostBackend, MemoryReport, Rank, Transfer};

pub use processes::ProcessError;
use processes::Spoken;
pub(crate) use tensors::dtype;

use crate::args::{ArgsError, Mode, RunArgs, TransferChoice};
use crate::demand;
use crate::output::{self, OutputError};
use crate::plot::{self, PlotError};
use crate::report::{Outcome, Report};
use crate::routing::{Routing, RoutingError, Shards};
use crate::table;
use crate::trace::{self, TraceError};
use crate::verdict::Verdict;
use crate::workload::WorkloadConfig;

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The arguments do not go together, or not with the routing.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// The trace was not read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The routing cannot be made, or not be spread over so many ranks.
    #[error("the routing does not fit the run")]
    Routing(#[source] RoutingError),
    /// There is no device of the kind that was asked for.
    #[error("--backend cuda cannot be used")]
    Device(#[source] BackendError),
    /// The sizes are more than a rank can be made for.
    #[error("{what} is {value}, more than the {limit} that this version is made for")]
    TooLarge {
        /// The size.
        what: &'static str,
        /// Its value, or that it cannot be counted.
        value: String,
        /// The limit.
        limit: u64,
    },
    /// In rounds a window must hold any one token.
    #[error(
        "an initial capacity of {capacity} rows cannot hold every token; --mode rounds needs at least \
         {least}: raise --capacity-factor"
    )]
    TooSmall {
        /// Rows of every rank.
        capacity: u32,
        /// Rows that one token may need: a padded row for each of its experts on a rank.
        least: usize,
    },
    /// No group can be made of these settings.
    #[error("the group cannot be made")]
    Refused(#[source] graph_ep::Error),
    /// The group could be made of these settings, but not on these devices at this time.
    #[error("the group cannot be set up")]
    Setup(#[source] graph_ep::Error),
    /// Ctrl-C could not be taken over.
    #[error("cannot listen for Ctrl-C")]
    Interrupt(#[source] ctrlc::Error),
    /// Ranks could not run as processes.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// This process's rank failed.
    #[error("rank {rank} stopped; {failure}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Why.
        failure: String,
    },
    /// A thread could not be started.
    #[error("cannot start the thread of rank {rank}")]
    Thread {
        /// The rank.
        rank: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The report could not be written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The plot could not be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl RunError {
    /// How a run that ended so is told to the shell.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Args(_)
            | Self::Trace(_)
            | Self::Routing(_)
            | Self::Device(_)
            | Self::TooLarge { .. }
            | Self::TooSmall { .. }
            | Self::Refused(_) => Verdict::BadInput,
            Self::Process(error) => error.verdict(),
            Self::Setup(_)
            | Self::Interrupt(_)
            | Self::Rank { .. }
            | Self::Thread { .. }
            | Self::Output(_)
            | Self::Plot(_) => Verdict::Failed,
        }
    }
}

/// What every rank and the collector need to know.
#[derive(Debug)]
struct Plan {
    args: RunArgs,
    routing: Routing,
    shards: Shards,
    initial_capacity: u32,
    worst_case_rows: usize,
    /// What each step requires of each rank, from the routing alone.
    demand: Vec<Vec<usize>>,
    /// What each rank will hold.
    memory: Vec<MemoryReport>,
}

/// Does what `args` ask for.
///
/// # Errors
///
/// [`RunError`], if the run could not begin or not come to a verdict.
pub fn run(args: &RunArgs) -> Result<Verdict, RunError> {
    args.check_outputs()?;
    let joins = args.processes && processes::is_rank();
    if joins {
        processes::begin_rank()?;
    }
    // A launcher says itself how many ranks there are.
    let ranks = if joins { processes::world()? } else { args.ranks };
    // What a rank would refuse is refused once, and before anything is looked for.
    let plan = Plan::new(&RunArgs { ranks, ..args.clone() })?;
    if args.processes && !joins {
        return processes::spawn(ranks);
    }
    match Devices::find(args.backend).map_err(RunError::Device)? {
        Devices::Host => run_on(&plan, joins, device::host),
        Devices::Cuda(gpus) => run_on(&plan, joins, |rank| device::cuda(&gpus, rank)),
    }
}

/// The same, on devices that `backend` makes for each rank.
fn run_on<B: Backend>(
    plan: &Plan,
    joins: bool,
    backend: impl Fn(usize) -> Result<B, BackendError> + Sync,
) -> Result<Verdict, RunError> {
    if !joins {
        return conclude(&plan.args, &group::run(plan, backend)?);
    }
    match processes::run_rank(plan, backend)? {
        Spoken::Report(report) => conclude(&plan.args, &report),
        Spoken::Nothing(verdict) => Ok(verdict),
    }
}

/// Writes and shows the report, and says what it amounts to.
fn conclude(args: &RunArgs, report: &Report) -> Result<Verdict, RunError> {
    // Files first, and none without having tried the other: a stdout that is closed must not lose them,
    // nor a disk that is full what is shown.
    let reported = args.report.as_deref().map(|path| report.write(path)).transpose();
    let drawn = args.plot.as_deref().map(|path| plot::write(report, path)).transpose();
    output::show(&table::render(report));
    if let Some(failure) = &report.failure {
        output::tell(&format!("failed: {failure}"));
    }
    reported?;
    drawn?;
    Ok(match report.outcome {
        Outcome::Verified => Verdict::Verified,
        Outcome::Mismatch | Outcome::Failed => Verdict::Failed,
    })
}

impl Plan {
    fn new(args: &RunArgs) -> Result<Self, RunError> {
        let (routing, shards) = load(args)?;
        let (tokens, top_k) = (shards.max_tokens(), routing.top_k());
        let too_large = |what, value: String| RunError::TooLarge {
            what,
            value,
            limit: i32::MAX.unsigned_abs().into(),
        };
        let rows =
            demand::initial_capacity_rows(args.capacity_factor, tokens, top_k, args.alignment);
        let rows = rows.filter(|rows| i32::try_from(*rows).is_ok()).ok_or_else(|| {
            let rows = rows.map_or("beyond counting".to_owned(), |rows| rows.to_string());
            too_large("the initial capacity in rows", rows)
        })?;
        let worst_case_rows = demand::worst_case_rows(
            routing.tokens(),
            args.ranks,
            routing.experts(),
            top_k,
            args.alignment,
        )
        .filter(|rows| i32::try_from(*rows).is_ok())
        .ok_or_else(|| too_large("the worst case in rows", "2³¹ or more".to_owned()))?;
        // Both fit, as was just seen.
        let initial_capacity = rows.min(worst_case_rows) as u32;
        let local = routing.experts().div_ceil(args.ranks);
        let least = routing.top_k().min(local) * args.alignment;
        if args.mode == Mode::Rounds && (initial_capacity as usize) < least {
            return Err(RunError::TooSmall { capacity: initial_capacity, least });
        }
        let demand = demand::required_rows(&routing, args.ranks, args.alignment);
        tracing::info!(
            routing = routing.name(),
            steps = routing.steps(),
            layers = routing.layers(),
            tokens = routing.tokens(),
            ranks = args.ranks,
            initial_capacity,
            worst_case_rows,
            "routing loaded"
        );
        let args = args.clone();
        let memory = Vec::new();
        let mut plan =
            Self { args, routing, shards, initial_capacity, worst_case_rows, demand, memory };
        plan.memory = plan.memory_reports()?;
        Ok(plan)
    }

    /// What each rank will hold. Refuses, before any rank exists, what a rank would refuse.
    fn memory_reports(&self) -> Result<Vec<MemoryReport>, RunError> {
        let ranks = self.args.ranks;
        let reports = (0..ranks)
            .map(|rank| self.group().memory_report(Rank::from_index(rank), ranks))
            .collect::<Result<Vec<_>, _>>()
            .map_err(RunError::Refused)?;
        for report in &reports {
            tracing::debug!("memory of a rank\n{report}");
            let needed = report.budget_bytes();
            if let Some(limit) = self.args.memory_limit.filter(|limit| needed > *limit) {
                let capacity_rows = report.budget_rows;
                let error = graph_ep::Error::MemoryLimit { capacity_rows, needed, limit };
                return Err(RunError::Refused(error));
            }
        }
        Ok(reports)
    }

    /// The sizes of the expert-parallel group, as its ranks are built from them.
    fn group(&self) -> graph_ep::ExpertParallelBuilder {
        graph_ep::ExpertParallel::<HostBackend>::builder(
            self.args.hidden,
            self.routing.experts(),
            self.routing.top_k(),
            self.shards.max_tokens().max(1),
        )
        .dtype(tensors::dtype(self.args.dtype))
        .alignment(self.args.alignment as u32)
        .capacity_rows(self.initial_capacity)
        .routing(graph_ep::RoutingDependence::Independent)
        .transfer(self.args.transfer.into())
        .max_dispatches(self.routing.layers())
    }
}

impl From<TransferChoice> for Transfer {
    fn from(choice: TransferChoice) -> Self {
        match choice {
            TransferChoice::Auto => Self::Auto,
            TransferChoice::Pull => Self::Pull,
            TransferChoice::Push => Self::Push,
        }
    }
}

/// The routing that `args` name, cut to `--steps` and spread over `--ranks`.
fn load(args: &RunArgs) -> Result<(Routing, Shards), RunError> {
    let routing = match (&args.trace, args.workload) {
        (Some(path), _) => trace::load(path)?,
        (None, Some(workload)) => WorkloadConfig::new(workload, args.seed, args.ranks)
            .generate()
            .map_err(RunError::Routing)?,
        (None, None) => trace::built_in()?,
    };
    Ok(args.check(routing)?)
}

/// An error and its causes in one line.
fn line(error: &(dyn Error + 'static)) -> String {
    graph_ep::ep_context::error::chain(error)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn plan(line: &str) -> Plan {
        let words = ["graph-ep", "run"].into_iter().chain(line.split_whitespace());
        let Command::Run(args) = Cli::parse_from(words).command else { panic!("another command") };
        Plan::new(&args).expect("it can run")
    }

    #[test]
    fn no_capacity_is_above_what_can_be_required() {
        for line in ["--ranks 1", "--ranks 3 --capacity-factor 1000 --alignment 4"] {
            let plan = plan(line);
            assert_eq!(plan.initial_capacity as usize, plan.worst_case_rows, "{line}");
        }
        assert_eq!(plan("--ranks 8").initial_capacity, 640);
    }
}

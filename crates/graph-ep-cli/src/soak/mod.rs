//! `graph-ep soak`: the engine for long, under load, with every output compared on its device.
//!
//! What a step computes is a closed form of its number (`form`), which kernels make, apply and compare
//! (`kernels`), so that the host has no part in a step but its launch. How large a group is and what it
//! takes is in `sizes`, a rank's memory and steps in `rig`; `replays`, `random`, `cycles` and `phased` are
//! what is done with them, on threads that are the ranks of a group (`ranks`); what these find out is added
//! up (`tally`) and told (`report`, `table`).

mod args;
mod cycles;
mod form;
pub(crate) mod kernels;
mod phased;
mod random;
mod ranks;
mod replays;
pub mod report;
mod rig;
mod sizes;
mod table;
mod tally;

#[cfg(test)]
mod device;
#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use graph_ep::ep_context::rendezvous::RendezvousError;
use graph_ep::{BackendError, BodyError, DispatchError, OverflowError, RoutingDependence};

pub use args::{
    Common, CyclesArgs, PhasedArgs, RandomArgs, ReplaysArgs, SizeArgs, SoakArgs, SoakArgsError,
    SoakCommand,
};
pub use cycles::Held;

use crate::args::{ArgsError, Mode, check_outputs};
use crate::bench::report::utc_now;
use crate::bench::{command_line, commit};
use crate::gauge::Gauge;
use crate::output::{self, OutputError};
use crate::run::device::{Devices, cuda, host};
use crate::verdict::Verdict;
use report::{Entry, HeldReport, Report, SCHEMA};
use sizes::Sizes;

/// Why a soak has no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SoakError {
    /// Arguments do not go together.
    #[error(transparent)]
    Args(#[from] SoakArgsError),
    /// A file could not be written.
    #[error(transparent)]
    Outputs(#[from] ArgsError),
    /// There is no device of the kind that was asked for.
    #[error("--backend cuda cannot be used")]
    Device(#[source] BackendError),
    /// No group can be made of these settings.
    #[error("the group cannot be made")]
    Refused(#[source] graph_ep::Error),
    /// Ranks failed.
    #[error("{0}")]
    Ranks(String),
    /// A rank panicked.
    #[error("it panicked")]
    Panic,
    /// A thread could not be started.
    #[error("its thread cannot be started")]
    Thread(#[source] std::io::Error),
    /// The group could not be built, or its memory not be had.
    #[error("the group cannot be set up")]
    Setup(#[from] graph_ep::Error),
    /// Ranks did not meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// An operation was refused, or the group failed.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] OverflowError),
    /// A part of a step was refused.
    #[error("a part of a step was refused")]
    Body(#[source] BodyError),
    /// What receivers say they dropped is not what outputs lack.
    #[error("mode {mode}: outputs lack {missing} pairs, and {dropped} were counted as dropped")]
    Miscounted {
        /// The mode.
        mode: Mode,
        /// Pairs that outputs lack.
        missing: u64,
        /// Pairs that receivers counted.
        dropped: u64,
    },
    /// The system does not say what this process holds.
    #[error("/proc/self cannot be read")]
    Proc {
        /// Its reason.
        source: std::io::Error,
    },
    /// The report could not be written.
    #[error(transparent)]
    Output(#[from] OutputError),
}

impl SoakError {
    /// How a soak that ended so is told to the shell.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Args(_) | Self::Outputs(_) | Self::Device(_) | Self::Refused(_) => {
                Verdict::BadInput
            }
            _ => Verdict::Failed,
        }
    }
}

impl SoakArgs {
    /// What all commands take.
    pub fn common(&self) -> &Common {
        match &self.command {
            SoakCommand::Replays(args) => &args.common,
            SoakCommand::Random(args) => &args.common,
            SoakCommand::Cycles(args) => &args.common,
            SoakCommand::Phased(args) => &args.common,
        }
    }
}

/// Does what `args` ask for, writes the report and shows it.
///
/// # Errors
///
/// [`SoakError`], if it could not begin or not come to a verdict.
pub fn run(args: &SoakArgs) -> Result<Verdict, SoakError> {
    let common = args.common();
    check_outputs(common.report.as_deref(), None)?;
    common.check()?;
    let devices = Devices::find(common.backend).map_err(SoakError::Device)?;
    let found = match &devices {
        Devices::Host => soak(&args.command, 0, &host)?,
        Devices::Cuda(gpus) => soak(&args.command, gpus.len(), &|rank| cuda(gpus, rank))?,
    };
    let kept = found.held.as_ref().is_none_or(|held| held.before.is_all_of(&held.after));
    let report = Report {
        schema: SCHEMA.to_owned(),
        date: utc_now(),
        commit: commit(common.commit.as_deref()),
        command: command_line(words()),
        hardware: devices.describe(),
        ranks: common.ranks,
        verified: kept && found.entries.iter().all(|entry| entry.verified),
        results: found.entries,
        held: found.held,
    };
    // The file first, which a stdout that is closed must not lose; a full disk must not lose the table.
    let reported = common.report.as_deref().map(|path| report.write(path)).transpose();
    output::show(&table::render(&report));
    reported?;
    Ok(if report.verified { Verdict::Verified } else { Verdict::Failed })
}

/// The command line, with the program's name in place of where it lies.
fn words() -> impl Iterator<Item = OsString> {
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    let name = Path::new(&program).file_name().map(OsStr::to_owned);
    name.into_iter().chain(words)
}

/// What a soak found out.
struct Found {
    entries: Vec<Entry>,
    held: Option<HeldReport>,
}

impl From<Vec<Entry>> for Found {
    fn from(entries: Vec<Entry>) -> Self {
        Self { entries, held: None }
    }
}

/// Does it on the devices that `backend` makes for ranks, which are `gpus` GPUs or the host.
fn soak<B: Gauge>(
    command: &SoakCommand,
    gpus: usize,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
) -> Result<Found, SoakError> {
    let on_gpus = gpus > 0;
    let usual = |given: Option<usize>, on_gpu, on_host| {
        given.unwrap_or(if on_gpus { on_gpu } else { on_host })
    };
    // Refused here, and not by ranks: the settings are wrong then, and no rank has failed.
    let sizes = |args: &SizeArgs, common: &Common| -> Result<Sizes, SoakError> {
        let sizes = args.sizes(common, on_gpus)?;
        sizes.check().map_err(SoakError::Refused)?;
        Ok(sizes)
    };
    match command {
        SoakCommand::Replays(args) => {
            args.check()?;
            let sizes = sizes(&args.sizes, &args.common)?;
            let replays = usual(args.replays, 100_000, 5_000);
            let ranks = replays::run(&sizes, args.mode, replays, backend)?;
            let name = format!("{replays} replays");
            Ok(vec![tally::entry(name, args.mode.to_string(), describe(&sizes), &ranks)].into())
        }
        SoakCommand::Random(args) => {
            let common = &args.common;
            let per_gpu = common.ranks.div_ceil(gpus.max(1));
            let limits = random::Limits {
                ranks: common.ranks,
                episodes: args.episodes,
                steps: usual(args.steps, 1000, 60),
                seed: common.seed,
                recover: !on_gpus || per_gpu == 1,
                memory: common.memory_limit,
            };
            for number in 0..args.groups {
                random::Plan::draw(&limits, number).sizes.check().map_err(SoakError::Refused)?;
            }
            let mut entries = Vec::new();
            for number in 0..args.groups {
                let plan = random::Plan::draw(&limits, number);
                tracing::info!(number, plan = plan.describe(), "a random group");
                let ranks = random::run(&plan, backend).inspect_err(|_| {
                    // What it takes to see it again.
                    let (seed, plan) = (limits.seed, plan.describe());
                    output::tell(&format!("group {number}, seed {seed}: {plan}"));
                })?;
                let modes: Vec<_> = plan.episodes.iter().map(|(m, _)| m.to_string()).collect();
                let name = format!("{number}");
                entries.push(tally::entry(name, modes.join(" "), plan.describe(), &ranks));
                if !entries.last().is_some_and(|entry| entry.verified) {
                    break;
                }
            }
            Ok(entries.into())
        }
        SoakCommand::Cycles(args) => {
            let sizes = Sizes { burst: 3, ..sizes(&args.sizes, &args.common)? };
            let (before, after, ranks) = cycles::run(&sizes, args.cycles, gpus, backend)?;
            let name = format!("{} groups", args.cycles);
            let mode = Mode::Recover.to_string();
            let entry = tally::entry(name, mode, describe(&sizes), &ranks);
            let held = Some(HeldReport { cycles: args.cycles, before, after });
            Ok(Found { entries: vec![entry], held })
        }
        SoakCommand::Phased(args) => {
            args::may_drop(args.common.ranks)?;
            let sizes = Sizes {
                routing: RoutingDependence::Independent,
                ..sizes(&args.sizes, &args.common)?
            };
            let ranks = phased::run(&sizes, args.steps, backend)?;
            let name = format!("{} steps in phases", args.steps);
            let entry = tally::entry(name, Mode::Drop.to_string(), describe(&sizes), &ranks);
            let Entry { missing, dropped, .. } = entry;
            if missing != dropped {
                return Err(SoakError::Miscounted { mode: Mode::Drop, missing, dropped });
            }
            Ok(vec![entry].into())
        }
    }
}

fn describe(sizes: &Sizes) -> String {
    random::Plan { sizes: sizes.clone(), episodes: Vec::new() }.describe()
}

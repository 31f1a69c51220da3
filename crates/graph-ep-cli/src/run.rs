//! The main job, from arguments to a verdict.

use crate::args::{ArgsError, RunArgs};
use crate::routing::{Routing, RoutingError};
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
    /// The workload cannot be generated.
    #[error("the workload cannot be generated")]
    Workload(#[source] RoutingError),
    /// There is nothing to run on.
    #[error("engine not linked")]
    NoEngine,
}

impl RunError {
    /// How a run that ended so is told to the shell.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Args(_) | Self::Trace(_) | Self::Workload(_) | Self::NoEngine => {
                Verdict::BadInput
            }
        }
    }
}

/// Does what `args` ask for.
///
/// # Errors
///
/// [`RunError`], if the run could not begin or not come to a verdict.
pub fn run(args: &RunArgs) -> Result<Verdict, RunError> {
    args.check_outputs()?;
    let routing = load(args)?;
    tracing::info!(name = routing.name(), steps = routing.steps(), "routing loaded");
    Err(RunError::NoEngine)
}

/// The routing that `args` name, cut to `--steps` and fit for `--ranks`.
fn load(args: &RunArgs) -> Result<Routing, RunError> {
    let routing = match (&args.trace, args.workload) {
        (Some(path), _) => trace::load(path)?,
        (None, Some(workload)) => WorkloadConfig::new(workload, args.seed, args.ranks)
            .generate()
            .map_err(RunError::Workload)?,
        (None, None) => trace::built_in()?,
    };
    Ok(args.check(routing)?)
}

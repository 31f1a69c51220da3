//! Why nothing was measured or compared.

use graph_ep::BackendError;

use super::plot::PlotError;
use super::report::ReadError;
use crate::args::ArgsError;
use crate::output::OutputError;
use crate::verdict::Verdict;

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The arguments do not go together.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// There is no device of the kind that was asked for.
    #[error("--backend cuda cannot be used")]
    Device(#[source] BackendError),
    /// None of the operations exists for any of the shapes.
    #[error(
        "there is nothing to measure: replay and recover need --layout expert and values, round needs \
         values"
    )]
    Nothing,
    /// No law can be fitted to reports without exchanges and steps.
    #[error(
        "there is nothing to fit in these reports: no verified exchange by this program, and no step"
    )]
    NothingToFit,
    /// Sizes were given for which no law was found.
    #[error(
        "there is nothing to predict from in these reports: no {least} verified dispatches and no {least} \
         verified combines that push rows of one layout among ranks with a GPU each"
    )]
    NothingToPredict {
        /// What a law is fitted to, at least.
        least: usize,
    },
    /// NCCL moves bytes between GPUs.
    #[error("--against nccl needs GPUs, one for each of {ranks} ranks; there are {gpus}")]
    NoRival {
        /// The most ranks of a group.
        ranks: usize,
        /// GPUs.
        gpus: usize,
    },
    /// No group can be made of a shape.
    #[error("the group cannot be set up")]
    Setup(#[source] graph_ep::Error),
    /// A rank stopped.
    #[error("{0}")]
    Rank(String),
    /// A thread could not be started.
    #[error("cannot start the thread of rank {rank}")]
    Thread {
        /// The rank.
        rank: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A report could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The report could not be written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The plot could not be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl BenchError {
    /// How a benchmark that ended so is told to the shell.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Args(_)
            | Self::Device(_)
            | Self::Nothing
            | Self::NothingToFit
            | Self::NothingToPredict { .. }
            | Self::NoRival { .. }
            | Self::Setup(_)
            | Self::Read(_) => Verdict::BadInput,
            Self::Rank(_) | Self::Thread { .. } | Self::Output(_) | Self::Plot(_) => {
                Verdict::Failed
            }
        }
    }
}

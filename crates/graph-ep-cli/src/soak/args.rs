//! The command line of `graph-ep soak`.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand};
use graph_ep::{Layout, RoutingDependence, Weighting};

use super::form::{MOST_DROPPING, MOST_RANKS, MOST_TOP_K};
use super::sizes::Sizes;
use crate::args::{BackendChoice, Dtype, Mode, TransferChoice, bytes, number};

/// What the help of every soak ends with.
const AFTER_HELP: &str = "Inputs are made on the device, fresh in each step, and every output is compared \
                          there with what it has to be, exactly.\n\
                          Exit codes: 0 all is as it has to be; 1 an output differs, something was left \
                          behind, a limit was reached or a rank failed; 2 bad arguments.";

/// Arguments of `graph-ep soak`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = AFTER_HELP)]
pub struct SoakArgs {
    /// What to do for long.
    #[command(subcommand)]
    pub command: SoakCommand,
}

/// What can be done for long.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum SoakCommand {
    /// Replay one recorded step over and over, with routing that overflows now and then
    Replays(ReplaysArgs),
    /// Groups of random sizes and settings, modes and batch sizes in random order
    Random(RandomArgs),
    /// Create a group, run it and drop it, over and over, and look at what is left behind
    Cycles(CyclesArgs),
    /// Run all ranks from one thread, one operation at a time, none of which ever waits: for tools that
    /// run one kernel at a time
    Phased(PhasedArgs),
}

/// What all of them take.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct Common {
    /// Ranks, each a thread of this process
    #[arg(long, value_name = "N", default_value = "2", value_parser = number::positive)]
    pub ranks: usize,

    /// Where ranks run
    #[arg(long, value_enum, default_value_t)]
    pub backend: BackendChoice,

    /// Memory that each rank may have, all of its buffers included: bytes, or with KiB, MiB or GiB
    /// [default: unlimited]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub memory_limit: Option<u64>,

    /// What everything is drawn from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Write a report
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,

    /// The commit, for the report [default: $GRAPH_EP_COMMIT]
    #[arg(long, value_name = "HASH")]
    pub commit: Option<String>,

    /// Trace what happens to stderr: -v decisions, -vv steps, -vvv everything
    #[arg(short, long, action = ArgAction::Count)]
    pub verbose: u8,
}

/// The sizes of a group.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct SizeArgs {
    /// The most tokens of each rank
    #[arg(long, value_name = "N", default_value = "16", value_parser = number::positive)]
    pub tokens: usize,

    /// Experts over all ranks, as many on each
    #[arg(long, value_name = "N", default_value = "16", value_parser = number::positive)]
    pub experts: usize,

    /// Experts of a token, at most 8
    #[arg(long, value_name = "K", default_value = "4", value_parser = number::positive)]
    pub top_k: usize,

    /// Elements of a token: a multiple of 8 [default: 1024 on GPUs, 64 on the host]
    #[arg(long, value_name = "H", value_parser = number::hidden)]
    pub hidden: Option<usize>,

    /// Layers of a step
    #[arg(long, value_name = "N", default_value = "2", value_parser = number::positive)]
    pub layers: usize,

    /// Rows to which each expert's rows are rounded up: a power of two, at most 256
    #[arg(long, value_name = "A", default_value = "4", value_parser = number::alignment)]
    pub alignment: usize,

    /// Initial capacity of every rank, in multiples of its mean load
    #[arg(long, value_name = "F", default_value = "1.5", value_parser = number::positive_factor)]
    pub capacity_factor: f64,

    /// Element type of tokens on their way
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,

    /// How rows get from rank to rank
    #[arg(long, value_enum, default_value_t)]
    pub transfer: TransferChoice,

    /// One step of so many sends all tokens to one rank; 0 for none
    #[arg(long, value_name = "N", default_value = "256")]
    pub burst: u32,
}

/// Arguments of `graph-ep soak replays`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = AFTER_HELP)]
pub struct ReplaysArgs {
    /// What happens when routing requires more rows than there are
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,

    /// Steps [default: 100000 on GPUs, 5000 on the host]
    #[arg(long, value_name = "N", value_parser = number::positive)]
    pub replays: Option<usize>,

    /// The sizes.
    #[command(flatten)]
    pub sizes: SizeArgs,

    /// What all commands take.
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `graph-ep soak random`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = AFTER_HELP)]
pub struct RandomArgs {
    /// Groups
    #[arg(long, value_name = "N", default_value = "24", value_parser = number::positive)]
    pub groups: usize,

    /// Changes of mode in each group
    #[arg(long, value_name = "N", default_value = "8", value_parser = number::up_to::<{ 1 << 20 }>)]
    pub episodes: usize,

    /// The most steps between two changes of mode [default: 1000 on GPUs, 60 on the host]
    #[arg(long, value_name = "N", value_parser = number::positive)]
    pub steps: Option<usize>,

    /// What all commands take.
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `graph-ep soak cycles`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = AFTER_HELP)]
pub struct CyclesArgs {
    /// Groups that are created, run and dropped, besides a tenth as many before anything is counted
    #[arg(long, value_name = "N", default_value = "1000", value_parser = number::positive)]
    pub cycles: usize,

    /// The sizes.
    #[command(flatten)]
    pub sizes: SizeArgs,

    /// What all commands take.
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `graph-ep soak phased`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(after_help = AFTER_HELP)]
pub struct PhasedArgs {
    /// Steps
    #[arg(long, value_name = "N", default_value = "4", value_parser = number::positive)]
    pub steps: usize,

    /// The sizes.
    #[command(flatten)]
    pub sizes: SizeArgs,

    /// What all commands take.
    #[command(flatten)]
    pub common: Common,
}

/// Arguments that do not go together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SoakArgsError {
    /// Experts are shared out evenly.
    #[error("--experts is {experts}, but must be a multiple of the {ranks} ranks")]
    Experts {
        /// Experts.
        experts: usize,
        /// Ranks.
        ranks: usize,
    },
    /// A token has so many different experts.
    #[error("--top-k is {top_k}, but must be at most {most}")]
    TopK {
        /// Experts of a token.
        top_k: usize,
        /// The most.
        most: usize,
    },
    /// Sets of ranks are words.
    #[error("--ranks is {ranks}, but must be at most {most} {why}")]
    Ranks {
        /// Ranks.
        ranks: usize,
        /// The most.
        most: usize,
        /// Where that is so.
        why: &'static str,
    },
    /// A step that overflows has no output then.
    #[error("--mode static gives the first step up that overflows; a soak goes on")]
    Static,
    /// Layers, tokens or experts beyond what the closed form tells apart.
    #[error("--{name} is {value}, but must be at most {most}")]
    TooMany {
        /// Of what.
        name: &'static str,
        /// How many.
        value: usize,
        /// The most.
        most: usize,
    },
}

impl ReplaysArgs {
    /// Whether the mode can go on for long.
    pub(super) fn check(&self) -> Result<(), SoakArgsError> {
        match self.mode {
            Mode::Static => Err(SoakArgsError::Static),
            Mode::Drop => may_drop(self.common.ranks),
            _ => Ok(()),
        }
    }
}

/// Whether what was dropped can be told.
pub(super) fn may_drop(ranks: usize) -> Result<(), SoakArgsError> {
    at_most(ranks, MOST_DROPPING, "where rows may be dropped")
}

fn at_most(ranks: usize, most: usize, why: &'static str) -> Result<(), SoakArgsError> {
    if ranks > most { Err(SoakArgsError::Ranks { ranks, most, why }) } else { Ok(()) }
}

impl Common {
    /// What holds of every soak: a word has a bit for each rank.
    pub(super) fn check(&self) -> Result<(), SoakArgsError> {
        at_most(self.ranks, MOST_RANKS, "in a soak")
    }
}

impl SizeArgs {
    /// The sizes of a group of so many ranks, on GPUs or on the host.
    pub(super) fn sizes(&self, common: &Common, on_gpus: bool) -> Result<Sizes, SoakArgsError> {
        let (ranks, experts) = (common.ranks, self.experts);
        if !experts.is_multiple_of(ranks) {
            return Err(SoakArgsError::Experts { experts, ranks });
        }
        let most = MOST_TOP_K.min(experts);
        if self.top_k > most {
            return Err(SoakArgsError::TopK { top_k: self.top_k, most });
        }
        for (name, value) in
            [("tokens", self.tokens), ("experts", self.experts), ("layers", self.layers)]
        {
            let most = 1 << 16;
            if value > most {
                return Err(SoakArgsError::TooMany { name, value, most });
            }
        }
        Ok(Sizes {
            ranks,
            tokens: self.tokens,
            experts,
            top_k: self.top_k,
            hidden: self.hidden.unwrap_or(if on_gpus { 1024 } else { 64 }),
            layers: self.layers,
            lanes: 1,
            nested: false,
            dtype: crate::run::dtype(self.dtype),
            layout: Layout::ExpertGrouped,
            weighting: Weighting::Combine,
            alignment: self.alignment as u32,
            capacity_factor: self.capacity_factor,
            transfer: self.transfer.into(),
            routing: RoutingDependence::Dependent,
            burst: self.burst,
            ragged: true,
            seed: common.seed,
            memory_limit: common.memory_limit,
        })
    }
}

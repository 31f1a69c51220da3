//! The command line of `graph-ep bench`.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, ValueEnum};

use super::compare::NOISE;
use super::inputs::Skew;
use super::model::ModelArgs;
use super::report::{Axis, Dtype, LayoutChoice, Op, Padding};
use crate::args::{BackendChoice, NumberError, TransferChoice, bytes, number};

/// Arguments of `graph-ep bench`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// What to do other than measure.
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// What to measure.
    #[command(flatten)]
    pub measure: MeasureArgs,
}

/// What `graph-ep bench` can do other than measure.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum BenchCommand {
    /// Show what is faster or slower in a second report, beyond noise
    Compare(CompareArgs),
    /// Show a report again: its table, and its plot if asked for
    Show(ShowArgs),
    /// Fit laws to reports, say how far they are off, and predict other sizes
    Model(ModelArgs),
}

/// Arguments of `graph-ep bench show`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Exit codes: 0 every result in it is verified; 1 one is not, or the plot could not be \
                  written; 2 bad arguments or no report."
)]
pub struct ShowArgs {
    /// The report
    #[arg(value_name = "A.json")]
    pub report: PathBuf,

    /// Draw times and shares of the limits
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// What the plot has across [default: the size of which there are most]
    #[arg(long, value_name = "SIZE", value_enum)]
    pub over: Option<Axis>,
}

/// Arguments of `graph-ep bench compare`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Exit codes: 0 nothing is slower, beyond noise; 1 a result is, or was verified before and \
                  is not now; 2 bad arguments or no report.\n\
                  Results of one report only, and limits of the hardware, are shown and do not count."
)]
pub struct CompareArgs {
    /// The report that was written first
    #[arg(value_name = "A.json")]
    pub before: PathBuf,

    /// The report that was written later
    #[arg(value_name = "B.json")]
    pub after: PathBuf,

    /// Fraction of a median by which two may differ without meaning anything
    #[arg(long, value_name = "F", default_value_t = NOISE, value_parser = noise)]
    pub noise: f64,
}

/// What to measure. Lists are separated by commas; every combination is measured.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Exit codes: 0 measured and verified; 1 an output differs or a rank failed; 2 bad \
                        arguments.\n\
                        Sizes that are not given are those of a large model on GPUs, small ones on the \
                        host, and tiny ones with --quick."
)]
pub struct MeasureArgs {
    /// Operations [default: all; counters against none only where they are asked for]
    #[arg(long, value_name = "OP,..", value_enum, value_delimiter = ',')]
    pub ops: Vec<Op>,

    /// Tokens of each rank
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = number::up_to::<{ number::MAX_TOKENS }>)]
    pub tokens: Vec<usize>,

    /// Order of received rows
    #[arg(long, value_name = "NAME,..", value_enum, value_delimiter = ',')]
    pub layout: Vec<LayoutChoice>,

    /// Element type of tokens on their way; fp8 is bytes with scales that were quantised before
    #[arg(long, value_name = "TYPE,..", value_enum, value_delimiter = ',')]
    pub dtype: Vec<Dtype>,

    /// Experts of a token
    #[arg(long, value_name = "K,..", value_delimiter = ',', value_parser = number::up_to::<{ number::MAX_TOP_K }>)]
    pub top_k: Vec<usize>,

    /// Experts over all ranks
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = number::up_to::<{ number::MAX_EXPERTS }>)]
    pub experts: Vec<usize>,

    /// Elements of a token: a multiple of 8
    #[arg(long, value_name = "H,..", value_delimiter = ',', value_parser = number::hidden)]
    pub hidden: Vec<usize>,

    /// Ranks of the group, each a thread of this process
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = number::up_to::<{ number::MAX_RANKS }>)]
    pub ranks: Vec<usize>,

    /// How choices are spread over experts
    #[arg(long, value_name = "NAME,..", value_enum, value_delimiter = ',')]
    pub skew: Vec<Skew>,

    /// Streaming multiprocessors for an operation, 0 for all
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub sms: Vec<u32>,

    /// How rows get from rank to rank
    #[arg(long, value_name = "WAY,..", value_enum, value_delimiter = ',')]
    pub transfer: Vec<TransferChoice>,

    /// Rows to which each expert's rows are rounded up: a power of two, at most 256
    #[arg(long, value_name = "A", value_parser = number::alignment)]
    pub alignment: Option<usize>,

    /// What a dispatch does with the rows that are added for that [default: cleared]
    #[arg(long, value_name = "NAME,..", value_enum, value_delimiter = ',')]
    pub padding: Vec<Padding>,

    /// Samples of each result [default: as many as take about half a second]
    #[arg(long, value_name = "N", value_parser = number::up_to::<{ 1 << 20 }>)]
    pub samples: Option<usize>,

    /// MoE layers of a step that is replayed or recovered
    #[arg(
        long,
        value_name = "N,..",
        default_value = "4",
        value_delimiter = ',',
        value_parser = number::up_to::<{ 1 << 10 }>
    )]
    pub step_layers: Vec<usize>,

    /// Bytes by which the receive buffer grows, by fresh memory and by what was given back: a number,
    /// or one with KiB, MiB or GiB; less where there is not so much memory [default: 1GiB, on the host
    /// 64MiB]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub grow_bytes: Option<u64>,

    /// Seed of tokens and routing
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Where ranks run
    #[arg(long, value_enum, default_value_t)]
    pub backend: BackendChoice,

    /// Move the same bytes by another library too, in the same process
    #[arg(long, value_name = "NAME", value_enum)]
    pub against: Option<Against>,

    /// Tiny sizes and few samples: shows that everything works, and no time that means anything
    #[arg(long)]
    pub quick: bool,

    /// Write a report
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,

    /// Draw what was measured against its limits
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// The commit that is measured, for the report [default: GRAPH_EP_COMMIT of the environment]
    #[arg(long, value_name = "SHA")]
    pub commit: Option<String>,

    /// Trace what happens to stderr: -v decisions, -vv steps, -vvv everything
    #[arg(short, long, action = ArgAction::Count)]
    pub verbose: u8,
}

/// Other libraries that move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Against {
    /// NCCL's send and receive
    Nccl,
}

fn noise(text: &str) -> Result<f64, NumberError> {
    let noise: f64 = text.parse()?;
    let right = noise.is_finite() && noise >= 0.0;
    if right { Ok(noise) } else { Err(NumberError::Noise) }
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;
    use clap::error::ErrorKind;

    use super::*;
    use crate::args::{Cli, Command};

    pub(crate) fn parse(line: &str) -> Result<BenchArgs, clap::Error> {
        let words = ["graph-ep", "bench"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| {
            let Command::Bench(args) = cli.command else { panic!("another command") };
            *args
        })
    }

    #[test]
    fn lists_are_separated_by_commas() {
        let args = parse(
            "--ops dispatch,round --tokens 1,128,4096 --layout expert,flat --dtype bf16,fp8 --top-k 8 \
             --sms 0,24 --skew uniform,one-expert --grow-bytes 2MiB --against nccl",
        );
        let measure = args.unwrap().measure;
        assert_eq!(measure.ops, [Op::Dispatch, Op::Round]);
        assert_eq!(measure.tokens, [1, 128, 4096]);
        assert_eq!(measure.layout, [LayoutChoice::Expert, LayoutChoice::Flat]);
        assert_eq!(measure.dtype, [Dtype::Bf16, Dtype::Fp8]);
        assert_eq!((measure.top_k, measure.sms), (vec![8], vec![0, 24]));
        assert_eq!(measure.skew, [Skew::Uniform, Skew::OneExpert]);
        assert_eq!(measure.grow_bytes, Some(2 << 20));
        assert_eq!((measure.against, measure.step_layers.clone()), (Some(Against::Nccl), vec![4]));
        assert!(measure.ranks.is_empty() && measure.samples.is_none());
    }

    #[test]
    fn comparing_is_a_command_of_its_own() {
        let args = parse("compare a.json b.json --noise 0.1").unwrap();
        let Some(BenchCommand::Compare(compare)) = args.command else { panic!("no command") };
        assert_eq!(compare.before, PathBuf::from("a.json"));
        assert_eq!((compare.after, compare.noise), ("b.json".into(), 0.1));
        let error = parse("--tokens 1 compare a.json b.json").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ArgumentConflict);
    }

    #[test]
    fn bad_usage_exits_with_2() {
        for line in [
            "--ops send",
            "--tokens 0",
            "--tokens 1,,2",
            "--hidden 12",
            "--skew flat",
            "--sms -1",
            "--alignment 3",
            "--padding kept",
            "--samples 0",
            "--against mpi",
            "--grow-bytes 1GB",
            "compare a.json",
            "compare a.json b.json --noise -1",
            "compare a.json b.json --noise nan",
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}

//! The command line.
//!
//! Values are checked as they are parsed; what depends on the routing is checked by
//! [`RunArgs::check`] once it is loaded. Both end in exit code 2.

pub(crate) mod bytes;
mod check;
pub(crate) mod choice;
pub(crate) mod number;

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

pub use check::ArgsError;
pub(crate) use check::check_outputs;
pub(crate) use choice::display_as_value_name;
pub use choice::{BackendChoice, Dtype, GraphChoice, GrowthChoice, Mode, TransferChoice};
pub use number::NumberError;

use crate::bench::BenchArgs;
use crate::compile::CompileArgs;
use crate::policies::PoliciesArgs;
use crate::soak::SoakArgs;
use crate::workload::Workload;

/// MoE expert parallelism inside graphs: runs, measures and explains it.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "graph-ep", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Clone, Debug, PartialEq, Subcommand)]
pub enum Command {
    /// Spread router decisions over ranks, record each step in a graph, replay it, recover when
    /// routing overflows, and verify that no token was lost
    Run(RunArgs),
    /// Measure dispatch, combine and what is built of them, and hold them against what the hardware was
    /// measured to do
    Bench(Box<BenchArgs>),
    /// Judge how receive buffers grow: steps replayed, time lost and rows reserved by each policy, on
    /// recorded and made-up routing
    Policies(PoliciesArgs),
    /// Run for long, under load, and compare every output on its device
    Soak(Box<SoakArgs>),
    /// Say what there is to run on: GPUs, driver, compiler, links, limits, and which modes will work
    #[command(after_help = "Exit codes: 0 whatever was found; 2 bad arguments.")]
    Doctor,
    /// Compile the kernels of a configuration ahead of time, without a GPU
    Compile(CompileArgs),
}

/// Arguments of `graph-ep run`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Exit codes: 0 verified; 1 an output differs, a limit was reached or a rank \
                        failed; 2 bad input or arguments, or something not built yet.\n\
                        Without --trace and --workload, a recorded trace that is built in is used."
)]
pub struct RunArgs {
    /// Router decisions to replay: a safetensors file with `topk_idx`
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    pub trace: Option<PathBuf>,

    /// Made-up router decisions in place of a trace
    #[arg(long, value_name = "NAME", value_enum)]
    pub workload: Option<Workload>,

    /// Ranks of the expert-parallel group, at most as many as there are experts
    #[arg(long, value_name = "N", default_value = "8", value_parser = number::positive)]
    pub ranks: usize,

    /// Run each rank in a process of its own: starts them, or, where RANK and WORLD_SIZE are set as
    /// torchrun does, joins as one of them
    #[arg(long)]
    pub processes: bool,

    /// Where ranks run
    #[arg(long, value_enum, default_value_t)]
    pub backend: BackendChoice,

    /// What happens when routing requires more rows than there are
    #[arg(long, value_enum, default_value_t)]
    pub mode: Mode,

    /// Whether growth invalidates a recorded graph
    #[arg(long, value_enum, default_value_t)]
    pub graph: GraphChoice,

    /// Initial capacity of every rank, in multiples of its mean load
    #[arg(long, value_name = "F", default_value = "1.25", value_parser = number::positive_factor)]
    pub capacity_factor: f64,

    /// Rows to which each expert's rows are rounded up: a power of two, at most 256
    #[arg(long, value_name = "A", default_value = "16", value_parser = number::alignment)]
    pub alignment: usize,

    /// How much to grow after an overflow
    #[arg(long, value_enum, default_value_t)]
    pub growth: GrowthChoice,

    /// Grow between steps once a requirement times this factor exceeds the capacity [default: off, 1.05
    /// with --growth adaptive in mode recover]
    #[arg(long, value_name = "F", value_parser = number::look_ahead)]
    pub look_ahead: Option<f64>,

    /// Shrink between steps after this many that needed less [default: off]
    #[arg(long, value_name = "N", value_parser = number::up_to::<{ u32::MAX as usize }>)]
    pub shrink_after: Option<usize>,

    /// Elements of a token: a multiple of 8
    #[arg(long, value_name = "H", default_value = "256", value_parser = number::hidden)]
    pub hidden: usize,

    /// Element type of tokens on their way
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,

    /// How rows get from rank to rank
    #[arg(long, value_enum, default_value_t)]
    pub transfer: TransferChoice,

    /// Replay only the first N steps [default: all]
    #[arg(long, value_name = "N", value_parser = number::positive)]
    pub steps: Option<usize>,

    /// Memory that each rank may have, all of its buffers included: bytes, or with KiB, MiB or GiB
    /// [default: unlimited]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub memory_limit: Option<u64>,

    /// Seed of tokens, missing weights and made-up decisions
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Write a report of the run
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,

    /// Draw required rows against capacity
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,

    /// Trace what happens to stderr: -v decisions, -vv steps, -vvv everything
    #[arg(short, long, action = ArgAction::Count)]
    pub verbose: u8,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    fn parse(line: &str) -> Result<RunArgs, clap::Error> {
        let words = ["graph-ep", "run"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| {
            let Command::Run(args) = cli.command else { panic!("another command") };
            args
        })
    }

    #[test]
    fn the_command_is_consistent() {
        Cli::command().debug_assert();
    }

    /// All commands, each with its path, those that hold others among them.
    fn commands() -> Vec<(String, clap::Command)> {
        let mut root = Cli::command();
        root.build();
        let mut found = vec![("graph-ep".to_owned(), root)];
        let mut next = 0;
        while let Some((path, command)) = found.get(next).cloned() {
            let inner = command.get_subcommands().filter(|inner| inner.get_name() != "help");
            found
                .extend(inner.map(|inner| (format!("{path} {}", inner.get_name()), inner.clone())));
            next += 1;
        }
        found
    }

    #[test]
    fn every_help_says_what_exit_codes_mean() {
        for (path, mut command) in commands().into_iter().skip(1) {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Exit codes: 0 "), "{path}: {help}");
        }
    }

    #[test]
    fn a_help_names_no_option_that_the_command_lacks() {
        for (path, mut command) in commands() {
            let own: Vec<_> = command
                .get_arguments()
                .filter_map(|arg| arg.get_long())
                .map(str::to_owned)
                .collect();
            let help = command.render_long_help().to_string();
            let words: Vec<_> = help.split_whitespace().collect();
            for (before, word) in std::iter::once(&"").chain(&words).zip(&words) {
                let Some(option) = word.trim_start_matches(['[', '`', '(']).strip_prefix("--")
                else {
                    continue;
                };
                // An option behind the name of a command, `bench --ops`, is that one's.
                let of_another = before.starts_with('`');
                let end = option.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
                let option = &option[..end.unwrap_or(option.len())];
                assert!(of_another || own.iter().any(|one| one == option), "{path}: --{option}");
            }
        }
    }

    #[test]
    fn defaults_are_those_documented() {
        let expected = RunArgs {
            trace: None,
            workload: None,
            ranks: 8,
            processes: false,
            backend: BackendChoice::Auto,
            mode: Mode::Recover,
            graph: GraphChoice::CapacityShaped,
            capacity_factor: 1.25,
            alignment: 16,
            growth: GrowthChoice::Adaptive,
            look_ahead: None,
            shrink_after: None,
            hidden: 256,
            dtype: Dtype::Bf16,
            transfer: TransferChoice::Auto,
            steps: None,
            memory_limit: None,
            seed: 0,
            report: None,
            plot: None,
            verbose: 0,
        };
        assert_eq!(parse("").unwrap(), expected);
    }

    #[test]
    fn every_flag_arrives() {
        let args = parse(
            "--workload zero-load --ranks 4 --processes --backend cuda --mode rounds --graph device-counts \
             --capacity-factor 0.5 --alignment 1 --growth exact --look-ahead 1.1 --shrink-after 5 \
             --hidden 8 --dtype fp32 --transfer push --steps 3 --memory-limit 2MiB --seed 18446744073709551615 \
             --report r.json --plot p.svg -vv",
        );
        let expected = RunArgs {
            trace: None,
            workload: Some(Workload::ZeroLoad),
            ranks: 4,
            processes: true,
            backend: BackendChoice::Cuda,
            mode: Mode::Rounds,
            graph: GraphChoice::DeviceCounts,
            capacity_factor: 0.5,
            alignment: 1,
            growth: GrowthChoice::Exact,
            look_ahead: Some(1.1),
            shrink_after: Some(5),
            hidden: 8,
            dtype: Dtype::Fp32,
            transfer: TransferChoice::Push,
            steps: Some(3),
            memory_limit: Some(2 << 20),
            seed: u64::MAX,
            report: Some("r.json".into()),
            plot: Some("p.svg".into()),
            verbose: 2,
        };
        assert_eq!(args.unwrap(), expected);
        assert_eq!(parse("--trace t.safetensors").unwrap().trace, Some("t.safetensors".into()));
    }

    #[test]
    fn bad_usage_exits_with_2() {
        for line in [
            "--trace t --workload burst",
            "--workload nonsense",
            "--ranks 0",
            "--ranks -1",
            "--mode dropp",
            "--capacity-factor 0",
            "--capacity-factor -1",
            "--capacity-factor nan",
            "--capacity-factor inf",
            "--alignment 0",
            "--alignment 3",
            "--alignment 512",
            "--look-ahead 0.9",
            "--look-ahead 0",
            "--shrink-after 0",
            "--shrink-after 4294967296",
            "--hidden 0",
            "--hidden 12",
            "--dtype fp8",
            "--steps 0",
            "--steps 1.5",
            "--memory-limit 3KB",
            "--seed -1",
            "--deadline 3",
            "stray",
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.use_stderr(), "{line}");
        }
        let help = parse("--help").unwrap_err();
        assert_eq!((help.kind(), help.exit_code()), (ErrorKind::DisplayHelp, 0));
    }

    #[test]
    fn messages_name_value_and_limit() {
        let message = parse("--alignment 48").unwrap_err().to_string();
        assert!(message.contains("'48'") && message.contains("power of two"), "{message}");
    }
}

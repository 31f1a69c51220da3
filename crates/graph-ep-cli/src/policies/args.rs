//! The command line of `graph-ep policies`.

use std::path::PathBuf;

use clap::Args;

use crate::args::number;
use crate::workload::Workload;

/// Arguments of `graph-ep policies`. Lists are separated by commas.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Nothing runs: what a policy does follows from the routing alone. Without --trace and \
                  --workload, the built-in trace and every workload are taken.\n\
                  Exit codes: 0 judged; 1 a policy cannot be followed, or a file not be written; 2 bad \
                  input or arguments."
)]
pub struct PoliciesArgs {
    /// Router decisions: safetensors files with `topk_idx`; of one name they are told apart by their places
    /// in this list
    #[arg(long, value_name = "FILE,..", value_delimiter = ',')]
    pub trace: Vec<PathBuf>,

    /// Made-up router decisions
    #[arg(long, value_name = "NAME,..", value_enum, value_delimiter = ',')]
    pub workload: Vec<Workload>,

    /// Ranks over which they are spread, at most as many as there are experts
    #[arg(
        long,
        value_name = "N,..",
        default_value = "2,8,32",
        value_delimiter = ',',
        value_parser = number::positive
    )]
    pub ranks: Vec<usize>,

    /// Steps of a workload; a trace has as many as it has
    #[arg(long, value_name = "N", default_value = "256", value_parser = number::positive)]
    pub steps: usize,

    /// Seeds of workloads; what is counted is added up over them
    #[arg(long, value_name = "N,..", default_value = "0,1,2", value_delimiter = ',')]
    pub seeds: Vec<u64>,

    /// Initial capacity of every rank, in multiples of its mean load
    #[arg(long, value_name = "F", default_value = "1.25", value_parser = number::positive_factor)]
    pub capacity_factor: f64,

    /// Rows to which each expert's rows are rounded up: a power of two, at most 256
    #[arg(long, value_name = "A", default_value = "16", value_parser = number::alignment)]
    pub alignment: usize,

    /// A report of `graph-ep bench` with recover and grow, to take times from [default: measured on two
    /// H200s]
    #[arg(long, value_name = "REPORT.json")]
    pub costs: Option<PathBuf>,

    /// Tokens of each rank in the results that times are taken from
    #[arg(long, value_name = "N", default_value = "128", value_parser = number::positive)]
    pub cost_tokens: usize,

    /// Bytes that are mapped for a row, in all buffers that grow together
    #[arg(long, value_name = "N", default_value = "28672", value_parser = number::positive)]
    pub row_bytes: usize,

    /// Write a report
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,

    /// Draw time lost against rows held
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    pub(crate) fn parse(line: &str) -> Result<PoliciesArgs, clap::Error> {
        let words = ["graph-ep", "policies"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| {
            let Command::Policies(args) = cli.command else { panic!("another command") };
            args
        })
    }

    #[test]
    fn lists_are_separated_by_commas_and_bad_numbers_refused() {
        let args = parse("--workload burst,hot-rank --ranks 4,16 --seeds 7").unwrap();
        assert_eq!(args.workload, [Workload::Burst, Workload::HotRank]);
        assert_eq!((args.ranks, args.seeds), (vec![4, 16], vec![7]));
        let args = parse("").unwrap();
        assert_eq!((args.ranks, args.seeds, args.steps), (vec![2, 8, 32], vec![0, 1, 2], 256));
        for line in
            ["--ranks 0", "--workload no", "--alignment 3", "--capacity-factor 0", "--steps 0"]
        {
            assert_eq!(parse(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }
}

//! The command line of `graph-ep bench model`.

use std::path::PathBuf;

use clap::Args;

use super::predict::Wanted;
use crate::args::number;

/// Arguments of `graph-ep bench model`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(
    after_help = "Exit codes: 0 laws were fitted; 2 bad arguments, no report, or too little in the reports."
)]
pub struct ModelArgs {
    /// Reports to fit laws to, of machines that are alike
    #[arg(value_name = "REPORT.json", required = true)]
    pub reports: Vec<PathBuf>,

    /// Sizes to predict: ranks, tokens, top-k, experts or hidden, each with a list; every combination
    /// [default: ranks=2,8,72,1024 tokens=1,128,4096 top-k=8 experts=256 hidden=7168]
    #[arg(long, value_name = "SIZE=N,..", num_args = 1.., value_parser = size)]
    pub predict: Vec<(Size, Vec<usize>)>,

    /// Ranks that NVLink connects
    #[arg(long, value_name = "N", default_value = "72", value_parser = number::positive)]
    pub domain: usize,

    /// 10⁹ bytes a second that each rank sends beyond them
    #[arg(long, value_name = "GBPS", default_value = "50", value_parser = number::positive_factor)]
    pub network: f64,

    /// List every operation with what was measured and what laws say
    #[arg(long)]
    pub points: bool,
}

/// A size that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Ranks of the group.
    Ranks,
    /// Tokens of each rank.
    Tokens,
    /// Choices of a token.
    TopK,
    /// Experts, over all ranks.
    Experts,
    /// Elements of a token.
    Hidden,
}

impl ModelArgs {
    /// The sizes to predict.
    pub(super) fn wanted(&self) -> Wanted {
        let of = |size: Size, usual: &[usize]| {
            let given = self.predict.iter().filter(|(given, _)| *given == size);
            let given: Vec<usize> = given.flat_map(|(_, list)| list.iter().copied()).collect();
            if given.is_empty() { usual.to_vec() } else { given }
        };
        Wanted {
            ranks: of(Size::Ranks, &[2, 8, 72, 1024]),
            tokens: of(Size::Tokens, &[1, 128, 4096]),
            top_k: of(Size::TopK, &[8]),
            experts: of(Size::Experts, &[256]),
            hidden: of(Size::Hidden, &[7168]),
        }
    }
}

/// `tokens=1,128`.
fn size(text: &str) -> Result<(Size, Vec<usize>), String> {
    let (name, list) = text.split_once('=').ok_or("it must be SIZE=N,..")?;
    let size = match name {
        "ranks" => Size::Ranks,
        "tokens" => Size::Tokens,
        "top-k" => Size::TopK,
        "experts" => Size::Experts,
        "hidden" => Size::Hidden,
        _ => return Err("a size is ranks, tokens, top-k, experts or hidden".to_owned()),
    };
    let positive = |word: &str| match number::positive(word) {
        // Far above anything that is built, so that no product overflows.
        Ok(number) if number <= 1 << 24 => Ok(number),
        Ok(_) => Err(format!("{word} is more than {}", 1 << 24)),
        Err(error) => Err(error.to_string()),
    };
    Ok((size, list.split(',').map(positive).collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::super::super::BenchCommand;
    use super::super::super::args::tests::parse;
    use super::*;

    fn model(line: &str) -> Result<ModelArgs, clap::Error> {
        parse(line).map(|args| {
            let Some(BenchCommand::Model(model)) = args.command else { panic!("no model") };
            model
        })
    }

    #[test]
    fn sizes_are_lists_by_name() {
        let args = model("model a.json b.json --predict ranks=8,72 tokens=128 --domain 8").unwrap();
        assert_eq!(args.reports.len(), 2);
        let wanted = args.wanted();
        assert_eq!((wanted.ranks, wanted.tokens), (vec![8, 72], vec![128]));
        assert_eq!((wanted.hidden, args.domain), (vec![7168], 8));
        for line in [
            "model",
            "model a.json --predict rank=8",
            "model a.json --predict ranks=0",
            "model a.json --predict tokens=99999999999",
            "model a.json --predict ranks",
            "model a.json --network 0",
        ] {
            assert_eq!(model(line).expect_err(line).exit_code(), 2, "{line}");
        }
    }
}

//! The program `graph-ep`: parses the command line, sets up tracing, and turns how the run ended
//! into an exit code.

// `output` says everything, and does not panic where nobody reads it.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::error::Error;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::Parser;
use graph_ep::ep_context::error::chain;
use graph_ep_cli::args::{Cli, Command};
use graph_ep_cli::bench::{self, BenchError, nccl};
use graph_ep_cli::compile::{self, CompileError};
use graph_ep_cli::policies::{self, PoliciesError};
use graph_ep_cli::run::{self, RunError};
use graph_ep_cli::soak::{self, SoakError};
use graph_ep_cli::verdict::Verdict;
use graph_ep_cli::{doctor, output};
use tracing::level_filters::LevelFilter;

fn main() -> ExitCode {
    allow_many_streams();
    // Arguments that do not parse end here, with exit code 2.
    let verdict = match Cli::parse().command {
        Command::Run(args) => {
            trace_to_stderr(args.verbose);
            concluded(run::run(&args), RunError::verdict)
        }
        Command::Doctor => doctor::run(),
        Command::Bench(args) => {
            trace_to_stderr(args.measure.verbose);
            if args.measure.against.is_some() {
                // SAFETY: no other thread exists yet that could read the environment.
                unsafe { nccl::forbid_multicast() };
            }
            concluded(bench::run(&args), BenchError::verdict)
        }
        Command::Policies(args) => concluded(policies::run(&args), PoliciesError::verdict),
        Command::Soak(args) => {
            trace_to_stderr(args.common().verbose);
            concluded(soak::run(&args), SoakError::verdict)
        }
        Command::Compile(args) => concluded(compile::run(&args), CompileError::verdict),
    };
    verdict.into()
}

/// Asks the CUDA driver for as many hardware queues as it has: ranks that share a GPU wait for each
/// other there, and must not stand in one queue. Has to be said before the driver is first used.
fn allow_many_streams() {
    const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: no other thread exists yet that could read the environment.
        unsafe { std::env::set_var(VARIABLE, "32") };
    }
}

/// Shows events of the level that so many `-v` ask for. stdout is left to results.
fn trace_to_stderr(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // It would complain on a stderr that cannot be written to, and panic.
        .log_internal_errors(false)
        .init();
}

/// The verdict of `result`. Says on stderr, in one line, why there is none; then it is that `of` the error.
fn concluded<E: Error>(result: Result<Verdict, E>, of: impl FnOnce(&E) -> Verdict) -> Verdict {
    result.unwrap_or_else(|error| {
        output::tell(&format!("error: {}", chain(&error)));
        of(&error)
    })
}

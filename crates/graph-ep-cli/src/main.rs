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
use graph_ep_cli::bench::{self, nccl};
use graph_ep_cli::verdict::Verdict;
use graph_ep_cli::{compile, doctor, policies, soak};
use graph_ep_cli::{output, run};
use tracing::level_filters::LevelFilter;

fn main() -> ExitCode {
    allow_many_streams();
    // Arguments that do not parse end here, with exit code 2.
    let args = match Cli::parse().command {
        Command::Run(args) => args,
        Command::Doctor => return doctor::run().into(),
        Command::Bench(args) => {
            trace_to_stderr(args.measure.verbose);
            if args.measure.against.is_some() {
                // SAFETY: no other thread exists yet that could read the environment.
                unsafe { nccl::forbid_multicast() };
            }
            return match bench::run(&args) {
                Ok(verdict) => verdict.into(),
                Err(error) => {
                    complain(&error);
                    error.verdict().into()
                }
            };
        }
        Command::Policies(args) => {
            return match policies::run(&args) {
                Ok(verdict) => verdict.into(),
                Err(error) => {
                    complain(&error);
                    error.verdict().into()
                }
            };
        }
        Command::Soak(args) => {
            trace_to_stderr(args.common().verbose);
            return match soak::run(&args) {
                Ok(verdict) => verdict.into(),
                Err(error) => {
                    complain(&error);
                    error.verdict().into()
                }
            };
        }
        Command::Compile(args) => {
            return match compile::run(&args) {
                Ok(verdict) => verdict.into(),
                Err(error) => {
                    complain(&error);
                    Verdict::Failed.into()
                }
            };
        }
    };
    trace_to_stderr(args.verbose);
    match run::run(&args) {
        Ok(verdict) => verdict.into(),
        Err(error) => {
            complain(&error);
            error.verdict().into()
        }
    }
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

/// The error and what caused it, in one line on stderr.
fn complain(error: &dyn Error) {
    output::tell(&format!("error: {}", chain(error)));
}

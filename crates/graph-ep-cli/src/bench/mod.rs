//! `graph-ep bench`: how fast the operations of a layer are, and how fast they could be.
//!
//! What is measured is a list of cases ([`cases`]), each on ranks that are threads of this process
//! (`ranks`): first the limits of the hardware ([`limits`]), then the operations ([`ops`]), on inputs
//! that are made up ([`inputs`]), verified ([`verify`]) and held against what their bytes take at best
//! ([`bytes`]). All that there is to say is a [`report`], from which table, plots and comparison are
//! made.

pub mod args;
pub mod bytes;
pub mod cases;
pub mod compare;
mod error;
pub(crate) mod growth;
pub mod inputs;
mod interval;
pub mod limits;
mod machine;
pub mod model;
pub mod nccl;
pub mod ops;
pub mod plot;
mod ranks;
pub mod report;
pub mod stats;
pub mod table;
pub mod verify;

pub use args::{Against, BenchArgs, BenchCommand, CompareArgs, MeasureArgs, ShowArgs};
pub use error::BenchError;

use std::env;
use std::ffi::OsString;

use graph_ep::ep_context::CudaBackend;
use graph_ep::{BackendError, Rank};

use crate::args::check_outputs;
use crate::gauge::Gauge;
use crate::output;
use crate::run::device::{self, Devices};
use crate::verdict::Verdict;
use cases::{Kernels, Measured, measured};
use machine::Machine;
use ops::Join;
use ranks::Found;
use report::{Report, SCHEMA, utc_now};

/// Does what `args` ask for.
///
/// # Errors
///
/// [`BenchError`], if nothing was measured or compared.
pub fn run(args: &BenchArgs) -> Result<Verdict, BenchError> {
    match &args.command {
        Some(BenchCommand::Compare(compare)) => {
            Ok(compare::run(&compare.before, &compare.after, compare.noise)?)
        }
        Some(BenchCommand::Show(show)) => show_again(show),
        Some(BenchCommand::Model(args)) => model::run(args),
        None => measure(&args.measure),
    }
}

/// Shows a report that was written before.
fn show_again(args: &ShowArgs) -> Result<Verdict, BenchError> {
    check_outputs(None, args.plot.as_deref())?;
    let report = Report::read(&args.report)?;
    let drawn = args.plot.as_deref().map(|path| plot::write(&report, args.over, path)).transpose();
    output::show(&table::render(&report));
    drawn?;
    Ok(if report.verified() { Verdict::Verified } else { Verdict::Failed })
}

fn measure(args: &MeasureArgs) -> Result<Verdict, BenchError> {
    check_outputs(args.report.as_deref(), args.plot.as_deref())?;
    let devices = Devices::find(args.backend).map_err(BenchError::Device)?;
    let machine = Machine::new(&devices, args);
    let all = measured(args, machine.gpus, machine.memory);
    // NCCL takes no two ranks on one GPU.
    let most = all.iter().map(|measured| measured.shape.ranks).max().unwrap_or(0);
    if args.against.is_some() && machine.gpus < most {
        return Err(BenchError::NoRival { ranks: most, gpus: machine.gpus });
    }
    if all.is_empty() {
        return Err(BenchError::Nothing);
    }
    // What a rank would refuse is refused once, and before any is started.
    for Measured { shape, .. } in &all {
        shape.group().memory_report(Rank(0), shape.ranks).map_err(BenchError::Setup)?;
    }
    let found = match &devices {
        Devices::Host => measure_on(args, &machine, &all, |rank, _| device::host(rank), None)?,
        Devices::Cuda(gpus) => {
            let join: Option<Join<CudaBackend>> = match args.against {
                Some(Against::Nccl) => Some(ops::nccl),
                None => None,
            };
            let on_gpu = |rank, kernels| match kernels {
                Kernels::Counting => device::cuda(gpus, rank),
                Kernels::Bare => device::cuda_without_counters(gpus, rank),
            };
            measure_on(args, &machine, &all, on_gpu, join)?
        }
    };
    conclude(args, &machine, found)
}

/// Measures all shapes, those of one number of ranks after those of another.
fn measure_on<B: Gauge>(
    args: &MeasureArgs,
    machine: &Machine,
    all: &[Measured],
    backend: impl Fn(usize, Kernels) -> Result<B, BackendError> + Sync,
    join: Option<Join<B>>,
) -> Result<Found, BenchError> {
    let mut found = Found::default();
    for shapes in all.chunk_by(|a, b| a.shape.ranks == b.shape.ranks) {
        let more = ranks::run(args, machine, shapes, &backend, join)?;
        found.limits.extend(more.limits);
        found.results.extend(more.results);
    }
    Ok(found)
}

/// Writes and shows the report, and says what it amounts to.
fn conclude(args: &MeasureArgs, machine: &Machine, found: Found) -> Result<Verdict, BenchError> {
    let report = Report {
        schema: SCHEMA.to_owned(),
        date: utc_now(),
        commit: commit(args.commit.as_deref()),
        command: command_line(env::args_os()),
        hardware: machine.hardware.clone(),
        method: METHOD.iter().map(|line| (*line).to_owned()).collect(),
        limits: found.limits,
        results: found.results,
    };
    // Files first, and none without having tried the other: a stdout that is closed must not lose them,
    // nor a disk that is full what is shown.
    let reported = args.report.as_deref().map(|path| report.write(path)).transpose();
    let drawn = args.plot.as_deref().map(|path| plot::write(&report, None, path)).transpose();
    output::show(&table::render(&report));
    reported?;
    drawn?;
    Ok(if report.verified() { Verdict::Verified } else { Verdict::Failed })
}

/// The commit that was given, or that the environment names.
pub(crate) fn commit(given: Option<&str>) -> String {
    let of_environment = || env::var("GRAPH_EP_COMMIT").ok().filter(|commit| !commit.is_empty());
    given.map(str::to_owned).or_else(of_environment).unwrap_or_else(|| "unknown".to_owned())
}

/// What a time includes and how it was taken.
const METHOD: &[&str] = &[
    "A sample is the time of the slowest rank in one replay, by marks on each rank's device, all ranks \
     aligned on their devices just before; results are quantiles over samples, after warming up.",
    "dispatch: from topk ids, weights and tokens in ordinary memory to rows in the order of the layout, \
     offsets and counters. combine: from expert outputs, which are the received rows, to weighted sums \
     in ordinary memory. FP8 is bytes with scales, quantised before; its expert outputs are BF16.",
    "Each layer of a replay has memory of its own, together more than caches hold. Before every replay \
     other ids and weights, in device memory, take the place of those before.",
    "pair: a replay of all layers, divided by their number. dispatch and combine: each by itself, with \
     the cost of two marks, which is listed as empty-interval and not subtracted.",
    "replay: a step with experts, from its beginning to its record, the stream being idle before; host \
     time is that of the calls that queue it. recover: by the clock of the host, from the launch to the \
     record that counts. round: one routing over and over, with rows for one window, and with fewer, divided \
     by its layers.",
    "grow: the calls that map more rows behind a buffer and make them usable, by the clock of the host, all \
     ranks at once; unmapping is not timed. fresh: by memory that this bench did not give back before, each \
     sample in rows of its own, all of which stay; no more samples than three quarters of what is free have \
     room for. given back: by memory that the same rows gave back just before.",
    "host: the calls that launch a step and settle it when its record is there, without what passes between \
     them; the driver's launch of the graph is part of that. counters: a whole step, from a mark before its \
     beginning to one behind its end; without a record the marks stand inside, and without counters kernels \
     are compiled without their updates.",
    "by nccl: the rows of one routing that cross between ranks, by sends and receives whose sizes were \
     known when they were recorded, from where they lie ready to where they arrive, not in order.",
    "Bytes are those that no exchange can do without, from routing alone: rows that cross between GPUs, \
     each once for each rank; in memory tokens read, rows written, with their padding unless it is left, \
     expert rows read, partial sums of other ranks landed and read, outputs written. The limit is what \
     takes longer: the wire at the rate of peer writes, or of peer reads where a dispatch pulls, or \
     memory at the rate of a copy.",
    "Outputs are verified after the last sample, over spoilt memory, with a routing that was not the \
     last: offsets and counts whole, rows and outputs by sample, bit for bit with the reference.",
];

/// Words as a shell would take them. What is no Unicode in them is replaced: it is for people to read.
pub(crate) fn command_line(words: impl Iterator<Item = OsString>) -> String {
    let quoted = words.map(|word| {
        let word = word.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:+".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_can_be_pasted() {
        let words = ["graph-ep", "bench", "--report", "my report's.json", "--tokens", "1,2", ""];
        let line = command_line(words.map(OsString::from).into_iter());
        assert_eq!(line, r"graph-ep bench --report 'my report'\''s.json' --tokens 1,2 ''");
    }
}

//! Everything that a benchmark has to say, as one value.
//!
//! Table, plots and comparison are made from a [`Report`] alone, and it is what `--report` writes, as
//! JSON. Names and meanings of fields are an interface: they change only together with [`SCHEMA`].
//! Fields that a reader does not know are ignored, so that later ones may be added.

mod axis;
mod date;
mod read;
pub(crate) mod shape;
mod words;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use axis::Axis;
pub use date::utc_now;
pub use read::ReadError;
pub use words::{By, Dtype, LayoutChoice, LimitKind, Op, Padding};

use super::stats::{Quantiles, thousandths};
use crate::output::{OutputError, json, write_json};

/// Name and version of the fields of [`Report`].
pub const SCHEMA: &str = "graph-ep bench, 1";

/// What was measured, on what, how, and against which limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`] of the program that wrote it.
    pub schema: String,
    /// When the benchmark ended, in UTC: `2026-11-30T14:05:09Z`, see [`utc_now`].
    pub date: String,
    /// The commit that was measured; `unknown` if nobody said.
    pub commit: String,
    /// The command line, arguments quoted where a shell needs it.
    pub command: String,
    /// What it ran on, a line each: devices, driver, compiler, libraries.
    pub hardware: Vec<String>,
    /// What a time includes and how it was taken, a line each.
    pub method: Vec<String>,
    /// What the hardware was measured to do in the same run.
    pub limits: Vec<Limit>,
    /// What was measured, in the order in which it was.
    pub results: Vec<Entry>,
}

/// One limit of the hardware: the time of something that nothing built on it can beat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// What was done.
    pub what: LimitKind,
    /// The rank that did it.
    pub from: usize,
    /// The rank whose memory it was done to; none where that is its own.
    pub to: Option<usize>,
    /// Streaming multiprocessors that took part; 0 if all, or if it is no kernel.
    pub sms: u32,
    /// Bytes moved in one sample in each direction: for a copy, bytes read plus bytes written. 0 for
    /// what is a latency.
    pub bytes: u64,
    /// `bytes` over the median, in 10⁹ bytes a second; none for what is a latency.
    pub gbps: Option<f64>,
    /// The time of one.
    #[serde(flatten)]
    pub time: Quantiles,
}

impl Limit {
    /// A limit with its rate, which follows from bytes and time.
    pub fn new(
        what: LimitKind,
        (from, to): (usize, Option<usize>),
        sms: u32,
        bytes: u64,
        time: Quantiles,
    ) -> Self {
        let gbps = (bytes > 0).then(|| gbps(bytes, time.median_us)).flatten();
        Self { what, from, to, sms, bytes, gbps, time }
    }
}

/// What was set up for a measurement: two results with equal cases can be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Case {
    /// The operation.
    pub op: Op,
    /// What tells apart results of one operation on one shape: `capacity-shaped`, `eager`, `W=2`.
    /// Empty where there is nothing to tell apart.
    pub variant: String,
    /// Whose code ran.
    pub by: By,
    /// Order of the received rows.
    pub layout: LayoutChoice,
    /// Element type of tokens on their way.
    pub dtype: Dtype,
    /// Tokens of each rank.
    pub tokens: usize,
    /// Elements of a token.
    pub hidden: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// Experts, over all ranks.
    pub experts: usize,
    /// Ranks in the group.
    pub ranks: usize,
    /// GPUs that they were on: fewer than ranks where these share them, 0 on the host backend.
    pub gpus: usize,
    /// How choices were spread over experts.
    pub skew: String,
    /// Streaming multiprocessors that the operation was given; 0 if all.
    pub sms: u32,
    /// Whether rows of padding were cleared. Only in a report where they were left: they are cleared
    /// in those of programs that could do nothing else.
    #[serde(default, skip_serializing_if = "Padding::is_cleared")]
    pub padding: Padding,
    /// Whether it was replayed from a graph.
    pub captured: bool,
    /// Dispatch and combine pairs in one replay, or in one step.
    pub layers: usize,
}

/// What an operation cannot do without, from its routing alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Bytes that have to cross between GPUs, of the rank with the most.
    pub wire_bytes: u64,
    /// Bytes that have to be read from or written to the memory of a GPU, of the one with the most.
    pub memory_bytes: u64,
}

/// The limit that an operation meets first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Which it is.
    pub by: LimitKind,
    /// Microseconds that the operation's bytes take at that limit.
    pub us: f64,
}

/// One measured operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What was measured.
    #[serde(flatten)]
    pub case: Case,
    /// Microseconds of one operation, each sample that of the slowest rank.
    #[serde(flatten)]
    pub time: Quantiles,
    /// The bytes of one operation.
    #[serde(flatten)]
    pub work: Work,
    /// `wire_bytes` over the median, in 10⁹ bytes a second; 0 where nothing crosses.
    pub wire_gbps: f64,
    /// The limit that binds; none for what moves no rows.
    pub limit: Option<LimitKind>,
    /// Microseconds at that limit.
    pub limit_us: Option<f64>,
    /// `limit_us` over the median: 1 is as fast as the hardware was measured to be.
    pub limit_share: Option<f64>,
    /// Microseconds of the host in one operation, where that was told apart; the median.
    pub host_us: Option<f64>,
    /// What else was found of it, by name: parts of its time, whose names end in `us`, and numbers of
    /// things.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, f64>,
    /// Whether what the operation made is what it should be, checked after the last sample.
    pub verified: bool,
}

impl Entry {
    /// A result, with the rate and the share that follow from what is given. `host_us` and `details`
    /// are for the caller to set.
    pub fn new(
        case: Case,
        time: Quantiles,
        work: Work,
        bound: Option<Bound>,
        verified: bool,
    ) -> Self {
        Self {
            case,
            time,
            work,
            wire_gbps: gbps(work.wire_bytes, time.median_us).unwrap_or(0.0),
            limit: bound.map(|bound| bound.by),
            limit_us: bound.and_then(|bound| finite(bound.us)),
            limit_share: bound.and_then(|bound| finite(bound.us / time.median_us)),
            host_us: None,
            details: BTreeMap::new(),
            verified,
        }
    }

    /// The entry with one more of its [details](Entry::details), to three places; without it if it is no
    /// number.
    #[must_use]
    pub fn with(mut self, name: &str, value: f64) -> Self {
        self.details.extend(finite(value).map(|value| (name.to_owned(), value)));
        self
    }
}

impl Report {
    /// The report as JSON, indented, ending in a line feed.
    pub fn to_json(&self) -> String {
        json(self)
    }

    /// Writes [`Report::to_json`] to `path`, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`OutputError`], if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), OutputError> {
        write_json(path, self)
    }

    /// Reads a report that a program with the same [`SCHEMA`] wrote. Blocks on the file system.
    ///
    /// # Errors
    ///
    /// [`ReadError`] says whether the file could not be read, is no JSON, is something else, or lacks
    /// what a report has.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        read::read(path)
    }

    /// Whether every result was verified.
    pub fn verified(&self) -> bool {
        self.results.iter().all(|entry| entry.verified)
    }
}

/// 10⁹ bytes a second; none for no time at all.
fn gbps(bytes: u64, us: f64) -> Option<f64> {
    finite(bytes as f64 / us / 1e3)
}

/// JSON knows no other numbers.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then(|| thousandths(value))
}

#[cfg(test)]
pub(crate) mod tests;

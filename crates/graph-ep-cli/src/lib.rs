//! The program `graph-ep`, as a library of its parts.
//!
//! The program replays router decisions over the ranks of an expert-parallel group and shows what
//! happened. Its parts fall into three groups, none of which knows the engine:
//!
//! - **input**: [`routing`] is what every source of decisions is turned into; [`trace`] reads
//!   recorded ones, [`workload`] makes up others, and [`demand`] computes from them what the engine
//!   will have to provide;
//! - **command line**: [`args`] and [`verdict`], the exit codes;
//! - **output**: [`report`] is the whole of what a run has to say; [`table`] and [`plot`] draw from
//!   it alone, and [`progress`] is what a person sees while the run lasts. [`output`] writes files
//!   so that no half of one is seen, and all that is said on stdout and stderr.
//!
//! [`run`] joins them. [`policies`] judges growth on routing alone. [`mod@bench`] measures the engine, and
//! has a report, a table and plots of its own; [`soak`] runs it for long.

// `output` says everything, and does not panic where nobody reads it.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod args;
pub mod bench;
pub mod compile;
pub mod demand;
pub mod doctor;
pub mod gauge;
pub mod output;
pub mod plot;
pub mod policies;
pub mod progress;
pub mod report;
pub mod routing;
pub mod run;
pub mod soak;
pub mod table;
pub mod trace;
pub mod verdict;
pub mod workload;

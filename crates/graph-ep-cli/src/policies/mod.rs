//! `graph-ep policies`: how growth policies would have done, computed from routing alone.
//!
//! Each routing over each number of ranks (`scene`) is given to each policy (`candidate`), and what the
//! simulation that recovery is tested against says of it is priced (`judge`) with measured [`Costs`].
//! A clairvoyant, which knows the routing beforehand, is the scale.

mod args;
mod candidate;
mod costs;
mod judge;
mod plot;
mod report;
mod scene;
mod table;

pub use args::PoliciesArgs;
pub use costs::Costs;
pub use report::{Report, SCHEMA, SceneScores, Score, Summary};

use graph_ep::overflow::GrowthError;

use crate::args::{ArgsError, check_outputs};
use crate::bench::report::{ReadError, Report as BenchReport};
use crate::output::{self, OutputError};
use crate::plot::PlotError;
use crate::routing::RoutingError;
use crate::trace::TraceError;
use crate::verdict::Verdict;
use candidate::Candidate;

/// Why policies were not judged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoliciesError {
    /// The arguments do not go together.
    #[error(transparent)]
    Args(#[from] ArgsError),
    /// A trace was not read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A routing cannot be made, or not be spread over so many ranks.
    #[error("{routing:?} cannot be spread over {ranks} ranks")]
    Routing {
        /// Trace or workload.
        routing: String,
        /// Ranks asked for.
        ranks: usize,
        /// Why not.
        source: RoutingError,
    },
    /// What is named twice would be counted twice, or be two under one name.
    #[error("{what} {value} is named twice")]
    Twice {
        /// What: a flag or a kind.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// Rows are more than a rank can have.
    #[error("{routing:?} over {ranks} ranks needs 2³² rows or more")]
    TooLarge {
        /// Trace or workload.
        routing: String,
        /// Ranks asked for.
        ranks: usize,
    },
    /// The report to take times from was not read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The report to take times from lacks some.
    #[error("the report of --costs has no result of {what} at {tokens} tokens")]
    Costs {
        /// Operation and variant.
        what: &'static str,
        /// Tokens of each rank.
        tokens: usize,
    },
    /// A policy cannot do what the routing requires.
    #[error("a policy fails")]
    Growth(#[from] GrowthError),
    /// The report could not be written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The plot could not be drawn or written.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl PoliciesError {
    /// Bad input, unless it is the output that failed.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Output(_) | Self::Plot(_) | Self::Growth(_) => Verdict::Failed,
            _ => Verdict::BadInput,
        }
    }
}

/// Judges policies as `args` say, and writes and shows what came out.
///
/// # Errors
///
/// [`PoliciesError`].
pub fn run(args: &PoliciesArgs) -> Result<Verdict, PoliciesError> {
    check_outputs(args.report.as_deref(), args.plot.as_deref())?;
    let report = judged(args)?;
    // Files first, and none without having tried the other: a stdout that is closed must not lose them,
    // nor a disk that is full what is shown.
    let reported = args.report.as_deref().map(|path| report.write(path)).transpose();
    let drawn = args.plot.as_deref().map(|path| plot::write(&report, path)).transpose();
    output::show(&table::render(&report));
    reported?;
    drawn?;
    Ok(Verdict::Verified)
}

fn judged(args: &PoliciesArgs) -> Result<Report, PoliciesError> {
    let costs = match &args.costs {
        Some(path) => Costs::of(&BenchReport::read(path)?, args.cost_tokens, args.row_bytes)?,
        None => Costs::measured(args.row_bytes),
    };
    let scenes = scene::all(args)?;
    let alike = scenes.chunk_by(|a, b| (&a.routing, a.ranks) == (&b.routing, b.ranks));
    let scores = alike.map(|scenes| {
        let scores = Candidate::all().into_iter().map(|one| judge::judge(one, scenes, &costs));
        Ok(SceneScores {
            routing: scenes[0].routing.clone(),
            ranks: scenes[0].ranks,
            initial_rows: scenes[0].initial,
            worst_case_rows: scenes[0].worst_case,
            scores: scores.collect::<Result<_, GrowthError>>()?,
        })
    });
    let scenes = scores.collect::<Result<_, GrowthError>>()?;
    Ok(Report {
        schema: SCHEMA.to_owned(),
        costs,
        capacity_factor: args.capacity_factor,
        alignment: args.alignment,
        seeds: args.seeds.clone(),
        scenes,
    })
}

#[cfg(test)]
mod tests;

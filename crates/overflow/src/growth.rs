//! How much a receive buffer grows.
//!
//! Everything here is a pure function of numbers that every rank holds when a step has ended, so
//! ranks need not talk to agree on it, and a policy can be judged on recorded routing without running
//! anything ([`Simulation`]).
//!
//! Two moments, two mechanisms:
//!
//! - **A step overflowed.** The [`GrowthPolicy`] says what capacity each rank takes before the step
//!   is replayed. It may [refuse](GrowthRefusal), and then nobody replays.
//! - **Between steps.** `BetweenSteps` may grow ahead of need, or shrink what has long been too
//!   large. Shrinking is off unless asked for, and so is growing ahead unless the policy does it by
//!   itself; neither can fail.
//!
//! All capacities, requirements and limits are padded rows of one rank: its rows grouped by expert,
//! each group filled up to a multiple of the alignment. A rank has one capacity for all of its
//! layers, and its requirement in a step is that of its worst layer.

mod between;
mod peaks;
mod policy;
#[cfg(test)]
mod recorded;
mod simulation;

pub use between::Adjustments;
pub(crate) use between::{BetweenSteps, EndedStep};
pub(crate) use policy::GrowthInput;
pub use policy::{GrowthPolicy, GrowthRefusal};
pub use simulation::{FirstRows, Simulation, SimulationOutcome};

/// A setting that makes no policy, or input that makes no simulation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GrowthError {
    /// A factor of a policy is not finite or too small.
    #[error("{setting} factor is {factor}, must be finite and at least {least}")]
    Factor {
        /// What the factor belongs to.
        setting: &'static str,
        /// The factor given.
        factor: f64,
        /// The least that is accepted.
        least: f64,
    },
    /// A step of a simulation lists another number of ranks than the first step.
    #[error("step {step} has requirements of {found} ranks, step 0 of {expected}")]
    RankCount {
        /// Position of the step.
        step: usize,
        /// Ranks in that step.
        found: usize,
        /// Ranks in the first step.
        expected: usize,
    },
    /// A simulated rank could not grow as far as it had to.
    #[error("step {step}, rank {rank}: {refusal}")]
    Refused {
        /// Position of the step.
        step: usize,
        /// The rank that refused.
        rank: usize,
        /// Why.
        #[source]
        refusal: GrowthRefusal,
    },
}

/// `ceil(factor · rows)`, computed in f64; what is not a positive number gives zero.
///
/// Wider than a capacity, so that a wish beyond any limit stays one until it is clamped.
fn scaled(factor: f64, rows: u32) -> u64 {
    (factor * f64::from(rows)).ceil() as u64
}

/// `rows` rounded up to a multiple of `alignment`; an alignment of zero counts as one.
fn round_up(rows: u64, alignment: u32) -> u64 {
    let alignment = u64::from(alignment.max(1));
    rows.checked_next_multiple_of(alignment).unwrap_or(u64::MAX)
}

/// `rows` rounded down to a multiple of `alignment`; an alignment of zero counts as one.
fn round_down(rows: u32, alignment: u32) -> u32 {
    rows - rows % alignment.max(1)
}

/// `wished` brought into `least..=most`, where `least ≤ most`.
fn clamp(wished: u64, least: u32, most: u32) -> u32 {
    u32::try_from(wished).unwrap_or(u32::MAX).clamp(least, most)
}

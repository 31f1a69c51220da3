//! Why a routing is refused.

use std::fmt;

/// Where in a routing something is: positions along its dimensions, from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Along the first dimension; not what the source calls the step.
    pub step: usize,
    /// MoE layer.
    pub layer: usize,
    /// Token of the step, over all ranks.
    pub token: usize,
    /// Which of the token's choices.
    pub choice: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, layer, token, choice } = self;
        write!(f, "step {step}, layer {layer}, token {token}, choice {choice}")
    }
}

/// Why router decisions are refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RoutingError {
    /// A dimension is zero.
    #[error("there are zero {dimension}")]
    Empty {
        /// Which.
        dimension: &'static str,
    },
    /// The sizes of the dimensions multiply to more than can be addressed.
    #[error(
        "steps {steps} x layers {layers} x tokens {tokens} x top-k {top_k} is too many choices to \
         address"
    )]
    TooLarge {
        /// Steps.
        steps: usize,
        /// Layers.
        layers: usize,
        /// Tokens.
        tokens: usize,
        /// Choices of a token.
        top_k: usize,
    },
    /// More experts than [`MAX_EXPERTS`](super::MAX_EXPERTS).
    #[error("{experts} experts are more than the {limit} supported")]
    TooManyExperts {
        /// The number stated.
        experts: usize,
        /// The most there may be.
        limit: usize,
    },
    /// A token would have to choose an expert twice.
    #[error("top-k {top_k} exceeds the {experts} experts, and a token may not choose one twice")]
    TopKExceedsExperts {
        /// Choices of a token.
        top_k: usize,
        /// Number of experts.
        experts: usize,
    },
    /// A list has another length than the dimensions say.
    #[error("{what} has {found} entries where the dimensions say {expected}")]
    Length {
        /// Which list.
        what: &'static str,
        /// Entries by the dimensions.
        expected: usize,
        /// Entries there.
        found: usize,
    },
    /// An id names no expert.
    #[error("{at}: expert {id} does not exist, ids are 0 to {} of {experts} experts", experts - 1)]
    ExpertOutOfRange {
        /// Where.
        at: Position,
        /// The id there.
        id: i32,
        /// Number of experts.
        experts: usize,
    },
    /// An id is negative and not −1.
    #[error("{at}: {id} is no expert id; the only negative value allowed is -1, for none")]
    NegativeId {
        /// Where.
        at: Position,
        /// The value there.
        id: i32,
    },
    /// A token chose an expert twice.
    #[error("{at}: expert {id} was already chosen by this token")]
    ExpertTwice {
        /// Where the second choice is.
        at: Position,
        /// The expert.
        id: i32,
    },
    /// A weight is infinite or not a number.
    #[error("{at}: the weight {value} is not finite")]
    WeightNotFinite {
        /// Where.
        at: Position,
        /// The weight there.
        value: f32,
    },
    /// A row of token ownership does not divide the tokens among the ranks.
    #[error(
        "step {step}: the offsets at which ranks' tokens start must begin at 0, end at {tokens} and \
         never fall, but entry {entry} is {value}"
    )]
    Ownership {
        /// Step of the row.
        step: usize,
        /// Tokens of a step.
        tokens: usize,
        /// First entry of the row that is wrong.
        entry: usize,
        /// Its value.
        value: usize,
    },
    /// No ranks were asked for.
    #[error("at least one rank is needed")]
    NoRanks,
    /// A rank would have no expert.
    #[error("{ranks} ranks are more than the {experts} experts; every rank needs at least one")]
    MoreRanksThanExperts {
        /// Ranks asked for.
        ranks: usize,
        /// Number of experts.
        experts: usize,
    },
    /// The ownership of tokens was made for another number of ranks.
    #[error("this routing gives its tokens to {fixed} ranks and cannot be spread over {ranks}")]
    RanksFixed {
        /// Ranks it was made for.
        fixed: usize,
        /// Ranks asked for.
        ranks: usize,
    },
    /// Fewer steps than wanted.
    #[error("{wanted} steps were asked for, but there are {available}")]
    NotEnoughSteps {
        /// Steps asked for.
        wanted: usize,
        /// Steps there are.
        available: usize,
    },
}

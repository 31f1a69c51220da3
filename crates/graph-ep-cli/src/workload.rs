//! Made-up routing: one named pattern each, for what a recorded trace may not show.
//!
//! Every decision is a function of the seed, the step, the layer and the token alone, by a
//! counter-based generator of integers: a part of a workload is the same on every machine, whatever
//! is generated beside it. Workloads have no weights of their own.

pub(crate) mod counter;
mod pattern;

use clap::ValueEnum;

use crate::routing::{Ownership, Routing, RoutingError, RoutingParts, check_dimensions};
use counter::Counter;
use pattern::Pattern;

/// A pattern of routing.
///
/// What is said of capacity holds for the default size over eight ranks, and for a capacity that
/// starts at 1.25 times the mean load, as the program's does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Workload {
    /// Ranks are level, and experts as good as
    ///
    /// Every token chooses one expert from each of top-k equal parts, as under a balancing loss and
    /// group-limited routing. Experts stray from their mean by chance only: the initial capacity
    /// suffices, and no step overflows.
    Balanced,
    /// One expert is chosen by most tokens
    ///
    /// Three of four tokens choose one particular expert of the layer, as when a router collapses.
    /// That expert's rank requires half as much again as the mean, from the first step to the last.
    /// Growth with headroom pays once; exact growth follows the noise of the peak for a while.
    HotExpert,
    /// One rank's experts are all that many tokens choose
    ///
    /// Half of the tokens choose only experts of one rank, the same throughout. It requires four
    /// times what it has at the start, and the others half of what they have: growing one rank
    /// alone costs little memory, growing all alike costs much.
    HotRank,
    /// One expert of every rank is hot
    ///
    /// Three of four tokens choose the one hot expert of each rank, in every rank. Experts are as
    /// skewed as they can be, ranks are level: capacity, which belongs to the rank, is not touched.
    SpreadHot,
    /// Ranks own unequal numbers of tokens
    ///
    /// They are drawn anew for each step, and now and then a rank owns none. Choices are balanced.
    /// Capacity is sized for the fullest rank of any step, several times the mean: no step
    /// overflows, but ranks disagree about how much they send.
    #[value(alias = "ragged-sources")]
    Ragged,
    /// Half of the ranks send nothing, half receive nothing
    ///
    /// The halves are drawn apart from each other and anew every eight steps. Signals must pass
    /// with nothing to carry. Tokens and choices crowd on half as many ranks each, so requirement
    /// and initial capacity double together, and no step overflows.
    #[value(alias = "zero-load-ranks")]
    ZeroLoad,
    /// One rank is hot, and every eight steps the next
    ///
    /// Otherwise as hot-rank. Growth that serves only the rank that overflowed pays again at every
    /// turn; growth of all ranks pays once.
    Rotating,
    /// Balanced, with a few steps in which one rank is hot
    ///
    /// In three steps of sixteen, seven of eight tokens choose only experts of one rank, another in
    /// each burst. The peak is near the worst case and brief: what was grown for it lies idle
    /// unless it is shrunk again.
    Burst,
}

impl Workload {
    /// The name on the command line.
    pub fn name(self) -> String {
        // `to_possible_value` is `None` for skipped variants only, of which there are none.
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The size of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkloadConfig {
    workload: Workload,
    seed: u64,
    ranks: usize,
    steps: usize,
    layers: usize,
    tokens: usize,
    experts: usize,
    top_k: usize,
}

impl WorkloadConfig {
    /// `workload` for `ranks` ranks: 64 steps of 4 layers, 512 tokens a step, 64 experts, top-8.
    pub fn new(workload: Workload, seed: u64, ranks: usize) -> Self {
        Self { workload, seed, ranks, steps: 64, layers: 4, tokens: 512, experts: 64, top_k: 8 }
    }

    /// Sets the number of steps.
    pub fn steps(self, steps: usize) -> Self {
        Self { steps, ..self }
    }

    /// Sets the number of MoE layers of a step.
    pub fn layers(self, layers: usize) -> Self {
        Self { layers, ..self }
    }

    /// Sets the number of tokens of a step, over all ranks.
    pub fn tokens(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// Sets the number of experts.
    pub fn experts(self, experts: usize) -> Self {
        Self { experts, ..self }
    }

    /// Sets the number of choices of a token.
    pub fn top_k(self, top_k: usize) -> Self {
        Self { top_k, ..self }
    }

    /// Generates the routing. Allocates 4 bytes for each choice.
    ///
    /// # Errors
    ///
    /// [`RoutingError`], if a size is zero, if there are more ranks or choices than experts, or if
    /// there is no memory for so many choices.
    pub fn generate(&self) -> Result<Routing, RoutingError> {
        let Self { workload, seed, ranks, steps, layers, tokens, experts, top_k } = *self;
        let mut parts = RoutingParts {
            name: workload.name(),
            origin: Some(format!("generated from seed {seed}")),
            experts,
            top_k,
            steps,
            layers,
            tokens,
            ..RoutingParts::default()
        };
        let choices = check_dimensions(&parts)?;
        if ranks == 0 {
            return Err(RoutingError::NoRanks);
        }
        if ranks > experts {
            return Err(RoutingError::MoreRanksThanExperts { ranks, experts });
        }
        let too_large = RoutingError::TooLarge { steps, layers, tokens, top_k };
        parts.ids.try_reserve_exact(choices).map_err(|_| too_large)?;

        for step in 0..steps {
            for layer in 0..layers {
                let pattern = Pattern::of(self, step, layer);
                for token in 0..tokens {
                    let counter = Counter::of_token(seed, step, layer, token);
                    pattern.choose(counter, top_k, &mut parts.ids);
                }
            }
        }
        parts.ownership = self.ownership();
        Routing::new(parts)
    }

    fn ownership(&self) -> Ownership {
        let shares: fn(&Self, usize) -> Vec<usize> = match self.workload {
            Workload::Ragged => pattern::ragged_shares,
            Workload::ZeroLoad => pattern::zero_load_shares,
            _ => return Ownership::Even,
        };
        let offsets = (0..self.steps)
            .flat_map(|step| {
                let shares = shares(self, step);
                let total: usize = shares.iter().sum();
                (0..=self.ranks).map(move |rank| {
                    let before: usize = shares[..rank].iter().sum();
                    (before as u128 * self.tokens as u128 / total as u128) as usize
                })
            })
            .collect();
        Ownership::Split { ranks: self.ranks, offsets }
    }
}

#[cfg(test)]
mod tests;

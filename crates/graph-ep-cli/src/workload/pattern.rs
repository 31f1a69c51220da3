//! What a workload prefers, in one layer of one step.

use super::counter::{Counter, Purpose};
use super::{Workload, WorkloadConfig};
use crate::demand::even_range;

/// Steps for which a rotating or idle rank stays the same.
const PERIOD: usize = 8;

/// Steps from the start of a burst to the start of the next, and how many of them it lasts.
const BURST_EVERY: usize = 16;
const BURST_STEPS: usize = 3;

/// The largest share of a ragged rank, in parts; the smallest is none.
const RAGGED_PARTS: usize = 4;

/// How the tokens of one layer and step choose.
pub(super) enum Pattern {
    /// One expert from each of top-k equal parts of all of them.
    Level {
        /// Number of experts.
        experts: usize,
    },
    /// Some tokens prefer hot experts, the others choose among all alike.
    Skewed {
        /// The experts that may be chosen: first the hot ones, then the others.
        experts: Vec<i32>,
        /// How many of them are hot.
        hot: usize,
        /// Of eight tokens, how many choose as many hot experts as they can.
        hot_tokens: usize,
    },
}

impl Pattern {
    /// The pattern of a layer in a step. The sizes in `config` have been checked.
    pub(super) fn of(config: &WorkloadConfig, step: usize, layer: usize) -> Self {
        let WorkloadConfig { workload, seed, ranks, experts, .. } = *config;
        let all = || (0..experts).collect::<Vec<_>>();
        // What is hot is drawn for a key, and stays for as long as the key does.
        let hot =
            |key: usize, below: usize| Counter::new(Purpose::Hot, &[seed, key as u64]).below(below);
        let rank = |rank: usize| even_range(experts, ranks, rank).collect::<Vec<_>>();
        match workload {
            Workload::Balanced | Workload::Ragged => Self::Level { experts },
            Workload::HotExpert => Self::skewed(all(), &[hot(layer, experts)], 6),
            Workload::HotRank => Self::skewed(all(), &rank(hot(0, ranks)), 4),
            Workload::SpreadHot => {
                let one_each: Vec<_> = (0..ranks)
                    .map(|rank| {
                        let local = even_range(experts, ranks, rank);
                        local.start + hot(layer * ranks + rank, local.len())
                    })
                    .collect();
                Self::skewed(all(), &one_each, 6)
            }
            Workload::ZeroLoad => {
                let mut allowed = all();
                for idle in idle_experts(config, step) {
                    let local = even_range(experts, ranks, idle);
                    allowed.retain(|expert| !local.contains(expert));
                }
                Self::skewed(allowed, &[], 0)
            }
            Workload::Rotating => {
                Self::skewed(all(), &rank((hot(0, ranks) + step / PERIOD) % ranks), 4)
            }
            Workload::Burst => {
                let phase = Counter::new(Purpose::Phase, &[seed]).below(BURST_EVERY);
                let since = step + phase;
                if since % BURST_EVERY < BURST_STEPS {
                    Self::skewed(all(), &rank(hot(since / BURST_EVERY, ranks)), 7)
                } else {
                    Self::Level { experts }
                }
            }
        }
    }

    fn skewed(allowed: Vec<usize>, hot: &[usize], hot_tokens: usize) -> Self {
        let others = allowed.iter().filter(|expert| !hot.contains(expert));
        // Ids fit: there are at most `MAX_EXPERTS` experts.
        let experts = hot.iter().chain(others).map(|&expert| expert as i32).collect();
        Self::Skewed { experts, hot: hot.len(), hot_tokens }
    }

    /// Appends the `top_k` distinct choices of one token.
    pub(super) fn choose(&self, mut counter: Counter, top_k: usize, ids: &mut Vec<i32>) {
        match self {
            // Ranks are level to within a few experts, not merely on average.
            Self::Level { experts } => ids.extend((0..top_k).map(|choice| {
                let part = even_range(*experts, top_k, choice);
                (part.start + counter.below(part.len())) as i32
            })),
            Self::Skewed { experts, hot, hot_tokens } => {
                let prefers = counter.below(8) < *hot_tokens;
                // Drawing reorders, and no token may see the order that another left.
                let mut pool = experts.clone();
                let taken = if prefers { top_k.min(*hot) } else { 0 };
                if taken > 0 {
                    counter.draw(&mut pool[..*hot], taken);
                }
                if taken < top_k {
                    // Every hot expert has been taken, or none.
                    counter.draw(&mut pool[taken..], top_k - taken);
                }
                ids.extend_from_slice(&pool[..top_k]);
            }
        }
    }
}

/// Ranks that receive no token in `step`: half of them, or as many fewer as leaves every token
/// enough experts to choose.
fn idle_experts(config: &WorkloadConfig, step: usize) -> Vec<usize> {
    let WorkloadConfig { ranks, experts, top_k, .. } = *config;
    let mut idle = half_of_ranks(config, Purpose::IdleExperts, step);
    let held = |ranks_idle: &[usize]| -> usize {
        ranks_idle.iter().map(|&rank| even_range(experts, ranks, rank).len()).sum()
    };
    while experts - held(&idle) < top_k {
        idle.pop();
    }
    idle
}

fn half_of_ranks(config: &WorkloadConfig, purpose: Purpose, step: usize) -> Vec<usize> {
    let mut ranks: Vec<usize> = (0..config.ranks).collect();
    let half = config.ranks / 2;
    Counter::new(purpose, &[config.seed, (step / PERIOD) as u64]).draw(&mut ranks, half);
    ranks.truncate(half);
    ranks
}

/// The parts in which ragged ranks share a step's tokens; not all zero.
pub(super) fn ragged_shares(config: &WorkloadConfig, step: usize) -> Vec<usize> {
    let mut counter = Counter::new(Purpose::Shares, &[config.seed, step as u64]);
    let mut shares: Vec<usize> =
        (0..config.ranks).map(|_| counter.below(RAGGED_PARTS + 1)).collect();
    if shares.iter().all(|&parts| parts == 0) {
        shares[step % config.ranks] = 1;
    }
    shares
}

/// One part for each rank that is not idle; with one rank, none is.
pub(super) fn zero_load_shares(config: &WorkloadConfig, step: usize) -> Vec<usize> {
    let mut shares = vec![1; config.ranks];
    for idle in half_of_ranks(config, Purpose::IdleSources, step) {
        shares[idle] = 0;
    }
    shares
}

//! How choices are spread over experts.

use std::fmt;

use clap::ValueEnum;

use crate::demand::even_range;
use crate::workload::counter::{Counter, Purpose};

/// A pattern of choices. No token chooses an expert twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum)]
pub enum Skew {
    /// Every set of experts is as likely as every other
    #[default]
    Uniform,
    /// Half of the tokens choose as many experts of rank 0 as they can
    HotRank,
    /// Expert 0 is among the choices of every token
    OneExpert,
    /// The n-th most popular expert of a layer is chosen in proportion to 1/n
    Zipf,
    /// One expert from each of top-k equal parts of all
    Level,
    /// Three of four tokens choose one particular expert of as many ranks as they can
    SpreadHot,
    /// Only experts of the first half of the ranks are chosen
    ZeroLoad,
}

impl Skew {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Uniform,
        Self::HotRank,
        Self::OneExpert,
        Self::Zipf,
        Self::Level,
        Self::SpreadHot,
        Self::ZeroLoad,
    ];
}

impl fmt::Display for Skew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_possible_value() {
            Some(value) => f.pad(value.get_name()),
            None => Ok(()),
        }
    }
}

/// Draws of a popular expert before the next best is taken: with as many experts as choices, most draws
/// repeat one that was chosen.
const DRAWS: usize = 64;

/// Chooses for the tokens of one layer.
pub(super) struct Chooser {
    skew: Skew,
    seed: u64,
    /// Every expert, under [`Skew::ZeroLoad`] of the ranks that receive any; under [`Skew::Zipf`] the most
    /// popular first, where some are hot those.
    experts: Vec<i32>,
    /// Hot experts: those of rank 0, since shares are dealt out in order, or one of each rank.
    hot: usize,
    /// Experts of the first half of the ranks.
    receiving: usize,
    /// Popularity of each expert in `experts` and of those before it.
    popularity: Vec<usize>,
}

impl Chooser {
    pub(super) fn new(skew: Skew, experts: usize, ranks: usize, seed: u64, layer: usize) -> Self {
        let mut all: Vec<i32> = (0..experts as i32).collect();
        if skew == Skew::Zipf {
            Counter::new(Purpose::Hot, &[seed, layer as u64]).draw(&mut all, experts);
        }
        let mut hot = even_range(experts, ranks, 0).len();
        if skew == Skew::SpreadHot {
            let first: Vec<i32> =
                (0..ranks).map(|rank| even_range(experts, ranks, rank).start as i32).collect();
            all.retain(|expert| !first.contains(expert));
            hot = first.len();
            all.splice(0..0, first);
        }
        let mut sum = 0;
        let popularity = (1..=experts).map(|place| {
            sum += (1 << 32) / place;
            sum
        });
        let popularity = popularity.collect();
        // At least one rank receives something.
        let receiving = even_range(experts, ranks, ranks.div_ceil(2) - 1).end;
        Self { skew, seed, experts: all, hot, receiving, popularity }
    }

    /// Appends the `top_k` choices of the token at `place`: routing, layer and number; and their weights.
    pub(super) fn choose(
        &mut self,
        (routing, layer, token): (usize, usize, usize),
        top_k: usize,
        ids: &mut Vec<i32>,
        weights: &mut Vec<f32>,
    ) {
        let mut counter = Counter::of_token(self.seed, routing, layer, token);
        let begin = ids.len();
        match self.skew {
            Skew::Uniform => self.draw(&mut counter, (0, 0), top_k, ids),
            Skew::Level => {
                let experts = self.experts.len();
                ids.extend((0..top_k).map(|choice| {
                    let part = even_range(experts, top_k, choice);
                    (part.start + counter.below(part.len())) as i32
                }));
            }
            Skew::ZeroLoad => {
                let idle = self.experts.len() - self.receiving.max(top_k);
                self.draw(&mut counter, (0, idle), top_k, ids);
            }
            Skew::HotRank | Skew::SpreadHot => {
                let prefers = match self.skew {
                    Skew::HotRank => counter.below(2) == 0,
                    _ => counter.below(4) < 3,
                };
                let hot = if prefers { top_k.min(self.hot) } else { 0 };
                self.draw(&mut counter, (0, self.experts.len() - self.hot), hot, ids);
                let behind = if prefers { self.hot } else { 0 };
                self.draw(&mut counter, (behind, 0), top_k - hot, ids);
            }
            Skew::OneExpert => {
                ids.push(0);
                self.draw(&mut counter, (1, 0), top_k - 1, ids);
            }
            Skew::Zipf => {
                for _ in 0..top_k {
                    let choice = self.popular(&mut counter, &ids[begin..]);
                    ids.push(choice);
                }
            }
        }
        let drawn = (0..top_k).map(|_| (1 + counter.below(256)) as f32);
        let drawn: Vec<f32> = drawn.collect();
        let sum: f32 = drawn.iter().sum();
        weights.extend(drawn.iter().map(|weight| weight / sum));
    }

    /// Appends `count` experts, drawn without replacement from all but the first and last so many.
    fn draw(
        &mut self,
        counter: &mut Counter,
        (first, last): (usize, usize),
        count: usize,
        ids: &mut Vec<i32>,
    ) {
        let end = self.experts.len() - last;
        let pool = &mut self.experts[first..end];
        let mut swaps = Vec::with_capacity(count);
        for place in 0..count {
            let other = place + counter.below(pool.len() - place);
            pool.swap(place, other);
            swaps.push(other);
        }
        ids.extend_from_slice(&pool[..count]);
        // No token may see the order that another left.
        for (place, other) in swaps.into_iter().enumerate().rev() {
            pool.swap(place, other);
        }
    }

    /// A popular expert that is not among `chosen`, of which there are fewer than experts.
    fn popular(&self, counter: &mut Counter, chosen: &[i32]) -> i32 {
        let all = self.popularity.last().copied().unwrap_or(1);
        for _ in 0..DRAWS {
            let at = counter.below(all);
            let place = self.popularity.partition_point(|sum| *sum <= at);
            if !chosen.contains(&self.experts[place]) {
                return self.experts[place];
            }
        }
        let left = self.experts.iter().find(|expert| !chosen.contains(expert));
        left.copied().unwrap_or(-1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each of 16 experts over 4 ranks is chosen by 4000 tokens, top-2.
    fn counts(skew: Skew) -> [usize; 16] {
        let mut chooser = Chooser::new(skew, 16, 4, 7, 0);
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for token in 0..4000 {
            chooser.choose((0, 0, token), 2, &mut ids, &mut weights);
        }
        let mut counts = [0; 16];
        for id in ids {
            counts[id as usize] += 1;
        }
        counts
    }

    #[test]
    fn patterns_are_what_their_names_say() {
        // Each expected 500 times; six standard deviations of a binomial are 126.
        assert!(counts(Skew::Uniform).iter().all(|count| count.abs_diff(500) < 130));
        // Half of 8000 to four experts, and a quarter of the other half.
        let hot: usize = counts(Skew::HotRank)[..4].iter().sum();
        assert!(hot.abs_diff(5000) < 250, "{hot}");
        let one = counts(Skew::OneExpert);
        assert_eq!(one[0], 4000);
        assert!(one[1..].iter().all(|count| count.abs_diff(267) < 100), "{one:?}");
        let level = counts(Skew::Level);
        assert!(level.iter().all(|count| count.abs_diff(500) < 130), "{level:?}");
        assert_eq!(level[..8].iter().sum::<usize>(), 4000);
        // Three of four tokens choose two of four hot experts, the others two of all.
        let spread = counts(Skew::SpreadHot);
        assert!([0, 4, 8, 12].iter().all(|at| spread[*at].abs_diff(1625) < 200), "{spread:?}");
        let idle = counts(Skew::ZeroLoad);
        assert!(idle[..8].iter().all(|count| count.abs_diff(1000) < 180), "{idle:?}");
        assert_eq!(idle[8..], [0; 8]);
        let mut zipf = counts(Skew::Zipf);
        zipf.sort_unstable();
        assert!(zipf[15] > 3 * zipf[7] && zipf[15] > 8 * zipf[0], "{zipf:?}");
    }

    #[test]
    fn a_token_chooses_the_same_whoever_chose_before() {
        for skew in Skew::ALL {
            let of = |before: usize| {
                let mut chooser = Chooser::new(skew, 16, 4, 7, 0);
                let (mut ids, mut weights) = (Vec::new(), Vec::new());
                for token in (0..before).chain([99]) {
                    chooser.choose((0, 0, token), 3, &mut ids, &mut weights);
                }
                (ids.split_off(before * 3), weights.split_off(before * 3))
            };
            assert_eq!(of(0), of(10), "{skew}");
        }
    }
}

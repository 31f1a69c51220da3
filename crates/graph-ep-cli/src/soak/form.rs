//! What a soak computes in closed form: from the number of a step follow its routing, its tokens, and
//! what has to come out.
//!
//! All of it is whole numbers: a value is one of −4 to 3, an expert makes at most ±12 of it, a weight
//! is 1 or 2, and a token has at most eight experts, so that no sum exceeds ±192. BF16, which holds the
//! fewest digits, holds every whole number up to ±256. So every sum is exact in whatever order it is
//! added, and an output is right only if it is equal.
//!
//! The kernels in `kernels/soak` compute the same.

use super::kernels::Shape;
use crate::workload::counter::{STRIDE, mix};

/// The most experts of a token for which sums stay exact.
pub(super) const MOST_TOP_K: usize = 8;

/// The most ranks among which every set is told from every other where rows are dropped.
pub(super) const MOST_DROPPING: usize = 5;

/// The most ranks.
pub(super) const MOST_RANKS: usize = 32;

/// A whole number from −4 to 3.
fn digit(one: u32, column: u32) -> i32 {
    let mut word = one ^ column.wrapping_mul(0x9e37_79b9);
    word = (word ^ (word >> 16)).wrapping_mul(0x7feb_352d);
    word = (word ^ (word >> 15)).wrapping_mul(0x846c_a68b);
    (word >> 29).cast_signed() - 4
}

/// What an expert makes of a value.
pub(super) fn result(expert: u32, column: u32, value: i32) -> i32 {
    scale(expert) * value + shift(expert, column)
}

/// What an expert multiplies by: 1 or 2, so that a sum over experts never loses the token.
pub(super) fn scale(expert: u32) -> i32 {
    1 + (expert.wrapping_mul(0x9e37_79b9) >> 31).cast_signed()
}

/// And what it adds.
pub(super) fn shift(expert: u32, column: u32) -> i32 {
    digit(expert.wrapping_mul(0x85eb_ca6b).wrapping_add(0x5bd1_e995), column)
}

/// A step, of which everything else is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    shape: Shape,
    step: u64,
}

impl Draw {
    pub(super) fn new(shape: &Shape, step: u64) -> Self {
        let word = mix(shape.seed.wrapping_add(step.wrapping_mul(STRIDE)));
        Self { shape: *shape, step: word }
    }

    /// Whether all tokens go to one rank.
    pub(super) fn is_burst(&self) -> bool {
        self.shape.burst != 0 && ((self.step >> 32) as u32).is_multiple_of(self.shape.burst)
    }

    /// Tokens of a rank.
    pub(super) fn tokens(&self, rank: u32) -> u32 {
        if self.shape.ragged == 0 || self.is_burst() {
            return self.shape.max_tokens;
        }
        let word = mix(self.step.wrapping_sub(u64::from(rank + 1).wrapping_mul(STRIDE)));
        (word >> 32) as u32 % (self.shape.max_tokens + 1)
    }

    /// One of them.
    pub(super) fn token(&self, layer: u32, rank: u32, token: u32) -> Token {
        let place = (u64::from(layer) << 48) | (u64::from(rank) << 32) | u64::from(token);
        let word = mix(self.step.wrapping_add((place + 1).wrapping_mul(STRIDE)));
        let shape = &self.shape;
        let (one, two) = (mix(word), mix(mix(word)));
        let doubled = (two >> 56) as u32;
        let (first, stride, none) = if self.is_burst() {
            let share = shape.experts / shape.world;
            let rank = (self.step as u32).wrapping_add(layer) % shape.world;
            ((rank * share).min(shape.experts - shape.top_k), 1, 0)
        } else {
            let stride = 1 + (one >> 32) as u32 % (shape.experts / shape.top_k);
            let none = (two & (two >> 8) & (two >> 16) & (two >> 24)) as u32 & 0xff;
            (one as u32 % shape.experts, stride, none)
        };
        Token { word: word as u32, experts: shape.experts, first, stride, none, doubled }
    }
}

/// A token: its values, and its experts, which are an arithmetic sequence, so that all differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    word: u32,
    experts: u32,
    first: u32,
    stride: u32,
    /// A bit for each choice that is none.
    none: u32,
    /// A bit for each weight that is 2 rather than 1.
    doubled: u32,
}

impl Token {
    pub(super) fn value(&self, column: u32) -> i32 {
        digit(self.word, column)
    }

    pub(super) fn expert(&self, choice: u32) -> Option<u32> {
        let expert = (self.first + choice * self.stride) % self.experts;
        (self.none >> choice & 1 == 0).then_some(expert)
    }

    pub(super) fn weight(&self, choice: u32) -> i32 {
        1 + (self.doubled >> choice & 1).cast_signed()
    }

    /// Its choices that are experts of ranks in the set, or of others.
    fn choices(&self, shape: &Shape, ranks: u32, inside: bool) -> impl Iterator<Item = (u32, u32)> {
        let (token, share) = (*self, shape.experts / shape.world);
        (0..shape.top_k)
            .filter_map(move |choice| token.expert(choice).map(|expert| (choice, expert)))
            .filter(move |(_, expert)| (ranks >> (expert / share) & 1 != 0) == inside)
    }

    /// What a column of its output has to be where only the ranks in a set take part.
    pub(super) fn expected(&self, shape: &Shape, ranks: u32, column: u32) -> i32 {
        let value = self.value(column);
        let weighted = |(choice, expert)| self.weight(choice) * result(expert, column, value);
        self.choices(shape, ranks, true).map(weighted).sum()
    }

    /// Its pairs for ranks outside of a set.
    pub(super) fn missing(&self, shape: &Shape, ranks: u32) -> u32 {
        self.choices(shape, ranks, false).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use graph_ep::DType;

    use super::*;

    fn shape(world: u32, experts: u32, top_k: u32) -> Shape {
        Shape {
            seed: 7,
            world,
            experts,
            top_k,
            hidden: 64,
            max_tokens: 16,
            layers: 2,
            burst: 8,
            ragged: 1,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// Every number that can occur on the way, the weighted results of experts and the sums over any of
    /// a token's experts, is one of the format.
    #[test]
    fn every_sum_is_exact_in_every_format() {
        let most = 2 * 4 + 4;
        let bound = 2 * most * MOST_TOP_K as i32;
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
            for number in -bound..=bound {
                let (mut bytes, mut back) = (vec![0; dtype.bytes()], [0.0]);
                dtype.encode(&[number as f32], &mut bytes);
                dtype.decode(&bytes, &mut back);
                assert_eq!(back[0], number as f32, "{dtype:?}");
            }
        }
        for expert in 0..64 {
            for column in 0..64 {
                for value in -4..4 {
                    assert!(result(expert, column, value).abs() <= most);
                }
            }
        }
    }

    #[test]
    fn experts_of_a_token_differ_and_exist() {
        for (world, experts, top_k) in [(2, 8, 8), (2, 6, 4), (3, 9, 2), (4, 64, 8), (1, 1, 1)] {
            let shape = shape(world, experts, top_k);
            let (mut none, mut bursts) = (0, 0);
            for step in 0..200 {
                let draw = Draw::new(&shape, step);
                bursts += u32::from(draw.is_burst());
                assert!(draw.tokens(0) <= shape.max_tokens);
                let token = draw.token(1, 0, 3);
                let chosen: Vec<_> = (0..top_k).filter_map(|c| token.expert(c)).collect();
                none += top_k - chosen.len() as u32;
                assert!(chosen.iter().all(|expert| *expert < experts));
                assert_eq!(chosen.iter().collect::<HashSet<_>>().len(), chosen.len());
            }
            assert!(none > 0 && bursts > 5 && bursts < 60, "{none} none, {bursts} bursts");
        }
    }

    #[test]
    fn a_burst_sends_everything_to_one_rank() {
        let shape = shape(4, 32, 8);
        let burst = (0..).map(|step| Draw::new(&shape, step)).find(Draw::is_burst).unwrap();
        let ranks: HashSet<_> = (0..16)
            .flat_map(|token| (0..8).filter_map(move |c| burst.token(0, 2, token).expert(c)))
            .map(|expert| expert / 8)
            .collect();
        assert_eq!(ranks.len(), 1);
        assert_eq!(burst.tokens(0), 16);
    }

    #[test]
    fn outputs_of_tokens_steps_layers_and_sets_differ() {
        let shape = shape(2, 8, 4);
        let mut seen = HashSet::new();
        for step in 0..20 {
            let draw = Draw::new(&shape, step);
            for (layer, rank, at) in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)] {
                let token = draw.token(layer, rank, at);
                let row: Vec<_> = (0..64).map(|c| token.expected(&shape, 0b11, c)).collect();
                assert!(seen.insert(row));
            }
        }
        let token = Draw::new(&shape, 1).token(0, 0, 0);
        let parts = |ranks| (0..64).map(move |c| token.expected(&shape, ranks, c));
        let sums: Vec<_> = parts(0b01).zip(parts(0b10)).map(|(a, b)| a + b).collect();
        assert_eq!(sums, parts(0b11).collect::<Vec<_>>());
        assert_eq!(token.missing(&shape, 0b11), 0);
        let pairs = (0..4).filter_map(|c| token.expert(c)).count() as u32;
        assert_eq!(token.missing(&shape, 0), pairs);
        assert_eq!(token.missing(&shape, 0b01) + token.missing(&shape, 0b10), pairs);
    }
}

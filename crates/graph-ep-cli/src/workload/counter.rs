//! Random numbers that are a function of where they are used.
//!
//! A counter-based generator: the place (what for, seed, step, layer, token) is hashed to a start,
//! and the numbers drawn there follow by counting from it. Nothing is carried from one place to the
//! next, so no order of generation is fixed. The hash is the finaliser of SplitMix64, a bijection
//! of 64 bits of which every output bit depends on every input bit; all arithmetic is on integers,
//! the same on every machine.

/// The golden ratio in 64 bits, odd: counting by it visits every state before it repeats.
pub(crate) const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The numbers of one place.
#[derive(Clone, Debug)]
pub(crate) struct Counter {
    state: u64,
}

/// What a place draws for. Two purposes at one place draw different numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// The choices of a token.
    Token = 1,
    /// Which expert or rank is hot.
    Hot,
    /// When bursts come.
    Phase,
    /// How many tokens ranks own.
    Shares,
    /// Which ranks own no tokens.
    IdleSources,
    /// Which ranks receive no tokens.
    IdleExperts,
}

impl Counter {
    /// The counter of `purpose` at the place that `words` name.
    pub(crate) fn new(purpose: Purpose, words: &[u64]) -> Self {
        Self::starting_at(mix(purpose as u64), words)
    }

    /// The counter that counts from `start`, hashed with `words`.
    pub(crate) fn starting_at(start: u64, words: &[u64]) -> Self {
        let state = words.iter().fold(start, |hash, word| mix(hash.wrapping_add(STRIDE) ^ word));
        Self { state }
    }

    /// The counter of a token's choices.
    pub(crate) fn of_token(seed: u64, step: usize, layer: usize, token: usize) -> Self {
        Self::new(Purpose::Token, &[seed, step as u64, layer as u64, token as u64])
    }

    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STRIDE);
        mix(self.state)
    }

    /// A number below `bound`, which must not be zero. The bias is below `bound` / 2⁶⁴.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Moves `count` elements, drawn without replacement, to the front of `from`.
    pub(crate) fn draw<T>(&mut self, from: &mut [T], count: usize) {
        for place in 0..count {
            from.swap(place, place + self.below(from.len() - place));
        }
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection without visible pattern.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_splitmix64() {
        // The published generator's first outputs from state 0.
        let mut counter = Counter::starting_at(0, &[]);
        assert_eq!(counter.next(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(counter.next(), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn places_and_purposes_are_told_apart() {
        let first = |purpose, words: &[u64]| Counter::new(purpose, words).next();
        let all = [
            first(Purpose::Token, &[0, 0, 1]),
            first(Purpose::Token, &[0, 1, 0]),
            first(Purpose::Token, &[1, 0, 0]),
            first(Purpose::Token, &[0, 0]),
            first(Purpose::Hot, &[0, 0, 1]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(!all[..i].contains(a));
        }
    }

    #[test]
    fn numbers_below_a_bound_are_level() {
        let mut counter = Counter::new(Purpose::Token, &[3]);
        let mut counts = [0_u32; 7];
        for _ in 0..70_000 {
            counts[counter.below(7)] += 1;
        }
        // Six standard deviations of a binomial with mean 10 000.
        assert!(counts.iter().all(|&c| c.abs_diff(10_000) < 560), "{counts:?}");
    }

    #[test]
    fn drawing_keeps_the_elements() {
        let mut counter = Counter::new(Purpose::Token, &[4]);
        let mut elements = [0, 1, 2, 3, 4];
        counter.draw(&mut elements, 3);
        elements.sort_unstable();
        assert_eq!(elements, [0, 1, 2, 3, 4]);
    }
}

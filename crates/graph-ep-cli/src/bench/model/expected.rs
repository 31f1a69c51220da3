//! Bytes that an exchange needs when every set of experts is as likely as every other, without any
//! routing: for sizes that nobody has measured.

use crate::bench::bytes::Halves;
use crate::bench::report::Work;

/// An exchange, each rank on a GPU of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Exchange {
    pub(super) ranks: usize,
    /// Of each rank.
    pub(super) tokens: usize,
    pub(super) top_k: usize,
    /// Over all ranks, which hold equally many.
    pub(super) experts: usize,
    /// Bytes of a row on its way, scales included; and of a row of sums.
    pub(super) row_bytes: usize,
    pub(super) sum_bytes: usize,
    pub(super) alignment: usize,
    pub(super) flat: bool,
}

impl Exchange {
    /// Experts of a rank.
    pub(super) fn local(&self) -> f64 {
        self.experts as f64 / self.ranks as f64
    }

    /// Tokens of one rank that have an expert on a particular rank.
    pub(super) fn items(&self) -> f64 {
        let (experts, local) = (self.experts as f64, self.local());
        // None of k different experts is there.
        let none = (0..self.top_k)
            .map(|chosen| (experts - local - chosen as f64).max(0.0) / (experts - chosen as f64))
            .product::<f64>();
        self.tokens as f64 * (1.0 - none)
    }

    /// Rows that a rank receives, each expert's padded.
    fn padded(&self) -> f64 {
        let tokens = self.ranks * self.tokens;
        let chosen = self.top_k as f64 / self.experts as f64;
        self.local() * padded_mean(tokens, chosen, self.alignment)
    }

    /// What either half cannot do without.
    pub(super) fn halves(&self) -> Halves {
        let (items, tokens) = (self.items(), self.tokens as f64);
        let others = (self.ranks - 1) as f64;
        let (row, sum) = (self.row_bytes as f64, self.sum_bytes as f64);
        let received = self.ranks as f64 * items;
        let (rows, read) = match self.flat {
            true => (received, received),
            false => (self.padded(), tokens * self.top_k as f64),
        };
        let work = |wire: f64, memory: f64| Work {
            wire_bytes: wire.round() as u64,
            memory_bytes: memory.round() as u64,
        };
        Halves {
            dispatch: work(others * items * row, (tokens + rows) * row),
            combine: work(others * items * sum, (read + 2.0 * others * items + tokens) * sum),
        }
    }
}

/// The mean of ⌈X / a⌉ · a, where X of `tries` come true, each with probability `chance`.
fn padded_mean(tries: usize, chance: f64, alignment: usize) -> f64 {
    let (tries, a) = (tries as f64, alignment.max(1) as f64);
    let chance = chance.clamp(0.0, 1.0);
    let mean = tries * chance;
    if chance >= 1.0 {
        return (mean / a).ceil() * a;
    }
    // Spread over several multiples of the alignment, the rest is uniform.
    if mean * (1.0 - chance) > 4.0 * a * a && mean > 500.0 {
        return mean + (a - 1.0) / 2.0;
    }
    // The probabilities of 0, 1, 2, …; those beyond any doubt are left out.
    let mut log = tries * (1.0 - chance).ln();
    let (odds, most) = ((chance / (1.0 - chance)).ln(), mean + 12.0 * mean.sqrt() + 12.0);
    let (mut padded, mut count) = (0.0, 0.0);
    while count <= most.min(tries) {
        padded += log.exp() * (count / a).ceil() * a;
        log += odds + ((tries - count) / (count + 1.0)).ln();
        count += 1.0;
    }
    padded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cases::Shape;
    use crate::bench::cases::tests::shape;
    use crate::bench::inputs::Inputs;
    use crate::bench::report::LayoutChoice;

    /// What is expected is what made-up routing has, up to chance.
    #[test]
    fn expected_bytes_are_those_of_routing() {
        for (ranks, tokens, layout) in [
            (1, 64, LayoutChoice::Expert),
            (2, 256, LayoutChoice::Expert),
            (4, 96, LayoutChoice::Flat),
            (8, 512, LayoutChoice::Expert),
        ] {
            let shape =
                Shape { ranks, tokens, top_k: 4, experts: 32, alignment: 8, layout, ..shape() };
            let routings: Vec<_> = {
                let inputs = Inputs::new(&shape, 6, 3);
                (0..6).map(|layer| inputs.counts(0, layer).clone()).collect()
            };
            let devices: Vec<usize> = (0..ranks).collect();
            let found = Halves::mean(&shape, &routings, &devices);
            let exchange = Exchange {
                ranks,
                tokens,
                top_k: 4,
                experts: 32,
                row_bytes: shape.row_bytes(),
                sum_bytes: shape.sum_bytes(),
                alignment: 8,
                flat: layout == LayoutChoice::Flat,
            };
            let expected = exchange.halves();
            for (found, expected) in [
                (found.dispatch.wire_bytes, expected.dispatch.wire_bytes),
                (found.dispatch.memory_bytes, expected.dispatch.memory_bytes),
                (found.combine.wire_bytes, expected.combine.wire_bytes),
                (found.combine.memory_bytes, expected.combine.memory_bytes),
            ] {
                let (found, expected) = (found as f64, expected as f64);
                // What is found is that of the rank with most.
                assert!(
                    found >= 0.97 * expected && found <= 1.1 * expected,
                    "{ranks} ranks: {found} for {expected}"
                );
            }
        }
    }

    #[test]
    fn padding_is_exact_where_it_can_be_counted() {
        // One try, one in two: 0 or 1, padded 0 or 4.
        assert!((padded_mean(1, 0.5, 4) - 2.0).abs() < 1e-12);
        assert!((padded_mean(10, 1.0, 4) - 12.0).abs() < 1e-12);
        assert!((padded_mean(3, 0.25, 1) - 0.75).abs() < 1e-9);
        // Many: half of the alignment, less half a row.
        assert!((padded_mean(1 << 20, 0.03125, 16) - (32768.0 + 7.5)).abs() < 0.1);
        let (near, far) =
            (padded_mean(65_000, 1.0 / 32.0, 16), padded_mean(66_000, 1.0 / 32.0, 16));
        assert!((far - near - 31.25).abs() < 1.0, "{near} {far}");
    }
}

//! The bytes that an exchange cannot do without, from its routing alone, and how long they take at best.
//!
//! Ranks that share a GPU share its memory and its links: what they do is added up, and a row that stays
//! on the GPU is no wire traffic.

use super::cases::Shape;
use super::limits::Limits;
use super::report::{Bound, LimitKind, Padding, Work};
use crate::demand::even_range;

/// What one layer of a routing sends where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    ranks: usize,
    /// `[sources, receivers]`: tokens of the source with an expert on the receiver.
    items: Vec<usize>,
    /// `[experts]`: tokens that chose it.
    pairs: Vec<usize>,
}

impl Counts {
    /// Counts `[tokens, top_k]` ids of each rank, all of them experts, none twice in a token.
    pub fn new<'i>(
        ids: impl ExactSizeIterator<Item = &'i [i32]>,
        top_k: usize,
        experts: usize,
    ) -> Self {
        let ranks = ids.len();
        let mut owner = vec![0; experts];
        for rank in 0..ranks {
            owner[even_range(experts, ranks, rank)].fill(rank);
        }
        let mut counts = Self { ranks, items: vec![0; ranks * ranks], pairs: vec![0; experts] };
        // The last token that was counted for each receiver.
        let mut seen = vec![usize::MAX; ranks];
        for (source, ids) in ids.enumerate() {
            seen.fill(usize::MAX);
            for (token, choices) in ids.chunks(top_k.max(1)).enumerate() {
                for id in choices {
                    let expert = *id as usize;
                    counts.pairs[expert] += 1;
                    let receiver = owner[expert];
                    if seen[receiver] != token {
                        seen[receiver] = token;
                        counts.items[source * ranks + receiver] += 1;
                    }
                }
            }
        }
        counts
    }

    /// Tokens of `source` that have an expert on `receiver`.
    pub fn items(&self, source: usize, receiver: usize) -> usize {
        self.items[source * self.ranks + receiver]
    }

    /// Tokens of all ranks that have an expert on `receiver`.
    fn received(&self, receiver: usize) -> usize {
        (0..self.ranks).map(|source| self.items(source, receiver)).sum()
    }

    /// Pairs of a token and an expert of `rank`.
    fn pairs(&self, rank: usize) -> usize {
        self.pairs[even_range(self.pairs.len(), self.ranks, rank)].iter().sum()
    }

    /// Receive rows that the layout needs on `rank`, padding included.
    pub fn required(&self, shape: &Shape, rank: usize) -> usize {
        if shape.flat() {
            return self.received(rank).next_multiple_of(shape.alignment);
        }
        let local = &self.pairs[even_range(self.pairs.len(), self.ranks, rank)];
        local.iter().map(|count| count.next_multiple_of(shape.alignment)).sum()
    }

    /// Those of them that a dispatch to `rank` writes: all, unless padding is left as it is.
    fn stored(&self, shape: &Shape, rank: usize) -> usize {
        match shape.padding {
            Padding::Cleared => self.required(shape, rank),
            Padding::Left => self.pairs(rank),
        }
    }
}

/// What a pair cannot do without, half by half, of the GPU that has most to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Halves {
    /// Of dispatch.
    pub dispatch: Work,
    /// Of combine.
    pub combine: Work,
}

impl Halves {
    /// The mean over `routings`, with rank r on device `devices[r]`.
    pub fn mean(shape: &Shape, routings: &[Counts], devices: &[usize]) -> Self {
        let mut sum = Self::default();
        for counts in routings {
            let one = Self::of(shape, counts, devices);
            sum.dispatch = add(sum.dispatch, one.dispatch);
            sum.combine = add(sum.combine, one.combine);
        }
        let mean = |work: Work| {
            let count = routings.len().max(1) as u64;
            Work { wire_bytes: work.wire_bytes / count, memory_bytes: work.memory_bytes / count }
        };
        Self { dispatch: mean(sum.dispatch), combine: mean(sum.combine) }
    }

    fn of(shape: &Shape, counts: &Counts, devices: &[usize]) -> Self {
        let ranks = devices.len();
        let (row, sum) = (shape.row_bytes() + shape.scale_bytes(), shape.sum_bytes());
        let on = |device: usize| (0..ranks).filter(move |rank| devices[*rank] == device);
        let elsewhere = |device: usize| (0..ranks).filter(move |rank| devices[*rank] != device);
        let mut halves = Self::default();
        for device in devices {
            let crossing = |from_here: bool| -> usize {
                on(*device)
                    .flat_map(|here| elsewhere(*device).map(move |there| (here, there)))
                    .map(|(here, there)| match from_here {
                        true => counts.items(here, there),
                        false => counts.items(there, here),
                    })
                    .sum()
            };
            // A link carries both directions at once.
            let crossing = crossing(true).max(crossing(false));
            let (mut dispatched, mut combined) = (0, 0);
            for rank in on(*device) {
                let returned: usize =
                    (0..ranks).filter(|r| *r != rank).map(|r| counts.items(rank, r)).sum();
                let read = if shape.flat() { counts.received(rank) } else { counts.pairs(rank) };
                dispatched += (shape.tokens + counts.stored(shape, rank)) * row;
                // A partial sum of another rank lands, and is read.
                combined += (read + 2 * returned + shape.tokens) * sum;
            }
            let work = |bytes: usize, memory: usize| Work {
                wire_bytes: (crossing * bytes) as u64,
                memory_bytes: memory as u64,
            };
            halves.dispatch = most(halves.dispatch, work(row, dispatched));
            halves.combine = most(halves.combine, work(sum, combined));
        }
        halves
    }

    /// Both together.
    pub fn pair(&self) -> Work {
        add(self.dispatch, self.combine)
    }
}

/// The limit of a dispatch, which reads from peers or, if it pushes, writes to them.
pub fn dispatch_bound(limits: &Limits, sms: u32, pushes: bool, work: Work) -> Option<Bound> {
    if pushes {
        return combine_bound(limits, sms, work);
    }
    bound(work, (LimitKind::PeerRead, limits.peer_read_gbps(sms)), limits.copy_gbps(sms))
}

/// The limit of a combine, which writes to peers.
pub fn combine_bound(limits: &Limits, sms: u32, work: Work) -> Option<Bound> {
    bound(work, (LimitKind::PeerWrite, limits.peer_write_gbps(sms)), limits.copy_gbps(sms))
}

/// The limit of one after the other, named after the half that takes longer.
pub fn pair_bound(limits: &Limits, sms: u32, pushes: bool, halves: &Halves) -> Option<Bound> {
    let dispatch = dispatch_bound(limits, sms, pushes, halves.dispatch)?;
    let combine = combine_bound(limits, sms, halves.combine)?;
    let by = if dispatch.us >= combine.us { dispatch.by } else { combine.by };
    Some(Bound { by, us: dispatch.us + combine.us })
}

/// Wire or memory, whichever takes longer.
fn bound(
    work: Work,
    (wire, wire_gbps): (LimitKind, Option<f64>),
    memory_gbps: Option<f64>,
) -> Option<Bound> {
    let us = |bytes: u64, gbps: f64| bytes as f64 / gbps / 1e3;
    let memory = memory_gbps
        .map(|gbps| Bound { by: LimitKind::MemoryCopy, us: us(work.memory_bytes, gbps) });
    let wire = wire_gbps
        .filter(|_| work.wire_bytes > 0)
        .map(|gbps| Bound { by: wire, us: us(work.wire_bytes, gbps) });
    wire.into_iter().chain(memory).max_by(|a, b| a.us.total_cmp(&b.us))
}

fn add(a: Work, b: Work) -> Work {
    Work { wire_bytes: a.wire_bytes + b.wire_bytes, memory_bytes: a.memory_bytes + b.memory_bytes }
}

fn most(a: Work, b: Work) -> Work {
    Work {
        wire_bytes: a.wire_bytes.max(b.wire_bytes),
        memory_bytes: a.memory_bytes.max(b.memory_bytes),
    }
}

#[cfg(test)]
mod tests {
    use graph_ep::token_dispatch::reference::required::required_rows;
    use graph_ep::token_dispatch::reference::routing::tokens_per_expert;
    use graph_ep::token_dispatch::reference::{ExpertMap, window};
    use proptest::prelude::*;

    use super::*;
    use crate::bench::cases::tests::shape;
    use crate::bench::inputs::{Inputs, Skew};
    use crate::bench::report::LayoutChoice;

    /// 2 ranks with two experts each, top-2, two tokens a rank.
    fn by_hand() -> (Shape, Counts) {
        let shape = Shape { tokens: 2, experts: 4, ..shape() };
        // Rank 0: one token stays, one goes to both. Rank 1: both go to rank 0, one with two experts.
        let ids: [&[i32]; 2] = [&[0, 1, /**/ 1, 2], &[0, 1, /**/ 0, 3]];
        (shape, Counts::new(ids.into_iter(), 2, 4))
    }

    #[test]
    fn rows_are_counted_once_for_each_rank_and_pairs_for_each_expert() {
        let (shape, counts) = by_hand();
        let items = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(from, to)| counts.items(from, to));
        assert_eq!(items, [2, 1, 2, 1]);
        assert_eq!(counts.pairs, [3, 3, 1, 1]);
        assert_eq!([0, 1].map(|rank| counts.required(&shape, rank)), [8, 8]);
        let flat = Shape { layout: LayoutChoice::Flat, ..shape };
        assert_eq!([0, 1].map(|rank| counts.required(&flat, rank)), [4, 4]);
    }

    #[test]
    fn bytes_by_hand() {
        let (shape, counts) = by_hand();
        let row = 32;
        // Two rows come to rank 0, one goes.
        let halves = Halves::mean(&shape, std::slice::from_ref(&counts), &[0, 1]);
        assert_eq!(halves.dispatch, Work { wire_bytes: 2 * row, memory_bytes: (2 + 8) * row });
        // Rank 0 reads six pairs, gets one partial sum and writes two outputs; rank 1: 2, 2, 2.
        let combine = Work { wire_bytes: 2 * row, memory_bytes: (6 + 2 + 2) * row };
        assert_eq!(halves.combine, combine);
        // Without the padding of the two that choose an expert of rank 1, rank 0 has most to write.
        let left = Shape { padding: Padding::Left, ..shape };
        let halves = Halves::mean(&left, std::slice::from_ref(&counts), &[0, 1]);
        assert_eq!(halves.dispatch, Work { wire_bytes: 2 * row, memory_bytes: (2 + 6) * row });
        assert_eq!(halves.combine, combine);
        // On one device nothing crosses, and memory is shared.
        let halves = Halves::mean(&shape, &[counts], &[0, 0]);
        assert_eq!(halves.dispatch, Work { wire_bytes: 0, memory_bytes: 2 * (2 + 8) * row });
        let both = (6 + 2 + 2 + 2 + 4 + 2) * row;
        assert_eq!(halves.pair(), Work { wire_bytes: 0, memory_bytes: 20 * row + both });
    }

    #[test]
    fn what_takes_longer_binds() {
        let work = |wire_bytes| Work { wire_bytes, memory_bytes: 4_000_000 };
        let wire = (LimitKind::PeerRead, Some(100.0));
        let longer = bound(work(1_000_000), wire, Some(1000.0)).unwrap();
        assert_eq!(longer, Bound { by: LimitKind::PeerRead, us: 10.0 });
        let shorter = bound(work(100_000), wire, Some(1000.0)).unwrap();
        assert_eq!(shorter, Bound { by: LimitKind::MemoryCopy, us: 4.0 });
        assert_eq!(bound(work(0), wire, None), None);
        assert_eq!(bound(work(5), (LimitKind::PeerRead, None), None), None);
    }

    proptest! {
        #[test]
        fn counts_are_those_of_the_reference(
            skew in prop::sample::select(Skew::ALL.to_vec()),
            experts in 2_usize..20,
            ranks in 1_usize..5,
            seed: u64,
        ) {
            let ranks = ranks.min(experts);
            let shape = Shape { skew, experts, ranks, tokens: 7, ..shape() };
            let inputs = Inputs::new(&shape, 1, seed);
            let (counts, wide) = (inputs.counts(0, 0), inputs.wide_ids(0, 0));
            let map = ExpertMap::contiguous(experts, ranks).unwrap();
            let topk: Vec<&[i64]> = wide.iter().map(Vec::as_slice).collect();
            let chosen = tokens_per_expert(&wide.concat(), shape.top_k, experts);
            for rank in 0..ranks {
                let items = window::items(&topk, shape.top_k, &map, rank);
                for source in 0..ranks {
                    let from = items.iter().filter(|item| item.source == source).count();
                    prop_assert_eq!(counts.items(source, rank), from);
                }
                let rows = required_rows(&chosen, &map, rank, shape.alignment);
                prop_assert_eq!(counts.required(&shape, rank), rows);
            }
        }
    }
}

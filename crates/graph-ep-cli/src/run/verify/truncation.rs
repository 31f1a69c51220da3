//! Which choices are left where receivers take no more rows than they have.
//!
//! A receiver takes the items of its window, in order of (source, token), and drops all others. A
//! dropped choice contributes as much as one that was never made, so it is said to be none; what is
//! left can be checked a token at a time.

use graph_ep::token_dispatch::reference::window::{items, longest_prefix};

use super::Verifier;

impl Verifier<'_> {
    /// Replaces by −1 what `topk`, the ids of this rank's tokens in a layer, loses where every receiver
    /// has `capacity` rows. All ranks have the same where rows are dropped, since none grows.
    pub(super) fn truncate(&self, step: usize, layer: usize, capacity: usize, topk: &mut [i64]) {
        let (top_k, alignment) = (self.plan.routing.top_k(), self.plan.args.alignment);
        let ids: Vec<i64> =
            self.plan.routing.layer(step, layer).ids.iter().map(|id| i64::from(*id)).collect();
        let sources: Vec<&[i64]> = (0..self.plan.args.ranks)
            .map(|rank| {
                let range = self.plan.shards.range(step, rank);
                &ids[range.start * top_k..range.end * top_k]
            })
            .collect();
        for receiver in 0..self.plan.args.ranks {
            let items = items(&sources, top_k, &self.map, receiver);
            // Ascending by source and token, whatever is behind the first that is not taken is dropped.
            let Some(cut) = items.get(longest_prefix(&items, capacity, alignment)) else {
                continue;
            };
            for (token, ids) in topk.chunks_mut(top_k).enumerate() {
                if (self.rank, token) < (cut.source, cut.token) {
                    continue;
                }
                for id in ids {
                    let expert = usize::try_from(*id).ok();
                    if expert.and_then(|e| self.map.owner_of_expert(e)) == Some(receiver) {
                        *id = -1;
                    }
                }
            }
        }
    }
}

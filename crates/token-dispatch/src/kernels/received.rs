//! The lists that ranks have for this one, wherever they are.

use super::memory::{LaneBlocks, entry_address, load, table};
use crate::geometry::Geometry;
use crate::params::{DispatchHeader, Item, Pair, TRANSFER_PUSH};

/// Items and pairs for this rank by their sender: in the sender's block, or, where it pushed them, in
/// that of this rank.
pub(super) struct ReceivedLists<'a> {
    geometry: &'a Geometry,
    blocks: LaneBlocks<'a>,
    headers: &'a [DispatchHeader],
}

impl<'a> ReceivedLists<'a> {
    /// # Safety
    ///
    /// The signals of every rank were acquired, and nobody overwrites headers and lists while this
    /// lives.
    pub(super) unsafe fn new(geometry: &'a Geometry, blocks: LaneBlocks<'a>) -> Self {
        let headers = blocks.own(geometry.lane.dispatch_headers);
        // SAFETY: as this function's contract says.
        let headers = unsafe { table(headers, geometry.world as usize) };
        Self { geometry, blocks, headers }
    }

    /// An item of `source` and its pairs.
    ///
    /// # Safety
    ///
    /// `source` has more than `position` items for this rank.
    pub(super) unsafe fn item(&self, source: usize, position: u32) -> (Item, &'a [Pair]) {
        let (g, header) = (self.geometry, &self.headers[source]);
        let pushed = header.transfer == TRANSFER_PUSH;
        let (items, pairs) = if pushed {
            pushed_lists(g, &self.blocks, g.rank as usize, source)
        } else {
            let items = self.blocks.at(source, g.lane.items);
            let pairs = self.blocks.at(source, g.lane.pairs);
            (
                entry_address::<Item>(items, header.item_base),
                entry_address::<Pair>(pairs, header.pair_base),
            )
        };
        // SAFETY: this function's contract; the item's pairs lie in the list of pairs.
        unsafe {
            let item: Item = load(entry_address::<Item>(items, position));
            let first = if pushed { position * pair_width(g) } else { item.pair_begin };
            (item, table(entry_address::<Pair>(pairs, first), item.pairs as usize))
        }
    }
}

/// The most pairs of one token for one rank. Where lists are pushed each item has room for so many, so
/// that nobody has to read the item first to find them.
pub(super) fn pair_width(g: &Geometry) -> u32 {
    g.top_k.min(g.slots)
}

/// Where `source` pushes its items and pairs in the block of `to`.
pub(super) fn pushed_lists(
    g: &Geometry,
    blocks: &LaneBlocks<'_>,
    to: usize,
    source: usize,
) -> (u64, u64) {
    let first = source as u32 * g.max_tokens;
    let items = blocks.at(to, g.lane.pushed_items);
    let pairs = blocks.at(to, g.lane.pushed_pairs);
    (entry_address::<Item>(items, first), entry_address::<Pair>(pairs, first * pair_width(g)))
}

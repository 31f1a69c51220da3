//! A lane: staging, landing and signals for one dispatch–combine pair at a time.

use std::fmt;
use std::sync::Arc;

use ep_context::rendezvous::all_or_none;
use ep_context::{
    Backend, Buffer, ContextError, DeviceSlice, EpContext, Phase, Queue, Retained, SymmetricBlock,
};
use smallvec::SmallVec;

use crate::RoutingDependence;
use crate::config::{DispatchConfig, LEAST_SMS};
use crate::dispatcher::TokenDispatcher;
use crate::error::DispatchError;
use crate::geometry::Geometry;
use crate::handle::Handle;
use crate::kernels::MOST_RANKS;
use crate::launch;
use crate::params::{LaneParams, LaneState};

/// Room for one open dispatch–combine pair. A clone is the same lane.
pub struct Lane<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    memory: Arc<LaneMemory<B>>,
    index: usize,
    /// The most blocks of an operation, where that is fewer than the dispatcher has.
    most_blocks: u32,
}

pub(crate) struct LaneMemory<B: Backend> {
    block: SymmetricBlock<B>,
    blocks: Buffer<B>,
    state: Buffer<B>,
    expert_counts: Buffer<B>,
    rank_counts: Buffer<B>,
    block_counts: Option<Buffer<B>>,
}

impl<B: Backend> LaneMemory<B> {
    pub(crate) fn new(
        context: &EpContext<B>,
        config: &DispatchConfig,
        geometry: &Geometry,
        queue: &Queue<'static, B>,
    ) -> Result<Self, DispatchError> {
        let world = context.world();
        let block = context.share("lane", geometry.lane.bytes as usize)?;
        let local = (|| -> Result<Self, DispatchError> {
            let memory = Self {
                block: block.clone(),
                blocks: context.allocate("lane table", 8 * world)?,
                state: context.allocate("lane state", size_of::<LaneState>())?,
                expert_counts: context
                    .allocate("expert counts", 4 * world * geometry.slots as usize)?,
                rank_counts: context.allocate("rank counts", 8 * world)?,
                block_counts: match block_count_bytes(geometry) {
                    0 => None,
                    bytes => Some(context.allocate("block counts", bytes)?),
                },
            };
            let state = LaneState { epoch: config.first_epoch, ..bytemuck::Zeroable::zeroed() };
            let words = vec![config.first_epoch; world];
            // SAFETY: this rank has just allocated all of it, and peers signal only after the round
            // that ends the set-up of a dispatcher. The two groups of words lie in its own block.
            unsafe {
                queue.upload(&memory.blocks.slice(), bytemuck::cast_slice(block.addresses()))?;
                queue.upload(&memory.state.slice(), bytemuck::bytes_of(&state))?;
                for region in [geometry.lane.dispatch_words, geometry.lane.combine_words] {
                    let address = block.own_address() + region;
                    let words_of = DeviceSlice::owned_by(block.retain(), address, 4 * world);
                    queue.upload(&words_of, bytemuck::cast_slice(&words))?;
                }
            }
            Ok(memory)
        })();
        let deadline = context.deadlines().of(Phase::Setup);
        let memory = all_or_none(context.rendezvous(), "lane memory", local, deadline);
        Ok(memory.map_err(ContextError::from)?)
    }
}

/// Bytes of what the blocks count that build lists beside others.
pub(crate) fn block_count_bytes(g: &Geometry) -> usize {
    let columns = (g.world * g.slots + 2 * g.world) as usize;
    if g.push == 0 { 0 } else { size_of::<u32>() * launch::MOST_LISTERS as usize * columns }
}

impl<B: Backend> Lane<B> {
    pub(crate) fn new(
        dispatcher: TokenDispatcher<B>,
        memory: Arc<LaneMemory<B>>,
        index: usize,
    ) -> Self {
        Self { dispatcher, memory, index, most_blocks: u32::MAX }
    }

    /// The lane's place among those of its dispatcher.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The same lane for calls that are to use at most so many multiprocessors at a time, so that the rest is
    /// left to what runs beside them: the experts of another lane, or that lane itself. It can only be
    /// fewer than the lane has without, see [`Lane::sms`], and takes the place of a budget that `self` has:
    /// zero gives all back, as in [`sm_budget`](crate::DispatchConfigBuilder::sm_budget). May differ between
    /// ranks, between the calls of a pair, and between lanes; what comes out does not depend on it. The host
    /// backend does not look at it.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] for fewer than [`LEAST_SMS`] that are not zero.
    pub fn with_sm_budget(&self, multiprocessors: u32) -> Result<Self, DispatchError> {
        let most_blocks = match multiprocessors {
            0 => u32::MAX,
            1..LEAST_SMS => {
                return Err(DispatchError::Config {
                    field: "sm_budget",
                    value: multiprocessors.to_string(),
                    limit: format!("0, which is all, or at least {LEAST_SMS}"),
                });
            }
            _ => multiprocessors,
        };
        Ok(Self { most_blocks, ..self.clone() })
    }

    /// The most multiprocessors that an operation of a static step uses at a time: where
    /// [rows are pushed](TokenDispatcher::pushes) the lane's part of those of the dispatcher, since all
    /// lanes may be in flight at once, and where they are pulled all of these; or fewer, by
    /// [`Lane::with_sm_budget`]. Rounds, eager steps and backward passes pull in every group.
    pub fn sms(&self) -> u32 {
        if self.dispatcher.pushes() { self.push_blocks() } else { self.blocks() }
    }

    /// The most blocks of an operation that does not wait with all of them.
    pub(crate) fn blocks(&self) -> u32 {
        self.dispatcher.inner.blocks.min(self.most_blocks)
    }

    /// The most blocks of one that does.
    pub(crate) fn push_blocks(&self) -> u32 {
        self.dispatcher.inner.push_blocks.min(self.most_blocks)
    }

    /// The lane's staging area, `[max_tokens]` rows as they are received. Tokens that are written here,
    /// after the lane's last combine and before its next dispatch, are not copied by that dispatch.
    /// Rows that a dispatch quantises cannot be staged.
    pub fn staging(&self) -> DeviceSlice<'static, B> {
        let g = &self.dispatcher.inner.geometry;
        let address = self.memory.block.own_address() + g.lane.staging;
        let bytes = g.max_tokens as usize * g.row_bytes as usize;
        // SAFETY: 1. the area lies in this rank's own block, which the owner keeps mapped. 2. Said
        // in the documentation above.
        unsafe { DeviceSlice::owned_by(self.memory.block.retain(), address, bytes) }
    }

    /// The lane's staging area of scales, `[max_tokens]` rows of them; empty if there are none. Used
    /// as [`Lane::staging`] is.
    pub fn staged_scales(&self) -> DeviceSlice<'static, B> {
        let g = &self.dispatcher.inner.geometry;
        let address = self.memory.block.own_address() + g.lane.scales;
        let bytes = g.max_tokens as usize * g.scale_bytes as usize;
        // SAFETY: as for the staging area.
        unsafe { DeviceSlice::owned_by(self.memory.block.retain(), address, bytes) }
    }

    pub(crate) fn dependent(&self) -> u32 {
        u32::from(self.dispatcher.inner.config.routing == RoutingDependence::Dependent)
    }

    pub(crate) fn dispatcher(&self) -> &TokenDispatcher<B> {
        &self.dispatcher
    }

    /// Scratch of the route: pairs of each expert slot of each rank, items and pairs of each rank.
    pub(crate) fn scratch(&self) -> (u64, u64) {
        (self.memory.expert_counts.address(), self.memory.rank_counts.address())
    }

    /// Scratch of a route that several blocks do; zero where none does.
    pub(crate) fn block_counts(&self) -> u64 {
        self.memory.block_counts.as_ref().map_or(0, Buffer::address)
    }

    pub(crate) fn params(&self) -> LaneParams {
        LaneParams { blocks: self.memory.blocks.address(), state: self.memory.state.address() }
    }

    /// The shared blocks of the first ranks, for operations that push: of more ranks nobody does.
    pub(crate) fn blocks_at_hand(&self) -> [u64; MOST_RANKS] {
        let mut first = [0; MOST_RANKS];
        for (to, address) in first.iter_mut().zip(self.memory.block.addresses()) {
            *to = *address;
        }
        first
    }

    /// What operations on this lane need to stay mapped.
    pub(crate) fn retained(&self) -> SmallVec<[Retained; 2]> {
        let memory: Retained = self.memory.clone();
        [memory].into_iter().collect()
    }

    pub(crate) fn keep(&self, handle: &Handle<B>) -> SmallVec<[Retained; 8]> {
        let mut retained: SmallVec<[Retained; 8]> =
            self.dispatcher.retained().into_iter().collect();
        retained.extend(self.retained());
        retained.extend(handle.retained());
        retained
    }
}

impl<B: Backend> Clone for Lane<B> {
    fn clone(&self) -> Self {
        Self {
            dispatcher: self.dispatcher.clone(),
            memory: self.memory.clone(),
            index: self.index,
            most_blocks: self.most_blocks,
        }
    }
}

impl<B: Backend> fmt::Debug for Lane<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("index", &self.index)
            .field("dispatcher", &self.dispatcher)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use ep_context::Rank;

    use super::*;
    use crate::ExpertMap;

    /// Kernels stride over their work with whatever grid they have: a grid beyond the budget shows in nothing
    /// but in what it takes from others.
    #[test]
    fn no_operation_of_a_lane_has_more_blocks_than_its_budget() {
        let settings = [(1, 8, 1), (2, 256, 1), (2, 256, 128), (2, 256, 4096), (8, 256, 4096)];
        for (ranks, experts, tokens) in settings {
            let map = ExpertMap::contiguous(experts, ranks).unwrap();
            let config = DispatchConfig::builder(7168, 8, tokens, map).build().unwrap();
            let g = Geometry::new(&config, Rank(0), ranks);
            for budget in LEAST_SMS..=132 {
                let shapes = [
                    launch::push_dispatch(&g, tokens as u32, budget).launch,
                    launch::push_combine(&g, g.max_tokens, budget, 200 << 10).launch,
                    launch::route(&g, budget),
                    launch::stage(&g, budget),
                    launch::items(&g, g.sum_bytes, budget),
                    launch::items_and_padding(&g, g.row_bytes, budget),
                    launch::rows(tokens as u64, g.sum_bytes, budget),
                ];
                let most = shapes.iter().map(|shape| shape.blocks).max();
                assert!(
                    most <= Some(budget),
                    "{budget} blocks, {ranks} ranks, {tokens} tokens: {shapes:?}"
                );
            }
        }
    }
}

//! A lane: staging, landing and signals for one dispatch–combine pair at a time.

use std::fmt;
use std::sync::Arc;

use ep_context::rendezvous::all_or_none;
use ep_context::{
    Backend, Buffer, ContextError, DeviceSlice, EpContext, LaunchShape, Phase, Queue, Retained,
    RowBuffer, SymmetricBlock,
};
use smallvec::SmallVec;

use crate::RoutingDependence;
use crate::config::DispatchConfig;
use crate::dispatcher::TokenDispatcher;
use crate::error::DispatchError;
use crate::geometry::Geometry;
use crate::handle::Handle;
use crate::kernels;
use crate::params::{
    CountParams, GatherParams, LaneParams, LaneState, ReduceParams, ReducePushParams, RouteParams,
    WindowParams, WindowState,
};
use crate::step::{Step, StepMode};

/// Room for one open dispatch–combine pair. A clone is the same lane.
pub struct Lane<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    memory: Arc<LaneMemory<B>>,
    index: usize,
}

pub(crate) struct LaneMemory<B: Backend> {
    block: SymmetricBlock<B>,
    blocks: Buffer<B>,
    state: Buffer<B>,
    expert_counts: Buffer<B>,
    rank_counts: Buffer<B>,
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
            };
            let state =
                LaneState { epoch: config.first_epoch, acknowledge_epoch: config.first_epoch };
            let words = vec![config.first_epoch; world];
            // SAFETY: this rank has just allocated all of it, and peers signal only after the round
            // that ends the set-up of a dispatcher. The three groups of words lie in its own block.
            unsafe {
                queue.upload(&memory.blocks.slice(), bytemuck::cast_slice(block.addresses()))?;
                queue.upload(&memory.state.slice(), bytemuck::bytes_of(&state))?;
                for region in [
                    geometry.lane.dispatch_words,
                    geometry.lane.combine_words,
                    geometry.lane.acknowledge_words,
                ] {
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

/// Expert ids of tokens.
#[derive(Clone, Debug)]
pub enum TopKIds<'a, B: Backend> {
    /// `[tokens, top_k]` i32; −1 is none.
    I32(DeviceSlice<'a, B>),
    /// `[tokens, top_k]` i64; −1 is none.
    I64(DeviceSlice<'a, B>),
}

impl<'a, B: Backend> TopKIds<'a, B> {
    fn slice(&self) -> &DeviceSlice<'a, B> {
        match self {
            TopKIds::I32(slice) | TopKIds::I64(slice) => slice,
        }
    }

    fn id_bytes(&self) -> usize {
        match self {
            TopKIds::I32(_) => 4,
            TopKIds::I64(_) => 8,
        }
    }
}

/// How many tokens a dispatch sends.
#[derive(Clone, Debug)]
pub enum TokenCount<'a, B: Backend> {
    /// So many; a recorded dispatch sends so many in every replay.
    Fixed(usize),
    /// As many as a u32 in device memory says when the dispatch runs, at most so many: one graph for
    /// shorter batches. More is a fault of this rank.
    Device(DeviceSlice<'a, B>, usize),
}

/// The arguments of a dispatch.
#[derive(Debug)]
pub struct Dispatch<'s, 'a, B: Backend> {
    /// `[tokens, hidden]` rows, or [`Lane::staging`] if the caller wrote them there.
    pub tokens: DeviceSlice<'a, B>,
    /// How many.
    pub count: TokenCount<'a, B>,
    /// Their experts.
    pub topk_ids: TopKIds<'a, B>,
    /// `[tokens, top_k]` f32 weights, applied in combine; without them every weight is 1.
    pub topk_weights: Option<DeviceSlice<'a, B>>,
    /// Where rows arrive: a buffer of the handle's row set, with rows of `hidden` values.
    pub rows: &'s RowBuffer<B>,
    /// What remembers the dispatch.
    pub handle: &'s Handle<B>,
}

/// The arguments of a combine.
#[derive(Debug)]
pub struct Combine<'s, 'a, B: Backend> {
    /// The handle that the dispatch filled.
    pub handle: &'s Handle<B>,
    /// What the experts made of each row, in the place of the row: `[capacity, hidden]`.
    pub expert_rows: DeviceSlice<'a, B>,
    /// `[tokens, hidden]` rows for the sums.
    pub output: DeviceSlice<'a, B>,
}

impl<B: Backend> Lane<B> {
    pub(crate) fn new(
        dispatcher: TokenDispatcher<B>,
        memory: Arc<LaneMemory<B>>,
        index: usize,
    ) -> Self {
        Self { dispatcher, memory, index }
    }

    /// The lane's place among those of its dispatcher.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The lane's staging area, `[max_tokens, hidden]`. Tokens that are written here, after the
    /// lane's last combine and before its next dispatch, are not copied by that dispatch.
    pub fn staging(&self) -> DeviceSlice<'static, B> {
        let g = &self.dispatcher.inner.geometry;
        let address = self.memory.block.own_address() + g.lane.staging;
        let bytes = (g.max_tokens * g.row_bytes) as usize;
        // SAFETY: 1. the area lies in this rank's own block, which the owner keeps mapped. 2. Said
        // in the documentation above.
        unsafe { DeviceSlice::owned_by(self.memory.block.retain(), address, bytes) }
    }

    /// Queues a dispatch: every token goes to the ranks of its experts and arrives in expert-grouped
    /// rows; `handle` then holds `expert_offsets`, `tokens_per_expert` and `total` for the experts.
    ///
    /// In a static step nothing is waited for and nothing allocated, and the operation can be
    /// recorded. In an eager step the host waits for the count, and the row set grows to it.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Argument`] for a slice that is too short or a foreign row buffer,
    /// [`DispatchError::Order`] if a dispatch is open on this lane, [`DispatchError::EagerLimit`].
    pub fn dispatch<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let (most, word) = match &args.count {
            TokenCount::Fixed(tokens) => (*tokens, None),
            TokenCount::Device(word, most) => (*most, Some(word)),
        };
        self.check_dispatch(args, most, word)?;
        let rows = args.handle.rows();
        let ordinal = step.open(self, args.handle.id(), rows)?;
        self.route(step, args, ordinal, most, word)?;
        self.count(step, args.handle, ordinal)?;
        if let StepMode::Eager { max_rows } = step.options().mode {
            self.fit(step, args.handle, max_rows)?;
        }
        self.window(step, args.handle)?;
        self.gather(step, args)
    }

    fn route<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
        ordinal: u32,
        most: usize,
        word: Option<&DeviceSlice<'a, B>>,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher.inner;
        let params = RouteParams {
            geometry: inner.geometry,
            wait: self.dispatcher.wait_params(),
            lane: self.params(),
            handle: args.handle.params(),
            state: inner.shared.state.address(),
            homes: inner.shared.homes.address(),
            topk_ids: args.topk_ids.slice().address(),
            topk_weights: args.topk_weights.as_ref().map_or(0, DeviceSlice::address),
            tokens: args.tokens.address(),
            num_tokens_word: word.map_or(0, DeviceSlice::address),
            expert_counts: self.memory.expert_counts.address(),
            rank_counts: self.memory.rank_counts.address(),
            num_tokens: most as u32,
            id_bytes: args.topk_ids.id_bytes() as u32,
            ordinal,
            dependent: self.dependent(),
        };
        let mut uses: SmallVec<[&DeviceSlice<'a, B>; 4]> = SmallVec::new();
        uses.extend([&args.tokens, args.topk_ids.slice()]);
        uses.extend(args.topk_weights.as_ref());
        uses.extend(word);
        // SAFETY: 1. addresses lie in `uses`, in the lane, the handle or the dispatcher, which are
        // retained; lengths were checked. 2. The pair is this step's alone, and peers are ordered by
        // the lane's signals.
        Ok(unsafe {
            step.queue().launch::<kernels::Route>(
                &inner.kernels.route,
                LaunchShape::ONE_WARP,
                &params,
                &uses,
                &self.keep(args.handle),
            )
        }?)
    }

    fn count(
        &self,
        step: &Step<'_, B>,
        handle: &Handle<B>,
        ordinal: u32,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher.inner;
        let capacity = handle.rows().capacity_word();
        let params = CountParams {
            geometry: inner.geometry,
            wait: self.dispatcher.wait_params(),
            lane: self.params(),
            handle: handle.params(),
            state: inner.shared.state.address(),
            required_by_dispatch: inner.shared.required_by_dispatch.address(),
            capacity: capacity.address(),
            row_limit: step.row_limit(handle.rows()),
            max_dispatches: inner.config.max_dispatches as u32,
            ordinal,
            budgeted: u32::from(step.options().mode == StepMode::Static),
            dependent: self.dependent(),
            reserved: 0,
        };
        // SAFETY: as for the route; the capacity word is only written between steps.
        Ok(unsafe {
            step.queue().launch::<kernels::Count>(
                &inner.kernels.count,
                LaunchShape::ONE_WARP,
                &params,
                &[&capacity],
                &self.keep(handle),
            )
        }?)
    }

    /// Eager mode: looks at what is required and makes room for it.
    fn fit<'a>(
        &self,
        step: &Step<'a, B>,
        handle: &Handle<B>,
        max_rows: u32,
    ) -> Result<(), DispatchError> {
        let mut window: WindowState = bytemuck::Zeroable::zeroed();
        step.queue().download(&handle.window(), bytemuck::bytes_of_mut(&mut window))?;
        if let Some(fault) = self.dispatcher.context().fault() {
            return Err(fault.into());
        }
        let rows = handle.rows();
        let limit = max_rows.min(rows.max_rows());
        if window.required <= rows.capacity() {
            return Ok(());
        }
        let direct = Queue::direct(step.queue().backend(), step.queue().stream());
        let grown = if window.required > limit {
            let (rank, required) = (self.dispatcher.rank(), window.required);
            Err(DispatchError::EagerLimit { rank, required, limit })
        } else {
            rows.plan(window.required)
                .and_then(|growth| growth.commit(&direct))
                .map_err(DispatchError::from)
        };
        if grown.is_err() {
            // Peers wait for this rank's combine: tell them rather than let them time out.
            self.dispatcher.abandon(&direct, Phase::Growth)?;
        }
        grown
    }

    fn window(&self, step: &Step<'_, B>, handle: &Handle<B>) -> Result<(), DispatchError> {
        let inner = &self.dispatcher.inner;
        let capacity = handle.rows().capacity_word();
        let params = WindowParams {
            geometry: inner.geometry,
            wait: self.dispatcher.wait_params(),
            lane: self.params(),
            handle: handle.params(),
            state: inner.shared.state.address(),
            capacity: capacity.address(),
            row_limit: step.row_limit(handle.rows()),
            last: 1,
        };
        // SAFETY: as for the count.
        Ok(unsafe {
            step.queue().launch::<kernels::Window>(
                &inner.kernels.window,
                LaunchShape::ONE_WARP,
                &params,
                &[&capacity],
                &self.keep(handle),
            )
        }?)
    }

    fn gather<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher.inner;
        let params = GatherParams {
            geometry: inner.geometry,
            wait: self.dispatcher.wait_params(),
            lane: self.params(),
            handle: args.handle.params(),
            rows: args.rows.address(),
        };
        // SAFETY: as for the route; the window keeps rows below the capacity, for which every buffer
        // of the set is mapped.
        Ok(unsafe {
            step.queue().launch::<kernels::Gather>(
                &inner.kernels.gather,
                LaunchShape::ONE_WARP,
                &params,
                &[&args.rows.slice()],
                &self.keep(args.handle),
            )
        }?)
    }

    /// Queues a combine: the weighted rows of each token are summed on their expert ranks, sent to
    /// the token's owner and added in the order of the ranks. A token none of whose experts took
    /// part gets zeros.
    ///
    /// Nothing is waited for by the host, nothing allocated; the operation can be recorded.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Argument`] for a slice that is too short, [`DispatchError::Order`] if no
    /// dispatch into this handle is open on this lane.
    pub fn combine<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Combine<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher.inner;
        let g = &inner.geometry;
        let limit = step.row_limit(args.handle.rows());
        self.at_least(
            "combine",
            "length of the expert rows in bytes",
            args.expert_rows.bytes(),
            limit as usize * g.row_bytes as usize,
        )?;
        self.aligned("combine", "address of the expert rows", &args.expert_rows)?;
        self.aligned("combine", "address of the output", &args.output)?;
        let ordinal = step.close(self, args.handle.id())?;
        let retained = self.keep(args.handle);
        let params = ReducePushParams {
            geometry: *g,
            wait: self.dispatcher.wait_params(),
            lane: self.params(),
            handle: args.handle.params(),
            state: inner.shared.state.address(),
            expert_rows: args.expert_rows.address(),
            ordinal,
            release: 1,
        };
        // SAFETY: 1. as for the route; the window keeps rows below the limit that was checked.
        // 2. Landing slots are this rank's by the sender's lists, ordered by the lane's signals.
        unsafe {
            step.queue().launch::<kernels::ReducePush>(
                &inner.kernels.reduce_push,
                LaunchShape::ONE_WARP,
                &params,
                &[&args.expert_rows],
                &retained,
            )
        }?;
        let params = ReduceParams {
            geometry: *g,
            wait: self.dispatcher.wait_params(),
            lane: self.params(),
            handle: args.handle.params(),
            state: inner.shared.state.address(),
            peer_required: inner.shared.peer_required.address(),
            output: args.output.address(),
            ordinal,
            reserved: 0,
        };
        // SAFETY: as above; the output has a row for each token, as was checked when the pair was
        // opened and below.
        Ok(unsafe {
            step.queue().launch::<kernels::Reduce>(
                &inner.kernels.reduce,
                LaunchShape::ONE_WARP,
                &params,
                &[&args.output],
                &retained,
            )
        }?)
    }

    fn dependent(&self) -> u32 {
        u32::from(self.dispatcher.inner.config.routing == RoutingDependence::Dependent)
    }

    pub(crate) fn params(&self) -> LaneParams {
        LaneParams { blocks: self.memory.blocks.address(), state: self.memory.state.address() }
    }

    /// What operations on this lane need to stay mapped.
    pub(crate) fn retained(&self) -> SmallVec<[Retained; 2]> {
        let memory: Retained = self.memory.clone();
        [memory].into_iter().collect()
    }

    fn keep(&self, handle: &Handle<B>) -> SmallVec<[Retained; 8]> {
        let mut retained: SmallVec<[Retained; 8]> =
            self.dispatcher.retained().into_iter().collect();
        retained.extend(self.retained());
        retained.extend(handle.retained());
        retained
    }
}

/// Checks of arguments.
impl<B: Backend> Lane<B> {
    fn check_dispatch<'a>(
        &self,
        args: &Dispatch<'_, 'a, B>,
        tokens: usize,
        word: Option<&DeviceSlice<'a, B>>,
    ) -> Result<(), DispatchError> {
        const OP: &str = "dispatch";
        let g = &self.dispatcher.inner.geometry;
        let top_k = g.top_k as usize;
        if tokens > g.max_tokens as usize {
            let limit =
                format!("at most {}, the tokens that the lanes were made for", g.max_tokens);
            return Err(self.argument(OP, "number of tokens", tokens, limit));
        }
        let row_bytes = g.row_bytes as usize;
        let tokens_bytes = args.tokens.bytes();
        self.at_least(OP, "length of the tokens in bytes", tokens_bytes, tokens * row_bytes)?;
        self.aligned(OP, "address of the tokens", &args.tokens)?;
        let ids = args.topk_ids.slice().bytes();
        let id_bytes = args.topk_ids.id_bytes();
        self.at_least(OP, "length of topk_ids in bytes", ids, tokens * top_k * id_bytes)?;
        if let Some(weights) = &args.topk_weights {
            let bytes = weights.bytes();
            self.at_least(OP, "length of topk_weights in bytes", bytes, tokens * top_k * 4)?;
        }
        if let Some(word) = word {
            self.at_least(OP, "length of the token count in bytes", word.bytes(), 4)?;
        }
        if args.rows.row_bytes() != row_bytes {
            let limit = format!("{row_bytes}, the bytes of a token");
            return Err(self.argument(OP, "bytes of a receive row", args.rows.row_bytes(), limit));
        }
        if args.rows.set_id() != args.handle.rows().id() {
            let limit = "a buffer of the handle's row set".to_owned();
            return Err(self.argument(OP, "receive buffer", "of another row set", limit));
        }
        Ok(())
    }

    fn at_least(
        &self,
        operation: &'static str,
        argument: &'static str,
        value: usize,
        least: usize,
    ) -> Result<(), DispatchError> {
        if value >= least {
            return Ok(());
        }
        Err(self.argument(operation, argument, value, format!("at least {least}")))
    }

    fn aligned(
        &self,
        operation: &'static str,
        argument: &'static str,
        slice: &DeviceSlice<'_, B>,
    ) -> Result<(), DispatchError> {
        if slice.address().is_multiple_of(16) {
            return Ok(());
        }
        let value = format!("{:#x}", slice.address());
        Err(self.argument(operation, argument, value, "a multiple of 16".to_owned()))
    }

    fn argument(
        &self,
        operation: &'static str,
        argument: &'static str,
        value: impl fmt::Display,
        limit: String,
    ) -> DispatchError {
        let (rank, value) = (self.dispatcher.rank(), value.to_string());
        DispatchError::Argument { operation, rank, argument, value, limit }
    }
}

impl<B: Backend> Clone for Lane<B> {
    fn clone(&self) -> Self {
        Self { dispatcher: self.dispatcher.clone(), memory: self.memory.clone(), index: self.index }
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

//! Dispatch: every token to the ranks of its experts.

use ep_context::backend::Condition;
use ep_context::{Backend, DeviceSlice, Phase, Queue, RowBuffer};
use smallvec::SmallVec;

use crate::error::DispatchError;
use crate::handle::Handle;
use crate::kernels;
use crate::lane::Lane;
use crate::launch;
use crate::params::{
    CountParams, GatherParams, HALF_RECEIVE, HALF_SEND, PushDispatchParams, RouteParams,
    WindowParams, WindowState,
};
use crate::step::{Bounds, Step, StepMode};

/// Expert ids of tokens.
#[derive(Clone, Debug)]
pub enum TopKIds<'a, B: Backend> {
    /// `[tokens, top_k]` i32; −1 is none.
    I32(DeviceSlice<'a, B>),
    /// `[tokens, top_k]` i64; −1 is none.
    I64(DeviceSlice<'a, B>),
}

impl<'a, B: Backend> TopKIds<'a, B> {
    pub(crate) fn slice(&self) -> &DeviceSlice<'a, B> {
        match self {
            TopKIds::I32(slice) | TopKIds::I64(slice) => slice,
        }
    }

    pub(crate) fn id_bytes(&self) -> usize {
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
    /// `[tokens]` rows as the [`Payload`](crate::Payload) says, or [`Lane::staging`] if the caller
    /// wrote them there.
    pub tokens: DeviceSlice<'a, B>,
    /// `[tokens]` rows of scales, where the payload is bytes with scales; or
    /// [`Lane::staged_scales`].
    pub scales: Option<DeviceSlice<'a, B>>,
    /// How many tokens.
    pub count: TokenCount<'a, B>,
    /// Their experts.
    pub topk_ids: TopKIds<'a, B>,
    /// `[tokens, top_k]` f32 weights; without them every weight is 1.
    pub topk_weights: Option<DeviceSlice<'a, B>>,
    /// Where rows arrive: a buffer of the handle's row set.
    pub rows: &'s RowBuffer<B>,
    /// Where rows of scales arrive, if the payload has any: another buffer of that set.
    pub received_scales: Option<&'s RowBuffer<B>>,
    /// What remembers the dispatch.
    pub handle: &'s Handle<B>,
}

impl<'s, 'a, B: Backend> Dispatch<'s, 'a, B> {
    /// A dispatch without weights and scales.
    pub fn new(
        tokens: DeviceSlice<'a, B>,
        count: TokenCount<'a, B>,
        topk_ids: TopKIds<'a, B>,
        rows: &'s RowBuffer<B>,
        handle: &'s Handle<B>,
    ) -> Self {
        Self {
            tokens,
            scales: None,
            count,
            topk_ids,
            topk_weights: None,
            rows,
            received_scales: None,
            handle,
        }
    }

    pub(crate) fn sent(&self) -> Sent {
        let (most, word) = self.most_tokens();
        let address = |slice: Option<&DeviceSlice<'a, B>>| slice.map_or(0, DeviceSlice::address);
        Sent {
            tokens: self.tokens.address(),
            scales: address(self.scales.as_ref()),
            topk_ids: self.topk_ids.slice().address(),
            id_bytes: self.topk_ids.id_bytes(),
            topk_weights: address(self.topk_weights.as_ref()),
            count_word: address(word),
            most,
        }
    }

    pub(crate) fn most_tokens(&self) -> (usize, Option<&DeviceSlice<'a, B>>) {
        match &self.count {
            TokenCount::Fixed(tokens) => (*tokens, None),
            TokenCount::Device(word, most) => (*most, Some(word)),
        }
    }

    /// What the sender's half reads, whoever does it.
    fn read(&self) -> impl Iterator<Item = &DeviceSlice<'a, B>> {
        let given = [&self.tokens, self.topk_ids.slice()].into_iter();
        let (_, word) = self.most_tokens();
        given.chain(self.topk_weights.as_ref()).chain(self.scales.as_ref()).chain(word)
    }
}

/// What the sender's half of a dispatch was given; zero for an address that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sent {
    pub(crate) tokens: u64,
    pub(crate) scales: u64,
    pub(crate) topk_ids: u64,
    pub(crate) id_bytes: usize,
    pub(crate) topk_weights: u64,
    pub(crate) count_word: u64,
    pub(crate) most: usize,
}

impl<B: Backend> Lane<B> {
    /// Queues a dispatch: every token goes to the ranks of its experts and arrives there once for
    /// each of them, or, in the flat layout, once. `handle` then holds `expert_offsets`,
    /// `tokens_per_expert` and `total` for the experts.
    ///
    /// In a static step nothing is waited for and nothing allocated, and the operation can be
    /// recorded. In an eager step the host waits for the count, and the row set grows to it.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Argument`] for a slice that is too short or a foreign row buffer,
    /// [`DispatchError::Order`] if a dispatch is open on this lane or the step runs in rounds,
    /// [`DispatchError::EagerLimit`].
    pub fn dispatch<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        self.refuse_rounds(step, "dispatch")?;
        if self.pushes(step) {
            let ordinal = self.open(step, args)?;
            step.note_pushed();
            return self.push(step, args, ordinal, HALF_SEND | HALF_RECEIVE);
        }
        let ordinal = self.send(step, args)?;
        self.take(step, args, ordinal)
    }

    /// Queues a dispatch but for its receiver's half, which [`Lane::dispatch_receive`] queues: what
    /// the caller queues between the two runs while tokens of other ranks may still be on their way.
    ///
    /// On other ranks the dispatch may be a whole one. A number of tokens in device memory stays as it is
    /// until the second half has run.
    ///
    /// # Errors
    ///
    /// As for [`Lane::dispatch`].
    pub fn dispatch_send<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        self.refuse_rounds(step, "dispatch_send")?;
        if self.pushes(step) {
            let ordinal = self.open(step, args)?;
            step.note_pushed();
            self.push(step, args, ordinal, HALF_SEND)?;
        } else {
            self.send(step, args)?;
        }
        step.note_sent(args.sent());
        Ok(())
    }

    /// Queues the receiver's half of a dispatch: waits on the device for every sender, and brings the
    /// rows. `args` are those of the [`Lane::dispatch_send`] before. In an eager step the host waits
    /// for the count.
    ///
    /// # Errors
    ///
    /// As for [`Lane::dispatch`]; [`DispatchError::Argument`] for tokens, scales, ids, weights or a count other
    /// than those that were sent; [`DispatchError::Order`] if no dispatch into this handle was sent on
    /// this lane, or its rows are received already.
    pub fn dispatch_receive<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let (most, word) = args.most_tokens();
        self.check_dispatch(args, most, word)?;
        if let Some(sent) = step.sent(self, args.handle) {
            self.check_sent(args, &sent)?;
        }
        let ordinal = step.receive(self, args.handle)?;
        if step.was_pushed(self, args.handle) {
            return self.push(step, args, ordinal, HALF_RECEIVE);
        }
        self.take(step, args, ordinal)
    }

    /// Whether dispatches of the step push their rows.
    fn pushes(&self, step: &Step<'_, B>) -> bool {
        self.dispatcher().inner.pushes && step.options().mode == StepMode::Static
    }

    fn refuse_rounds(
        &self,
        step: &Step<'_, B>,
        operation: &'static str,
    ) -> Result<(), DispatchError> {
        if step.options().mode != StepMode::Rounds {
            return Ok(());
        }
        Err(DispatchError::Order {
            operation,
            rank: self.dispatcher().rank(),
            reason:
                "the step runs in rounds, where dispatch, experts and combine are one loop; use \
                     Lane::rounds"
                    .to_owned(),
        })
    }

    /// The receiver's half of a dispatch that pulls.
    fn take<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
        ordinal: u32,
    ) -> Result<(), DispatchError> {
        self.count(step, args.handle, ordinal, None)?;
        if let StepMode::Eager { max_rows } = step.options().mode {
            self.fit(step, args.handle, max_rows)?;
            step.renew_bounds(self, args.handle);
        }
        self.window(step, args.handle, None)?;
        self.gather(step, args)
    }

    /// The sender's half of a dispatch. Returns the place of the dispatch in the step.
    pub(crate) fn send<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<u32, DispatchError> {
        let ordinal = self.open(step, args)?;
        self.route(step, args, ordinal)?;
        Ok(ordinal)
    }

    /// Checks the arguments and takes a place in the step.
    fn open<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<u32, DispatchError> {
        let (most, word) = args.most_tokens();
        self.check_dispatch(args, most, word)?;
        let bounds = Bounds { tokens: most as u32, rows: step.row_limit(args.handle.rows()) };
        let ordinal = step.open(self, args.handle, bounds)?;
        step.note_filled();
        Ok(ordinal)
    }

    /// A dispatch that pushes, or a half of it, in one operation.
    fn push<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
        ordinal: u32,
        halves: u32,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let (most, word) = args.most_tokens();
        let (expert_counts, rank_counts) = self.scratch();
        let capacity = args.handle.rows().capacity_word();
        let shape = launch::push_dispatch(&inner.geometry, most as u32, self.push_blocks())
            .of_dispatch(halves);
        let params = PushDispatchParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            blocks: self.blocks_at_hand(),
            handle: args.handle.params(),
            state: inner.shared.state.address(),
            homes: inner.shared.homes.address(),
            topk_ids: args.topk_ids.slice().address(),
            topk_weights: args.topk_weights.as_ref().map_or(0, DeviceSlice::address),
            tokens: args.tokens.address(),
            scales: args.scales.as_ref().map_or(0, DeviceSlice::address),
            num_tokens_word: word.map_or(0, DeviceSlice::address),
            expert_counts,
            rank_counts,
            block_counts: self.block_counts(),
            required_by_dispatch: inner.shared.required_by_dispatch.address(),
            capacity: capacity.address(),
            rows: args.rows.address(),
            received_scales: args.received_scales.map_or(0, RowBuffer::address),
            condition: 0,
            num_tokens: most as u32,
            id_bytes: args.topk_ids.id_bytes() as u32,
            ordinal,
            dependent: self.dependent(),
            row_limit: step.bounds_of(self, args.handle).rows,
            max_dispatches: inner.config.max_dispatches as u32,
            budgeted: u32::from(step.options().mode == StepMode::Static),
            last: 1,
            listers: shape.listers,
            senders: shape.senders,
            halves,
            reserved: 0,
        };
        let (rows, scales) = (args.rows.slice(), args.received_scales.map(RowBuffer::slice));
        let mut uses: SmallVec<[&DeviceSlice<'a, B>; 8]> = args.read().collect();
        uses.extend([&capacity, &rows]);
        uses.extend(scales.as_ref());
        // SAFETY: 1. addresses lie in `uses`, in the lane, the handle or the dispatcher, which are
        // retained; lengths were checked, and the window keeps rows below the capacity, for which
        // every buffer of the set is mapped. 2. The pair is this step's alone, and peers are ordered
        // by the lane's signals and flags.
        Ok(unsafe {
            step.queue().launch::<kernels::PushDispatch>(
                &inner.kernels.push_dispatch,
                shape.launch,
                &params,
                &uses,
                &self.keep(args.handle),
            )
        }?)
    }

    fn route<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
        ordinal: u32,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let (most, word) = args.most_tokens();
        let (expert_counts, rank_counts) = self.scratch();
        let params = RouteParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: args.handle.params(),
            state: inner.shared.state.address(),
            homes: inner.shared.homes.address(),
            topk_ids: args.topk_ids.slice().address(),
            topk_weights: args.topk_weights.as_ref().map_or(0, DeviceSlice::address),
            tokens: args.tokens.address(),
            scales: args.scales.as_ref().map_or(0, DeviceSlice::address),
            num_tokens_word: word.map_or(0, DeviceSlice::address),
            expert_counts,
            rank_counts,
            num_tokens: most as u32,
            id_bytes: args.topk_ids.id_bytes() as u32,
            ordinal,
            dependent: self.dependent(),
        };
        let uses: SmallVec<[&DeviceSlice<'a, B>; 5]> = args.read().collect();
        // SAFETY: 1. addresses lie in `uses`, in the lane, the handle or the dispatcher, which are
        // retained; lengths were checked. 2. The pair is this step's alone, and peers are ordered by
        // the lane's signals.
        Ok(unsafe {
            step.queue().launch::<kernels::Route>(
                &inner.kernels.route,
                launch::route(&inner.geometry, self.blocks()),
                &params,
                &uses,
                &self.keep(args.handle),
            )
        }?)
    }

    /// Waits on the device for every sender, and counts.
    pub(crate) fn count(
        &self,
        step: &Step<'_, B>,
        handle: &Handle<B>,
        ordinal: u32,
        condition: Option<Condition>,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let capacity = handle.rows().capacity_word();
        let params = CountParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            state: inner.shared.state.address(),
            required_by_dispatch: inner.shared.required_by_dispatch.address(),
            capacity: capacity.address(),
            row_limit: step.bounds_of(self, handle).rows,
            max_dispatches: inner.config.max_dispatches as u32,
            ordinal,
            budgeted: u32::from(step.options().mode == StepMode::Static),
            dependent: self.dependent(),
            reserved: 0,
            condition: condition.map_or(0, |condition| condition.0),
        };
        // SAFETY: as for the route; the capacity word is only written between steps, and the
        // condition belongs to the recording.
        Ok(unsafe {
            step.queue().launch::<kernels::Count>(
                &inner.kernels.count,
                launch::slots(&inner.geometry),
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
        let into = bytemuck::bytes_of_mut(&mut window);
        // SAFETY: the window is written in the order of this step's stream.
        unsafe { step.queue().download(&handle.window(), into) }?;
        if let Some(fault) = self.dispatcher().context().fault() {
            return Err(fault.into());
        }
        let rows = handle.rows();
        let limit = max_rows.min(rows.max_rows());
        if window.required <= rows.capacity() {
            return Ok(());
        }
        let direct = Queue::direct(step.queue().backend(), step.queue().stream());
        let grown = if window.required > limit {
            let (rank, required) = (self.dispatcher().rank(), window.required);
            Err(DispatchError::EagerLimit { rank, required, limit })
        } else {
            rows.plan(window.required)
                // SAFETY: the queue is the step's, or that of the branch to which the set belongs until it
                // is joined; other steps that receive into it are ordered with this one.
                .and_then(|growth| unsafe { growth.commit(&direct) })
                .map_err(DispatchError::from)
        };
        if grown.is_err() {
            // Peers wait for this rank's combine: tell them rather than let them time out. Why there is no
            // room says more than why they cannot be told.
            let _ = self.dispatcher().abandon(&direct, Phase::Growth);
        }
        grown
    }

    /// Takes the next window: the only one, which drops what it leaves, unless it is in a loop.
    pub(crate) fn window(
        &self,
        step: &Step<'_, B>,
        handle: &Handle<B>,
        condition: Option<Condition>,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let capacity = handle.rows().capacity_word();
        let params = WindowParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            state: inner.shared.state.address(),
            capacity: capacity.address(),
            row_limit: step.bounds_of(self, handle).rows,
            last: u32::from(condition.is_none()),
            condition: condition.map_or(0, |condition| condition.0),
        };
        // SAFETY: as for the count.
        Ok(unsafe {
            step.queue().launch::<kernels::Window>(
                &inner.kernels.window,
                launch::window(),
                &params,
                &[&capacity],
                &self.keep(handle),
            )
        }?)
    }

    /// Brings the rows of the window.
    pub(crate) fn gather<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = GatherParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: args.handle.params(),
            rows: args.rows.address(),
            scales: args.received_scales.map_or(0, RowBuffer::address),
        };
        let (rows, scales) = (args.rows.slice(), args.received_scales.map(RowBuffer::slice));
        let mut uses: SmallVec<[&DeviceSlice<'a, B>; 2]> = SmallVec::new();
        uses.push(&rows);
        uses.extend(scales.as_ref());
        // SAFETY: as for the route; the window keeps rows below the capacity, for which every buffer
        // of the set is mapped.
        Ok(unsafe {
            step.queue().launch::<kernels::Gather>(
                &inner.kernels.gather,
                launch::items_and_padding(&inner.geometry, inner.geometry.row_bytes, self.blocks()),
                &params,
                &uses,
                &self.keep(args.handle),
            )
        }?)
    }
}

//! One rank's part in an expert-parallel group, and one MoE layer of a step.

use std::fmt;

use ep_context::{Backend, Buffer, DeviceSlice, EpContext, Queue, RowBuffer, RowSet};
use graph_capture::{BodyError, CaptureError, EmbedOptions, EmbeddedStep};
use overflow::{EngineGraph, OverflowError, RecoverySettings, StepRunner};
use token_dispatch::{
    Combine, Dispatch, Handle, Lane, Step, StepMode, TokenCount, TokenDispatcher, TopKIds,
};

use crate::builder::{ExpertParallelBuilder, ReceiveParts};
use crate::error::Error;

/// One rank's part in an expert-parallel group: dispatcher, receive buffers, stream. A clone is the
/// same part.
///
/// ```
/// use graph_ep::synthetic::SyntheticExperts;
/// use graph_ep::{
///     ExpertParallel, HostBackend, MoeLayer, RecoverySettings, ThreadGroup, TokenCount, TopKIds,
/// };
///
/// // Two ranks, as threads of this process; hidden 64, 8 experts, top-2, at most 16 tokens a rank.
/// let ranks = ThreadGroup::new(2)?.into_iter().map(|rendezvous| {
///     std::thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///         let group = ExpertParallel::<HostBackend>::builder(64, 8, 2, 16)
///             .capacity_factor(1.25)
///             .build(HostBackend::default(), rendezvous)?;
///         let tokens = group.allocate(16 * 64 * 2)?;
///         let ids = group.allocate(16 * 2 * 4)?;
///         let output = group.allocate(16 * 64 * 2)?;
///         let experts = SyntheticExperts::new(&group)?;
///
///         // The body of a step: here one MoE layer. It is recorded once and replayed.
///         let layer = MoeLayer::new(
///             tokens.slice(),
///             TokenCount::Fixed(16),
///             TopKIds::I32(ids.slice()),
///             output.slice(),
///         );
///         let body = {
///             let group = group.clone();
///             move |step: &mut graph_ep::Step<'static, HostBackend>| {
///                 group.layer(step, &layer, |queue, received| experts.queue(queue, received))
///             }
///         };
///         let mut runner = group.runner(RecoverySettings::new(), body)?;
///
///         // All 16 tokens of both ranks go to experts 0 and 1, which rank 0 holds: 64 rows where
///         // the budget is 48. The step is recovered, and no row is missing.
///         let skewed: Vec<i32> = (0..16).flat_map(|_| [0, 1]).collect();
///         group.write(&ids, bytemuck::cast_slice(&skewed))?;
///         let report = runner.run()?;
///         assert!(matches!(report.outcome, graph_ep::Outcome::Recovered { replays: 1, .. }));
///         assert_eq!(report.record.dropped, 0);
///         Ok(())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     rank.join().expect("no panic").expect("no error");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ExpertParallel<B: Backend> {
    builder: ExpertParallelBuilder,
    dispatcher: TokenDispatcher<B>,
    stream: B::Stream,
    rows: RowSet<B>,
    handle: Handle<B>,
    received: RowBuffer<B>,
    scales: Option<RowBuffer<B>>,
    outputs: RowBuffer<B>,
}

impl<B: Backend> ExpertParallel<B> {
    /// Starts to collect settings: rows of `hidden` values, `top_k` of `experts` experts for each
    /// token, at most `max_tokens` tokens on a rank.
    pub fn builder(
        hidden: usize,
        experts: usize,
        top_k: usize,
        max_tokens: usize,
    ) -> ExpertParallelBuilder {
        ExpertParallelBuilder::new(hidden, experts, top_k, max_tokens)
    }

    pub(crate) fn new(
        builder: ExpertParallelBuilder,
        dispatcher: TokenDispatcher<B>,
        parts: ReceiveParts<B>,
    ) -> Self {
        let ReceiveParts { stream, rows, handle, received, scales, outputs } = parts;
        Self { builder, dispatcher, stream, rows, handle, received, scales, outputs }
    }

    /// The membership of the group.
    pub fn context(&self) -> &EpContext<B> {
        self.dispatcher.context()
    }

    /// The dispatcher.
    pub fn dispatcher(&self) -> &TokenDispatcher<B> {
        &self.dispatcher
    }

    /// The stream on which steps run.
    pub fn stream(&self) -> &B::Stream {
        &self.stream
    }

    /// The row set of the receive buffers. Buffers that an engine adds to it grow with them.
    pub fn rows(&self) -> &RowSet<B> {
        &self.rows
    }

    /// The same group with room for `max_tokens` tokens on a rank, for sequences longer than were
    /// thought of at the start. Collective, between steps; allocates and maps new lanes and receive
    /// buffers, with the capacity that there is, and leaves experts where they were
    /// [set](TokenDispatcher::set_expert_map) last. Graphs and runners are recorded anew on the group
    /// that is returned, and this one is dropped with the last that still uses it.
    ///
    /// # Errors
    ///
    /// As for [`ExpertParallelBuilder::build`], a size that is out of range on one rank among them, on all ranks;
    /// this group is then as before.
    pub fn resize_tokens(&self, max_tokens: usize) -> Result<Self, Error> {
        self.builder.resize(self, max_tokens)
    }

    /// Zeroed device memory of the caller's own, for inputs and outputs. Not counted against the memory
    /// limit, which is for what the memory report lists.
    ///
    /// # Errors
    ///
    /// Out of memory.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer<B>, Error> {
        Ok(self.context().allocate_uncounted("tensor", bytes)?)
    }

    /// Queues a copy of `data` to the start of `to` on [`ExpertParallel::stream`], before the next step that runs
    /// there. Where steps run on another stream, as those of [`ExpertParallel::engine_runner`] do, nothing orders
    /// it with them: upload on that stream, by [`Queue::upload`] of a [`Queue::direct`], or order the two by
    /// [`Backend::order`]. As large a copy, or so many, that they [wait](Queue::upload) do so here too.
    ///
    /// # Errors
    ///
    /// `to` is shorter.
    pub fn write(&self, to: &Buffer<B>, data: &[u8]) -> Result<(), Error> {
        let queue = Queue::direct(self.context().backend(), &self.stream);
        // SAFETY: the buffer is used in the order of this group's stream, or of one that the caller has ordered
        // with it.
        Ok(unsafe { queue.upload(&to.slice(), data) }?)
    }

    /// Waits for [`ExpertParallel::stream`] and copies the start of `from` to the host. What runs on other
    /// streams, such as steps of [`ExpertParallel::engine_runner`], is not waited for, and must not write `from`
    /// meanwhile, or the bytes are old, new or torn: wait for the step's record before, download on that stream by
    /// [`Queue::download`], or order the two by [`Backend::order`].
    ///
    /// # Errors
    ///
    /// `from` is shorter, or earlier work failed.
    pub fn read(&self, from: &DeviceSlice<'static, B>, into: &mut [u8]) -> Result<(), Error> {
        let queue = Queue::direct(self.context().backend(), &self.stream);
        // SAFETY: what writes the slice is queued on this group's stream, or the caller has waited for it or
        // ordered it with that.
        Ok(unsafe { queue.download(from, into) }?)
    }

    /// A runner of steps whose body is `body`. Collective.
    ///
    /// # Errors
    ///
    /// A setting out of range, or one that differs between ranks.
    pub fn runner(
        &self,
        settings: RecoverySettings,
        body: impl FnMut(&mut Step<'static, B>) -> Result<(), BodyError> + Send + 'static,
    ) -> Result<StepRunner<B>, OverflowError> {
        StepRunner::new(
            &self.dispatcher,
            self.stream.clone(),
            self.rows.clone(),
            settings,
            Box::new(body),
        )
    }

    /// A runner of steps whose graph the engine captures and launches itself, in the order of `stream`:
    /// one of the engine's. Collective. [`ExpertParallel::write`] and [`ExpertParallel::read`] are of the group's own
    /// stream, and not ordered with these steps.
    ///
    /// # Errors
    ///
    /// As for [`ExpertParallel::runner`].
    pub fn engine_runner(
        &self,
        settings: RecoverySettings,
        stream: B::Stream,
        engine: impl EngineGraph<B> + 'static,
    ) -> Result<StepRunner<B>, OverflowError> {
        let rows = self.rows.clone();
        StepRunner::for_engine(&self.dispatcher, stream, rows, settings, Box::new(engine))
    }

    /// Records a step into what an engine is capturing on `stream`, see [`EmbeddedStep::record`].
    ///
    /// ```
    /// use graph_ep::synthetic::SyntheticExperts;
    /// use graph_ep::{
    ///     Backend, ExpertParallel, HostBackend, MoeLayer, StepOptions, ThreadGroup, TokenCount,
    ///     TopKIds,
    /// };
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let alone = ThreadGroup::new(1)?.into_iter().next().ok_or("one rank")?;
    /// let ep = ExpertParallel::<HostBackend>::builder(64, 8, 2, 16)
    ///     .build(HostBackend::default(), alone)?;
    /// let (tokens, output) = (ep.allocate(16 * 64 * 2)?, ep.allocate(16 * 64 * 2)?);
    /// let ids = ep.allocate(16 * 2 * 4)?;
    /// ep.write(&ids, bytemuck::cast_slice(&[0_i32, 5].repeat(16)))?;
    /// let experts = SyntheticExperts::new(&ep)?;
    /// let layer = MoeLayer::new(
    ///     tokens.slice(),
    ///     TokenCount::Fixed(16),
    ///     TopKIds::I32(ids.slice()),
    ///     output.slice(),
    /// );
    ///
    /// // An engine on the host backend; on a GPU it captures by what means it likes.
    /// let (engine, stream) = (ep.context().backend(), ep.stream());
    /// let recording = engine.begin_recording(stream)?;
    /// let step = ep.embed(stream, StepOptions::new(), |step| {
    ///     ep.layer(step, &layer, |queue, received| experts.queue(queue, received))
    /// })?;
    /// let graph = engine.instantiate(engine.end_recording(&recording)?)?;
    ///
    /// let number = step.replay(|| Ok(engine.replay(stream, &graph)?))?;
    /// assert_eq!(ep.dispatcher().records().wait(number)?.delivered, 32);
    ///
    /// // The engine launches a graph that is stale: the step says so, and the group goes on.
    /// let rows = ep.rows();
    /// let direct = graph_ep::Queue::direct(engine, stream);
    /// // SAFETY: the graph is launched on this stream, and nothing else uses the rows.
    /// unsafe { rows.plan(rows.max_rows())?.commit(&direct) }?;
    /// engine.replay(stream, &graph)?;
    /// let told = ep.dispatcher().records().wait(step.replayed());
    /// assert!(matches!(told, Err(graph_ep::DispatchError::StaleGraph { recorded: 1, now: 2, .. })));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`EmbeddedStep::record`].
    pub fn embed(
        &self,
        stream: &B::Stream,
        options: impl Into<EmbedOptions>,
        body: impl FnOnce(&mut Step<'static, B>) -> Result<(), BodyError>,
    ) -> Result<EmbeddedStep<B>, CaptureError> {
        EmbeddedStep::record(&self.dispatcher, stream, options, &[&self.rows], body)
    }

    /// Queues one MoE layer of a step on lane 0: dispatch, `experts`, combine. In rounds, `experts` is
    /// the body of a loop on the device.
    ///
    /// # Errors
    ///
    /// What [`Lane::dispatch`], `experts` and [`Lane::combine`] refuse.
    pub fn layer<'a>(
        &self,
        step: &mut Step<'a, B>,
        layer: &MoeLayer<'a, B>,
        experts: impl FnOnce(&Queue<'a, B>, &Received<'_, B>) -> Result<(), BodyError>,
    ) -> Result<(), BodyError> {
        let lane: Lane<B> = self.dispatcher.lane(0).ok_or("the dispatcher has no lane")?;
        let dispatch = Dispatch {
            tokens: layer.tokens.clone(),
            scales: layer.scales.clone(),
            count: layer.count.clone(),
            topk_ids: layer.topk_ids.clone(),
            topk_weights: layer.topk_weights.clone(),
            rows: &self.received,
            received_scales: self.scales.as_ref(),
            handle: &self.handle,
        };
        let received = Received {
            rows: &self.received,
            scales: self.scales.as_ref(),
            outputs: &self.outputs,
            handle: &self.handle,
            row_limit: step.row_limit(&self.rows),
        };
        let expert_rows = self.outputs.slice();
        if step.options().mode() == StepMode::Rounds {
            return lane.rounds(step, &dispatch, &expert_rows, &layer.output, |step| {
                experts(step.queue(), &received)
            });
        }
        lane.dispatch(step, &dispatch)?;
        experts(step.queue(), &received)?;
        let output = layer.output.clone();
        lane.combine(step, &Combine { handle: &self.handle, expert_rows, output })?;
        Ok(())
    }
}

impl<B: Backend> Clone for ExpertParallel<B> {
    fn clone(&self) -> Self {
        Self {
            builder: self.builder.clone(),
            dispatcher: self.dispatcher.clone(),
            stream: self.stream.clone(),
            rows: self.rows.clone(),
            handle: self.handle.clone(),
            received: self.received.clone(),
            scales: self.scales.clone(),
            outputs: self.outputs.clone(),
        }
    }
}

impl<B: Backend> fmt::Debug for ExpertParallel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertParallel")
            .field("dispatcher", &self.dispatcher)
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

/// The tensors of one MoE layer on one rank.
#[derive(Clone, Debug)]
pub struct MoeLayer<'a, B: Backend> {
    /// `[tokens]` rows as the [`Payload`](token_dispatch::Payload) says: `[tokens, hidden]` values unless they are
    /// bytes.
    pub tokens: DeviceSlice<'a, B>,
    /// `[tokens]` rows of scales, where the payload is bytes with scales.
    pub scales: Option<DeviceSlice<'a, B>>,
    /// How many tokens.
    pub count: TokenCount<'a, B>,
    /// `[tokens, top_k]` expert ids; −1 is none.
    pub topk_ids: TopKIds<'a, B>,
    /// `[tokens, top_k]` f32; without them every weight is 1.
    pub topk_weights: Option<DeviceSlice<'a, B>>,
    /// `[tokens, hidden]`: the weighted sum of what the experts made of each token.
    pub output: DeviceSlice<'a, B>,
}

impl<'a, B: Backend> MoeLayer<'a, B> {
    /// A layer without weights.
    pub fn new(
        tokens: DeviceSlice<'a, B>,
        count: TokenCount<'a, B>,
        topk_ids: TopKIds<'a, B>,
        output: DeviceSlice<'a, B>,
    ) -> Self {
        Self { tokens, scales: None, count, topk_ids, topk_weights: None, output }
    }
}

/// What the experts of a rank work on: the rows of the window, which lie as the
/// [`Layout`](token_dispatch::Layout) says.
#[derive(Debug)]
pub struct Received<'s, B: Backend> {
    /// `[capacity]` rows: of `hidden` values, of bytes, or of `hidden` FP8 values, as the
    /// [`Payload`](token_dispatch::Payload) says.
    ///
    /// Grouped by expert, the rows of local expert `e` are those from `expert_offsets[e]`, as many as
    /// `tokens_per_expert[e]`; up to the next offset follow rows of zeros, or what was there before if
    /// [`clear_padding`](crate::ExpertParallelBuilder::clear_padding) is off. Flat, there are `total` rows, one for
    /// each token that has experts here, with these in [`Handle::row_experts`] and their weights in
    /// [`Handle::row_weights`]; `expert_offsets` then tell nothing but the total.
    pub rows: &'s RowBuffer<B>,
    /// `[capacity]` rows of scales, if the payload has any.
    pub scales: Option<&'s RowBuffer<B>>,
    /// `[capacity, hidden]` values of the number format, whatever the payload: where the experts leave the result
    /// of each row, in the same place.
    pub outputs: &'s RowBuffer<B>,
    /// Holds `expert_offsets`, `tokens_per_expert` and `total`, all in device memory.
    pub handle: &'s Handle<B>,
    /// The rows that whatever has a row dimension must cover in this step.
    pub row_limit: u32,
}

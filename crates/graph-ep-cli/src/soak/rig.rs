//! One rank of a soak: its membership, its memory, and what its steps do.

use std::num::NonZeroU32;
use std::sync::Arc;

use graph_ep::{
    Adjustments, Backend, BackendError, BodyError, Buffer, Combine, DeviceSlice, Dispatch,
    ExpertParallel, Handle, Kernel, Lane, LaunchShape, Layout, OverflowPolicy, Phase, Queue,
    RecoveryHooks, RecoverySettings, Rendezvous, RowBuffer, Step, StepMode, StepRecord, StepRunner,
    TokenCount, TopKIds,
};

use super::SoakError;
use super::kernels::{
    self, Check, CheckParams, Experts, ExpertsParams, Input, InputParams, Shape, State,
};
use super::sizes::{Sizes, Tensor};
use crate::args::Mode;

/// Steps after which capacity shrinks again where a step overflowed, so that the next burst overflows
/// too.
const SHRINK_AFTER: u32 = 16;

/// Blocks and threads of the kernels of a soak.
const LAUNCH: LaunchShape = LaunchShape::new(64, 256);

/// One rank.
pub(super) struct Rig<B: Backend> {
    pub(super) group: ExpertParallel<B>,
    program: Arc<Program<B>>,
}

/// What the steps of a rank use.
struct Program<B: Backend> {
    group: ExpertParallel<B>,
    sizes: Sizes,
    shape: Shape,
    input: B::Loaded<Input>,
    experts: B::Loaded<Experts>,
    check: B::Loaded<Check>,
    state: Buffer<B>,
    before: Buffer<B>,
    count: Buffer<B>,
    tokens: Buffer<B>,
    ids: Buffer<B>,
    weights: Buffer<B>,
    outputs: Buffer<B>,
    layers: Vec<Layer<B>>,
}

/// Where a layer receives.
struct Layer<B: Backend> {
    handle: Handle<B>,
    rows: RowBuffer<B>,
    results: RowBuffer<B>,
}

/// The parts of a pair, for steps that are queued in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    DispatchSend,
    /// The experts come behind it.
    DispatchReceive,
    CombineSend,
    CombineReceive,
}

impl Half {
    pub(super) const ALL: [Self; 4] =
        [Self::DispatchSend, Self::DispatchReceive, Self::CombineSend, Self::CombineReceive];
}

impl<B: Backend> Rig<B> {
    /// Joins the group, allocates, and loads kernels. Collective.
    pub(super) fn new(
        backend: B,
        rendezvous: impl Rendezvous + 'static,
        sizes: &Sizes,
    ) -> Result<Self, SoakError> {
        let group = sizes.builder()?.build(backend, rendezvous)?;
        let program = Program::new(&group, sizes)?;
        let rig = Self { group, program: Arc::new(program) };
        // Nobody launches while another may still allocate on a device that they share.
        rig.meet("the memory of a soak")?;
        Ok(rig)
    }

    /// Waits for the other ranks. Collective.
    pub(super) fn meet(&self, purpose: &str) -> Result<(), SoakError> {
        let context = self.group.context();
        let deadline = context.deadlines().of(Phase::Setup);
        Ok(context.rendezvous().barrier(purpose, deadline)?)
    }

    /// A runner of steps. Collective. Where it recovers, the state of the soak is put back before a
    /// step is replayed, as an engine puts back what a step has changed.
    pub(super) fn runner(&self, mode: Mode) -> Result<StepRunner<B>, SoakError> {
        let policy = match mode {
            Mode::Rounds => OverflowPolicy::Rounds,
            Mode::Drop => OverflowPolicy::Drop,
            Mode::Static => OverflowPolicy::Fail,
            Mode::Recover | Mode::Eager => OverflowPolicy::Recover,
        };
        let shrinks = (mode == Mode::Recover).then_some(SHRINK_AFTER);
        let settings =
            RecoverySettings::new().with_overflow(policy).with_adjustments(Adjustments {
                shrink_after: shrinks.and_then(NonZeroU32::new),
                min_rows: self.program.sizes.least_rows(),
                ..Adjustments::default()
            });
        let (program, dropping) = (self.program.clone(), mode == Mode::Drop);
        let body = move |step: &mut Step<'static, B>| program.queue(step, dropping);
        let hooks = PutBack { program: self.program.clone() };
        Ok(self.group.runner(settings, body)?.hooks(hooks))
    }

    /// What `work` returns; where that is an error, peers are told, so that none waits for this rank.
    pub(super) fn or_abort<T>(
        &self,
        work: impl FnOnce() -> Result<T, SoakError>,
    ) -> Result<T, SoakError> {
        work().inspect_err(|error| {
            self.group.context().abort();
            self.group.context().rendezvous().abort(&error.to_string());
        })
    }

    /// From which inputs and outputs follow.
    pub(super) fn shape(&self) -> Shape {
        self.program.shape
    }

    /// Takes capacity back to what it was at the start, between two recordings. Collective, so that
    /// nobody launches while another still unmaps.
    pub(super) fn shrink(&self) -> Result<(), SoakError> {
        let rows = self.group.rows();
        let initial = self.program.sizes.capacity_rows()?;
        if rows.capacity() != initial {
            let queue = Queue::direct(self.group.context().backend(), self.group.stream());
            // SAFETY: all steps run on the stream of the group, or on branches of it.
            unsafe { rows.plan(initial)?.commit(&queue) }?;
            self.settle()?;
            if let Err(error) = rows.trim() {
                tracing::debug!(%error, "rows stay mapped for now");
            }
        }
        self.meet("the capacity of the start")
    }

    /// Waits for the stream and reads what was found so far.
    pub(super) fn state(&self) -> Result<State, SoakError> {
        let mut state: State = bytemuck::Zeroable::zeroed();
        self.group.read(&self.program.state.slice(), bytemuck::bytes_of_mut(&mut state))?;
        Ok(state)
    }

    /// Begins a step that is queued in parts, directly.
    pub(super) fn begin(&self) -> Result<Step<'static, B>, SoakError> {
        let context = self.group.context();
        let queue = Queue::direct(context.backend(), self.group.stream());
        let options = graph_ep::StepOptions::new().with_mode(StepMode::Static);
        let step = Step::begin(self.group.dispatcher(), queue, options)?;
        self.program.launch_input(step.queue())?;
        Ok(step)
    }

    /// Queues one part of a layer.
    pub(super) fn half(
        &self,
        step: &mut Step<'static, B>,
        layer: usize,
        half: Half,
    ) -> Result<(), SoakError> {
        self.program.half(step, layer, half).map_err(SoakError::Body)
    }

    /// Queues the comparison of a step that was queued in parts, of which items may be left out if it
    /// is `dropping`.
    pub(super) fn compare(&self, step: &Step<'static, B>, dropping: bool) -> Result<(), SoakError> {
        Ok(self.program.launch_check(step.queue(), dropping)?)
    }

    /// Waits until everything that is queued has run.
    pub(super) fn settle(&self) -> Result<(), SoakError> {
        Ok(self.group.context().backend().synchronize(self.group.stream())?)
    }
}

impl<B: Backend> Program<B> {
    fn new(group: &ExpertParallel<B>, sizes: &Sizes) -> Result<Self, SoakError> {
        let tensor = |tensor: Tensor| tensor.allocate(group, sizes);
        let backend = group.context().backend();
        let constants = kernels::constants(sizes.dtype);
        let layer = || -> Result<Layer<B>, SoakError> {
            Ok(Layer {
                handle: Handle::new(group.dispatcher(), group.rows())?,
                rows: group.rows().add("rows of a layer", sizes.row_bytes())?,
                results: group.rows().add("results of a layer", sizes.row_bytes())?,
            })
        };
        let state = tensor(Tensor::State)?;
        let shape = Shape {
            seed: sizes.seed,
            state: state.address(),
            rank: group.context().rank().0,
            world: sizes.ranks as u32,
            experts: sizes.experts as u32,
            top_k: sizes.top_k as u32,
            hidden: sizes.hidden as u32,
            max_tokens: sizes.tokens as u32,
            layers: sizes.layers as u32,
            burst: sizes.burst,
            ragged: sizes.ragged.into(),
            format: sizes.dtype as u32,
        };
        Ok(Self {
            group: group.clone(),
            sizes: sizes.clone(),
            shape,
            input: backend.load::<Input>(&constants)?,
            experts: backend.load::<Experts>(&constants)?,
            check: backend.load::<Check>(&constants)?,
            state,
            before: tensor(Tensor::Before)?,
            count: tensor(Tensor::Count)?,
            tokens: tensor(Tensor::Tokens)?,
            ids: tensor(Tensor::Ids)?,
            weights: tensor(Tensor::Weights)?,
            outputs: tensor(Tensor::Outputs)?,
            layers: (0..sizes.layers).map(|_| layer()).collect::<Result<_, _>>()?,
        })
    }

    /// What a step does: makes its inputs, runs all layers, compares.
    fn queue(&self, step: &mut Step<'static, B>, dropping: bool) -> Result<(), BodyError> {
        self.launch_input(step.queue())?;
        let layers = 0..self.sizes.layers;
        if step.options().mode() == StepMode::Rounds {
            layers.clone().try_for_each(|layer| self.rounds(step, layer))?;
        } else if self.sizes.nested {
            layers.clone().try_for_each(|layer| self.dispatch(step, layer))?;
            layers.clone().rev().try_for_each(|layer| self.combine(step, layer))?;
        } else {
            for layer in layers {
                self.dispatch(step, layer)?;
                self.combine(step, layer)?;
            }
        }
        Ok(self.launch_check(step.queue(), dropping)?)
    }

    /// A dispatch and its experts.
    fn dispatch(&self, step: &mut Step<'static, B>, layer: usize) -> Result<(), BodyError> {
        self.lane(layer)?.dispatch(step, &self.dispatch_of(layer)?)?;
        Ok(self.launch_experts(step.queue(), layer)?)
    }

    fn combine(&self, step: &mut Step<'static, B>, layer: usize) -> Result<(), BodyError> {
        Ok(self.lane(layer)?.combine(step, &self.combine_of(layer)?)?)
    }

    fn rounds(&self, step: &mut Step<'static, B>, layer: usize) -> Result<(), BodyError> {
        let (dispatch, combine) = (self.dispatch_of(layer)?, self.combine_of(layer)?);
        let (rows, output) = (&combine.expert_rows, &combine.output);
        self.lane(layer)?.rounds(step, &dispatch, rows, output, |step| -> Result<(), BodyError> {
            Ok(self.launch_experts(step.queue(), layer)?)
        })
    }

    fn half(&self, step: &mut Step<'static, B>, layer: usize, half: Half) -> Result<(), BodyError> {
        let lane = self.lane(layer)?;
        match half {
            Half::DispatchSend => lane.dispatch_send(step, &self.dispatch_of(layer)?)?,
            Half::DispatchReceive => {
                lane.dispatch_receive(step, &self.dispatch_of(layer)?)?;
                self.launch_experts(step.queue(), layer)?;
            }
            Half::CombineSend => lane.combine_send(step, &self.combine_of(layer)?)?,
            Half::CombineReceive => lane.combine_receive(step, &self.combine_of(layer)?)?,
        }
        Ok(())
    }

    fn lane(&self, layer: usize) -> Result<Lane<B>, BodyError> {
        let lane = self.group.dispatcher().lane(layer % self.sizes.lanes);
        lane.ok_or_else(|| "the dispatcher has fewer lanes than the soak".into())
    }

    fn dispatch_of(&self, layer: usize) -> Result<Dispatch<'_, 'static, B>, BodyError> {
        let of = &self.layers[layer];
        let count = TokenCount::Device(self.count.slice(), self.sizes.tokens);
        let ids = TopKIds::I32(self.part(&self.ids, layer)?);
        let tokens = self.part(&self.tokens, layer)?;
        Ok(Dispatch {
            topk_weights: Some(self.part(&self.weights, layer)?),
            ..Dispatch::new(tokens, count, ids, &of.rows, &of.handle)
        })
    }

    fn combine_of(&self, layer: usize) -> Result<Combine<'_, 'static, B>, BodyError> {
        let of = &self.layers[layer];
        let output = self.part(&self.outputs, layer)?;
        Ok(Combine { handle: &of.handle, expert_rows: of.results.slice(), output })
    }

    /// The part of a buffer that is a layer's.
    fn part(&self, of: &Buffer<B>, layer: usize) -> Result<DeviceSlice<'static, B>, BodyError> {
        let bytes = of.bytes() / self.sizes.layers;
        let part = of.slice().get(layer * bytes..(layer + 1) * bytes);
        part.ok_or_else(|| "a layer beyond the last".into())
    }

    fn launch_input(&self, queue: &Queue<'static, B>) -> Result<(), BackendError> {
        let params = InputParams {
            shape: self.shape,
            before: self.before.address(),
            count: self.count.address(),
            tokens: self.tokens.address(),
            ids: self.ids.address(),
            weights: self.weights.address(),
        };
        let uses = [&self.state, &self.before, &self.count, &self.tokens, &self.ids, &self.weights];
        self.launch::<Input>(queue, &self.input, &params, &uses.map(Buffer::slice))
    }

    fn launch_experts(&self, queue: &Queue<'static, B>, layer: usize) -> Result<(), BackendError> {
        let Layer { handle, rows, results } = &self.layers[layer];
        let beside = |buffer: Option<&RowBuffer<B>>| buffer.map_or(0, RowBuffer::address);
        let config = self.group.dispatcher().config();
        let slots = self.sizes.experts / self.sizes.ranks;
        let width = match self.sizes.layout {
            Layout::Flat => config.flat_width(slots),
            Layout::ExpertGrouped => 1,
        };
        let (offsets, counts) = (handle.expert_offsets(), handle.tokens_per_expert());
        let params = ExpertsParams {
            shape: self.shape,
            rows: rows.address(),
            outputs: results.address(),
            expert_offsets: offsets.address(),
            tokens_per_expert: counts.address(),
            row_weights: beside(handle.row_weights()),
            row_experts: beside(handle.row_experts()),
            slots: slots as u32,
            width: width as u32,
        };
        let mut uses = vec![rows.slice(), results.slice(), offsets, counts];
        uses.extend(handle.row_weights().map(RowBuffer::slice));
        uses.extend(handle.row_experts().map(RowBuffer::slice));
        self.launch::<Experts>(queue, &self.experts, &params, &uses)
    }

    fn launch_check(&self, queue: &Queue<'static, B>, dropping: bool) -> Result<(), BackendError> {
        let params = CheckParams {
            shape: self.shape,
            outputs: self.outputs.address(),
            dropping: dropping.into(),
            reserved: 0,
        };
        let uses = [self.state.slice(), self.outputs.slice()];
        self.launch::<Check>(queue, &self.check, &params, &uses)
    }

    fn launch<K: Kernel>(
        &self,
        queue: &Queue<'static, B>,
        kernel: &B::Loaded<K>,
        params: &K::Params,
        uses: &[DeviceSlice<'static, B>],
    ) -> Result<(), BackendError> {
        let uses: Vec<_> = uses.iter().collect();
        // SAFETY: every address in the parameters is that of a slice in the list, of the length that
        // the sizes give it; whatever else touches them is queued on the same stream.
        unsafe { queue.launch::<K>(kernel, LAUNCH, params, &uses, &[]) }
    }
}

/// Puts back what a discarded run of a step has counted.
struct PutBack<B: Backend> {
    program: Arc<Program<B>>,
}

impl<B: Backend> RecoveryHooks for PutBack<B> {
    fn before_replay(&mut self, _: &StepRecord, _: u32) -> Result<(), BodyError> {
        let Program { group, state, before, .. } = self.program.as_ref();
        let queue = Queue::direct(group.context().backend(), group.stream());
        // SAFETY: two buffers of this rank, used on this stream only.
        Ok(unsafe { queue.copy(&state.slice(), &before.slice()) }?)
    }
}

//! One rank, built and fed from a case; what it sees of a step is in `seen`.

mod seen;

use std::sync::Arc;

use graph_ep::ep_context::{MemoryAccount, PlannedGrowth, RowShape};
use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{
    BodyError, Buffer, CaptureError, Error, ExpertParallel, ExpertParallelBuilder, Handle,
    OverflowError, Queue, Rank, RecoverySettings, RowBuffer, Step, StepGraph, StepMode,
    StepOptions, StepRunner,
};

use crate::backend::{PATIENCE, RankEnv, TestBackend};
use crate::case::Case;
use crate::experts::Experts;
use crate::inputs::Inputs;
use crate::outcome::Ran;
use crate::program::{AnyExperts, Program};

pub use seen::Stage;

use seen::must;

/// Each byte of outputs and received rows before a step.
pub const SPOILT: u8 = 0xa5;

/// One rank of a case: its membership, the memory of every layer, and what a step does with it.
#[derive(Debug)]
pub struct Rig<T: TestBackend> {
    /// The rank's part in the group.
    pub group: ExpertParallel<T::Backend>,
    /// The case.
    pub case: Case,
    /// The memory of the rank's device.
    pub memory: MemoryAccount,
    layers: Arc<[Layer<T>]>,
    experts: Arc<AnyExperts<T>>,
}

/// The memory of one layer: what it is given, where it receives, what it gives out.
#[derive(Debug)]
pub struct Layer<T: TestBackend> {
    /// `[max tokens]` rows as the case has them.
    pub tokens: Buffer<T::Backend>,
    /// `[max tokens]` rows of scales.
    pub scales: Buffer<T::Backend>,
    /// One u32.
    pub count: Buffer<T::Backend>,
    /// `[max tokens, top_k]`, i32 or i64.
    pub ids: Buffer<T::Backend>,
    /// `[max tokens, top_k]` f32.
    pub weights: Buffer<T::Backend>,
    /// `[max tokens, hidden]`.
    pub output: Buffer<T::Backend>,
    /// What the dispatch fills.
    pub handle: Handle<T::Backend>,
    /// Received rows.
    pub rows: RowBuffer<T::Backend>,
    /// Received rows of scales, if the case has any.
    pub received_scales: Option<RowBuffer<T::Backend>>,
    /// What the experts make of them.
    pub results: RowBuffer<T::Backend>,
}

impl<T: TestBackend> Rig<T> {
    /// Joins the group and allocates what the case needs. Collective.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn new(env: RankEnv<T>, case: &Case) -> Self {
        Self::with(env, &case.builder(Rank::from_index(0)), case)
    }

    /// Joins the group with the settings of `builder`, but for the capacity, which is that of the
    /// case, and allocates what the case needs. Collective.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn with(env: RankEnv<T>, builder: &ExpertParallelBuilder, case: &Case) -> Self {
        let builder = builder.clone().capacity_rows(case.rows_of(env.rank().index()));
        let memory = env.memory.clone();
        let group = env.build(&builder).expect("the group is built");
        let rig = Self::on(group, case).expect("memory for the case");
        rig.meet("the memory of the case is there");
        Self { memory, ..rig }
    }

    /// Waits for the other ranks. Collective.
    ///
    /// Ranks that share a device have to meet before a step wherever one of them may still allocate,
    /// or give back what was dropped: that waits for the device, on which the step of another waits
    /// for this rank.
    ///
    /// # Panics
    ///
    /// If one does not come.
    pub fn meet(&self, purpose: &str) {
        let rendezvous = self.group.context().rendezvous();
        rendezvous.barrier(purpose, PATIENCE).expect("every rank comes");
    }

    /// Allocates what the case needs in a group that has been built for it. Not collective: ranks
    /// [meet](Self::meet) before their first step.
    ///
    /// # Errors
    ///
    /// Out of memory.
    pub fn on(group: ExpertParallel<T::Backend>, case: &Case) -> Result<Self, Error> {
        let most = case.max_tokens();
        let id_bytes = if case.wide_ids { 8 } else { 4 };
        let layer = || -> Result<Layer<T>, Error> {
            Ok(Layer {
                tokens: group.allocate(most * case.token_bytes())?,
                scales: group.allocate((most * case.scale_bytes()).max(16))?,
                count: group.allocate(4)?,
                ids: group.allocate(most * case.top_k * id_bytes)?,
                weights: group.allocate(most * case.top_k * 4)?,
                output: group.allocate(most * case.sum_bytes())?,
                handle: Handle::new(group.dispatcher(), group.rows())?,
                rows: group.rows().add("rows of a layer", case.row_bytes())?,
                received_scales: match case.scale_bytes() {
                    0 => None,
                    bytes => Some(group.rows().add("scales of a layer", bytes)?),
                },
                results: group.rows().add("results of a layer", case.sum_bytes())?,
            })
        };
        let layers = (0..case.layers).map(|_| layer()).collect::<Result<Vec<_>, _>>()?;
        let experts = Arc::new(match case.plain() {
            true => AnyExperts::Synthetic(SyntheticExperts::new(&group)?),
            false => AnyExperts::Own(Experts::new(&group, case)?),
        });
        let memory = MemoryAccount::new(None);
        Ok(Self { group, case: case.clone(), memory, layers: layers.into(), experts })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.context().rank().index()
    }

    /// The memory of a layer.
    pub fn layer(&self, index: usize) -> &Layer<T> {
        &self.layers[index]
    }

    /// Writes the inputs of `step` and spoils the outputs, in stream order.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn write(&self, step: usize) {
        self.write_at(&self.at(step), step);
    }

    fn write_at(&self, at: &str, step: usize) {
        for index in 0..self.case.layers {
            let inputs = Inputs::new(&self.case, step, index, self.rank());
            self.write_layer_at(&format!("{at}, layer {index}"), index, &inputs);
        }
    }

    /// Writes the inputs of one layer, and [`SPOILT`] bytes over its output and its received rows: a
    /// correct step leaves none, but in padding that it is told to leave.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn write_layer(&self, index: usize, inputs: &Inputs) {
        self.write_layer_at(&format!("rank {}, layer {index}", self.rank()), index, inputs);
    }

    fn write_layer_at(&self, at: &str, index: usize, inputs: &Inputs) {
        let layer = self.layer(index);
        let tokens = inputs.count(self.case.top_k) as u32;
        let spoilt = vec![SPOILT; layer.output.bytes()];
        for (buffer, bytes) in [
            (&layer.tokens, inputs.tokens.as_slice()),
            (&layer.scales, inputs.scales.as_slice()),
            (&layer.count, &tokens.to_le_bytes()),
            (&layer.ids, &inputs.id_bytes(self.case.wide_ids)),
            (&layer.weights, bytemuck::cast_slice(&inputs.weights)),
            (&layer.output, &spoilt),
        ] {
            must(at, "its inputs", self.group.write(buffer, bytes));
        }
        let beside = [layer.handle.row_weights(), layer.handle.row_experts()];
        let beside = beside.into_iter().flatten().chain(&layer.received_scales);
        for rows in [&layer.rows, &layer.results].into_iter().chain(beside) {
            let held = self.group.rows().capacity() as usize * rows.row_bytes();
            let slice = rows.slice().get(0..held).expect("the capacity is reserved");
            // SAFETY: rows below the capacity are mapped, and used on this stream only.
            let spoiling = unsafe { self.direct().upload(&slice, &vec![SPOILT; held]) };
            must(at, "its rows, spoilt", spoiling);
        }
    }

    /// The stream of the group, direct.
    pub fn direct(&self) -> Queue<'static, T::Backend> {
        Queue::direct(self.group.context().backend(), self.group.stream())
    }

    /// Makes a planned capacity hold before the next step.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn commit(&self, growth: PlannedGrowth<T::Backend>) {
        // SAFETY: steps of the case run on the stream of the group, or on one that streams or the host
        // have ordered with it.
        unsafe { growth.commit(&self.direct()) }.expect("the stream is alive");
    }

    /// What a step does: all layers of the case.
    pub fn body(
        &self,
    ) -> impl Fn(&mut Step<'static, T::Backend>) -> Result<(), BodyError> + Send + 'static {
        let program = self.program();
        move |step| program.queue(step)
    }

    /// The parts of a step, to be queued one by one.
    pub fn program(&self) -> Program<T> {
        Program {
            group: self.group.clone(),
            case: self.case.clone(),
            layers: self.layers.clone(),
            experts: self.experts.clone(),
            own_tokens: self.case.tokens[self.rank()],
        }
    }

    /// Runs one step without recording it and returns its number.
    ///
    /// # Errors
    ///
    /// What the step refuses.
    pub fn launch(&self, options: StepOptions) -> Result<u32, BodyError> {
        let mut step = Step::begin(self.group.dispatcher(), self.direct(), options)?;
        self.program().queue(&mut step)?;
        Ok(step.finish()?.number.unwrap_or_default())
    }

    /// Records the step as the case has it.
    ///
    /// # Errors
    ///
    /// What recording refuses.
    pub fn record(
        &self,
        options: StepOptions,
    ) -> Result<StepGraph<'static, T::Backend>, CaptureError> {
        StepGraph::record(self.group.dispatcher(), self.group.stream(), options, self.body())
    }

    /// Records the step in rounds, on all ranks before any of them launches it, as ranks that share a device
    /// have to. Collective.
    ///
    /// # Panics
    ///
    /// If that is refused.
    pub fn record_rounds(&self) -> StepGraph<'static, T::Backend> {
        let options = StepOptions::new().with_mode(StepMode::Rounds);
        let graph = self.record(options).expect("one token fits");
        self.meet("all have recorded");
        graph
    }

    /// A runner of the case's step.
    ///
    /// # Errors
    ///
    /// A setting out of range.
    pub fn runner(
        &self,
        settings: RecoverySettings,
    ) -> Result<StepRunner<T::Backend>, OverflowError> {
        self.group.runner(settings, self.body())
    }

    /// Sets the expert map of `case` for the next step, and moves the experts to it.
    ///
    /// # Errors
    ///
    /// What the dispatcher refuses.
    pub fn set_map(&self, case: &Case) -> Result<(), Error> {
        let map = case.expert_map();
        self.group.dispatcher().set_expert_map(&self.direct(), &map)?;
        match self.experts.as_ref() {
            AnyExperts::Synthetic(experts) => experts.follow(&self.group, &map),
            AnyExperts::Own(experts) => experts.follow(&self.group, case),
        }
    }

    /// Runs one step of `runner` on the inputs of `step`.
    ///
    /// # Errors
    ///
    /// What the runner reports.
    pub fn step(
        &self,
        runner: &mut StepRunner<T::Backend>,
        step: usize,
    ) -> Result<Ran, OverflowError> {
        self.write(step);
        let report = runner.run()?;
        Ok(Ran::new(self.seen_with(step, &report.record), &report))
    }

    /// Capacity and generation of the receive rows.
    pub fn shape(&self) -> RowShape {
        self.group.rows().shape()
    }
}

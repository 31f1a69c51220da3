//! Backward passes: one rank that runs them, and what it saw.

use std::sync::Arc;

use graph_ep::token_dispatch::{CombineBackward, DispatchBackward, RoundsBackward};
use graph_ep::{
    BodyError, Buffer, DType, DeviceSlice, RowBuffer, Step, StepGraph, StepMode, StepOptions,
};
use serde::{Deserialize, Serialize};

use crate::backend::{RankEnv, TestBackend};
use crate::case::Case;
use crate::experts::{Experts, Rows};
use crate::inputs::{Draw, decode, encode, tokens_in};
use crate::oracle::bits;
use crate::program::Program;
use crate::rig::Rig;

/// What one rank saw of the backward pass of one layer. Numbers are given as the bits of f32 ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GradRun {
    /// `[total, hidden]`: gradients as they arrived at the experts.
    pub rows: Vec<u32>,
    /// `[tokens, hidden]`.
    pub tokens: Vec<u32>,
    /// `[tokens, top_k]`.
    pub weights: Vec<u32>,
}

/// The gradients of the outputs of `layer` in `step` that `rank` starts from: `[tokens, hidden]`.
pub fn output_grads(case: &Case, step: usize, layer: usize, rank: usize) -> Vec<f32> {
    let mut draw = Draw::new(&[case.seed, 99, step as u64, layer as u64, rank as u64]);
    let values = tokens_in(case, step, layer, rank) * case.hidden;
    (0..values).map(|_| case.number().round(draw.value())).collect()
}

/// One rank that runs backward passes.
#[derive(Debug)]
pub struct GradRig<T: TestBackend> {
    /// The forward passes.
    pub rig: Rig<T>,
    grads: Arc<[Grads<T>]>,
    experts: Arc<Experts<T>>,
}

/// The gradients of a layer.
#[derive(Debug)]
pub struct Grads<T: TestBackend> {
    /// `[max tokens, hidden]`: those of the outputs.
    pub outputs: Buffer<T::Backend>,
    /// `[max tokens, hidden]`: those of the tokens.
    pub tokens: Buffer<T::Backend>,
    /// `[max tokens, top_k]` f32.
    pub weights: Buffer<T::Backend>,
    /// `[capacity, hidden]`: those of the experts' results, and then of the rows.
    pub rows: RowBuffer<T::Backend>,
    /// The same as they arrived.
    pub arrived: RowBuffer<T::Backend>,
    /// `[capacity, width]` f32.
    pub row_weights: RowBuffer<T::Backend>,
}

/// The backward pass of a step. Owns what it uses.
#[derive(Debug)]
pub struct BackwardProgram<T: TestBackend> {
    /// The forward pass.
    pub forward: Program<T>,
    grads: Arc<[Grads<T>]>,
    experts: Arc<Experts<T>>,
    width: usize,
}

impl<T: TestBackend> GradRig<T> {
    /// Joins the group and allocates what the case needs. Collective.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn new(env: RankEnv<T>, case: &Case) -> Self {
        let rig = Rig::<T>::new(env, case);
        let (group, most) = (&rig.group, case.max_tokens());
        let memory = |bytes: usize| group.allocate(bytes).expect("memory");
        let rows = |label, bytes| group.rows().add(label, bytes).expect("memory");
        let width = case.width(rig.rank());
        let layer = |_| Grads {
            outputs: memory(most * case.sum_bytes()),
            tokens: memory(most * case.sum_bytes()),
            weights: memory(most * case.top_k * 4),
            rows: rows("gradients of rows", case.sum_bytes()),
            arrived: rows("gradients that arrived", case.sum_bytes()),
            row_weights: rows("gradients of weights", 4 * width.max(1)),
        };
        let grads: Vec<_> = (0..case.layers).map(layer).collect();
        let experts = Arc::new(Experts::new(group, case).expect("memory"));
        rig.meet("the memory of the gradients is there");
        Self { grads: grads.into(), experts, rig }
    }

    /// What the steps do.
    pub fn program(&self) -> BackwardProgram<T> {
        BackwardProgram {
            forward: self.rig.program(),
            grads: self.grads.clone(),
            experts: self.experts.clone(),
            width: self.rig.case.width(self.rig.rank()),
        }
    }

    /// The memory of a layer's gradients.
    pub fn layer(&self, index: usize) -> &Grads<T> {
        &self.grads[index]
    }

    /// Writes the inputs of `step` and the gradients of its outputs, and spoils what comes of them.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn write(&self, step: usize) {
        self.rig.write(step);
        let case = &self.rig.case;
        let queue = self.rig.direct();
        for (index, grads) in self.grads.iter().enumerate() {
            let outputs = output_grads(case, step, index, self.rig.rank());
            let group = &self.rig.group;
            group.write(&grads.outputs, &encode(case.dtype, &outputs)).expect("it fits");
            for spoilt in [&grads.tokens, &grads.weights] {
                group.write(spoilt, &vec![0xa5; spoilt.bytes()]).expect("it fits");
            }
            for rows in [&grads.rows, &grads.arrived, &grads.row_weights] {
                let held = group.rows().capacity() as usize * rows.row_bytes();
                let slice = rows.slice().get(0..held).expect("the capacity is reserved");
                // SAFETY: rows below the capacity are mapped, and used on this stream only.
                unsafe { queue.upload(&slice, &vec![0xa5; held]) }.expect("it fits");
            }
        }
    }

    /// Reads what the backward pass of `step` left. The rows are those of the last window.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn seen(&self, step: usize) -> Vec<GradRun> {
        let (rig, case) = (&self.rig, &self.rig.case);
        let read = |slice: &DeviceSlice<'static, T::Backend>, bytes: usize, dtype: DType| {
            let mut data = vec![0; bytes];
            rig.group.read(slice, &mut data).expect("it ran");
            bits(&decode(dtype, &data))
        };
        let layer = |(index, grads): (usize, &Grads<T>)| {
            let tokens = tokens_in(case, step, index, rig.rank());
            let mut total = [0u8; 4];
            rig.group.read(&rig.layer(index).handle.total(), &mut total).expect("it ran");
            let total = u32::from_le_bytes(total) as usize;
            GradRun {
                rows: read(&grads.arrived.slice(), total * case.sum_bytes(), case.dtype),
                tokens: read(&grads.tokens.slice(), tokens * case.sum_bytes(), case.dtype),
                weights: read(&grads.weights.slice(), tokens * case.top_k * 4, DType::Fp32),
            }
        };
        self.grads.iter().enumerate().map(layer).collect()
    }

    /// Runs what `body` queues as one step and waits for it.
    ///
    /// # Panics
    ///
    /// If it is refused or fails.
    pub fn launch(
        &self,
        mode: StepMode,
        body: impl FnOnce(&mut Step<'static, T::Backend>) -> Result<(), BodyError>,
    ) {
        let options = StepOptions::new().with_mode(mode);
        let dispatcher = self.rig.group.dispatcher();
        let mut step = Step::begin(dispatcher, self.rig.direct(), options).expect("queued");
        body(&mut step).expect("queued");
        let number = step.finish().expect("queued").number.expect("it runs");
        self.rig.wait(number).expect("it ends");
    }

    /// Records what `body` queues.
    ///
    /// # Panics
    ///
    /// If it is refused.
    pub fn record(
        &self,
        mode: StepMode,
        body: impl FnOnce(&mut Step<'static, T::Backend>) -> Result<(), BodyError>,
    ) -> StepGraph<'static, T::Backend> {
        let options = StepOptions::new().with_mode(mode);
        let group = &self.rig.group;
        StepGraph::record(group.dispatcher(), group.stream(), options, body).expect("recorded")
    }

    /// Replays `graph` and waits for it.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn replay(&self, graph: &StepGraph<'static, T::Backend>) {
        let number = graph.replay(self.rig.group.stream()).expect("it is current");
        self.rig.wait(number).expect("it ends");
    }
}

impl<T: TestBackend> BackwardProgram<T> {
    /// Queues a forward and a backward pass of all layers, these in reverse.
    ///
    /// # Errors
    ///
    /// What an operation refuses.
    pub fn queue(&self, step: &mut Step<'static, T::Backend>) -> Result<(), BodyError> {
        let layers = 0..self.grads.len();
        if step.options().mode() == StepMode::Rounds {
            return layers.rev().try_for_each(|layer| self.rounds(step, layer));
        }
        self.forward.queue(step)?;
        layers.rev().try_for_each(|layer| self.backward(step, layer))
    }

    /// The arguments of the backward pass of a layer's combine.
    pub fn combine_arguments(&self, layer: usize) -> CombineBackward<'_, 'static, T::Backend> {
        let (memory, grads) = (&self.forward.layers[layer], &self.grads[layer]);
        CombineBackward {
            handle: &memory.handle,
            output_grads: grads.outputs.slice(),
            row_grads: grads.rows.slice(),
            expert_rows: Some(memory.results.slice()),
        }
    }

    /// The arguments of the backward pass of a layer's dispatch.
    pub fn dispatch_arguments(&self, layer: usize) -> DispatchBackward<'_, 'static, T::Backend> {
        let (memory, grads) = (&self.forward.layers[layer], &self.grads[layer]);
        DispatchBackward {
            handle: &memory.handle,
            row_grads: grads.rows.slice(),
            row_weight_grads: (self.width > 0).then(|| grads.row_weights.slice()),
            token_grads: grads.tokens.slice(),
            weight_grads: Some(grads.weights.slice()),
        }
    }

    /// Queues the backward pass of a layer, on the lane of its forward pass.
    ///
    /// # Errors
    ///
    /// What the lane refuses.
    pub fn backward(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let lane = self.forward.lane(layer)?;
        lane.combine_backward(step, &self.combine_arguments(layer))?;
        self.experts_backward(step, layer)?;
        Ok(lane.dispatch_backward(step, &self.dispatch_arguments(layer))?)
    }

    /// Queues the backward pass of a layer's experts, and keeps a copy of what arrived there.
    ///
    /// # Errors
    ///
    /// What the backend refuses.
    pub fn experts_backward(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let (memory, grads) = (&self.forward.layers[layer], &self.grads[layer]);
        let held = step.row_limit(self.forward.group.rows()) as usize * grads.rows.row_bytes();
        let part = |rows: &RowBuffer<T::Backend>| rows.slice().get(0..held).ok_or("reserved");
        // SAFETY: rows below the capacity are mapped, and used on this stream only.
        unsafe { step.queue().copy(&part(&grads.arrived)?, &part(&grads.rows)?) }?;
        let row_weights = (self.width > 0).then(|| grads.row_weights.slice());
        let (rows, row_grads) = (Rows::of(memory), grads.rows.slice());
        self.experts.queue_backward(step.queue(), &rows, &row_grads, row_weights.as_ref())
    }

    /// Queues the backward pass of a layer that ran in rounds, which gathers each window again.
    ///
    /// # Errors
    ///
    /// What the lane refuses.
    pub fn rounds(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let (memory, grads) = (&self.forward.layers[layer], &self.grads[layer]);
        let arguments = RoundsBackward {
            dispatch: self.forward.arguments(layer)?,
            gradient_lane: &self.forward.lane(layer + 1)?,
            output_grads: grads.outputs.slice(),
            expert_rows: memory.results.slice(),
            row_grads: grads.rows.slice(),
            row_weight_grads: (self.width > 0).then(|| grads.row_weights.slice()),
            token_grads: grads.tokens.slice(),
            weight_grads: Some(grads.weights.slice()),
        };
        self.forward.lane(layer)?.rounds_backward(
            step,
            &arguments,
            |step| self.forward.experts(step, layer),
            |step| self.experts_backward(step, layer),
        )
    }
}

//! What a step does on one rank, as a whole and operation by operation.

use std::sync::Arc;

use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{
    BodyError, Combine, Dispatch, ExpertParallel, Lane, Payload, Received, Step, StepMode,
    TokenCount, TopKIds,
};

use crate::backend::TestBackend;
use crate::case::{Case, Order};
use crate::experts::{Experts, Rows};
use crate::rig::Layer;

/// The experts of a case: those of the facade where they can read its rows.
#[derive(Debug)]
pub enum AnyExperts<T: TestBackend> {
    /// Those of the facade.
    Synthetic(SyntheticExperts<T::Backend>),
    /// Those of the suite.
    Own(Experts<T>),
}

/// What a step does on one rank. Owns what it uses.
#[derive(Debug)]
pub struct Program<T: TestBackend> {
    pub(crate) group: ExpertParallel<T::Backend>,
    pub(crate) case: Case,
    pub(crate) layers: Arc<[Layer<T>]>,
    pub(crate) experts: Arc<AnyExperts<T>>,
    pub(crate) own_tokens: usize,
}

impl<T: TestBackend> Program<T> {
    /// Queues all layers, in the order of the case.
    ///
    /// # Errors
    ///
    /// What an operation refuses.
    pub fn queue(&self, step: &mut Step<'static, T::Backend>) -> Result<(), BodyError> {
        if step.options().mode() == StepMode::Rounds {
            return (0..self.case.layers).try_for_each(|layer| self.rounds(step, layer));
        }
        let last = self.case.layers - 1;
        let combined = |layer: usize| layer < last || !self.case.ends_in_dispatch;
        match self.case.order {
            Order::Alternate => {
                for layer in 0..self.case.layers {
                    self.dispatch(step, layer)?;
                    self.experts(step, layer)?;
                    if combined(layer) {
                        self.combine(step, layer)?;
                    }
                }
            }
            Order::Nested => {
                (0..self.case.layers).try_for_each(|layer| self.dispatch(step, layer))?;
                (0..self.case.layers).try_for_each(|layer| self.experts(step, layer))?;
                for layer in (0..self.case.layers).rev().filter(|layer| combined(*layer)) {
                    self.combine(step, layer)?;
                }
            }
        }
        Ok(())
    }

    /// The lane of a layer.
    ///
    /// # Errors
    ///
    /// If the case has no lanes.
    pub fn lane(&self, layer: usize) -> Result<Lane<T::Backend>, BodyError> {
        let lane = self.group.dispatcher().lane(layer % self.case.lanes);
        lane.ok_or_else(|| "the dispatcher has fewer lanes than the case".into())
    }

    /// The arguments of a layer's dispatch.
    ///
    /// # Errors
    ///
    /// If the case has no lanes.
    pub fn arguments(&self, layer: usize) -> Result<Dispatch<'_, 'static, T::Backend>, BodyError> {
        let memory = &self.layers[layer];
        let lane = self.lane(layer)?;
        let (tokens, scales) = match self.case.staging {
            true => (lane.staging(), lane.staged_scales()),
            false => (memory.tokens.slice(), memory.scales.slice()),
        };
        // Bytes bring their scales along; those of FP8 rows are made.
        let brought = matches!(self.case.payload, Payload::Bytes { scale_bytes: 1.., .. });
        let count = match self.case.device_count {
            true => TokenCount::Device(memory.count.slice(), self.own_tokens),
            false => TokenCount::Fixed(self.own_tokens),
        };
        let ids = match self.case.wide_ids {
            true => TopKIds::I64(memory.ids.slice()),
            false => TopKIds::I32(memory.ids.slice()),
        };
        Ok(Dispatch {
            topk_weights: self.case.weights.then(|| memory.weights.slice()),
            scales: brought.then_some(scales),
            received_scales: memory.received_scales.as_ref(),
            ..Dispatch::new(tokens, count, ids, &memory.rows, &memory.handle)
        })
    }

    /// Queues the dispatch of a layer, staging its tokens before if the case says so.
    ///
    /// # Errors
    ///
    /// What the lane refuses.
    pub fn dispatch(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let arguments = self.arguments(layer)?;
        if self.case.staging {
            self.stage(step, layer)?;
        }
        Ok(self.lane(layer)?.dispatch(step, &arguments)?)
    }

    /// Queues copies of a layer's tokens and scales to where a dispatch would put them.
    fn stage(&self, step: &Step<'static, T::Backend>, layer: usize) -> Result<(), BodyError> {
        let (lane, memory) = (self.lane(layer)?, &self.layers[layer]);
        let mut areas = vec![(lane.staging(), memory.tokens.slice())];
        if self.case.scale_bytes() > 0 {
            areas.push((lane.staged_scales(), memory.scales.slice()));
        }
        for (area, tokens) in areas {
            // SAFETY: the lane's staging area is free between its last combine and this dispatch,
            // and all of that is on this stream. The two are different memory.
            unsafe { step.queue().copy(&area, &tokens) }?;
        }
        Ok(())
    }

    /// Queues a whole layer as a loop over its windows.
    ///
    /// # Errors
    ///
    /// What the lane refuses.
    pub fn rounds(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let memory = &self.layers[layer];
        let (results, output) = (memory.results.slice(), memory.output.slice());
        let arguments = self.arguments(layer)?;
        if self.case.staging {
            self.stage(step, layer)?;
        }
        self.lane(layer)?
            .rounds(step, &arguments, &results, &output, |step| self.experts(step, layer))
    }

    /// Queues the experts of a layer.
    ///
    /// # Errors
    ///
    /// What the backend refuses.
    pub fn experts(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let memory = &self.layers[layer];
        match self.experts.as_ref() {
            AnyExperts::Synthetic(experts) => {
                let received = Received {
                    rows: &memory.rows,
                    scales: None,
                    outputs: &memory.results,
                    handle: &memory.handle,
                    row_limit: step.row_limit(self.group.rows()),
                };
                experts.queue(step.queue(), &received)
            }
            AnyExperts::Own(experts) => {
                experts.queue(step.queue(), &Rows::of(memory), &memory.results.slice())
            }
        }
    }

    /// Queues the combine of a layer.
    ///
    /// # Errors
    ///
    /// What the lane refuses.
    pub fn combine(
        &self,
        step: &mut Step<'static, T::Backend>,
        layer: usize,
    ) -> Result<(), BodyError> {
        let memory = &self.layers[layer];
        let arguments = Combine {
            handle: &memory.handle,
            expert_rows: memory.results.slice(),
            output: memory.output.slice(),
        };
        Ok(self.lane(layer)?.combine(step, &arguments)?)
    }
}

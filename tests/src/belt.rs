//! A step that moves state on, as an engine's may that launches steps ahead: what it is given next, and what it
//! has given.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use graph_ep::{
    BodyError, Buffer, EmbeddedStep, EngineGraph, Queue, RecoveryHooks, Step, StepRecord, StepSpec,
};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::engine::Graphs;
use crate::inputs::{Inputs, decode};
use crate::oracle::bits;
use crate::program::Program;

/// Steps of a window, launched before the oldest of them is settled.
pub(crate) const WINDOW: usize = 3;
/// Steps in all.
pub(crate) const STEPS: usize = 8;

/// State of an engine's that every run of its step moves on: inputs of the steps to come, outputs of those
/// that were. The layers of a case are its places; the step is the first of them.
pub(crate) struct Belt<T: TestBackend> {
    /// Where the places are.
    pub(crate) program: Program<T>,
}

impl<T: TestBackend> Belt<T> {
    /// Steps that overflow now and then.
    pub(crate) fn case() -> Case {
        let tokens = vec![4, 9, 6];
        Case { skew: Skew::Rotating, layers: STEPS + WINDOW, tokens, ..Case::new(3) }
            .capacity(12)
            .on::<T>()
    }

    /// What `step` is given on every rank.
    pub(crate) fn inputs(case: &Case, step: usize) -> Vec<Inputs> {
        Inputs::of_all(case, step, 0)
    }

    /// Writes the inputs of `first` and those that follow it.
    pub(crate) fn fill(&self, first: usize) -> Result<(), BodyError> {
        let (group, case) = (&self.program.group, &self.program.case);
        let rank = group.context().rank().index();
        for (place, layer) in self.program.layers.iter().enumerate() {
            let inputs = &Self::inputs(case, first + place)[rank];
            group.write(&layer.tokens, &inputs.tokens)?;
            group.write(&layer.ids, &inputs.id_bytes(case.wide_ids))?;
            group.write(&layer.weights, bytemuck::cast_slice(&inputs.weights))?;
        }
        Ok(())
    }

    /// Takes the last `runs` outputs away.
    fn forget(&self, runs: usize) -> Result<(), BodyError> {
        let backend = self.program.group.context().backend();
        let queue = Queue::direct(backend, self.program.group.stream());
        let kept = self.program.layers.iter().skip(runs);
        for (to, from) in self.program.layers.iter().zip(kept) {
            // SAFETY: the two are different memory of one length, and all work on them is on this stream.
            unsafe { queue.copy(&to.output.slice(), &from.output.slice()) }?;
        }
        Ok(())
    }

    /// One step: makes room for an output, runs the first place, moves the inputs on.
    pub(crate) fn queue(&self, step: &mut Step<'static, T::Backend>) -> Result<(), BodyError> {
        let layers = &self.program.layers;
        let copy = |step: &Step<'static, T::Backend>, to: &Buffer<T::Backend>, from: &Buffer<_>| {
            // SAFETY: as above.
            unsafe { step.queue().copy(&to.slice(), &from.slice()) }
        };
        for place in (1..layers.len()).rev() {
            copy(step, &layers[place].output, &layers[place - 1].output)?;
        }
        self.program.dispatch(step, 0)?;
        self.program.experts(step, 0)?;
        self.program.combine(step, 0)?;
        for place in 1..layers.len() {
            let (to, from) = (&layers[place - 1], &layers[place]);
            copy(step, &to.tokens, &from.tokens)?;
            copy(step, &to.ids, &from.ids)?;
            copy(step, &to.weights, &from.weights)?;
        }
        Ok(())
    }

    /// The output that was made so many runs ago.
    pub(crate) fn output(&self, ago: usize) -> Vec<u32> {
        let (group, case) = (&self.program.group, &self.program.case);
        let mut output = vec![0; self.program.own_tokens * case.sum_bytes()];
        group.read(&self.program.layers[ago].output.slice(), &mut output).expect("it ran");
        bits(&decode(case.dtype, &output))
    }
}

/// Puts the belt back to before the first run that is discarded.
pub(crate) struct Rewind<T: TestBackend> {
    /// The belt.
    pub(crate) belt: Belt<T>,
    /// Steps launched and settled so far.
    pub(crate) counts: Arc<[AtomicUsize; 2]>,
}

impl<T: TestBackend> RecoveryHooks for Rewind<T> {
    fn before_replay(&mut self, _: &StepRecord, attempt: u32) -> Result<(), BodyError> {
        assert_eq!(attempt, 1, "a step of one layer fits when it is replayed");
        let [launched, settled] = self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        // The step itself, and all behind it.
        self.belt.forget(launched - settled)?;
        self.belt.fill(settled)
    }
}

/// The belt in graphs of an engine's.
pub(crate) struct BeltEngine<T: TestBackend> {
    /// The graphs.
    pub(crate) graphs: Graphs<T>,
    /// The belt.
    pub(crate) belt: Belt<T>,
}

impl<T: TestBackend> EngineGraph<T::Backend> for BeltEngine<T> {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, T::Backend>,
    ) -> Result<EmbeddedStep<T::Backend>, BodyError> {
        self.graphs.clear();
        let belt = &self.belt;
        let record = |stream: &_| spec.record(stream, |step| belt.queue(step));
        self.graphs.capture(record).map_err(|(error, _)| error.into())
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        Ok(self.graphs.launch()?)
    }
}

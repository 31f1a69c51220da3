//! What one rank sees of a step, and in which words a check fails where there is nothing to see: with the
//! rank, the step and how it was run, since whoever reads them is often far from the machine.

use std::fmt;

use graph_ep::ep_context::error::chain;
use graph_ep::{
    BodyError, DType, DispatchError, RowBuffer, StepGraph, StepMode, StepOptions, StepRecord,
};

use super::Rig;
use crate::backend::TestBackend;
use crate::inputs::{Inputs, decode};
use crate::oracle::bits;
use crate::outcome::{LayerRun, RankRun};

/// How a step came to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From a graph of its own.
    Replayed,
    /// From a graph of an engine's.
    Embedded,
    /// Without a graph.
    Direct(StepMode),
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Replayed => "replayed graph",
            Self::Embedded => "embedded graph",
            Self::Direct(StepMode::Static) => "direct static",
            Self::Direct(StepMode::Eager { .. }) => "direct eager",
            Self::Direct(StepMode::Rounds) => "direct in rounds",
        })
    }
}

/// What `result` holds.
///
/// # Panics
///
/// If it is an error: with the place, what was tried there, and the error with its causes.
#[track_caller]
pub(super) fn must<V>(at: &str, tried: &str, result: Result<V, impl Into<BodyError>>) -> V {
    result.unwrap_or_else(|error| panic!("{at}: {tried}: {}", chain(&*error.into())))
}

impl<T: TestBackend> Rig<T> {
    /// This rank and the step whose inputs were written, for messages.
    pub(super) fn at(&self, step: usize) -> String {
        format!("rank {}, step {step}", self.rank())
    }

    /// Writes the inputs of `step`, runs it without recording it, and returns what this rank saw.
    ///
    /// # Panics
    ///
    /// If the step fails.
    pub fn run(&self, step: usize, mode: StepMode) -> RankRun {
        let options = StepOptions::new().with_mode(mode);
        self.run_as(Stage::Direct(mode), step, || self.launch(options))
    }

    /// The same eagerly, without a limit.
    ///
    /// # Panics
    ///
    /// If the step fails.
    pub fn run_eager(&self, step: usize) -> RankRun {
        self.run(step, StepMode::Eager { max_rows: u32::MAX })
    }

    /// Writes the inputs of `step`, replays `graph`, and returns what this rank saw.
    ///
    /// # Panics
    ///
    /// If the replay fails.
    pub fn replay(&self, graph: &StepGraph<'static, T::Backend>, step: usize) -> RankRun {
        self.run_as(Stage::Replayed, step, || graph.replay(self.group.stream()))
    }

    /// Writes the inputs of `step`, has `launch` launch it as `stage` says, and returns what this rank saw.
    ///
    /// # Panics
    ///
    /// If the step fails, with rank, step and stage.
    pub fn run_as<E: Into<BodyError>>(
        &self,
        stage: Stage,
        step: usize,
        launch: impl FnOnce() -> Result<u32, E>,
    ) -> RankRun {
        let at = format!("{}, {stage}", self.at(step));
        self.write_at(&at, step);
        let number = must(&at, "it is not launched", launch());
        self.seen(stage, step, number)
    }

    /// Waits for the record of the step that was launched as `number`, and reads what this rank saw
    /// of it. `step` is the step whose inputs were written, and `stage` how it came to run.
    ///
    /// # Panics
    ///
    /// If the step failed, with rank, step and stage.
    pub fn seen(&self, stage: Stage, step: usize, number: u32) -> RankRun {
        let at = format!("{}, {stage}, number {number}", self.at(step));
        let record = must(&at, "it does not end", self.wait(number));
        self.read(&at, step, &record)
    }

    /// The record of the step that was launched as `number`.
    ///
    /// # Errors
    ///
    /// A fault of the group.
    pub fn wait(&self, number: u32) -> Result<StepRecord, DispatchError> {
        self.group.dispatcher().records().wait(number)
    }

    /// Reads what this rank saw of the step with this record.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn seen_with(&self, step: usize, record: &StepRecord) -> RankRun {
        self.read(&format!("{}, number {}", self.at(step), record.step), step, record)
    }

    fn read(&self, at: &str, step: usize, record: &StepRecord) -> RankRun {
        let layers = (0..self.case.layers)
            .map(|index| {
                let combined = !(self.case.ends_in_dispatch && index + 1 == self.case.layers);
                let inputs = Inputs::new(&self.case, step, index, self.rank());
                let tokens = if combined { inputs.count(self.case.top_k) } else { 0 };
                self.read_layer(at, index, tokens)
            })
            .collect();
        RankRun { layers, record: record.into() }
    }

    /// Reads what one layer left, of whose output `tokens` rows count.
    ///
    /// # Panics
    ///
    /// If the stream has failed.
    pub fn seen_layer(&self, index: usize, tokens: usize) -> LayerRun {
        self.read_layer(&format!("rank {}", self.rank()), index, tokens)
    }

    fn read_layer(&self, at: &str, index: usize, tokens: usize) -> LayerRun {
        let at = format!("{at}, layer {index}");
        let layer = self.layer(index);
        let local = self.group.dispatcher().local_experts();
        let mut expert_offsets = vec![0; local + 1];
        let mut tokens_per_expert = vec![0; local];
        let mut total = [0];
        for (what, slice, words) in [
            ("offsets", layer.handle.expert_offsets(), &mut expert_offsets[..]),
            ("tokens of experts", layer.handle.tokens_per_expert(), &mut tokens_per_expert[..]),
            ("rows received", layer.handle.total(), &mut total[..]),
        ] {
            must(&at, what, self.group.read(&slice, bytemuck::cast_slice_mut::<i32, u8>(words)));
        }
        let total = total[0];
        let held = self.group.rows().capacity();
        assert!((0..=held as i32).contains(&total), "{at}: {total} rows in a capacity of {held}");
        let rows = |buffer: Option<&RowBuffer<T::Backend>>| {
            let Some(buffer) = buffer else { return Vec::new() };
            let mut rows = vec![0; total as usize * buffer.row_bytes()];
            must(&at, "rows", self.group.read(&buffer.slice(), &mut rows));
            rows
        };
        let mut output = vec![0; tokens * self.case.sum_bytes()];
        must(&at, "outputs", self.group.read(&layer.output.slice(), &mut output));
        LayerRun {
            output: bits(&decode(self.case.dtype, &output)),
            expert_offsets,
            tokens_per_expert,
            total,
            rows: rows(Some(&layer.rows)),
            scales: rows(layer.received_scales.as_ref()),
            row_weights: bits(&decode(DType::Fp32, &rows(layer.handle.row_weights()))),
            row_experts: bits(&decode(DType::Fp32, &rows(layer.handle.row_experts())))
                .into_iter()
                .map(u32::cast_signed)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::{Case, HostThreads};

    /// What `fails` says when it panics.
    fn said<V>(fails: impl FnOnce() -> V) -> String {
        let Err(panic) = catch_unwind(AssertUnwindSafe(fails)) else { panic!("it has not failed") };
        *panic.downcast::<String>().expect("words")
    }

    #[test]
    fn a_step_that_fails_is_told_with_rank_and_stage() {
        let case = Case::new(2);
        let told = HostThreads::on_ranks(2, |env| {
            let rig = Rig::<HostThreads>::new(env, &case);
            let refused = said(|| rig.run_as(Stage::Embedded, 3, || Err::<u32, _>("no graph")));
            rig.meet("both were refused");
            rig.group.context().abort();
            let number = rig.launch(StepOptions::new()).expect("queued");
            let ended = said(|| rig.seen(Stage::Replayed, 4, number));
            (refused, ended)
        });
        for (rank, (refused, ended)) in told.iter().enumerate() {
            let expected =
                format!("rank {rank}, step 3, embedded graph: it is not launched: no graph");
            assert_eq!(*refused, expected);
            let expected =
                format!("rank {rank}, step 4, replayed graph, number 1: it does not end: ");
            assert!(ended.starts_with(&expected), "{ended}");
        }
    }
}

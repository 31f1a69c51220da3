//! Engines that do not do as they are asked.

use graph_ep::{
    BodyError, Dispatch, EmbeddedStep, EngineGraph, Handle, Queue, RowSet, Step, StepOptions,
    StepSpec, TokenCount, TopKIds,
};

use crate::backend::TestBackend;
use crate::engine::Engine;

/// An engine that changes the capacity of its rank just before it launches for the second time, if it is to.
pub(crate) struct Meddling<T: TestBackend> {
    pub(crate) engine: Engine<T>,
    pub(crate) rows: RowSet<T::Backend>,
    pub(crate) direct: Queue<'static, T::Backend>,
    /// Launches until then.
    pub(crate) left: Option<u32>,
}

impl<T: TestBackend> EngineGraph<T::Backend> for Meddling<T> {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, T::Backend>,
    ) -> Result<EmbeddedStep<T::Backend>, BodyError> {
        self.engine.capture(spec)
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.left = self.left.and_then(|left| left.checked_sub(1));
        if self.left == Some(0) {
            // SAFETY: the queue is that of the stream on which every step of the group runs.
            unsafe { self.rows.plan(self.rows.capacity() - 4)?.commit(&self.direct) }?;
        }
        self.engine.launch()
    }

    fn discard(&mut self) {
        self.engine.discard();
    }
}

/// What an engine records in place of what it was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Other {
    /// A step that holds nothing back, or that the runner's policy does not go with.
    Options(StepOptions),
    /// A step into rows that the runner does not grow.
    Rows,
    /// A step of another group.
    Group,
}

/// An engine that records another step than it was asked for, and can launch it.
pub(crate) struct Stubborn<T: TestBackend> {
    pub(crate) engine: Engine<T>,
    pub(crate) group: graph_ep::ExpertParallel<T::Backend>,
    pub(crate) other: Other,
    pub(crate) rows: RowSet<T::Backend>,
}

impl<T: TestBackend> EngineGraph<T::Backend> for Stubborn<T> {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, T::Backend>,
    ) -> Result<EmbeddedStep<T::Backend>, BodyError> {
        let (group, program) = (&self.group, &self.engine.program);
        let (options, rows) = match self.other {
            Other::Options(options) => (options, group.rows()),
            Other::Rows => (*spec.options(), &self.rows),
            Other::Group => (*spec.options(), group.rows()),
        };
        let into_others = matches!(self.other, Other::Rows);
        let handle = Handle::new(group.dispatcher(), rows)?;
        let received = rows.add("rows of another set", program.case.row_bytes())?;
        let body = |step: &mut Step<'static, T::Backend>| match into_others {
            true => {
                let layer = &program.layers[0];
                let (tokens, ids) = (layer.tokens.slice(), TopKIds::I32(layer.ids.slice()));
                let count = TokenCount::Fixed(program.own_tokens);
                let dispatch = Dispatch::new(tokens, count, ids, &received, &handle);
                Ok(program.lane(0)?.dispatch(step, &dispatch)?)
            }
            false => program.queue(step),
        };
        let record =
            |stream: &_| EmbeddedStep::record(group.dispatcher(), stream, options, &[rows], body);
        self.engine.graphs.capture(record).map_err(|(error, _)| error.into())
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.engine.launch()
    }

    fn discard(&mut self) {
        self.engine.discard();
    }
}

/// An engine whose capture of this number fails.
#[derive(Debug)]
pub(crate) struct FailsOnce<T: TestBackend> {
    pub(crate) engine: Engine<T>,
    pub(crate) at: Option<u32>,
}

impl<T: TestBackend> EngineGraph<T::Backend> for FailsOnce<T> {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, T::Backend>,
    ) -> Result<EmbeddedStep<T::Backend>, BodyError> {
        self.at = self.at.map(|captures| captures.saturating_sub(1));
        if self.at == Some(0) {
            self.at = None;
            self.engine.failures = 1;
        }
        self.engine.capture(spec)
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.engine.launch()
    }

    fn discard(&mut self) {
        self.engine.discard();
    }
}

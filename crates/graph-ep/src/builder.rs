//! From a model's sizes to a rank that is ready to record.

use ep_context::rendezvous::{Rendezvous, all_or_none};
use ep_context::{Backend, ContextError, Deadlines, EpContext, Phase, Rank, RowBuffer, RowSet};
use token_dispatch::{
    DType, DispatchConfig, ExpertMap, Handle, Layout, Payload, RoutingDependence, TokenDispatcher,
    Transfer, Weighting, worst_case_rows,
};

use crate::error::Error;
use crate::layer::ExpertParallel;
use crate::report::MemoryReport;

/// The rows of a capacity factor: ceil(factor · tokens · top_k), rounded up to the alignment. Tokens are those
/// of the rank that has most. `None` if that is no number of rows. May be more than any routing can send,
/// [`worst_case_rows`]; a budget that is [given as a factor](ExpertParallelBuilder::capacity_factor) is not.
pub fn initial_capacity_rows(
    factor: f64,
    tokens: usize,
    top_k: usize,
    alignment: u32,
) -> Option<u32> {
    let rows = (factor * (tokens * top_k) as f64).ceil();
    if !(factor.is_finite() && factor > 0.0 && rows < f64::from(1u32 << 31)) {
        return None;
    }
    // Exact: a whole number below 2³¹.
    (rows as u32).checked_next_multiple_of(alignment)
}

/// Collects what an [`ExpertParallel`] is built from. Every rank collects the same.
#[derive(Clone, Debug)]
pub struct ExpertParallelBuilder {
    hidden: usize,
    experts: usize,
    top_k: usize,
    max_tokens: usize,
    map: Option<ExpertMap>,
    dtype: DType,
    payload: Payload,
    layout: Layout,
    weighting: Weighting,
    backward: bool,
    alignment: u32,
    clear_padding: bool,
    capacity_factor: f64,
    capacity_rows: Option<u32>,
    expert_slots: Option<u32>,
    lanes: usize,
    routing: RoutingDependence,
    max_dispatches: usize,
    first_epoch: u32,
    first_step: u32,
    deadlines: Deadlines,
    memory_limit: Option<u64>,
    transfer: Transfer,
    sm_budget: u32,
}

impl ExpertParallelBuilder {
    pub(crate) fn new(hidden: usize, experts: usize, top_k: usize, max_tokens: usize) -> Self {
        Self {
            hidden,
            experts,
            top_k,
            max_tokens,
            map: None,
            dtype: DType::Bf16,
            payload: Payload::Values,
            layout: Layout::ExpertGrouped,
            weighting: Weighting::Combine,
            backward: false,
            alignment: 16,
            clear_padding: true,
            capacity_factor: 1.25,
            capacity_rows: None,
            expert_slots: None,
            lanes: 1,
            routing: RoutingDependence::Dependent,
            max_dispatches: 256,
            first_epoch: 0,
            first_step: 0,
            deadlines: Deadlines::default(),
            memory_limit: None,
            transfer: Transfer::Auto,
            sm_budget: 0,
        }
    }

    /// A home for each expert (default: contiguous, by floor division).
    #[must_use]
    pub fn expert_map(mut self, map: ExpertMap) -> Self {
        self.map = Some(map);
        self
    }

    /// Expert slots on every rank (default: those that the map uses), so that a map that uses more
    /// can be set later.
    #[must_use]
    pub fn expert_slots(mut self, slots: u32) -> Self {
        self.expert_slots = Some(slots);
        self
    }

    /// The format of tokens and sums (default BF16).
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// What a dispatched row is made of (default: values).
    #[must_use]
    pub fn payload(mut self, payload: Payload) -> Self {
        self.payload = payload;
        self
    }

    /// How received rows lie (default: grouped by expert).
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Who multiplies by the routing weights (default: combine).
    #[must_use]
    pub fn weighting(mut self, weighting: Weighting) -> Self {
        self.weighting = weighting;
        self
    }

    /// Whether backward passes are to be run (default: not).
    #[must_use]
    pub fn backward(mut self, backward: bool) -> Self {
        self.backward = backward;
        self
    }

    /// How rows get from rank to rank (default: [`Transfer::Auto`]).
    #[must_use]
    pub fn transfer(mut self, transfer: Transfer) -> Self {
        self.transfer = transfer;
        self
    }

    /// The most multiprocessors that an operation uses at a time (default: zero, all of them): at least
    /// [`LEAST_SMS`](token_dispatch::LEAST_SMS), which is 4. May differ between ranks.
    #[must_use]
    pub fn sm_budget(mut self, multiprocessors: u32) -> Self {
        self.sm_budget = multiprocessors;
        self
    }

    /// Rows of an expert are padded to a multiple of this power of two (default 16).
    #[must_use]
    pub fn alignment(mut self, rows: u32) -> Self {
        self.alignment = rows;
        self
    }

    /// Whether a dispatch clears the rows with which those of an expert are padded (default: it does); see
    /// [`clear_padding`](token_dispatch::DispatchConfigBuilder::clear_padding) for who may leave them.
    #[must_use]
    pub fn clear_padding(mut self, clear: bool) -> Self {
        self.clear_padding = clear;
        self
    }

    /// The receive budget in multiples of what balanced routing sends (default 1.25): as many rows as
    /// [`initial_capacity_rows`] says, but on no rank more than any routing can send it, for which see
    /// [`worst_case_rows`]. A rank without experts has one row block of the alignment.
    #[must_use]
    pub fn capacity_factor(mut self, factor: f64) -> Self {
        self.capacity_factor = factor;
        self
    }

    /// The receive budget in rows, in place of a factor: exactly as many, also where no routing can send
    /// them all.
    #[must_use]
    pub fn capacity_rows(mut self, rows: u32) -> Self {
        self.capacity_rows = Some(rows);
        self
    }

    /// Dispatch–combine pairs that may be open at once (default 1).
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// Whether routing depends on earlier outputs of the step (default: it does).
    #[must_use]
    pub fn routing(mut self, routing: RoutingDependence) -> Self {
        self.routing = routing;
        self
    }

    /// The most dispatches in a step whose requirements are recorded one by one (default 256).
    #[must_use]
    pub fn max_dispatches(mut self, dispatches: usize) -> Self {
        self.max_dispatches = dispatches;
        self
    }

    /// The epoch before the first; see
    /// [`first_epoch`](token_dispatch::DispatchConfigBuilder::first_epoch).
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// The number of the step before the first; see
    /// [`first_step`](token_dispatch::DispatchConfigBuilder::first_step).
    #[must_use]
    pub fn first_step(mut self, step: u32) -> Self {
        self.first_step = step;
        self
    }

    /// How long each phase may wait.
    #[must_use]
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// The most bytes of device memory for this rank, over everything in the memory report.
    #[must_use]
    pub fn memory_limit(mut self, bytes: Option<u64>) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// What the dispatcher of a group of `world` ranks is configured with, from which
    /// [`token_dispatch::memory`] says what more handles take. Allocates nothing.
    ///
    /// # Errors
    ///
    /// What [`ExpertParallelBuilder::build`] would refuse of the configuration.
    pub fn dispatch_config(&self, world: usize) -> Result<DispatchConfig, Error> {
        let map = match &self.map {
            Some(map) => map.clone(),
            None => ExpertMap::contiguous(self.experts, world)?,
        };
        let mut config = DispatchConfig::builder(self.hidden, self.top_k, self.max_tokens, map)
            .alignment(self.alignment)
            .clear_padding(self.clear_padding)
            .dtype(self.dtype)
            .payload(self.payload)
            .layout(self.layout)
            .weighting(self.weighting)
            .backward(self.backward)
            .lanes(self.lanes)
            .routing(self.routing)
            .max_dispatches(self.max_dispatches)
            .first_epoch(self.first_epoch)
            .first_step(self.first_step)
            .transfer(self.transfer)
            .sm_budget(self.sm_budget);
        if let Some(slots) = self.expert_slots {
            config = config.expert_slots(slots);
        }
        Ok(config.build()?)
    }

    /// What a rank of a group of `world` ranks will allocate. Allocates nothing.
    ///
    /// # Errors
    ///
    /// What [`ExpertParallelBuilder::build`] would refuse of the configuration.
    pub fn memory_report(&self, rank: Rank, world: usize) -> Result<MemoryReport, Error> {
        let config = self.dispatch_config(world)?;
        let (budget, worst) = self.capacities(&config, rank, world)?;
        let mut report = MemoryReport::new(budget, worst);
        for (label, bytes) in token_dispatch::memory::fixed_memory(&config, rank, world) {
            report.fixed(label, bytes);
        }
        let local = config.slots_of(rank) as usize;
        for (label, bytes) in token_dispatch::memory::handle_row_memory(&config, local) {
            report.rows(label, bytes);
        }
        report.rows("received rows", config.row_bytes());
        if config.scale_bytes() > 0 {
            report.rows("received scales", config.scale_bytes());
        }
        report.rows("expert outputs", config.sum_bytes());
        Ok(report)
    }

    /// Meets the other ranks and allocates everything. Collective: all ranks call it with the same
    /// settings, or all get an error that names the difference.
    ///
    /// # Errors
    ///
    /// A setting out of range, a budget above the memory limit, a rank that is missing, differs, or
    /// runs out of memory.
    pub fn build<B: Backend>(
        &self,
        backend: B,
        rendezvous: impl Rendezvous + 'static,
    ) -> Result<ExpertParallel<B>, Error> {
        let (rank, world) = (rendezvous.rank(), rendezvous.world());
        let config = self.dispatch_config(world)?;
        let (budget, worst) = self.capacities(&config, rank, world)?;
        if let Some(limit) = self.memory_limit {
            let needed = self.memory_report(rank, world)?.budget_bytes();
            if needed > limit {
                return Err(Error::MemoryLimit { capacity_rows: budget, needed, limit });
            }
        }
        let context = EpContext::builder(backend, rendezvous)
            .deadlines(self.deadlines)
            .memory_limit(self.memory_limit)
            .build()?;
        let stream = context.stream("step")?;
        let dispatcher = TokenDispatcher::new(&context, config)?;
        self.build_on(dispatcher, stream, Ok((budget, worst)))
    }

    /// The part of building that a resized group repeats. Collective.
    fn build_on<B: Backend>(
        &self,
        dispatcher: TokenDispatcher<B>,
        stream: B::Stream,
        capacities: Result<(u32, u32), Error>,
    ) -> Result<ExpertParallel<B>, Error> {
        let local = capacities
            .and_then(|(budget, worst)| Self::receive(&dispatcher, stream, budget, worst));
        let parts = all_or_none(
            dispatcher.context().rendezvous(),
            "receive buffers",
            local,
            self.deadlines.of(Phase::Setup),
        )
        .map_err(ContextError::from)?;
        Ok(ExpertParallel::new(self.clone(), dispatcher, parts))
    }

    /// A group like `before` with room for `max_tokens` tokens. Collective.
    pub(crate) fn resize<B: Backend>(
        &self,
        before: &ExpertParallel<B>,
        max_tokens: usize,
    ) -> Result<ExpertParallel<B>, Error> {
        let context = before.context();
        let capacity = before.rows().capacity();
        let resized = Self { max_tokens, capacity_rows: Some(capacity), ..self.clone() };
        let dispatcher = before.dispatcher().resized(max_tokens)?;
        let capacities = resized.capacities(dispatcher.config(), context.rank(), context.world());
        resized.build_on(dispatcher, before.stream().clone(), capacities)
    }

    fn receive<B: Backend>(
        dispatcher: &TokenDispatcher<B>,
        stream: B::Stream,
        budget: u32,
        worst: u32,
    ) -> Result<ReceiveParts<B>, Error> {
        let context = dispatcher.context();
        let config = dispatcher.config();
        let rows = RowSet::new(context, &stream, "receive rows", budget, budget.max(worst))?;
        let handle = Handle::new(dispatcher, &rows)?;
        let received = rows.add("received rows", config.row_bytes())?;
        let scales = match config.scale_bytes() {
            0 => None,
            bytes => Some(rows.add("received scales", bytes)?),
        };
        let outputs = rows.add("expert outputs", config.sum_bytes())?;
        Ok(ReceiveParts { stream, rows, handle, received, scales, outputs })
    }

    /// The receive budget and the rows of the worst routing.
    fn capacities(
        &self,
        config: &DispatchConfig,
        rank: Rank,
        world: usize,
    ) -> Result<(u32, u32), Error> {
        let by_factor = initial_capacity_rows(
            self.capacity_factor,
            self.max_tokens,
            self.top_k,
            self.alignment,
        );
        let local = config.slots_of(rank) as usize;
        let worst = worst_case_rows(self.max_tokens * world, self.top_k, local, self.alignment);
        let budget = match self.capacity_rows {
            Some(rows) => rows,
            None => {
                let rows = by_factor.ok_or(Error::CapacityFactor(self.capacity_factor))?;
                rows.min(worst.max(self.alignment))
            }
        };
        Ok((budget, worst))
    }
}

/// What one rank receives with.
pub(crate) struct ReceiveParts<B: Backend> {
    pub(crate) stream: B::Stream,
    pub(crate) rows: RowSet<B>,
    pub(crate) handle: Handle<B>,
    pub(crate) received: RowBuffer<B>,
    pub(crate) scales: Option<RowBuffer<B>>,
    pub(crate) outputs: RowBuffer<B>,
}

#[cfg(test)]
mod tests {
    use ep_context::HostBackend;
    use token_dispatch::ExpertHome;

    use super::*;

    fn rows(builder: &ExpertParallelBuilder, rank: u32, world: usize) -> (u32, u32) {
        let report = builder.memory_report(Rank(rank), world).expect("settings are in range");
        (report.budget_rows, report.worst_case_rows)
    }

    #[test]
    fn a_factor_buys_no_row_that_nothing_can_fill() {
        let builder = ExpertParallel::<HostBackend>::builder(64, 8, 2, 16).alignment(1);
        // One rank is sent two rows of each of its tokens, whatever the routing.
        assert_eq!(initial_capacity_rows(1.25, 16, 2, 1), Some(40));
        assert_eq!(rows(&builder, 0, 1), (32, 32));
        assert_eq!(rows(&builder.clone().capacity_factor(1e6), 0, 1), (32, 32));
        assert_eq!(rows(&builder.clone().capacity_factor(1e6), 1, 2), (64, 64));
        assert_eq!(rows(&builder.clone().capacity_factor(0.5), 0, 1), (16, 32));
        assert_eq!(rows(&builder.clone().capacity_factor(1.25), 1, 2), (40, 64));
        // What is asked for in rows is not changed.
        assert_eq!(rows(&builder.clone().capacity_rows(40), 0, 1), (40, 32));
        // A factor that is no number of rows is still an error.
        let refused = builder.capacity_factor(1e9).memory_report(Rank(0), 1);
        assert!(matches!(refused, Err(Error::CapacityFactor(_))), "{refused:?}");
    }

    #[test]
    fn a_rank_without_experts_has_a_block_of_rows() {
        let homes = (0..8).map(|slot| ExpertHome { rank: Rank(1), slot }).collect();
        let map = ExpertMap::new(homes, 2).expect("every slot once");
        let builder = ExpertParallel::<HostBackend>::builder(64, 8, 2, 16).expert_map(map);
        assert_eq!(rows(&builder, 0, 2), (16, 0));
        assert_eq!(rows(&builder, 1, 2), (48, (64 + 8 * 15) / 16 * 16));
    }
}

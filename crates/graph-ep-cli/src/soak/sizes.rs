//! The sizes of a group, and what a rank of it takes.

use graph_ep::token_dispatch::memory::{handle_memory, handle_row_memory};
use graph_ep::token_dispatch::worst_case_rows;
use graph_ep::{
    Backend, BackendError, Buffer, DType, Error, ExpertParallel, ExpertParallelBuilder,
    HostBackend, Layout, Rank, RoutingDependence, Transfer, Weighting, initial_capacity_rows,
};

use super::kernels::State;

/// The sizes and settings of a group, the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sizes {
    pub(super) ranks: usize,
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) lanes: usize,
    /// Whether all layers are dispatched before any is combined, each on a lane of its own.
    pub(super) nested: bool,
    pub(super) dtype: DType,
    pub(super) layout: Layout,
    pub(super) weighting: Weighting,
    pub(super) alignment: u32,
    pub(super) capacity_factor: f64,
    pub(super) transfer: Transfer,
    pub(super) routing: RoutingDependence,
    /// One step of so many sends all tokens to one rank; zero for none.
    pub(super) burst: u32,
    /// Whether the number of tokens differs from step to step.
    pub(super) ragged: bool,
    pub(super) seed: u64,
    /// The most bytes of a rank.
    pub(super) memory_limit: Option<u64>,
}

impl Sizes {
    /// Whether a group can be made of them within the memory limit, as far as no device is asked.
    pub(super) fn check(&self) -> Result<(), Error> {
        let needed = self.memory()?;
        match self.memory_limit.filter(|limit| needed > *limit) {
            Some(limit) => {
                Err(Error::MemoryLimit { capacity_rows: self.capacity_rows()?, needed, limit })
            }
            None => Ok(()),
        }
    }

    /// Bytes that a rank has at the start: those of its group, of each layer, and of what all layers compute.
    /// The same on all ranks, which have as many experts each.
    pub(super) fn memory(&self) -> Result<u64, Error> {
        let (builder, rank) = (self.builder()?, Rank(0));
        let group = builder.memory_report(rank, self.ranks)?.budget_bytes();
        let config = builder.dispatch_config(self.ranks)?;
        let lists = handle_row_memory(&config, self.experts / self.ranks);
        let row = lists.iter().map(|(_, bytes)| bytes).sum::<usize>() + 2 * self.row_bytes();
        // Of 31, 23 and 16 bits: more than 64 together.
        let rows = self.layers as u128 * u128::from(self.capacity_rows()?) * row as u128;
        let handles = self.layers * handle_memory(&config, rank, self.ranks);
        let tensors: usize = Tensor::ALL.iter().map(|tensor| tensor.bytes(self)).sum();
        let all = u128::from(group) + rows + (handles + tensors) as u128;
        Ok(u64::try_from(all).unwrap_or(u64::MAX))
    }

    pub(super) fn builder(&self) -> Result<ExpertParallelBuilder, Error> {
        let (experts, top_k) = (self.experts, self.top_k);
        let builder =
            ExpertParallel::<HostBackend>::builder(self.hidden, experts, top_k, self.tokens)
                .dtype(self.dtype)
                .layout(self.layout)
                .weighting(self.weighting)
                .alignment(self.alignment)
                .capacity_rows(self.capacity_rows()?)
                .transfer(self.transfer)
                .routing(self.routing)
                .lanes(self.lanes)
                .max_dispatches(self.layers)
                .memory_limit(self.memory_limit);
        Ok(builder)
    }

    /// Rows of every rank at the start: those of the factor, but room for one token at least, as rounds
    /// need, and for no more than there can be.
    pub(super) fn capacity_rows(&self) -> Result<u32, Error> {
        let (factor, tokens, top_k) = (self.capacity_factor, self.tokens, self.top_k);
        let rows = initial_capacity_rows(factor, tokens, top_k, self.alignment);
        let rows = rows.ok_or(Error::CapacityFactor(factor))?;
        let slots = self.experts / self.ranks;
        let worst = worst_case_rows(tokens * self.ranks, top_k, slots, self.alignment);
        Ok(rows.max(self.least_rows()).min(worst))
    }

    pub(super) fn least_rows(&self) -> u32 {
        self.top_k.min(self.experts / self.ranks) as u32 * self.alignment
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }
}

/// The buffers of a rank that are no rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tensor {
    State,
    /// The state as a step finds it.
    Before,
    /// How many tokens.
    Count,
    Tokens,
    Ids,
    Weights,
    Outputs,
}

impl Tensor {
    const ALL: [Self; 7] = [
        Self::State,
        Self::Before,
        Self::Count,
        Self::Tokens,
        Self::Ids,
        Self::Weights,
        Self::Outputs,
    ];

    fn bytes(self, sizes: &Sizes) -> usize {
        let tokens = sizes.layers * sizes.tokens;
        match self {
            Self::State | Self::Before => size_of::<State>(),
            Self::Count => size_of::<u32>(),
            Self::Tokens | Self::Outputs => tokens * sizes.row_bytes(),
            Self::Ids => tokens * sizes.top_k * size_of::<i32>(),
            Self::Weights => tokens * sizes.top_k * size_of::<f32>(),
        }
    }

    /// Counts against the memory limit, unlike what an engine usually has besides a group.
    pub(super) fn allocate<B: Backend>(
        self,
        group: &ExpertParallel<B>,
        sizes: &Sizes,
    ) -> Result<Buffer<B>, BackendError> {
        let label = match self {
            Self::State | Self::Before => "state of a soak",
            Self::Count => "number of tokens",
            Self::Tokens => "tokens",
            Self::Ids => "expert ids",
            Self::Weights => "weights",
            Self::Outputs => "outputs",
        };
        group.context().allocate(label, self.bytes(sizes))
    }
}

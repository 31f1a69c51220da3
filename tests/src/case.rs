//! The sizes and settings of one exchange, chosen by a check or generated.

use graph_ep::token_dispatch::reference::{Payload, placement, required};
use graph_ep::token_dispatch::{ExpertHome, worst_case_rows};
use graph_ep::{
    DType, ExpertMap, ExpertParallel, ExpertParallelBuilder, HostBackend, Rank, RoutingDependence,
};
use proptest::prelude::*;

use crate::backend::patient;

/// Where tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skew {
    /// Every expert alike.
    Even,
    /// Three tokens of four have this expert among theirs.
    Hot(usize),
    /// The hot expert moves by one with each step.
    Rotating,
}

/// In which order the layers of a step use lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Each layer is combined before the next is dispatched; layer `l` on lane `l % lanes`.
    Alternate,
    /// All layers are dispatched, each on a lane of its own, and combined in reverse.
    Nested,
}

/// One exchange: sizes and settings, the same on all ranks, from which all inputs follow.
#[derive(Clone, Debug)]
pub struct Case {
    /// Values of a row.
    pub hidden: usize,
    /// Experts of the model.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// The format of rows.
    pub dtype: DType,
    /// The most tokens of each rank; one entry a rank.
    pub tokens: Vec<usize>,
    /// Rows of an expert are padded to a multiple of this.
    pub alignment: u32,
    /// Receive rows of each rank before the first step; `None` for the worst case.
    pub capacity: Option<Vec<u32>>,
    /// Layers of a step.
    pub layers: usize,
    /// Lanes.
    pub lanes: usize,
    /// How layers use them.
    pub order: Order,
    /// Whether the last layer of a step is not combined.
    pub ends_in_dispatch: bool,
    /// Ids are i64 rather than i32.
    pub wide_ids: bool,
    /// Whether tokens have weights.
    pub weights: bool,
    /// Whether the number of tokens is a device word, which differs from step to step.
    pub device_count: bool,
    /// Whether tokens are written into the lane's staging area rather than copied by the dispatch.
    pub staging: bool,
    /// Whether some ids are −1, out of range, or repeated.
    pub bad_ids: bool,
    /// The rank of each expert; `None` for contiguous shares.
    pub placement: Option<Vec<usize>>,
    /// Whether routing is said to depend on outputs.
    pub routing: RoutingDependence,
    /// The epoch before the first.
    pub first_epoch: u32,
    /// Where tokens go.
    pub skew: Skew,
    /// What inputs are derived from.
    pub seed: u64,
}

impl Case {
    /// A small case on `world` ranks: two experts a rank, top-2, five tokens each, room for anything.
    pub fn new(world: usize) -> Self {
        Self {
            hidden: 8,
            experts: 2 * world,
            top_k: 2.min(2 * world),
            dtype: DType::Bf16,
            tokens: vec![5; world],
            alignment: 4,
            capacity: None,
            layers: 1,
            lanes: 1,
            order: Order::Alternate,
            ends_in_dispatch: false,
            wide_ids: false,
            weights: true,
            device_count: false,
            staging: false,
            bad_ids: false,
            placement: None,
            routing: RoutingDependence::Independent,
            first_epoch: 0,
            skew: Skew::Even,
            seed: 1,
        }
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.tokens.len()
    }

    /// The same capacity on every rank.
    #[must_use]
    pub fn capacity(mut self, rows: u32) -> Self {
        self.capacity = Some(vec![rows; self.world()]);
        self
    }

    /// The most tokens of any rank, for which lanes are made.
    pub fn max_tokens(&self) -> usize {
        self.tokens.iter().copied().max().unwrap_or(0).max(1)
    }

    /// The rank that holds each expert.
    pub fn rank_of(&self) -> Vec<usize> {
        self.placement.clone().unwrap_or_else(|| {
            let shares = (0..self.world()).flat_map(|rank| {
                placement::share(self.experts, self.world(), rank).map(move |_expert| rank)
            });
            shares.collect()
        })
    }

    /// The same for the reference.
    ///
    /// # Panics
    ///
    /// If the case places an expert outside the group.
    pub fn reference_map(&self) -> placement::ExpertMap {
        placement::ExpertMap::from_ranks(self.rank_of(), self.world()).expect("ranks of the group")
    }

    /// The format of rows, as the reference calls it.
    pub fn payload(&self) -> Payload {
        match self.dtype {
            DType::Bf16 => Payload::Bf16,
            DType::Fp16 => Payload::Fp16,
            DType::Fp32 => Payload::Fp32,
        }
    }

    /// Experts of a rank.
    pub fn held_by(&self, rank: usize) -> usize {
        self.rank_of().iter().filter(|&&holder| holder == rank).count()
    }

    /// The receive rows of `rank` before the first step.
    pub fn rows_of(&self, rank: usize) -> u32 {
        match &self.capacity {
            Some(rows) => rows[rank],
            None => self.worst_case(),
        }
    }

    /// Rows that no routing exceeds on any rank, by the rule of the reference.
    pub fn worst_case(&self) -> u32 {
        let tokens = self.max_tokens() * self.world();
        let map = self.reference_map();
        let rows =
            required::worst_case_rows(tokens, self.top_k, &map, self.alignment.max(1) as usize);
        rows as u32
    }

    /// The rows up to which `rank` can grow.
    pub fn max_rows_of(&self, rank: usize) -> u32 {
        let tokens = self.max_tokens() * self.world();
        worst_case_rows(tokens, self.top_k, self.held_by(rank), self.alignment)
            .max(self.rows_of(rank))
    }

    /// The settings of `rank`.
    ///
    /// # Panics
    ///
    /// If the case places an expert outside the group.
    pub fn builder(&self, rank: Rank) -> ExpertParallelBuilder {
        let mut next = vec![0; self.world()];
        let homes = self.rank_of().into_iter().map(|holder| {
            next[holder] += 1;
            ExpertHome { rank: Rank::from_index(holder), slot: next[holder] - 1 }
        });
        let map = ExpertMap::new(homes.collect(), self.world()).expect("slots count up");
        ExpertParallel::<HostBackend>::builder(
            self.hidden,
            self.experts,
            self.top_k,
            self.max_tokens(),
        )
        .expert_map(map)
        .dtype(self.dtype)
        .alignment(self.alignment)
        .capacity_rows(self.rows_of(rank.index()))
        .lanes(self.lanes)
        .routing(self.routing)
        .first_epoch(self.first_epoch)
        .deadlines(patient())
    }

    /// Any small case, with room for everything.
    pub fn any() -> impl Strategy<Value = Self> {
        let sizes = (1_usize..=4, 0_usize..6, 1_usize..=4, 0_u32..4, 1_usize..=3);
        let flags = (any::<[bool; 5]>(), 1_usize..=2, any::<bool>());
        let skew =
            prop_oneof![Just(Skew::Even), (0_usize..4).prop_map(Skew::Hot), Just(Skew::Rotating),];
        let dtype = prop::sample::select(vec![DType::Bf16, DType::Fp16, DType::Fp32]);
        (sizes, flags, skew, dtype, any::<u64>())
            .prop_flat_map(|(sizes, flags, skew, dtype, seed)| {
                let (world, spare, top_k, alignment, layers) = sizes;
                let experts = world + spare;
                let tokens = prop::collection::vec(0_usize..=6, world);
                let placement =
                    prop::option::weighted(0.3, prop::collection::vec(0..world, experts));
                (
                    Just((world, experts, top_k, alignment, layers, flags, skew, dtype, seed)),
                    tokens,
                    placement,
                )
            })
            .prop_map(|(fixed, tokens, placement)| {
                let (world, experts, top_k, alignment, layers, flags, skew, dtype, seed) = fixed;
                let ([wide_ids, weights, device_count, staging, bad_ids], lanes, near_wrap) = flags;
                Self {
                    experts,
                    top_k: top_k.min(experts),
                    dtype,
                    tokens,
                    alignment: 1 << alignment,
                    layers,
                    lanes,
                    wide_ids,
                    weights,
                    device_count,
                    staging,
                    bad_ids,
                    placement,
                    first_epoch: if near_wrap { u32::MAX - 2 } else { 0 },
                    skew,
                    seed,
                    ..Self::new(world)
                }
            })
    }
}

//! The sizes and settings of one exchange, chosen by a check or generated.

use graph_ep::token_dispatch::reference::{self, placement, required};
use graph_ep::token_dispatch::{ExpertHome, fp8, worst_case_rows};
use graph_ep::{
    DType, ExpertMap, ExpertParallel, ExpertParallelBuilder, HostBackend, Layout, Payload, Rank,
    RoutingDependence, Weighting,
};
use proptest::prelude::*;

use crate::backend::{TestBackend, patient};
use crate::harness;

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
    /// The format of sums, and of rows that are values.
    pub dtype: DType,
    /// What rows are made of.
    pub payload: Payload,
    /// How received rows lie.
    pub layout: Layout,
    /// Who multiplies by the weights.
    pub weighting: Weighting,
    /// Whether there are backward passes.
    pub backward: bool,
    /// The most tokens of each rank; one entry a rank.
    pub tokens: Vec<usize>,
    /// Rows of an expert are padded to a multiple of this.
    pub alignment: u32,
    /// Whether a dispatch clears these rows.
    pub clear_padding: bool,
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
    /// Whether values are so small that their sums may round to zero, of either sign.
    pub tiny: bool,
    /// The rank of each expert, slots in the order of ids; `None` for contiguous shares.
    pub placement: Option<Vec<usize>>,
    /// Where experts are, in place of `placement`.
    pub map: Option<ExpertMap>,
    /// Expert slots of each rank; `None` for those that the map uses.
    pub slots: Option<u32>,
    /// Whether routing is said to depend on outputs.
    pub routing: RoutingDependence,
    /// The epoch before the first.
    pub first_epoch: u32,
    /// The number of the step before the first.
    pub first_step: u32,
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
            payload: Payload::Values,
            layout: Layout::ExpertGrouped,
            weighting: Weighting::Combine,
            backward: false,
            tokens: vec![5; world],
            alignment: 4,
            clear_padding: true,
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
            tiny: false,
            placement: None,
            map: None,
            slots: None,
            routing: RoutingDependence::Independent,
            first_epoch: 0,
            first_step: 0,
            skew: Skew::Even,
            seed: 1,
        }
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.tokens.len()
    }

    /// The case on no more ranks than `T` has, and on two at least: those at the end are left out, with the
    /// experts that they would have where all ranks have the same number. A check that has fewer ranks than
    /// its case was written for shows less: a [harness] that is not libtest's says how many there were.
    #[must_use]
    pub fn on<T: TestBackend>(mut self) -> Self {
        let (whole, world) = (self.world(), self.world().min(T::most_ranks().max(2)));
        if world == whole {
            return self;
        }
        harness::on_fewer_ranks();
        assert!(self.map.is_none(), "a map is made for a number of ranks");
        self.tokens.truncate(world);
        if let Some(rows) = &mut self.capacity {
            rows.truncate(world);
        }
        match &mut self.placement {
            Some(ranks) => ranks.iter_mut().for_each(|rank| *rank %= world),
            None if self.experts.is_multiple_of(whole) => {
                self.experts = self.experts / whole * world
            }
            None => {}
        }
        self.top_k = self.top_k.min(self.experts);
        self
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

    /// Whether received rows have no groups.
    pub fn flat(&self) -> bool {
        self.layout == Layout::Flat
    }

    /// Whether the experts multiply by the weights, rather than combine.
    pub fn caller_weighs(&self) -> bool {
        self.flat() || self.weighting == Weighting::Caller
    }

    /// Whether the synthetic experts of the facade can read its rows.
    pub fn plain(&self) -> bool {
        self.payload == Payload::Values && !self.caller_weighs()
    }

    /// Bytes of a received row.
    pub fn row_bytes(&self) -> usize {
        match self.payload {
            Payload::Values => self.sum_bytes(),
            Payload::Bytes { row_bytes, .. } => row_bytes,
            Payload::Fp8 => self.hidden,
        }
    }

    /// Bytes of a received row of scales.
    pub fn scale_bytes(&self) -> usize {
        match self.payload {
            Payload::Values => 0,
            Payload::Bytes { scale_bytes, .. } => scale_bytes,
            Payload::Fp8 => fp8::scale_row_bytes(self.hidden),
        }
    }

    /// Bytes of a row that a token is given as.
    pub fn token_bytes(&self) -> usize {
        match self.payload {
            Payload::Values | Payload::Fp8 => self.sum_bytes(),
            Payload::Bytes { row_bytes, .. } => row_bytes,
        }
    }

    /// Bytes of a row of expert outputs, of a sum, of a gradient.
    pub fn sum_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// Weights beside each received row of `rank`, where the caller multiplies by them.
    pub fn width(&self, rank: usize) -> usize {
        match (self.layout, self.weighting) {
            (Layout::Flat, _) => self.top_k.min(self.slots_of(rank)),
            (Layout::ExpertGrouped, Weighting::Caller) => 1,
            (Layout::ExpertGrouped, Weighting::Combine) => 0,
        }
    }

    /// Where experts are.
    ///
    /// # Panics
    ///
    /// If the case places an expert outside the group.
    pub fn expert_map(&self) -> ExpertMap {
        if let Some(map) = &self.map {
            return map.clone();
        }
        let mut next = vec![0; self.world()];
        let homes = self.rank_of().into_iter().map(|holder| {
            next[holder] += 1;
            ExpertHome { rank: Rank::from_index(holder), slot: next[holder] - 1 }
        });
        ExpertMap::new(homes.collect(), self.world()).expect("slots count up")
    }

    /// The rank that holds each expert by the case's placement.
    fn rank_of(&self) -> Vec<usize> {
        self.placement.clone().unwrap_or_else(|| {
            let shares = (0..self.world()).flat_map(|rank| {
                placement::share(self.experts, self.world(), rank).map(move |_expert| rank)
            });
            shares.collect()
        })
    }

    /// Where tokens of `source` go, as the reference has it: the home of each expert is on the
    /// source's own rank if one is, and else the one whose turn it is, by the source's rank.
    ///
    /// # Panics
    ///
    /// If the case places an expert outside the group.
    pub fn reference_map(&self, source: usize) -> placement::ExpertMap {
        let map = self.expert_map();
        let ranks = map.homes().iter().map(|homes| {
            let ranks: Vec<usize> = homes.iter().map(|home| home.rank.index()).collect();
            if ranks.contains(&source) { source } else { ranks[source % ranks.len()] }
        });
        placement::ExpertMap::from_ranks(ranks.collect(), self.world()).expect("ranks of the group")
    }

    /// The expert in each slot of a rank.
    pub fn slots(&self, rank: usize) -> Vec<Option<usize>> {
        let experts = self.expert_map().experts_of(Rank::from_index(rank));
        let mut slots: Vec<_> = experts.into_iter().map(|e| e.map(|e| e as usize)).collect();
        slots.resize(self.slots_of(rank), None);
        slots
    }

    /// Expert slots of a rank.
    pub fn slots_of(&self, rank: usize) -> usize {
        self.slots.unwrap_or_else(|| self.expert_map().slots_of(Rank::from_index(rank))) as usize
    }

    /// The format of sums, as the reference calls it.
    pub fn number(&self) -> reference::Format {
        match self.dtype {
            DType::Bf16 => reference::Format::Bf16,
            DType::Fp16 => reference::Format::Fp16,
            DType::Fp32 => reference::Format::Fp32,
        }
    }

    /// The receive rows of `rank` before the first step.
    pub fn rows_of(&self, rank: usize) -> u32 {
        match &self.capacity {
            Some(rows) => rows[rank],
            None => self.worst_case(),
        }
    }

    /// Rows that no routing exceeds on any rank: by the rule of the reference, where every slot holds
    /// an expert.
    pub fn worst_case(&self) -> u32 {
        let of_rank = |rank| {
            let held = vec![rank; self.slots_of(rank)];
            let map = placement::ExpertMap::from_ranks(held, self.world()).expect("a rank");
            let tokens = self.max_tokens() * self.world();
            required::worst_case_rows(tokens, self.top_k, &map, self.alignment.max(1) as usize)
        };
        (0..self.world()).map(of_rank).max().unwrap_or(0) as u32
    }

    /// The rows up to which `rank` can grow.
    pub fn max_rows_of(&self, rank: usize) -> u32 {
        let tokens = self.max_tokens() * self.world();
        worst_case_rows(tokens, self.top_k, self.slots_of(rank), self.alignment)
            .max(self.rows_of(rank))
    }

    /// The settings of `rank`.
    ///
    /// # Panics
    ///
    /// If the case places an expert outside the group.
    pub fn builder(&self, rank: Rank) -> ExpertParallelBuilder {
        let builder = ExpertParallel::<HostBackend>::builder(
            self.hidden,
            self.experts,
            self.top_k,
            self.max_tokens(),
        )
        .expert_map(self.expert_map())
        .dtype(self.dtype)
        .payload(self.payload)
        .layout(self.layout)
        .weighting(self.weighting)
        .backward(self.backward)
        .alignment(self.alignment)
        .clear_padding(self.clear_padding)
        .capacity_rows(self.rows_of(rank.index()))
        .lanes(self.lanes)
        .routing(self.routing)
        .first_epoch(self.first_epoch)
        .first_step(self.first_step)
        .deadlines(patient());
        match self.slots {
            Some(slots) => builder.expert_slots(slots),
            None => builder,
        }
    }

    /// Any small case, with room for everything.
    pub fn any() -> impl Strategy<Value = Self> {
        let sizes = (1_usize..=4, 0_usize..6, 1_usize..=4, 0_u32..4, 1_usize..=3);
        let flags = (any::<[bool; 5]>(), 1_usize..=2, any::<bool>());
        let skew =
            prop_oneof![Just(Skew::Even), (0_usize..4).prop_map(Skew::Hot), Just(Skew::Rotating),];
        let dtype = prop::sample::select(vec![DType::Bf16, DType::Fp16, DType::Fp32]);
        let bytes = (1_usize..=5, 0_usize..=2);
        let payload = prop_oneof![
            3 => Just(Payload::Values),
            1 => Just(Payload::Fp8),
            1 => bytes.prop_map(|(row, scales)| Payload::Bytes {
                row_bytes: 16 * row,
                scale_bytes: 16 * scales,
            }),
        ];
        let weighting = prop::sample::select(vec![Weighting::Combine, Weighting::Caller]);
        let layout = prop::sample::select(vec![Layout::ExpertGrouped, Layout::Flat]);
        let format = (dtype, payload, layout, weighting);
        (sizes, flags, skew, format, any::<u64>())
            .prop_flat_map(|(sizes, flags, skew, format, seed)| {
                let (world, spare, top_k, alignment, layers) = sizes;
                let experts = world + spare;
                let tokens = prop::collection::vec(0_usize..=6, world);
                let placement =
                    prop::option::weighted(0.3, prop::collection::vec(0..world, experts));
                (
                    Just((world, experts, top_k, alignment, layers, flags, skew, format, seed)),
                    tokens,
                    placement,
                )
            })
            .prop_map(|(fixed, tokens, placement)| {
                let (world, experts, top_k, alignment, layers, flags, skew, format, seed) = fixed;
                let (dtype, payload, layout, weighting) = format;
                let ([wide_ids, weights, device_count, staging, bad_ids], lanes, near_wrap) = flags;
                Self {
                    experts,
                    top_k: top_k.min(experts),
                    dtype,
                    // FP8 rows are of 16 values at least.
                    hidden: if payload == Payload::Fp8 { 144 } else { 8 },
                    payload,
                    layout,
                    weighting,
                    // Quantised rows are staged by the dispatch alone.
                    staging: staging && payload != Payload::Fp8,
                    tokens,
                    alignment: 1 << alignment,
                    layers,
                    lanes,
                    wide_ids,
                    weights,
                    device_count,
                    bad_ids,
                    placement,
                    first_epoch: if near_wrap { u32::MAX - 2 } else { 0 },
                    first_step: if near_wrap { u32::MAX - 1 } else { 0 },
                    skew,
                    seed,
                    ..Self::new(world)
                }
            })
    }
}

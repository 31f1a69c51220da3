//! What is fixed for the life of a dispatcher.

use ep_context::Rank;

use crate::dtype::DType;
use crate::error::DispatchError;
use crate::experts::ExpertMap;
use crate::geometry::count_worst_case;
use crate::kernels::{MOST_RANKS, MOST_TOKENS, WARP_LANES};
use crate::launch;
use crate::params::STALE;

/// Whether the routing of a dispatch depends on what earlier dispatches of the step gave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingDependence {
    /// As in a model: after an overflow the rows that were left out change what later layers route.
    /// Requirements count up to the first over-budget dispatch of the step, over all ranks; the
    /// dispatches behind it move no rows.
    Dependent,
    /// As in a recorded trace: every dispatch counts, and moves what fits.
    Independent,
}

/// What a dispatched row is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// `hidden` values of the configuration's number format, as the caller gives them.
    Values,
    /// Bytes that nobody looks at, forwarded as they are: FP8, FP4, whatever the experts read. With
    /// a row of scales beside each, or none if that has no bytes.
    Bytes {
        /// Bytes of a row: a multiple of 16.
        row_bytes: usize,
        /// Bytes of a row of scales: a multiple of 16.
        scale_bytes: usize,
    },
    /// `hidden` values that are quantised where they are sent: FP8 e4m3 with an fp32 scale for each
    /// 128 of them; see [`fp8`](crate::fp8).
    Fp8,
}

/// How received rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Grouped by expert, one row for each pair of a token and a local expert.
    ExpertGrouped,
    /// In the order of arrival, one row for each token, with the token's local experts beside it.
    Flat,
}

/// How rows get from rank to rank in steps in which the host waits for nothing. Every way gives the same
/// bits. Eager steps, rounds and backward passes pull, and so does what
/// [`DispatchConfig::can_push`] refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// Push, unless ranks share a device.
    Auto,
    /// A receiver reads rows from its peers. Several operations, of which those that wait hold a
    /// single block, so that ranks can share a device.
    Pull,
    /// A sender writes rows to its peers, in one operation with what a receiver does. Lanes have room for
    /// a row of every token of every other rank. Ranks that share a device take equal parts of its
    /// multiprocessors.
    Push,
}

/// Who multiplies by the routing weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weighting {
    /// Combine does.
    Combine,
    /// The caller does, in its experts: dispatch brings the weights along with the rows.
    Caller,
}

/// Everything that is fixed for the life of a dispatcher, and equal on all ranks.
#[derive(Clone, Debug)]
pub struct DispatchConfig {
    pub(crate) hidden: usize,
    pub(crate) top_k: usize,
    pub(crate) max_tokens: usize,
    pub(crate) alignment: u32,
    pub(crate) clear_padding: bool,
    pub(crate) dtype: DType,
    pub(crate) payload: Payload,
    pub(crate) layout: Layout,
    pub(crate) weighting: Weighting,
    pub(crate) backward: bool,
    pub(crate) experts: ExpertMap,
    pub(crate) expert_slots: Option<u32>,
    pub(crate) lanes: usize,
    pub(crate) routing: RoutingDependence,
    pub(crate) max_dispatches: usize,
    pub(crate) record_ring: usize,
    pub(crate) first_epoch: u32,
    pub(crate) first_step: u32,
    pub(crate) transfer: Transfer,
    pub(crate) sm_budget: u32,
}

/// The fewest multiprocessors with which an operation can be told to do: with those, blocks that wait leave
/// room for blocks that are waited for.
pub const LEAST_SMS: u32 = 4;

/// The largest values that the index arithmetic of a step is built for.
pub(crate) const MAX_TOKENS: usize = 1 << 20;
pub(crate) const MAX_TOP_K: usize = 64;
pub(crate) const MAX_EXPERTS: usize = 1 << 16;
pub(crate) const MAX_HIDDEN: usize = 1 << 20;
pub(crate) const MAX_ALIGNMENT: u32 = 1 << 12;

impl DispatchConfig {
    /// Starts a configuration: rows of `hidden` values, `top_k` of the experts of `experts` for each
    /// token, and at most `max_tokens` tokens on a rank in one dispatch.
    pub fn builder(
        hidden: usize,
        top_k: usize,
        max_tokens: usize,
        experts: ExpertMap,
    ) -> DispatchConfigBuilder {
        DispatchConfigBuilder {
            config: Self {
                hidden,
                top_k,
                max_tokens,
                alignment: 16,
                clear_padding: true,
                dtype: DType::Bf16,
                payload: Payload::Values,
                layout: Layout::ExpertGrouped,
                weighting: Weighting::Combine,
                backward: false,
                experts,
                expert_slots: None,
                lanes: 1,
                routing: RoutingDependence::Dependent,
                max_dispatches: 256,
                record_ring: 64,
                first_epoch: 0,
                first_step: 0,
                transfer: Transfer::Auto,
                sm_budget: 0,
            },
        }
    }

    /// Values in a row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Experts of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The most tokens of a rank in one dispatch.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Records that are kept, see [`record_ring`](DispatchConfigBuilder::record_ring).
    pub fn record_ring(&self) -> usize {
        self.record_ring
    }

    /// The rows of each expert start at a multiple of this, and are padded to one.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Whether a dispatch clears the rows with which those of an expert are padded; see
    /// [`DispatchConfigBuilder::clear_padding`].
    pub fn clears_padding(&self) -> bool {
        self.clear_padding
    }

    /// The format of expert outputs, partial sums and outputs, and of tokens that are values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// What a dispatched row is made of.
    pub fn payload(&self) -> Payload {
        self.payload
    }

    /// How received rows lie.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Who multiplies by the routing weights.
    pub fn weighting(&self) -> Weighting {
        self.weighting
    }

    /// Where the experts are when the dispatcher is made. Where they are now, the dispatcher
    /// [says](crate::TokenDispatcher::expert_map).
    pub fn experts(&self) -> &ExpertMap {
        &self.experts
    }

    /// Bytes of a received row.
    pub fn row_bytes(&self) -> usize {
        match self.payload {
            Payload::Values => self.sum_bytes(),
            Payload::Bytes { row_bytes, .. } => row_bytes,
            Payload::Fp8 => self.hidden,
        }
    }

    /// Bytes of a received row of scales; zero if there are none.
    pub fn scale_bytes(&self) -> usize {
        match self.payload {
            Payload::Values => 0,
            Payload::Bytes { scale_bytes, .. } => scale_bytes,
            Payload::Fp8 => crate::fp8::scale_row_bytes(self.hidden),
        }
    }

    /// Bytes of a token's row as the caller gives it.
    pub fn token_bytes(&self) -> usize {
        match self.payload {
            Payload::Fp8 => self.sum_bytes(),
            Payload::Values | Payload::Bytes { .. } => self.row_bytes(),
        }
    }

    /// Bytes of a row of expert outputs, of a partial sum, of an output.
    pub fn sum_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// How rows get from rank to rank.
    pub fn transfer(&self) -> Transfer {
        self.transfer
    }

    /// The most multiprocessors that an operation uses; zero for all.
    pub fn sm_budget(&self) -> u32 {
        self.sm_budget
    }

    /// Whether rows can be pushed, and lanes have room for that: at most 32 ranks and experts of a token,
    /// lists whose counts fit in shared memory (4096 experts and ranks, in all), rows that are not
    /// quantised on the way.
    pub fn can_push(&self) -> bool {
        let ranks = self.experts.ranks();
        self.transfer != Transfer::Pull
            && ranks <= MOST_RANKS
            && self.top_k <= WARP_LANES
            && self.max_tokens <= MOST_TOKENS
            && ranks * (self.most_slots() as usize + 2) <= launch::MOST_PUSH_COLUMNS
            && self.payload != Payload::Fp8
    }

    /// Local experts that the flat layout names beside each row of a rank that holds
    /// `local_experts`.
    pub fn flat_width(&self, local_experts: usize) -> usize {
        self.top_k.min(local_experts)
    }

    /// Expert slots of a rank: the rows of each are a group of their own.
    pub fn slots_of(&self, rank: Rank) -> u32 {
        self.expert_slots.unwrap_or_else(|| self.experts.slots_of(rank))
    }

    /// The most expert slots of any rank.
    pub fn most_slots(&self) -> u32 {
        self.expert_slots.unwrap_or_else(|| self.experts.most_slots())
    }

    /// The same with another number of tokens.
    pub(crate) fn with_max_tokens(&self, max_tokens: usize) -> Result<Self, DispatchError> {
        DispatchConfigBuilder { config: Self { max_tokens, ..self.clone() } }.build()
    }

    /// Refuses sizes, each of them in range, of which a step may require more rows than it can say.
    fn check_worst_case(&self) -> Result<(), DispatchError> {
        let (ranks, slots) = (self.experts.ranks(), self.most_slots() as usize);
        let (tokens, top_k) = (self.max_tokens, self.top_k);
        let rows = count_worst_case(ranks * tokens, top_k, slots, self.alignment);
        if rows < u128::from(STALE) {
            return Ok(());
        }
        Err(DispatchError::Config {
            field: "receive rows of the worst routing",
            value: format!("{rows} ({ranks} ranks, {tokens} tokens, top-{top_k}, {slots} slots)"),
            limit: format!("at most {}", STALE - 1),
        })
    }

    /// The fields that must be equal on all ranks, in words.
    pub(crate) fn fields(&self) -> Vec<(&'static str, String)> {
        vec![
            ("hidden", self.hidden.to_string()),
            ("top_k", self.top_k.to_string()),
            ("max_tokens", self.max_tokens.to_string()),
            ("alignment", self.alignment.to_string()),
            ("clear_padding", self.clear_padding.to_string()),
            ("dtype", self.dtype.to_string()),
            ("payload", format!("{:?}", self.payload)),
            ("layout", format!("{:?}", self.layout)),
            ("weighting", format!("{:?}", self.weighting)),
            ("backward", self.backward.to_string()),
            ("experts", self.experts.experts().to_string()),
            ("homes of experts", self.experts.fingerprint()),
            ("expert_slots", format!("{:?}", self.expert_slots)),
            ("lanes", self.lanes.to_string()),
            ("routing", format!("{:?}", self.routing)),
            ("first_epoch", self.first_epoch.to_string()),
            ("first_step", self.first_step.to_string()),
            ("transfer", format!("{:?}", self.transfer)),
        ]
    }
}

/// Collects a [`DispatchConfig`].
#[derive(Clone, Debug)]
pub struct DispatchConfigBuilder {
    config: DispatchConfig,
}

impl DispatchConfigBuilder {
    /// Rows of an expert start at, and are padded to, multiples of this power of two (default 16).
    #[must_use]
    pub fn alignment(mut self, rows: u32) -> Self {
        self.config.alignment = rows;
        self
    }

    /// Whether a dispatch clears the rows with which those of an expert are padded, with their scales and
    /// weights (default: it does). With few tokens these are most of what it writes. If it does not, they
    /// keep what memory held: rows of earlier steps, or bits that are no number.
    ///
    /// Inference may leave them. Combine never reads what experts make of such a row, and where each row's
    /// result depends on that row alone, as in a grouped GEMM over rows, a NaN in it stays in it. Whatever
    /// takes several rows together must have them cleared: weight gradients, which are sums over rows; a
    /// quantiser with a maximum over rows. For that reason it has to clear where
    /// [`backward`](Self::backward) is asked for. Rows in the flat layout have no padding.
    #[must_use]
    pub fn clear_padding(mut self, clear: bool) -> Self {
        self.config.clear_padding = clear;
        self
    }

    /// The format of tokens, partial sums and outputs (default BF16).
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.config.dtype = dtype;
        self
    }

    /// Expert slots on every rank (default: those that the map uses). With more, a map that uses more
    /// can be set later; see
    /// [`TokenDispatcher::set_expert_map`](crate::TokenDispatcher::set_expert_map).
    #[must_use]
    pub fn expert_slots(mut self, slots: u32) -> Self {
        self.config.expert_slots = Some(slots);
        self
    }

    /// What a dispatched row is made of (default: values of the number format).
    #[must_use]
    pub fn payload(mut self, payload: Payload) -> Self {
        self.config.payload = payload;
        self
    }

    /// How received rows lie (default: grouped by expert).
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.config.layout = layout;
        self
    }

    /// Who multiplies by the routing weights (default: combine). In the flat layout it is always
    /// the caller, who adds up a token's local experts.
    #[must_use]
    pub fn weighting(mut self, weighting: Weighting) -> Self {
        self.config.weighting = weighting;
        self
    }

    /// Whether backward passes are to be run (default: not). Lanes then have room for the gradients
    /// of weights.
    #[must_use]
    pub fn backward(mut self, backward: bool) -> Self {
        self.config.backward = backward;
        self
    }

    /// How many dispatch–combine pairs may be open at once (default 1). Staging and landing memory
    /// is taken for each.
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.config.lanes = lanes;
        self
    }

    /// Whether routing depends on earlier outputs of the step (default: it does).
    #[must_use]
    pub fn routing(mut self, routing: RoutingDependence) -> Self {
        self.config.routing = routing;
        self
    }

    /// The most dispatches in one step whose requirements are recorded one by one (default 256).
    #[must_use]
    pub fn max_dispatches(mut self, dispatches: usize) -> Self {
        self.config.max_dispatches = dispatches;
        self
    }

    /// How many step records the host may leave unread before one is lost (default 64).
    #[must_use]
    pub fn record_ring(mut self, records: usize) -> Self {
        self.config.record_ring = records;
        self
    }

    /// The epoch before the first (default 0). Epochs wrap at 2³² and are only compared for
    /// equality; a start just below the wrap is for tests of that.
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.config.first_epoch = epoch;
        self
    }

    /// The number of the step before the first (default 0). Numbers wrap at 2³²; a start just below the
    /// wrap is for tests of that.
    #[must_use]
    pub fn first_step(mut self, step: u32) -> Self {
        self.config.first_step = step;
        self
    }

    /// How rows get from rank to rank (default: [`Transfer::Auto`]).
    #[must_use]
    pub fn transfer(mut self, transfer: Transfer) -> Self {
        self.config.transfer = transfer;
        self
    }

    /// The most multiprocessors that an operation uses at a time, so that the rest is left to other work
    /// (default: zero, which is all of them): at least [`LEAST_SMS`]. May differ between ranks. The host
    /// backend does not look at it.
    #[must_use]
    pub fn sm_budget(mut self, multiprocessors: u32) -> Self {
        self.config.sm_budget = multiprocessors;
        self
    }

    /// The configuration, if every setting is in range.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] naming the first setting that is not.
    pub fn build(self) -> Result<DispatchConfig, DispatchError> {
        let mut config = self.config;
        let experts = config.experts.experts();
        within("hidden", config.hidden, 1, MAX_HIDDEN)?;
        within("experts", experts, 1, MAX_EXPERTS)?;
        within("top_k", config.top_k, 1, experts.min(MAX_TOP_K))?;
        within("max_tokens", config.max_tokens, 1, MAX_TOKENS)?;
        within("lanes", config.lanes, 1, 64)?;
        within("max_dispatches", config.max_dispatches, 1, 1 << 16)?;
        within("record_ring", config.record_ring, 2, 1 << 16)?;
        if config.sm_budget != 0 {
            within("sm_budget", config.sm_budget as usize, LEAST_SMS as usize, 1 << 16)?;
        }
        if !config.alignment.is_power_of_two() || config.alignment > MAX_ALIGNMENT {
            return Err(DispatchError::Config {
                field: "alignment",
                value: config.alignment.to_string(),
                limit: format!("a power of two from 1 to {MAX_ALIGNMENT}"),
            });
        }
        for (what, bytes) in [
            ("bytes of an output row", config.sum_bytes()),
            ("bytes of a received row", config.row_bytes()),
            ("bytes of a row of scales", config.scale_bytes()),
        ] {
            if !bytes.is_multiple_of(16) || bytes > MAX_HIDDEN * 4 {
                return Err(DispatchError::Config {
                    field: what,
                    value: format!("{bytes} (hidden {}, {})", config.hidden, config.dtype),
                    limit: format!("a multiple of 16, at most {}", MAX_HIDDEN * 4),
                });
            }
        }
        within("bytes of a received row", config.row_bytes(), 1, MAX_HIDDEN * 4)?;
        if let Some(slots) = config.expert_slots {
            let used = config.experts.most_slots() as usize;
            within("expert_slots", slots as usize, used, MAX_EXPERTS)?;
        }
        config.check_worst_case()?;
        if config.layout == Layout::Flat {
            config.weighting = Weighting::Caller;
        }
        if config.backward && config.payload != Payload::Values {
            return Err(DispatchError::Config {
                field: "backward",
                value: format!("asked for with payload {:?}", config.payload),
                limit: "with payload Values: gradients are values".to_owned(),
            });
        }
        if config.backward && !config.clear_padding {
            return Err(DispatchError::Config {
                field: "clear_padding",
                value: "false, with backward".to_owned(),
                limit:
                    "true with backward: weight gradients are sums over rows, padding among them"
                        .to_owned(),
            });
        }
        Ok(config)
    }
}

fn within(field: &'static str, value: usize, low: usize, high: usize) -> Result<(), DispatchError> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(DispatchError::Config {
        field,
        value: value.to_string(),
        limit: format!("from {low} to {high}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of the sizes may be so large; all of them at once need more rows than are counted in 31 bits.
    #[test]
    fn rows_that_no_count_holds_are_refused() {
        let with = |ranks: usize, top_k: usize, tokens: usize| {
            let experts = ExpertMap::contiguous(64 * ranks, ranks).expect("64 for each rank");
            DispatchConfig::builder(8, top_k, tokens, experts).alignment(1).build()
        };
        with(32, 64, MAX_TOKENS - 1).expect("below 2³¹ rows");
        with(64, 16, MAX_TOKENS).expect("below 2³¹ rows");
        match with(32, 64, MAX_TOKENS) {
            Err(DispatchError::Config { field, value, limit }) => {
                assert_eq!(field, "receive rows of the worst routing");
                assert_eq!(value, "2147483648 (32 ranks, 1048576 tokens, top-64, 64 slots)");
                assert!(limit.contains("2147483647"), "{limit}");
            }
            other => panic!("{other:?}"),
        }
        with(64, 64, MAX_TOKENS).expect_err("beyond 32 bits");
    }
}

//! What is fixed for the life of a dispatcher.

use crate::dtype::DType;
use crate::error::DispatchError;
use crate::experts::ExpertMap;

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

/// Everything that is fixed for the life of a dispatcher, and equal on all ranks.
#[derive(Clone, Debug)]
pub struct DispatchConfig {
    pub(crate) hidden: usize,
    pub(crate) top_k: usize,
    pub(crate) max_tokens: usize,
    pub(crate) alignment: u32,
    pub(crate) dtype: DType,
    pub(crate) experts: ExpertMap,
    pub(crate) lanes: usize,
    pub(crate) routing: RoutingDependence,
    pub(crate) max_dispatches: usize,
    pub(crate) record_ring: usize,
    pub(crate) first_epoch: u32,
}

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
                dtype: DType::Bf16,
                experts,
                lanes: 1,
                routing: RoutingDependence::Dependent,
                max_dispatches: 256,
                record_ring: 64,
                first_epoch: 0,
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

    /// The rows of each expert start at a multiple of this, and are padded to one.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// The format of tokens, partial sums and outputs.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the experts are.
    pub fn experts(&self) -> &ExpertMap {
        &self.experts
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// The fields that must be equal on all ranks, in words.
    pub(crate) fn fields(&self) -> Vec<(&'static str, String)> {
        let homes: Vec<String> =
            self.experts.homes().iter().map(|home| home.rank.0.to_string()).collect();
        vec![
            ("hidden", self.hidden.to_string()),
            ("top_k", self.top_k.to_string()),
            ("max_tokens", self.max_tokens.to_string()),
            ("alignment", self.alignment.to_string()),
            ("dtype", self.dtype.to_string()),
            ("experts", self.experts.experts().to_string()),
            ("ranks of experts", homes.join(",")),
            ("lanes", self.lanes.to_string()),
            ("routing", format!("{:?}", self.routing)),
            ("first_epoch", self.first_epoch.to_string()),
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

    /// The format of tokens, partial sums and outputs (default BF16).
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.config.dtype = dtype;
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

    /// The configuration, if every setting is in range.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] naming the first setting that is not.
    pub fn build(self) -> Result<DispatchConfig, DispatchError> {
        let config = self.config;
        let experts = config.experts.experts();
        within("hidden", config.hidden, 1, MAX_HIDDEN)?;
        within("experts", experts, 1, MAX_EXPERTS)?;
        within("top_k", config.top_k, 1, experts.min(MAX_TOP_K))?;
        within("max_tokens", config.max_tokens, 1, MAX_TOKENS)?;
        within("lanes", config.lanes, 1, 64)?;
        within("max_dispatches", config.max_dispatches, 1, 1 << 16)?;
        within("record_ring", config.record_ring, 2, 1 << 16)?;
        if !config.alignment.is_power_of_two() || config.alignment > MAX_ALIGNMENT {
            return Err(DispatchError::Config {
                field: "alignment",
                value: config.alignment.to_string(),
                limit: format!("a power of two from 1 to {MAX_ALIGNMENT}"),
            });
        }
        if !config.row_bytes().is_multiple_of(16) {
            return Err(DispatchError::Config {
                field: "hidden",
                value: format!(
                    "{} ({} bytes of {})",
                    config.hidden,
                    config.row_bytes(),
                    config.dtype
                ),
                limit: "such that a row is a multiple of 16 bytes".to_owned(),
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

//! Router decisions of a run: which experts each token chose, in every step and layer.
//!
//! Recorded traces and made-up workloads both become a [`Routing`], and a `Routing` is checked when
//! it is built. What holds of it is therefore true of everything that reads one: every id is −1 or
//! below `experts`, no token names an expert twice, every weight is finite, and no dimension is
//! zero.

mod check;
mod error;
mod shards;

pub(crate) use check::dimensions as check_dimensions;
pub use error::{Position, RoutingError};
pub use shards::Shards;

/// The largest number of experts that a routing may name: all that a 16-bit id can.
///
/// Much is allocated in proportion to the number of experts, which a trace states in a few
/// characters; a bound keeps a damaged number from being taken for a plan.
pub const MAX_EXPERTS: usize = 1 << 16;

/// What a [`Routing`] is built from. Every field is checked by [`Routing::new`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingParts {
    /// A short name for reports: the file's, or the workload's.
    pub name: String,
    /// Where the decisions come from, in words, if known.
    pub origin: Option<String>,
    /// Number of experts; ids are below it.
    pub experts: usize,
    /// Choices of a token.
    pub top_k: usize,
    /// Number of steps.
    pub steps: usize,
    /// MoE layers of a step.
    pub layers: usize,
    /// Tokens of a step, over all ranks.
    pub tokens: usize,
    /// Expert ids `[steps, layers, tokens, top_k]`, row-major; −1 for a choice not made.
    pub ids: Vec<i32>,
    /// Router weights, shaped as `ids`.
    pub weights: Option<Vec<f32>>,
    /// What the source calls each step (a training step, say), one entry a step.
    pub step_labels: Option<Vec<i64>>,
    /// What kind of text each step was, one entry a step.
    pub domains: Option<Vec<i64>>,
    /// Who owns the tokens.
    pub ownership: Ownership,
}

/// Which rank owns which tokens of a step. A rank's tokens are always consecutive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ownership {
    /// Rank r of R owns tokens `[r·N/R, (r+1)·N/R)`, floor division, whatever R is.
    #[default]
    Even,
    /// Ranks own different shares, and different ones from step to step. This fixes the number of
    /// ranks.
    Split {
        /// Number of ranks.
        ranks: usize,
        /// `[steps, ranks + 1]`, row-major: rank r owns tokens `[offsets[r], offsets[r + 1])` of
        /// its step. A row starts at 0, ends at the number of tokens and never falls; a rank may
        /// own none.
        offsets: Vec<usize>,
    },
}

/// Router decisions of a run, checked. See the [module](self) for what holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    parts: RoutingParts,
}

/// The decisions of one layer in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerRouting<'a> {
    /// Expert ids `[tokens, top_k]`, row-major; −1 for none.
    pub ids: &'a [i32],
    /// Weights of the same shape, if the source has any.
    pub weights: Option<&'a [f32]>,
}

impl Routing {
    /// Checks `parts` and takes them over. Reads every id once; allocates one word an expert.
    ///
    /// # Errors
    ///
    /// [`RoutingError`] says which statement of the [module](self) does not hold, and where.
    pub fn new(parts: RoutingParts) -> Result<Self, RoutingError> {
        check::parts(&parts)?;
        Ok(Self { parts })
    }

    /// The name for reports.
    pub fn name(&self) -> &str {
        &self.parts.name
    }

    /// Where the decisions come from, in words.
    pub fn origin(&self) -> Option<&str> {
        self.parts.origin.as_deref()
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.parts.experts
    }

    /// Choices of a token.
    pub fn top_k(&self) -> usize {
        self.parts.top_k
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.parts.steps
    }

    /// MoE layers of a step.
    pub fn layers(&self) -> usize {
        self.parts.layers
    }

    /// Tokens of a step, over all ranks.
    pub fn tokens(&self) -> usize {
        self.parts.tokens
    }

    /// Who owns the tokens; [`Routing::shards`] applies it to a number of ranks.
    pub fn ownership(&self) -> &Ownership {
        &self.parts.ownership
    }

    /// What the source calls a step, if it names them. `None` also for a step that does not exist.
    pub fn step_label(&self, step: usize) -> Option<i64> {
        self.parts.step_labels.as_ref()?.get(step).copied()
    }

    /// What kind of text a step was, if the source says so. `None` also for a step that does not
    /// exist.
    pub fn domain(&self, step: usize) -> Option<i64> {
        self.parts.domains.as_ref()?.get(step).copied()
    }

    /// The decisions of one layer in one step.
    ///
    /// # Panics
    ///
    /// As a slice does, if `step` or `layer` does not exist.
    pub fn layer(&self, step: usize, layer: usize) -> LayerRouting<'_> {
        assert!(step < self.steps() && layer < self.layers(), "no layer {layer} in step {step}");
        let len = self.tokens() * self.top_k();
        let start = (step * self.layers() + layer) * len;
        LayerRouting {
            ids: &self.parts.ids[start..start + len],
            weights: self.parts.weights.as_ref().map(|w| &w[start..start + len]),
        }
    }

    /// Which tokens each of `ranks` ranks owns, in every step.
    ///
    /// # Errors
    ///
    /// [`RoutingError::NoRanks`] for none, [`RoutingError::MoreRanksThanExperts`] if a rank would
    /// be left without an expert, [`RoutingError::RanksFixed`] if the ownership was made for
    /// another number of ranks.
    pub fn shards(&self, ranks: usize) -> Result<Shards, RoutingError> {
        Shards::new(&self.parts, ranks)
    }

    /// Keeps the first `steps` steps.
    ///
    /// # Errors
    ///
    /// [`RoutingError::Empty`] for zero, [`RoutingError::NotEnoughSteps`] if there are fewer.
    pub fn first_steps(mut self, steps: usize) -> Result<Self, RoutingError> {
        let parts = &mut self.parts;
        if steps == 0 {
            return Err(RoutingError::Empty { dimension: "steps" });
        }
        if steps > parts.steps {
            return Err(RoutingError::NotEnoughSteps { wanted: steps, available: parts.steps });
        }
        let len = steps * parts.layers * parts.tokens * parts.top_k;
        parts.steps = steps;
        parts.ids.truncate(len);
        if let Some(weights) = &mut parts.weights {
            weights.truncate(len);
        }
        for labels in [&mut parts.step_labels, &mut parts.domains].into_iter().flatten() {
            labels.truncate(steps);
        }
        if let Ownership::Split { ranks, offsets } = &mut parts.ownership {
            offsets.truncate(steps * (*ranks + 1));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two steps, two layers, three tokens, two choices of five experts; `ids[i]` differ so that
    /// layout shows.
    pub(super) fn parts() -> RoutingParts {
        RoutingParts {
            name: "small".into(),
            experts: 5,
            top_k: 2,
            steps: 2,
            layers: 2,
            tokens: 3,
            ids: (0..12).flat_map(|row| [row % 5, (row + 1) % 5]).collect(),
            weights: Some((0..24).map(|i| i as f32).collect()),
            step_labels: Some(vec![10, 20]),
            domains: Some(vec![0, 1]),
            ..RoutingParts::default()
        }
    }

    #[test]
    fn a_layer_is_the_slice_of_its_step() {
        let routing = Routing::new(parts()).unwrap();
        let layer = routing.layer(1, 0);
        assert_eq!(layer.ids, [1, 2, 2, 3, 3, 4]);
        assert_eq!(layer.weights, Some(&[12., 13., 14., 15., 16., 17.][..]));
        assert_eq!(routing.step_label(1), Some(20));
        assert_eq!(routing.domain(1), Some(1));
        assert_eq!(routing.domain(2), None);
    }

    #[test]
    fn first_steps_cuts_everything_that_has_a_step_dimension() {
        let mut source = parts();
        source.ownership = Ownership::Split { ranks: 2, offsets: vec![0, 1, 3, 0, 0, 3] };
        let cut = Routing::new(source.clone()).unwrap().first_steps(1).unwrap();
        assert_eq!(cut.steps(), 1);
        // What is left must itself be a valid routing.
        assert_eq!(Routing::new(cut.parts.clone()).unwrap(), cut);
        let whole = Routing::new(source).unwrap();
        assert_eq!(
            whole.clone().first_steps(3),
            Err(RoutingError::NotEnoughSteps { wanted: 3, available: 2 })
        );
        assert_eq!(whole.first_steps(0), Err(RoutingError::Empty { dimension: "steps" }));
    }
}

//! The step that is measured: some MoE layers, one after the other, with synthetic experts.

use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::synthetic::SyntheticExperts;
use graph_ep::token_dispatch::RoutingDependence;
use graph_ep::{
    BodyError, Buffer, Error, ExpertParallel, HostBackend, MoeLayer, RecoverySettings, Rendezvous,
    Step, StepRunner, TokenCount, TopKIds,
};

use crate::ranks::Failure;

/// Ranks of the group: more than a laptop has idle cores, as it is with the host backend.
pub const RANKS: usize = 4;
/// Values in a row.
pub const HIDDEN: usize = 256;
/// Experts of the model.
pub const EXPERTS: usize = 32;
/// Experts of a token.
pub const TOP_K: usize = 4;
/// Tokens of a rank.
pub const TOKENS: usize = 64;
/// MoE layers of a step.
pub const LAYERS: usize = 4;
/// Rows of an expert are padded to a multiple of this.
pub const ALIGNMENT: u32 = 16;

/// Rows that hold what [`Load::Level`] sends to a rank: of each of its eight experts the 32 rows that
/// every expert gets.
pub const LEVEL_ROWS: u32 = (TOKENS * RANKS * TOP_K / EXPERTS) as u32 * (EXPERTS / RANKS) as u32;

/// Where tokens go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Every expert gets the same number of tokens.
    Level,
    /// Every token goes to four experts of rank 0, which needs four times the rows of a level load.
    OneRank,
}

impl Load {
    /// Expert ids of the tokens of `rank`: `[TOKENS, TOP_K]`.
    pub fn ids(self, rank: usize) -> Vec<i32> {
        let (spread, distance) = match self {
            Load::Level => (EXPERTS, EXPERTS / TOP_K),
            Load::OneRank => (EXPERTS / RANKS, EXPERTS / RANKS / TOP_K),
        };
        let token = |token: usize| {
            (0..TOP_K)
                .map(move |choice| ((rank * TOKENS + token + choice * distance) % spread) as i32)
        };
        (0..TOKENS).flat_map(token).collect()
    }
}

/// One rank, ready to run steps.
#[derive(Debug)]
pub struct Member {
    /// Its part in the group.
    pub group: ExpertParallel<HostBackend>,
    /// Its experts.
    pub experts: SyntheticExperts<HostBackend>,
    /// The tensors of each layer.
    pub layers: Vec<MoeLayer<'static, HostBackend>>,
    ids: Vec<Buffer<HostBackend>>,
}

impl Member {
    /// Joins the group with a capacity of `capacity_rows`, and fills in tokens and ids. Collective.
    ///
    /// # Errors
    ///
    /// What building a group may fail with.
    pub fn join(
        rendezvous: ThreadRendezvous,
        capacity_rows: u32,
        load: Load,
    ) -> Result<Self, Failure> {
        let rank = rendezvous.rank().index();
        let group = ExpertParallel::<HostBackend>::builder(HIDDEN, EXPERTS, TOP_K, TOKENS)
            .alignment(ALIGNMENT)
            .capacity_rows(capacity_rows)
            .routing(RoutingDependence::Independent)
            .build(HostBackend::default(), rendezvous)?;
        let experts = SyntheticExperts::new(&group)?;
        // Any finite values will do: 0x3f80 + i are BF16 numbers from 1 upwards.
        let values: Vec<u16> = (0..TOKENS * HIDDEN).map(|at| 0x3f80 + (at % 128) as u16).collect();
        let (mut layers, mut ids) = (Vec::new(), Vec::new());
        for _ in 0..LAYERS {
            let tokens = group.allocate(TOKENS * HIDDEN * 2)?;
            group.write(&tokens, bytemuck::cast_slice(&values))?;
            let choices = group.allocate(TOKENS * TOP_K * 4)?;
            let output = group.allocate(TOKENS * HIDDEN * 2)?;
            layers.push(MoeLayer::new(
                tokens.slice(),
                TokenCount::Fixed(TOKENS),
                TopKIds::I32(choices.slice()),
                output.slice(),
            ));
            ids.push(choices);
        }
        let member = Self { group, experts, layers, ids };
        member.route(rank, load)?;
        Ok(member)
    }

    /// Writes the expert ids of `load` for every layer, in the order of the stream.
    fn route(&self, rank: usize, load: Load) -> Result<(), Error> {
        let ids = load.ids(rank);
        self.ids.iter().try_for_each(|to| self.group.write(to, bytemuck::cast_slice(&ids)))
    }

    /// Queues all layers of a step.
    ///
    /// # Errors
    ///
    /// What queueing a layer may fail with.
    pub fn body(&self, step: &mut Step<'static, HostBackend>) -> Result<(), BodyError> {
        self.layers.iter().try_for_each(|layer| {
            self.group.layer(step, layer, |queue, received| self.experts.queue(queue, received))
        })
    }

    /// A runner of steps of this member.
    ///
    /// # Errors
    ///
    /// A setting out of range.
    pub fn into_runner(
        self,
        settings: RecoverySettings,
    ) -> Result<StepRunner<HostBackend>, Failure> {
        let group = self.group.clone();
        Ok(group.runner(settings, move |step| self.body(step))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_expert(load: Load) -> Vec<usize> {
        let mut counts = vec![0; EXPERTS];
        for id in (0..RANKS).flat_map(|rank| load.ids(rank)) {
            counts[id as usize] += 1;
        }
        counts
    }

    #[test]
    fn loads_are_what_they_are_called() {
        assert_eq!(per_expert(Load::Level), [32; EXPERTS]);
        let counts = per_expert(Load::OneRank);
        assert_eq!(counts[..EXPERTS / RANKS], [128; EXPERTS / RANKS]);
        assert!(counts[EXPERTS / RANKS..].iter().all(|&count| count == 0));
        assert_eq!(LEVEL_ROWS, 256);
    }

    #[test]
    fn no_token_names_an_expert_twice() {
        for ids in [Load::Level, Load::OneRank].map(|load| load.ids(1)) {
            for token in ids.chunks(TOP_K) {
                let mut sorted = token.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!(sorted.len(), TOP_K);
            }
        }
    }
}

//! What has to come out of a step, from the pure functions of `token_dispatch::reference`.

use std::fmt::LowerHex;

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::routing::invalid_ids;
use graph_ep::token_dispatch::reference::window::dropped_rows;
use graph_ep::token_dispatch::reference::{
    Approximation, Exchange, Item, Processed, Source, exact,
};

use crate::case::Case;
use crate::inputs::Inputs;
use crate::outcome::{LayerRun, RankRun};
use crate::rows;

/// What has to come out of one layer.
#[derive(Clone, Debug)]
pub struct LayerOracle {
    /// What each rank has to see; its output is that of its own tokens.
    pub ranks: Vec<LayerRun>,
    /// The outputs in f64.
    pub naive: Vec<Vec<Approximation>>,
    /// Receive rows that each rank requires.
    pub required: Vec<u32>,
    /// Pairs that reach each rank's experts.
    pub delivered: Vec<u64>,
    /// Pairs that do not, for lack of rows.
    pub dropped: Vec<u64>,
    /// Ids of each rank's tokens that are no expert, and that a token repeats.
    pub bad_ids: Vec<(u64, u64)>,
    /// The items that each rank took.
    pub taken: Vec<Vec<Item>>,
}

impl LayerOracle {
    /// The layer in which every rank brings its `inputs` and has `capacity` receive rows; `None`
    /// stands for as many as are required.
    ///
    /// # Panics
    ///
    /// If the inputs are none for the case.
    pub fn new(case: &Case, inputs: &[Inputs], capacity: Option<&[u32]>) -> Self {
        let world = case.world();
        let lists = rows::arrivals(case, inputs);
        let required: Vec<u32> =
            (0..world).map(|rank| rows::rows_of(case, rank, &lists[rank]) as u32).collect();
        let capacity = capacity.unwrap_or(&required);
        let taken: Vec<usize> = (0..world)
            .map(|rank| rows::window_of(case, &lists[rank], capacity[rank] as usize))
            .collect();
        let kept: Vec<&[Item]> = lists.iter().zip(&taken).map(|(l, end)| &l[..*end]).collect();
        let (outputs, naive): (Vec<_>, Vec<_>) =
            rows::outputs(case, inputs, &kept).into_iter().unzip();
        if case.plain() && case.map.is_none() {
            assert_eq!(outputs, by_reference(case, inputs, &lists, &taken), "two oracles differ");
        }
        let ranks = outputs.into_iter().enumerate().map(|(rank, output)| LayerRun {
            output,
            ..rows::layout(case, inputs, rank, kept[rank])
        });
        let pairs = |items: &[Item]| dropped_rows(items, 0) as u64;
        Self {
            ranks: ranks.collect(),
            naive,
            required,
            delivered: kept.iter().map(|kept| pairs(kept)).collect(),
            dropped: lists.iter().zip(&taken).map(|(list, end)| pairs(&list[*end..])).collect(),
            bad_ids: inputs
                .iter()
                .map(|own| invalid_ids(&own.ids, case.top_k, case.experts))
                .map(|bad| (bad.out_of_range as u64, bad.repeated as u64))
                .collect(),
            taken: kept.into_iter().map(<[Item]>::to_vec).collect(),
        }
    }

    /// The layer `layer` of step `step` of a case whose routing depends on nothing.
    ///
    /// # Panics
    ///
    /// As [`LayerOracle::new`].
    pub fn of_step(case: &Case, step: usize, layer: usize, capacity: Option<&[u32]>) -> Self {
        Self::new(case, &Inputs::of_all(case, step, layer), capacity)
    }
}

/// The outputs as the reference has them.
fn by_reference(
    case: &Case,
    inputs: &[Inputs],
    lists: &[Vec<Item>],
    taken: &[usize],
) -> Vec<Vec<u32>> {
    let map = case.reference_map(0);
    let sources = inputs
        .iter()
        .map(|own| Source { values: &own.values, topk: &own.ids, weights: &own.weights })
        .collect();
    let exchange = Exchange::new(&map, case.number(), case.top_k, case.hidden, sources)
        .expect("inputs of the case");
    let processed = Processed::prefixes(lists, taken).expect("one prefix a rank");
    let expert = |expert: usize, row: &[f32]| synthetic::apply(expert as u32, row);
    let outputs = exact(&exchange, expert, &processed).expect("experts keep the width");
    outputs.iter().map(|output| bits(output)).collect()
}

/// Holds a long list to another, and says where they differ rather than what they are.
///
/// # Panics
///
/// If they differ.
pub fn same<N: PartialEq + LowerHex>(what: &str, seen: &[N], expected: &[N]) {
    assert_eq!(seen.len(), expected.len(), "{what}: length");
    if let Some(at) = (0..seen.len()).find(|at| seen[*at] != expected[*at]) {
        panic!("{what}: {:#x} rather than {:#x} at {at}", seen[at], expected[at]);
    }
}

/// The bits of each number.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What a whole step has to be.
#[derive(Clone, Debug)]
pub struct StepOracle {
    layers: Vec<LayerOracle>,
    /// The capacity of each rank, where the step is held to one.
    capacity: Option<Vec<u32>>,
}

impl StepOracle {
    /// Step `step` of a case whose routing depends on nothing, held to `capacity` rows a rank or,
    /// with `None`, eager.
    pub fn new(case: &Case, step: usize, capacity: Option<&[u32]>) -> Self {
        let layers = (0..case.layers)
            .map(|layer| {
                let mut oracle = LayerOracle::of_step(case, step, layer, capacity);
                if case.ends_in_dispatch && layer + 1 == case.layers {
                    oracle.ranks.iter_mut().for_each(|rank| rank.output.clear());
                    oracle.naive.iter_mut().for_each(Vec::clear);
                }
                oracle
            })
            .collect();
        Self { layers, capacity: capacity.map(<[u32]>::to_vec) }
    }

    /// The layers.
    pub fn layers(&self) -> &[LayerOracle] {
        &self.layers
    }

    /// The rows that each rank requires: those of its worst layer.
    pub fn required(&self) -> Vec<u32> {
        let ranks = self.layers[0].required.len();
        (0..ranks)
            .map(|rank| self.layers.iter().map(|layer| layer.required[rank]).max().unwrap_or(0))
            .collect()
    }

    /// The first layer that is over budget on any rank.
    pub fn first_over(&self) -> Option<u32> {
        let capacity = self.capacity.as_ref()?;
        let over = |layer: &LayerOracle| {
            layer.required.iter().zip(capacity).any(|(required, rows)| required > rows)
        };
        self.layers.iter().position(over).map(|layer| layer as u32)
    }

    /// Holds every rank's run to this, rows, outputs, counters and all. `what` is for the message.
    ///
    /// # Panics
    ///
    /// Where a run differs.
    pub fn check(&self, what: &str, runs: &[RankRun]) {
        self.check_outputs(what, runs);
        for (rank, run) in runs.iter().enumerate() {
            for (layer, (oracle, seen)) in self.layers.iter().zip(&run.layers).enumerate() {
                let (expected, at) =
                    (&oracle.ranks[rank], format!("{what}: rank {rank}, layer {layer}"));
                assert_eq!(seen.tokens_per_expert, expected.tokens_per_expert, "{at}: counts");
                assert_eq!(seen.expert_offsets, expected.expert_offsets, "{at}: offsets");
                assert_eq!(seen.total, expected.total, "{at}: total");
                same(&format!("{at}: received rows"), &seen.rows, &expected.rows);
                same(&format!("{at}: received scales"), &seen.scales, &expected.scales);
                let (weights, experts) = (&expected.row_weights, &expected.row_experts);
                same(&format!("{at}: weights of rows"), &seen.row_weights, weights);
                same(&format!("{at}: experts of rows"), &seen.row_experts, experts);
            }
            self.check_record(&format!("{what}: rank {rank}"), rank, run);
        }
    }

    /// Holds the outputs to this: bit for bit, and within the tolerance of the sum in f64.
    ///
    /// # Panics
    ///
    /// Where an output differs.
    pub fn check_outputs(&self, what: &str, runs: &[RankRun]) {
        assert_eq!(runs.len(), self.layers[0].ranks.len(), "{what}: ranks");
        for (rank, run) in runs.iter().enumerate() {
            assert_eq!(run.layers.len(), self.layers.len(), "{what}: layers of rank {rank}");
            for (layer, (oracle, seen)) in self.layers.iter().zip(&run.layers).enumerate() {
                let at = format!("{what}: rank {rank}, layer {layer}");
                same(&format!("{at}: output"), &seen.output, &oracle.ranks[rank].output);
                for (output, naive) in seen.output.iter().zip(&oracle.naive[rank]) {
                    let output = f32::from_bits(*output);
                    assert!(naive.admits(output), "{at}: {output:e} against {naive:?}");
                }
            }
        }
    }

    fn check_record(&self, at: &str, rank: usize, run: &RankRun) {
        let record = &run.record;
        let sum = |part: fn(&LayerOracle) -> &Vec<u64>| -> u64 {
            self.layers.iter().map(|layer| part(layer)[rank]).sum()
        };
        let bad = self.layers.iter().map(|layer| layer.bad_ids[rank]);
        let (invalid, repeated) = bad.fold((0, 0), |sum, bad| (sum.0 + bad.0, sum.1 + bad.1));
        let by_dispatch: Vec<u32> = self.layers.iter().map(|layer| layer.required[rank]).collect();
        assert!(!record.drained, "{at}: drained");
        assert_eq!(record.first_over, self.first_over(), "{at}: first over-budget dispatch");
        assert_eq!(record.required, self.required(), "{at}: required rows");
        assert_eq!(record.required_by_dispatch, by_dispatch, "{at}: required by dispatch");
        assert_eq!(record.delivered, sum(|layer| &layer.delivered), "{at}: delivered pairs");
        assert_eq!(record.dropped, sum(|layer| &layer.dropped), "{at}: dropped pairs");
        assert_eq!(record.invalid_ids, invalid, "{at}: invalid ids");
        assert_eq!(record.repeated_ids, repeated, "{at}: repeated ids");
        assert_eq!(record.windows, 1, "{at}: windows");
        if let Some(capacity) = &self.capacity {
            assert_eq!(record.capacity, capacity[rank], "{at}: capacity");
        }
    }
}

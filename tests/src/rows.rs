//! What a receiver has to find, and the sums that come of it: the rules of dispatch and combine for
//! every payload, layout and weighting.

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::required::round_up;
use graph_ep::token_dispatch::reference::routing::{Choice, choices};
use graph_ep::token_dispatch::reference::window::{Item, items, longest_prefix};
use graph_ep::token_dispatch::reference::{Approximation, tolerance};

use crate::case::Case;
use crate::inputs::Inputs;
use crate::oracle::bits;
use crate::outcome::LayerRun;
use crate::rig::SPOILT;

/// The items of every rank, in the order in which they arrive.
pub fn arrivals(case: &Case, inputs: &[Inputs]) -> Vec<Vec<Item>> {
    let of_rank = |rank| {
        // Each source has a map of its own: copies of an expert share the senders.
        let of_source = |source: usize| {
            let mut topk: Vec<&[i64]> = vec![&[]; case.world()];
            topk[source] = &inputs[source].ids;
            items(&topk, case.top_k, &case.reference_map(source), rank)
        };
        (0..case.world()).flat_map(of_source).collect()
    };
    (0..case.world()).map(of_rank).collect()
}

/// The rows that these items take.
pub fn rows_of(case: &Case, rank: usize, items: &[Item]) -> usize {
    let alignment = case.alignment as usize;
    if case.flat() {
        return round_up(items.len(), alignment);
    }
    let slots = case.slots(rank).into_iter().flatten();
    let count = |expert| items.iter().filter(|item| item.experts.contains(&expert)).count();
    slots.map(|expert| round_up(count(expert), alignment)).sum()
}

/// How many of `items` one window of `capacity` rows takes.
pub fn window_of(case: &Case, items: &[Item], capacity: usize) -> usize {
    let alignment = case.alignment as usize;
    match case.flat() {
        true => items.len().min(capacity / alignment * alignment),
        false => longest_prefix(items, capacity, alignment),
    }
}

/// The windows in which `items` are worked off.
pub fn windows_of(case: &Case, items: &[Item], capacity: usize) -> usize {
    let (mut left, mut windows) = (items, 0);
    while !left.is_empty() {
        let taken = window_of(case, left, capacity);
        assert!(taken > 0, "a capacity of {capacity} rows takes nothing");
        (left, windows) = (&left[taken..], windows + 1);
    }
    windows
}

/// One received row that is no padding.
#[derive(Clone, Debug)]
pub struct Placed<'i> {
    /// The token.
    pub item: &'i Item,
    /// Its choices that this row is for, ascending by expert, with their weights: one where rows are
    /// grouped, all on this rank where they are not.
    pub choices: Vec<(Choice, f32)>,
}

/// The rows of `rank` when it has taken `items`, `None` for padding, and where each slot's begin.
pub fn placed<'i>(
    case: &Case,
    inputs: &[Inputs],
    rank: usize,
    items: &'i [Item],
) -> (Vec<Option<Placed<'i>>>, Vec<i32>) {
    let slots = case.slots(rank);
    if case.flat() {
        let row = |item| Some(Placed { item, choices: choices_of(case, inputs, item) });
        let mut offsets = vec![0; slots.len()];
        offsets.push(items.len() as i32);
        return (items.iter().map(row).collect(), offsets);
    }
    let (mut rows, mut offsets) = (Vec::new(), vec![0]);
    for expert in slots {
        for item in items {
            let mut choices = choices_of(case, inputs, item);
            choices.retain(|(choice, _)| Some(choice.expert) == expert);
            if !choices.is_empty() {
                rows.push(Some(Placed { item, choices }));
            }
        }
        rows.resize_with(round_up(rows.len(), case.alignment as usize), || None);
        offsets.push(rows.len() as i32);
    }
    (rows, offsets)
}

/// What `rank` finds when it has taken `items`; the output is left empty.
pub fn layout(case: &Case, inputs: &[Inputs], rank: usize, items: &[Item]) -> LayerRun {
    let (placed, expert_offsets) = placed(case, inputs, rank, items);
    let (slots, width) = (case.slots(rank), case.width(rank));
    let count = |expert: &Option<usize>| {
        let takes = |item: &&Item| expert.is_some_and(|expert| item.experts.contains(&expert));
        items.iter().filter(takes).count() as i32
    };
    let mut found = LayerRun {
        output: Vec::new(),
        tokens_per_expert: slots.iter().map(count).collect(),
        total: expert_offsets[slots.len()],
        expert_offsets,
        rows: Vec::new(),
        scales: Vec::new(),
        row_weights: Vec::new(),
        row_experts: Vec::new(),
    };
    for (row, placed) in placed.iter().enumerate() {
        if let Some(Placed { item, choices }) = placed {
            let (own, token) = (&inputs[item.source], item.token);
            found.rows.extend(&own.rows[token * case.row_bytes()..][..case.row_bytes()]);
            found.scales.extend(&own.scales[token * case.scale_bytes()..][..case.scale_bytes()]);
            // Nothing is beside the row where combine multiplies.
            for (choice, weight) in choices.iter().take(width) {
                let slot = slots.iter().position(|expert| *expert == Some(choice.expert));
                found.row_experts.push(slot.expect("it is held here") as i32);
                found.row_weights.push(weight.to_bits());
            }
        }
        let left = placed.is_none() && !case.clear_padding;
        let (byte, word) = if left { (SPOILT, u32::from_ne_bytes([SPOILT; 4])) } else { (0, 0) };
        found.rows.resize((row + 1) * case.row_bytes(), byte);
        found.scales.resize((row + 1) * case.scale_bytes(), byte);
        found.row_weights.resize((row + 1) * width, word);
        found.row_experts.resize((row + 1) * width, -1);
    }
    if !case.flat() {
        found.row_experts.clear();
    }
    found
}

/// The choices of an item that count on its receiver, ascending by expert, with their weights.
pub fn choices_of(case: &Case, inputs: &[Inputs], item: &Item) -> Vec<(Choice, f32)> {
    let own = item.token * case.top_k..(item.token + 1) * case.top_k;
    let (ids, weights) = (&inputs[item.source].ids, &inputs[item.source].weights);
    choices(&ids[own.clone()], case.experts)
        .into_iter()
        .filter(|choice| item.experts.contains(&choice.expert))
        .map(|choice| (choice, weights[own.start + choice.choice]))
        .collect()
}

/// The token's row, as experts read it.
pub fn values_of<'a>(case: &Case, inputs: &'a [Inputs], item: &Item) -> &'a [f32] {
    &inputs[item.source].values[item.token * case.hidden..][..case.hidden]
}

/// The outputs of every rank's tokens, bit for bit and in f64, from the items that each rank took.
pub fn outputs(
    case: &Case,
    inputs: &[Inputs],
    taken: &[&[Item]],
) -> Vec<(Vec<u32>, Vec<Approximation>)> {
    let number = case.number();
    let mut sums: Vec<Sums> =
        inputs.iter().map(|own| Sums::new(own.ids.len() / case.top_k * case.hidden)).collect();
    // Ranks in order, so that partial sums are added in theirs.
    for item in taken.iter().copied().flatten() {
        let mut partial = vec![0f32; case.hidden];
        let to = &mut sums[item.source];
        for (choice, weight) in choices_of(case, inputs, item) {
            let results =
                synthetic::apply(choice.expert as u32, values_of(case, inputs, item)).into_iter();
            for (column, result) in results.enumerate() {
                let result = number.round(result);
                let product = weight * result;
                // Rows with their weights in them are numbers of the format; in the flat layout a row
                // is the sum of all.
                let grouped = case.caller_weighs() && !case.flat();
                partial[column] += if grouped { number.round(product) } else { product };
                to.term(item.token * case.hidden + column, weight, result);
            }
        }
        for (column, partial) in partial.into_iter().enumerate() {
            to.exact[item.token * case.hidden + column] += number.round(partial);
        }
    }
    sums.into_iter().map(|sums| sums.finish(case)).collect()
}

/// The sums of one rank's tokens while they are made.
struct Sums {
    exact: Vec<f32>,
    naive: Vec<f64>,
    magnitude: Vec<f64>,
    terms: Vec<usize>,
}

impl Sums {
    fn new(values: usize) -> Self {
        let (naive, magnitude) = (vec![0.0; values], vec![0.0; values]);
        Self { exact: vec![0.0; values], naive, magnitude, terms: vec![0; values] }
    }

    fn term(&mut self, at: usize, weight: f32, value: f32) {
        let product = f64::from(weight) * f64::from(value);
        self.naive[at] += product;
        self.magnitude[at] += product.abs();
        self.terms[at] += 1;
    }

    fn finish(self, case: &Case) -> (Vec<u32>, Vec<Approximation>) {
        let number = case.number();
        let exact: Vec<f32> = self.exact.iter().map(|sum| number.round(*sum)).collect();
        let naive = (0..exact.len()).map(|at| {
            let (terms, magnitude) = (self.terms[at], self.magnitude[at]);
            // One more rounding of each term where experts round what they multiplied.
            let more =
                magnitude * number.unit_roundoff() + terms as f64 * number.subnormal_roundoff();
            let more = if case.caller_weighs() { 1.1 * more } else { 0.0 };
            Approximation {
                value: self.naive[at],
                tolerance: tolerance(number, terms, magnitude) + more,
            }
        });
        (bits(&exact), naive.collect())
    }
}

//! Whether what came out is what should have.
//!
//! Everything is held against the executable specification, `token_dispatch::reference`: where each
//! row has to be, and every bit of an output. Offsets and counts are compared whole; of rows and
//! outputs, where there are many, a sample that takes in the first and the last of every expert.

use std::ops::Range;

use graph_ep::synthetic;
use graph_ep::token_dispatch::reference::required::round_up;
use graph_ep::token_dispatch::reference::window::{Item, items};
use graph_ep::token_dispatch::reference::{
    Exchange, ExpertMap, Format, Processed, ReferenceError, Source, exact,
};
use graph_ep::{DType, Weighting};

use super::cases::Shape;
use super::inputs::{Given, Inputs};
use super::report::Padding;

/// Received rows that are compared in each layer, if there are as many.
const ROWS: usize = 4096;

/// Outputs that are compared in all layers of a replay together, if there are as many.
const OUTPUTS: usize = 256;

/// Outputs that are compared in each layer, at least.
const OUTPUTS_OF_LAYER: usize = 32;

/// What stands in a receive row, or beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The token.
    Row,
    /// Its scales.
    Scales,
    /// The slots of its experts, in the flat layout.
    Experts,
    /// Their weights, where the caller multiplies.
    Weights,
}

/// What combine adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Results {
    /// The received rows themselves; where they are no values, what stands for results.
    Rows,
    /// What the synthetic experts make of them.
    Synthetic,
}

/// What a rank found of a dispatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// First row of each local expert, and the end.
    pub offsets: Vec<i32>,
    /// Rows of each local expert, without padding.
    pub counts: Vec<i32>,
    /// Rows in all.
    pub total: i32,
}

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, layer {layer}: {what} {at} is wrong")]
pub struct Mismatch {
    /// The rank that found it.
    pub rank: usize,
    /// The layer.
    pub layer: usize,
    /// What it is.
    pub what: &'static str,
    /// Which one.
    pub at: usize,
}

/// Where the rows of one receiver have to be.
#[derive(Clone, Debug)]
struct Placement {
    items: Vec<Item>,
    /// Rows that lie together: positions in `items`, and the first row.
    groups: Vec<Group>,
    found: Found,
}

#[derive(Clone, Debug)]
struct Group {
    first: usize,
    items: Vec<usize>,
}

impl Placement {
    fn new(shape: &Shape, topk: &[&[i64]], map: &ExpertMap, receiver: usize) -> Self {
        let items = items(topk, shape.top_k, map, receiver);
        let mut of_expert: Vec<Vec<usize>> = vec![Vec::new(); map.experts()];
        for (at, item) in items.iter().enumerate() {
            for expert in &item.experts {
                of_expert[*expert].push(at);
            }
        }
        let local = map.experts_of_rank(receiver);
        let counts = local.iter().map(|expert| of_expert[*expert].len() as i32).collect();
        let (mut groups, mut offsets, mut end) = (Vec::new(), vec![0], 0);
        for expert in &local {
            if !shape.flat() {
                let group = std::mem::take(&mut of_expert[*expert]);
                let rows = round_up(group.len(), shape.alignment);
                groups.push(Group { first: end, items: group });
                end += rows;
            }
            offsets.push(end as i32);
        }
        if shape.flat() {
            end = items.len();
            groups.push(Group { first: 0, items: (0..end).collect() });
            if let Some(last) = offsets.last_mut() {
                *last = end as i32;
            }
        }
        Self { items, groups, found: Found { offsets, counts, total: end as i32 } }
    }

    /// The row of a token of `source` for `expert`, the group of which is `group`.
    fn row_of(&self, group: usize, source: usize, token: usize) -> Option<usize> {
        let group = self.groups.get(group)?;
        let key = |at: &usize| (self.items[*at].source, self.items[*at].token);
        let at = group.items.binary_search_by_key(&(source, token), key).ok()?;
        Some(group.first + at)
    }
}

/// Says what one rank has to find.
#[derive(Debug)]
pub struct Oracle<'g> {
    shape: &'g Shape,
    given: &'g Given,
    map: ExpertMap,
    format: Format,
    rank: usize,
}

impl<'g> Oracle<'g> {
    /// The oracle of `rank`.
    ///
    /// # Errors
    ///
    /// [`ReferenceError`] for a shape without ranks.
    pub fn new(shape: &'g Shape, given: &'g Given, rank: usize) -> Result<Self, ReferenceError> {
        let format = match shape.sums() {
            DType::Bf16 => Format::Bf16,
            DType::Fp16 => Format::Fp16,
            DType::Fp32 => Format::Fp32,
        };
        let map = ExpertMap::contiguous(shape.experts, shape.ranks)?;
        Ok(Self { shape, given, map, format, rank })
    }

    /// Holds what a dispatch left in one layer against the reference. `read` brings the rows of a range
    /// of one part.
    ///
    /// # Errors
    ///
    /// What `read` returns.
    pub fn received<E>(
        &self,
        (routing, layer): (usize, usize),
        found: &Found,
        mut read: impl FnMut(Part, Range<usize>) -> Result<Vec<u8>, E>,
    ) -> Result<Option<Mismatch>, E> {
        let wrong = |what, at| Ok(Some(Mismatch { rank: self.rank, layer, what, at }));
        let placement = self.placement(routing, layer, self.rank);
        if let Some(at) = first_difference(&found.counts, &placement.found.counts) {
            return wrong("the count of expert", at);
        }
        if let Some(at) = first_difference(&found.offsets, &placement.found.offsets) {
            return wrong("the offset of expert", at);
        }
        if found.total != placement.found.total {
            return wrong("the total, not", placement.found.total as usize);
        }
        let groups = placement.groups.iter().filter(|group| !group.items.is_empty()).count();
        let at_each_end = ROWS.div_ceil(2 * groups.max(1));
        for group in &placement.groups {
            // Padding belongs to the group, and is zero, unless it is left: then it holds anything.
            let rows = match self.shape.flat() || self.shape.padding == Padding::Left {
                true => group.items.len(),
                false => round_up(group.items.len(), self.shape.alignment),
            };
            for range in ends(rows, at_each_end) {
                for part in self.parts() {
                    let placed = group.first + range.start..group.first + range.end;
                    let bytes = read(*part, placed.clone())?;
                    let size = bytes.len() / range.len().max(1);
                    for (row, bytes) in range.clone().zip(bytes.chunks(size.max(1))) {
                        let item = group.items.get(row).map(|at| &placement.items[*at]);
                        if !self.is(*part, (routing, layer), item, bytes) {
                            return wrong(part.name(), group.first + row);
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    /// Holds a sample of the outputs of one of `layers` layers against the reference. `read` brings the
    /// output of a token.
    ///
    /// # Errors
    ///
    /// What `read` returns, and [`ReferenceError`] for rows that are no values.
    pub fn outputs<E: From<ReferenceError>>(
        &self,
        (routing, layer): (usize, usize),
        (rows_of, layers): (usize, usize),
        results: Results,
        mut read: impl FnMut(usize) -> Result<Vec<u8>, E>,
    ) -> Result<Option<Mismatch>, E> {
        let rows_apart = !self.shape.plain() && results == Results::Rows;
        let placements: Vec<Placement> = match rows_apart {
            true => (0..self.shape.ranks).map(|r| self.placement(routing, layer, r)).collect(),
            false => Vec::new(),
        };
        let count = OUTPUTS.div_ceil(layers.max(1)).max(OUTPUTS_OF_LAYER);
        for token in sample(self.shape.tokens, count, layer) {
            let expected = self.output((routing, layer), rows_of, token, results, &placements)?;
            if read(token)? != expected {
                return Ok(Some(Mismatch {
                    rank: self.rank,
                    layer,
                    what: "the output of token",
                    at: token,
                }));
            }
        }
        Ok(None)
    }

    fn placement(&self, routing: usize, layer: usize, receiver: usize) -> Placement {
        let wide = self.inputs().wide_ids(routing, layer);
        let topk: Vec<&[i64]> = wide.iter().map(Vec::as_slice).collect();
        Placement::new(self.shape, &topk, &self.map, receiver)
    }

    fn inputs(&self) -> &'g Inputs {
        &self.given.inputs
    }

    /// What there is beside a row.
    fn parts(&self) -> &'static [Part] {
        match (self.shape.plain(), self.shape.flat()) {
            (true, false) => &[Part::Row],
            (false, false) => &[Part::Row, Part::Scales],
            (true, true) => &[Part::Row, Part::Experts, Part::Weights],
            (false, true) => &[Part::Row, Part::Scales, Part::Experts, Part::Weights],
        }
    }

    /// Whether `bytes` are the part of the row that is for `item`, or is padding.
    fn is(
        &self,
        part: Part,
        (routing, layer): (usize, usize),
        item: Option<&Item>,
        bytes: &[u8],
    ) -> bool {
        let Some(Item { source, token, experts }) = item else {
            return bytes.iter().all(|byte| *byte == 0);
        };
        let rows = &self.given.rows;
        let slots = self.map.experts_of_rank(self.rank);
        let width = self.shape.top_k.min(slots.len());
        match part {
            Part::Row => bytes == rows.token(layer, *source, *token),
            Part::Scales => Some(bytes) == rows.scales(layer, *source, *token),
            Part::Experts => {
                let slot = |expert| slots.iter().position(|slot| slot == expert);
                let mut beside: Vec<i32> = experts
                    .iter()
                    .map(|expert| slot(expert).map_or(-1, |slot| slot as i32))
                    .collect();
                beside.resize(width, -1);
                bytes == bytemuck::cast_slice::<i32, u8>(&beside)
            }
            Part::Weights => {
                let (ids, weights) = self.choices((routing, layer), *source, *token);
                let weight = |expert: &usize| {
                    let choice = ids.iter().position(|id| *id as usize == *expert);
                    choice.map_or(0.0, |choice| weights[choice])
                };
                let mut beside: Vec<f32> = experts.iter().map(weight).collect();
                beside.resize(width, 0.0);
                bytes == bytemuck::cast_slice::<f32, u8>(&beside)
            }
        }
    }

    fn choices(
        &self,
        (routing, layer): (usize, usize),
        rank: usize,
        token: usize,
    ) -> (&'g [i32], &'g [f32]) {
        let own = token * self.shape.top_k..(token + 1) * self.shape.top_k;
        let (ids, weights) =
            (self.inputs().ids(routing, layer, rank), self.inputs().weights(routing, layer, rank));
        (&ids[own.clone()], &weights[own])
    }

    /// The output of one token of this rank, whose choices are those of `layer` and whose row is that of
    /// layer `rows_of`.
    fn output(
        &self,
        place: (usize, usize),
        rows_of: usize,
        token: usize,
        results: Results,
        placements: &[Placement],
    ) -> Result<Vec<u8>, ReferenceError> {
        let shape = self.shape;
        let (ids, weights) = self.choices(place, self.rank, token);
        let mut choices: Vec<(i64, f32)> =
            ids.iter().map(|id| i64::from(*id)).zip(weights.iter().copied()).collect();
        if self.weighting() == Weighting::Caller {
            // One row for each rank, which the caller has weighted and added up already.
            choices.sort_unstable_by_key(|(id, _)| *id);
            let mut seen = vec![false; shape.ranks];
            for (id, weight) in &mut choices {
                let owner = self.map.owner_of_expert(*id as usize).unwrap_or(0);
                *weight = 1.0;
                if std::mem::replace(&mut seen[owner], true) {
                    *id = -1;
                }
            }
        }
        let (topk, weights): (Vec<i64>, Vec<f32>) = choices.into_iter().unzip();
        let mut values = vec![0.0; shape.hidden];
        if shape.plain() {
            shape.sums().decode(self.given.rows.token(rows_of, self.rank, token), &mut values);
        }
        let nothing = Source { values: &[], topk: &[], weights: &[] };
        let mut sources = vec![nothing; shape.ranks];
        sources[self.rank] = Source { values: &values, topk: &topk, weights: &weights };
        let exchange = Exchange::new(&self.map, self.format, shape.top_k, shape.hidden, sources)?;
        let result = |expert: usize, row: &[f32]| match results {
            Results::Synthetic => synthetic::apply(expert as u32, row),
            Results::Rows if shape.plain() => row.to_vec(),
            Results::Rows => self.apart(place.1, expert, token, placements).unwrap_or_default(),
        };
        let rows = exact(&exchange, result, &Processed::all())?;
        let mut bytes = vec![0; shape.sum_bytes()];
        shape.sums().encode(&rows[self.rank], &mut bytes);
        Ok(bytes)
    }

    /// What stands for the result of `expert` for a token of this rank.
    fn apart(
        &self,
        layer: usize,
        expert: usize,
        token: usize,
        placements: &[Placement],
    ) -> Option<Vec<f32>> {
        let receiver = self.map.owner_of_expert(expert)?;
        let slot = self.map.experts_of_rank(receiver).iter().position(|slot| *slot == expert)?;
        let group = if self.shape.flat() { 0 } else { slot };
        let row = placements.get(receiver)?.row_of(group, self.rank, token)?;
        let mut values = vec![0.0; self.shape.hidden];
        self.shape.sums().decode(self.given.rows.result(layer, receiver, row)?, &mut values);
        Some(values)
    }

    fn weighting(&self) -> Weighting {
        if self.shape.flat() { Weighting::Caller } else { Weighting::Combine }
    }
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Row => "received row",
            Self::Scales => "the scales of received row",
            Self::Experts => "the experts beside received row",
            Self::Weights => "the weights beside received row",
        }
    }
}

fn first_difference(found: &[i32], expected: &[i32]) -> Option<usize> {
    let different = found.iter().zip(expected).position(|(found, expected)| found != expected);
    different.or((found.len() != expected.len()).then_some(found.len().min(expected.len())))
}

/// The first and the last `count` of `rows`, all of them if there are no more.
fn ends(rows: usize, count: usize) -> Vec<Range<usize>> {
    let all = [0..count.min(rows), rows.saturating_sub(count).max(count.min(rows))..rows];
    all.into_iter().filter(|range| !range.is_empty()).collect()
}

/// `count` of `tokens`, evenly apart, others in each layer; the first and the last are among them
/// wherever all are.
fn sample(tokens: usize, count: usize, layer: usize) -> impl Iterator<Item = usize> {
    let step = (tokens / count.max(1)).max(1);
    (layer % step..tokens).step_by(step)
}

#[cfg(test)]
mod tests;

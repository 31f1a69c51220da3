//! The inputs of one layer's exchange, checked once.

use super::placement::ExpertMap;
use super::routing::{Choice, choices};
use super::{Format, ReferenceError};

/// What one rank brings.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// `[tokens, hidden]`, numbers of the format.
    pub values: &'a [f32],
    /// `[tokens, top_k]`, −1 for none.
    pub topk: &'a [i64],
    /// `[tokens, top_k]`.
    pub weights: &'a [f32],
}

/// The inputs of one layer's exchange between all ranks.
#[derive(Debug, Clone)]
pub struct Exchange<'a> {
    map: &'a ExpertMap,
    format: Format,
    top_k: usize,
    hidden: usize,
    sources: Vec<Source<'a>>,
}

impl<'a> Exchange<'a> {
    /// One source for each rank of `map`, in rank order. Sources may differ in tokens, and may have
    /// none.
    ///
    /// # Errors
    /// [`ReferenceError::RankCount`], [`ReferenceError::Shape`] and [`ReferenceError::NotOfFormat`].
    pub fn new(
        map: &'a ExpertMap,
        format: Format,
        top_k: usize,
        hidden: usize,
        sources: Vec<Source<'a>>,
    ) -> Result<Self, ReferenceError> {
        if sources.len() != map.ranks() {
            let (found, ranks) = (sources.len(), map.ranks());
            return Err(ReferenceError::RankCount { what: "sources", found, ranks });
        }
        for (rank, source) in sources.iter().enumerate() {
            let tokens = source.tokens(top_k, hidden);
            for (what, found, expected) in [
                ("values", source.values.len(), tokens * hidden),
                ("expert ids", source.topk.len(), tokens * top_k),
                ("weights", source.weights.len(), tokens * top_k),
            ] {
                if found != expected {
                    return Err(ReferenceError::Shape { rank, what, found, expected });
                }
            }
            if let Some(index) = source.values.iter().position(|&v| !format.represents(v)) {
                let value = source.values[index];
                return Err(ReferenceError::NotOfFormat { rank, index, value, format });
            }
        }
        Ok(Self { map, format, top_k, hidden, sources })
    }

    /// Where the experts are.
    pub fn map(&self) -> &'a ExpertMap {
        self.map
    }

    /// The type that values, expert results, partials and outputs have.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Elements of a row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Tokens that rank `source` brings; a rank outside the group brings none.
    pub fn tokens(&self, source: usize) -> usize {
        self.sources.get(source).map_or(0, |s| s.tokens(self.top_k, self.hidden))
    }

    /// What each rank brings.
    pub fn sources(&self) -> &[Source<'a>] {
        &self.sources
    }

    /// The row, `[hidden]`, of a token that exists.
    pub(super) fn row(&self, source: usize, token: usize) -> &'a [f32] {
        &self.sources[source].values[token * self.hidden..][..self.hidden]
    }

    /// The choices that count of a token that exists, each with its weight, ascending by expert.
    pub(super) fn weighted_choices(&self, source: usize, token: usize) -> Vec<(Choice, f32)> {
        let own = token * self.top_k..(token + 1) * self.top_k;
        let weights = &self.sources[source].weights[own.clone()];
        choices(&self.sources[source].topk[own], self.map.experts())
            .into_iter()
            .map(|choice| (choice, weights[choice.choice]))
            .collect()
    }

    /// The result of `expert` for a row, rounded to the number format.
    pub(super) fn apply(
        &self,
        expert: usize,
        row: &[f32],
        function: &impl Fn(usize, &[f32]) -> Vec<f32>,
    ) -> Result<Vec<f32>, ReferenceError> {
        let mut result = function(expert, row);
        if result.len() != row.len() {
            let (found, expected) = (result.len(), row.len());
            return Err(ReferenceError::ExpertWidth { expert, found, expected });
        }
        for value in &mut result {
            *value = self.format.round(*value);
        }
        Ok(result)
    }
}

impl Source<'_> {
    /// Tokens, by whichever matrix has columns to count them by.
    fn tokens(&self, top_k: usize, hidden: usize) -> usize {
        match (self.topk.len().checked_div(top_k), self.values.len().checked_div(hidden)) {
            (Some(tokens), _) | (None, Some(tokens)) => tokens,
            (None, None) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_values_are_checked() {
        let map = ExpertMap::contiguous(2, 1).unwrap();
        let good = Source { values: &[1.0, 2.0], topk: &[0, 1], weights: &[0.5, 0.5] };
        let check = |source| Exchange::new(&map, Format::Bf16, 2, 2, vec![source]).map(|_| ());

        assert_eq!(check(good), Ok(()));
        assert_eq!(check(Source { values: &[], topk: &[], weights: &[] }), Ok(()));
        assert_eq!(
            check(Source { values: &[1.0, 2.0, 3.0], ..good }),
            Err(ReferenceError::Shape { rank: 0, what: "values", found: 3, expected: 2 })
        );
        assert_eq!(
            check(Source { topk: &[0, 1, 0], ..good }),
            Err(ReferenceError::Shape { rank: 0, what: "expert ids", found: 3, expected: 2 })
        );
        assert_eq!(
            check(Source { weights: &[0.5], ..good }),
            Err(ReferenceError::Shape { rank: 0, what: "weights", found: 1, expected: 2 })
        );
        let format = Format::Bf16;
        assert_eq!(
            check(Source { values: &[1.0, 1.001], ..good }),
            Err(ReferenceError::NotOfFormat { rank: 0, index: 1, value: 1.001, format })
        );
        assert_eq!(
            Exchange::new(&map, format, 2, 2, vec![good, good]).map(|_| ()),
            Err(ReferenceError::RankCount { what: "sources", found: 2, ranks: 1 })
        );
    }
}

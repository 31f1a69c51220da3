//! Tokens, ids and weights, derived from a case, the step, the layer and the rank alone.

use graph_ep::{DType, Payload};
use half::{bf16, f16};

use crate::case::{Case, Skew};
use crate::payload;

/// Rows as a caller thinks of them.
#[derive(Clone, Debug)]
pub enum Rows {
    /// `[tokens, hidden]` numbers.
    Values(Vec<f32>),
    /// Rows of bytes and of scales.
    Bytes(Vec<u8>, Vec<u8>),
}

/// What one rank brings to one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// `[tokens]` rows as the dispatch is given them.
    pub tokens: Vec<u8>,
    /// `[tokens]` rows as they arrive.
    pub rows: Vec<u8>,
    /// `[tokens]` rows of scales as they arrive; bytes bring theirs, FP8 rows are given them.
    pub scales: Vec<u8>,
    /// `[tokens, hidden]`: what experts read from a row.
    pub values: Vec<f32>,
    /// `[tokens, top_k]`.
    pub ids: Vec<i64>,
    /// `[tokens, top_k]`; all 1 if the case has no weights.
    pub weights: Vec<f32>,
}

impl Inputs {
    /// What `rank` brings to `layer` of `step`.
    pub fn new(case: &Case, step: usize, layer: usize, rank: usize) -> Self {
        let mut draw = Draw::new(&[case.seed, step as u64, layer as u64, rank as u64]);
        let tokens = tokens_in(case, step, layer, rank);
        let rows = match case.payload {
            Payload::Bytes { row_bytes, scale_bytes } => {
                let rows = (0..tokens * row_bytes).map(|_| draw.word() as u8).collect();
                let scales = (0..tokens * scale_bytes).map(|_| draw.word() as u8).collect();
                Rows::Bytes(rows, scales)
            }
            Payload::Values | Payload::Fp8 => {
                Rows::Values((0..tokens).flat_map(|_| draw.row(case)).collect())
            }
        };
        let ids = (0..tokens).flat_map(|_| ids_of_token(case, step, &mut draw)).collect();
        let weights = (0..tokens * case.top_k)
            .map(|_| if case.weights { draw.value() } else { 1.0 })
            .collect();
        Self::of(case, rows, ids, weights)
    }

    /// Rows, ids and weights that were chosen rather than drawn. Values are rounded to the number
    /// format of the case.
    pub fn of(case: &Case, rows: Rows, ids: Vec<i64>, weights: Vec<f32>) -> Self {
        let (tokens, rows, scales, values) = match rows {
            Rows::Bytes(rows, scales) => {
                let values = payload::read_rows(case, &rows, &scales);
                (rows.clone(), rows, scales, values)
            }
            Rows::Values(values) => {
                let values: Vec<f32> = values.iter().map(|v| case.number().round(*v)).collect();
                let tokens = encode(case.dtype, &values);
                match case.payload {
                    Payload::Fp8 => {
                        let (rows, scales) = payload::quantized(case, &values);
                        let values = payload::read_rows(case, &rows, &scales);
                        (tokens, rows, scales, values)
                    }
                    _ => (tokens.clone(), tokens, Vec::new(), values),
                }
            }
        };
        Self { tokens, rows, scales, values, ids, weights }
    }

    /// What every rank brings to `layer` of `step`.
    pub fn of_all(case: &Case, step: usize, layer: usize) -> Vec<Self> {
        (0..case.world()).map(|rank| Self::new(case, step, layer, rank)).collect()
    }

    /// How many tokens.
    pub fn count(&self, top_k: usize) -> usize {
        self.ids.len() / top_k
    }

    /// The ids as the device reads them.
    pub fn id_bytes(&self, wide: bool) -> Vec<u8> {
        match wide {
            true => self.ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
            false => self.ids.iter().flat_map(|id| narrow(*id).to_le_bytes()).collect(),
        }
    }
}

/// Ids of cases with i32 are made within its range.
fn narrow(id: i64) -> i32 {
    i32::try_from(id).unwrap_or(i32::MAX)
}

/// Payload numbers as the device reads them.
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::Fp16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::Fp32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Rows of the device as payload numbers.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Bf16 => {
            bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        }
        DType::Fp16 => {
            bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
        }
        DType::Fp32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

/// How many tokens `rank` has: what the case says, or less where the device says how many.
pub fn tokens_in(case: &Case, step: usize, layer: usize, rank: usize) -> usize {
    let most = case.tokens[rank];
    if !case.device_count {
        return most;
    }
    // The first step uses all, so that later ones leave stale rows behind theirs.
    let mut draw = Draw::new(&[case.seed, 77, step as u64, layer as u64, rank as u64]);
    if step == 0 { most } else { draw.below(most + 1) }
}

fn ids_of_token(case: &Case, step: usize, draw: &mut Draw) -> Vec<i64> {
    let mut ids: Vec<i64> = Vec::with_capacity(case.top_k);
    let hot = match case.skew {
        Skew::Even => None,
        Skew::Hot(expert) => Some(expert % case.experts),
        Skew::Rotating => Some(step % case.experts),
    };
    if let Some(hot) = hot
        && draw.below(4) > 0
    {
        ids.push(hot as i64);
    }
    while ids.len() < case.top_k {
        let id = draw.below(case.experts) as i64;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    // The hot one is not always first.
    let turn = draw.below(case.top_k);
    ids.rotate_left(turn);
    if case.bad_ids {
        for at in 0..ids.len() {
            match draw.below(8) {
                0 => ids[at] = -1,
                1 => ids[at] = draw.outside(case),
                2 => ids[at] = ids[0],
                _ => {}
            }
        }
    }
    ids
}

/// Numbers that follow from a few words (SplitMix64).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// Numbers that follow from `words`.
    pub fn new(words: &[u64]) -> Self {
        let mut draw = Self(0);
        for word in words {
            draw.0 = draw.word() ^ word;
        }
        draw
    }

    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        for (shift, multiplier) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
            word = (word ^ (word >> shift)).wrapping_mul(multiplier);
        }
        word ^ (word >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.word() % (end.max(1) as u64)) as usize
    }

    /// The values of a token. One in eight is zero where zeros are scaled in a way of their own.
    fn row(&mut self, case: &Case) -> Vec<f32> {
        let zero = case.payload == Payload::Fp8 && self.below(8) == 0;
        let scale = if case.tiny { 2.0_f32.powi(-24) } else { 1.0 };
        (0..case.hidden).map(|_| if zero { 0.0 } else { scale * self.value() }).collect()
    }

    /// A value of ordinary size that needs rounding; now and then a zero or a small one.
    pub fn value(&mut self) -> f32 {
        let fraction = (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        match self.below(16) {
            0 => 0.0,
            1 => -0.0,
            2 => fraction * 2.0_f32.powi(-20),
            _ => fraction * 4.0,
        }
    }

    /// An id that is neither −1 nor an expert.
    fn outside(&mut self, case: &Case) -> i64 {
        // The last are experts once the upper half of the word is cut off.
        let narrow = [case.experts as i64, -2, i64::from(i32::MAX), i64::from(i32::MIN)];
        let wide = [1 << 32, (1 << 40) + 1, i64::MAX, i64::MIN];
        let choices = if case.wide_ids { wide } else { narrow };
        choices[self.below(choices.len())]
    }
}

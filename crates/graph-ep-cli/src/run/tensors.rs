//! Tokens and weights: functions of seed, step, layer and token, the same whoever computes them.

use std::ops::Range;

use graph_ep::DType;

use super::Plan;
use crate::args::Dtype;
use crate::workload::counter::Counter;

/// The element type, as the engine calls it.
pub(crate) fn dtype(choice: Dtype) -> DType {
    match choice {
        Dtype::Bf16 => DType::Bf16,
        Dtype::Fp16 => DType::Fp16,
        Dtype::Fp32 => DType::Fp32,
    }
}

/// What the tokens of one rank bring to one layer.
#[derive(Debug, Default)]
pub(super) struct LayerInput {
    /// `[tokens, hidden]`, each value one of the payload type.
    pub(super) values: Vec<f32>,
    /// `[tokens, top_k]`, −1 for none.
    pub(super) ids: Vec<i32>,
    /// `[tokens, top_k]`.
    pub(super) weights: Vec<f32>,
}

impl LayerInput {
    /// The input of the tokens in `range`.
    pub(super) fn new(plan: &Plan, step: usize, layer: usize, range: Range<usize>) -> Self {
        let (top_k, hidden, seed) = (plan.routing.top_k(), plan.args.hidden, plan.args.seed);
        let routing = plan.routing.layer(step, layer);
        let choices = range.start * top_k..range.end * top_k;
        let mut input = Self { ids: routing.ids[choices.clone()].to_vec(), ..Self::default() };
        if let Some(weights) = routing.weights {
            input.weights = weights[choices].to_vec();
        }
        for token in range {
            let mut words = Words::of(seed, step, layer, token);
            // Eighths between −16 and 16: exact in every payload type, so that what is compared is
            // the exchange and not the rounding of its input.
            input.values.extend((0..hidden).map(|_| f32::from(words.byte().cast_signed()) / 8.0));
            if routing.weights.is_none() {
                let drawn: Vec<f32> = (0..top_k).map(|_| 1.0 + f32::from(words.byte())).collect();
                let sum: f32 = drawn.iter().sum();
                input.weights.extend(drawn.iter().map(|weight| weight / sum));
            }
        }
        input
    }
}

/// Pseudo-random bytes that depend on where a token stands and on nothing else.
struct Words {
    numbers: Counter,
    /// What is left of the last of them.
    left: u32,
    word: u64,
}

impl Words {
    fn of(seed: u64, step: usize, layer: usize, token: usize) -> Self {
        let numbers = Counter::starting_at(seed, &[step as u64, layer as u64, token as u64]);
        Self { numbers, left: 0, word: 0 }
    }

    fn byte(&mut self) -> u8 {
        if self.left == 0 {
            self.word = self.numbers.next();
            self.left = 8;
        }
        self.left -= 1;
        let byte = self.word as u8;
        self.word >>= 8;
        byte
    }
}

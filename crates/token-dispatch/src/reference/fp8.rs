//! FP8 e4m3 and the quantisation of rows, from their definitions.
//!
//! An e4m3 number has a sign, four bits of exponent (bias 7) and three of fraction; there are no
//! infinities, and the code whose bits are all set but for the sign is the one that is no number:
//!
//! ```text
//! exponent 0:   ± fraction / 8 · 2^−6
//! otherwise:    ± (1 + fraction / 8) · 2^(exponent − 7)        up to 1.75 · 2^8 = 448
//! ```
//!
//! A row is quantised in blocks of 128 values. A block's scale is its largest magnitude over 448, as
//! an f32 division gives it, or 1 if that is zero or no finite number. A value becomes the e4m3 number
//! nearest to value / scale, again an f32 division, ties to the even code; what lies beyond 448
//! becomes 448.

use super::arithmetic::power_of_two;

/// Values that share one scale.
pub const BLOCK: usize = 128;

/// The code of what is no number.
pub const NAN: u8 = 0x7f;

/// The code of the largest magnitude, 448.
const LARGEST: u8 = NAN - 1;

/// The value of a code.
pub fn decode(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 0xf), f64::from(code & 7) / 8.0);
    let magnitude = match exponent {
        _ if code & NAN == NAN => f64::NAN,
        0 => fraction * power_of_two(-6),
        _ => (1.0 + fraction) * power_of_two(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The code of the number nearest to `value`: found by looking at all of them.
pub fn encode(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | NAN;
    }
    let magnitude = f64::from(value.abs()).min(decode(LARGEST));
    let nearest = (0..=LARGEST).min_by(|&a, &b| {
        // Exact in f64 wherever two codes are about as far from the value.
        let distance = |code: u8| (decode(code) - magnitude).abs();
        distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
    });
    sign | nearest.unwrap_or(LARGEST)
}

/// The codes of a row and the scale of each of its blocks.
pub fn quantize(row: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let scales: Vec<f32> = row.chunks(BLOCK).map(scale_of).collect();
    let codes = row.chunks(BLOCK).zip(&scales);
    (
        codes.flat_map(|(block, &scale)| block.iter().map(move |v| encode(v / scale))).collect(),
        scales,
    )
}

fn scale_of(block: &[f32]) -> f32 {
    let largest = block.iter().filter(|v| !v.is_nan()).fold(0f32, |most, v| most.max(v.abs()));
    let scale = largest / decode(LARGEST) as f32;
    if scale > 0.0 && scale.is_finite() { scale } else { 1.0 }
}

/// The values that a quantised row stands for: each code times its block's scale, rounded to f32.
pub fn dequantize(codes: &[u8], scales: &[f32]) -> Vec<f32> {
    let blocks = codes.chunks(BLOCK).zip(scales);
    blocks
        .flat_map(|(block, &scale)| block.iter().map(move |c| decode(*c) as f32 * scale))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;

    #[test]
    fn codes_are_what_the_format_says() {
        let values = [(0x00, 0.0), (0x01, 0.001953125), (0x07, 0.013671875), (0x08, 0.015625)];
        for (code, value) in values.into_iter().chain([(0x38, 1.0), (0x39, 1.125), (0x7e, 448.0)]) {
            assert_eq!(decode(code), value);
            assert_eq!(decode(code | 0x80), -value);
        }
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
        for code in (0..=u8::MAX).filter(|code| code & NAN != NAN) {
            assert_eq!(encode(decode(code) as f32), code);
        }
    }

    #[test]
    fn ties_go_to_even_and_the_rest_to_the_nearest() {
        // Around 1 the numbers are 1/8 apart.
        assert_eq!(encode(1.0625), 0x38);
        assert_eq!(encode(1.1875), 0x3a);
        assert_eq!(encode(1.0625 + 1e-6), 0x39);
        // Half of the smallest, 2^−9, ties to zero and keeps its sign.
        assert_eq!(encode(-(2f32.powi(-10))), 0x80);
        assert_eq!(encode(2f32.powi(-10) * 1.01), 0x01);
        assert_eq!([encode(464.0), encode(1e30), encode(f32::INFINITY)], [0x7e; 3]);
        assert_eq!([encode(f32::NAN), encode(-1e30)], [0x7f, 0xfe]);
    }

    #[test]
    fn each_block_has_its_own_scale() {
        let mut row = vec![224.0; BLOCK];
        row.extend([0.0; BLOCK]);
        row.extend([-1.0, 0.5]);
        let (codes, scales) = quantize(&row);
        assert_eq!(scales, [0.5, 1.0, 1.0 / 448.0]);
        assert_eq!(codes[..BLOCK], [0x7e; BLOCK]);
        assert_eq!(codes[2 * BLOCK..], [0xfe, 0x76]);
    }

    fn by_the_engine(row: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut given = vec![0; 4 * row.len()];
        DType::Fp32.encode(row, &mut given);
        let mut codes = vec![0; row.len()];
        let mut scales = vec![0xaa; crate::fp8::scale_row_bytes(row.len())];
        let mut scratch = vec![0.0; row.len()];
        crate::fp8::quantize(DType::Fp32, &given, &mut scratch, &mut codes, &mut scales);
        let (words, _) = scales.as_chunks::<4>();
        let (scales, padding) = words.split_at(row.len().div_ceil(BLOCK));
        assert!(padding.iter().all(|word| *word == [0; 4]));
        (codes, scales.iter().map(|word| f32::from_le_bytes(*word)).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// Any bits at all: subnormals, infinities, what is no number.
        #[test]
        fn the_engine_quantises_by_this_rule(bits in prop::collection::vec(any::<u32>(), 1..300)) {
            let row: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            prop_assert_eq!(quantize(&row), by_the_engine(&row));
        }

        /// Values of like size, so that most are neither zero nor the largest.
        #[test]
        fn so_it_does_where_values_are_alike(row in prop::collection::vec(-448f32..448.0, 1..300)) {
            let (codes, scales) = quantize(&row);
            prop_assert_eq!(by_the_engine(&row), (codes.clone(), scales.clone()));
            let mut bytes = Vec::new();
            for scale in &scales {
                bytes.extend(scale.to_le_bytes());
            }
            let mut values = vec![0.0; row.len()];
            crate::fp8::dequantize(&codes, &bytes, &mut values);
            prop_assert_eq!(dequantize(&codes, &scales), values);
        }
    }
}

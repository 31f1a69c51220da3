//! FP8 on the way: values in blocks of 128, each with a scale.

use float8::F8E4M3;

use crate::dtype::DType;

/// Values that share one scale.
pub const BLOCK: usize = 128;

/// The largest finite e4m3 value.
pub const LARGEST: f32 = 448.0;

/// Bytes of a row of scales for rows of `hidden` values: one fp32 for each block, padded to 16 bytes.
pub const fn scale_row_bytes(hidden: usize) -> usize {
    (hidden.div_ceil(BLOCK) * size_of::<f32>()).next_multiple_of(16)
}

/// Quantises one row to e4m3 with a scale for each block.
///
/// A block's scale is its largest magnitude over 448, in fp32; or 1 if that is zero or not finite.
/// A value becomes the e4m3 number nearest to value / scale, ties to even, at most 448 in magnitude;
/// NaN stays NaN. `scratch` has room for a row of values; padding behind the scales is zeroed.
pub fn quantize(
    dtype: DType,
    row: &[u8],
    scratch: &mut [f32],
    bytes: &mut [u8],
    scales: &mut [u8],
) {
    dtype.decode(row, scratch);
    scales.fill(0);
    let (words, _) = scales.as_chunks_mut::<4>();
    for ((block, bytes), word) in scratch.chunks(BLOCK).zip(bytes.chunks_mut(BLOCK)).zip(words) {
        let scale = scale_of(block);
        *word = scale.to_le_bytes();
        for (byte, value) in bytes.iter_mut().zip(block) {
            *byte = F8E4M3::from_f32(value / scale).to_bits();
        }
    }
}

fn scale_of(block: &[f32]) -> f32 {
    let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / LARGEST;
    if scale > 0.0 && scale.is_finite() { scale } else { 1.0 }
}

/// The values of one quantised row.
pub fn dequantize(bytes: &[u8], scales: &[u8], values: &mut [f32]) {
    let (words, _) = scales.as_chunks::<4>();
    for ((block, bytes), word) in values.chunks_mut(BLOCK).zip(bytes.chunks(BLOCK)).zip(words) {
        let scale = f32::from_le_bytes(*word);
        for (value, byte) in block.iter_mut().zip(bytes) {
            *value = F8E4M3::from_bits(*byte).to_f32() * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round_trip(values: &[f32]) -> (Vec<f32>, Vec<u8>) {
        let mut row = vec![0; values.len() * 4];
        DType::Fp32.encode(values, &mut row);
        let mut bytes = vec![0; values.len()];
        let mut scales = vec![0xaa; scale_row_bytes(values.len())];
        quantize(DType::Fp32, &row, &mut vec![0.0; values.len()], &mut bytes, &mut scales);
        let mut back = vec![0.0; values.len()];
        dequantize(&bytes, &scales, &mut back);
        (back, scales)
    }

    #[test]
    fn blocks_have_scales_of_their_own_and_odd_values_survive() {
        let mut values = vec![448.0; BLOCK];
        values.extend([0.0, -0.0, 0.0]);
        let (back, scales) = round_trip(&values);
        assert_eq!(back, values);
        assert_eq!(scales.len(), 16);
        assert_eq!(scales[8..], [0; 8]);
        let (back, _) = round_trip(&[f32::NAN, f32::INFINITY, 1.0]);
        assert!(back[0].is_nan());
        assert_eq!(back[1..], [448.0, 1.0]);
    }

    proptest! {
        /// e4m3 has four significant bits: a value is off by at most 1/16 of itself, or, where the
        /// block's largest dwarfs it, by half of the smallest step, 2⁻¹⁰ scales.
        #[test]
        fn the_error_is_bounded(values in prop::collection::vec(-1e6f32..1e6, 1..300)) {
            let (back, scales) = round_trip(&values);
            for (at, (value, back)) in values.iter().zip(&back).enumerate() {
                let scale = f32::from_le_bytes(scales[at / BLOCK * 4..][..4].try_into().unwrap());
                let bound = (value.abs() / 16.0).max(scale * 2f32.powi(-10)) * 1.0001;
                prop_assert!((value - back).abs() <= bound, "{value} became {back}");
            }
        }
    }
}

//! Number formats of rows, and how values leave and enter them.

use std::fmt;

use half::{bf16, f16};

/// The number format of the values that combine adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DType {
    /// bfloat16.
    Bf16 = 0,
    /// IEEE half precision.
    Fp16 = 1,
    /// IEEE single precision.
    Fp32 = 2,
}

impl DType {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            DType::Bf16 | DType::Fp16 => 2,
            DType::Fp32 => 4,
        }
    }

    /// The format with the code that parameter blocks carry.
    pub const fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(DType::Bf16),
            1 => Some(DType::Fp16),
            2 => Some(DType::Fp32),
            _ => None,
        }
    }

    /// Reads `bytes` as values of this format and writes them to `values`, both of one row.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) {
        let size = self.bytes();
        debug_assert_eq!(bytes.len(), values.len() * size);
        match self {
            DType::Bf16 => read(bytes, values, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
            DType::Fp16 => read(bytes, values, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
            DType::Fp32 => read(bytes, values, f32::from_le_bytes),
        }
    }

    /// Rounds `values` to this format, to the nearest and ties to even, and writes them to `bytes`.
    pub fn encode(self, values: &[f32], bytes: &mut [u8]) {
        debug_assert_eq!(bytes.len(), values.len() * self.bytes());
        match self {
            DType::Bf16 => write(values, bytes, |v| bf16::from_f32(v).to_le_bytes()),
            DType::Fp16 => write(values, bytes, |v| f16::from_f32(v).to_le_bytes()),
            DType::Fp32 => write(values, bytes, f32::to_le_bytes),
        }
    }
}

fn read<const N: usize>(bytes: &[u8], values: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    let (words, _) = bytes.as_chunks::<N>();
    for (value, word) in values.iter_mut().zip(words) {
        *value = convert(*word);
    }
}

fn write<const N: usize>(values: &[f32], bytes: &mut [u8], convert: impl Fn(f32) -> [u8; N]) {
    let (words, _) = bytes.as_chunks_mut::<N>();
    for (word, value) in words.iter_mut().zip(values) {
        *word = convert(*value);
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Bf16 => "bf16",
            DType::Fp16 => "fp16",
            DType::Fp32 => "fp32",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        // Between 1 and the next bf16 (1 + 2^-7) the half-way point goes to the even neighbour.
        let mut bytes = [0; 4];
        DType::Bf16.encode(&[1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)], &mut bytes);
        let mut back = [0.0; 2];
        DType::Bf16.decode(&bytes, &mut back);
        assert_eq!(back, [1.0, 1.0 + 2f32.powi(-6)]);
        let mut bytes = [0; 8];
        DType::Fp32.encode(&[f32::MIN_POSITIVE, -0.0], &mut bytes);
        DType::Fp32.decode(&bytes, &mut back);
        assert_eq!(back.map(f32::to_bits), [f32::MIN_POSITIVE.to_bits(), (-0.0f32).to_bits()]);
    }
}

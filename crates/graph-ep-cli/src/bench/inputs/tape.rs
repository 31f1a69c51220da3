//! Rows that differ from each other everywhere, and cost nothing to make.

use graph_ep::DType;

use crate::workload::counter::{Counter, Purpose};

/// A long random sequence; a row is the part of it that begins at a place of its own. No two rows of one
/// tape begin at the same place, and whoever knows a row's number can look it up.
#[derive(Clone, Debug)]
pub struct Tape {
    bytes: Vec<u8>,
    element: usize,
    row: usize,
    span: usize,
}

/// Odd, so that multiplying by it visits every place of a power of two once; large, so that
/// neighbouring rows do not overlap where there is room.
const STRIDE: usize = 0x9e37_79b9;

impl Tape {
    /// A tape for `rows` rows of `values` numbers of `dtype`. Numbers are eighths between −16 and 16:
    /// exact in every type.
    pub fn of_values(dtype: DType, values: usize, rows: usize, seed: u64) -> Self {
        let eighths: Vec<f32> =
            (0..=u8::MAX).map(|byte| f32::from(byte.cast_signed()) / 8.0).collect();
        let mut table = vec![0; eighths.len() * dtype.bytes()];
        dtype.encode(&eighths, &mut table);
        let of = |byte: u8| &table[usize::from(byte) * dtype.bytes()..][..dtype.bytes()];
        Self::new(dtype.bytes(), values, rows, seed, |byte, bytes| {
            bytes.extend_from_slice(of(byte))
        })
    }

    /// A tape for `rows` rows of `row` bytes that mean nothing, a multiple of four.
    pub fn of_bytes(row: usize, rows: usize, seed: u64) -> Self {
        Self::new(4, row / 4, rows, seed, |byte, bytes| {
            bytes.extend_from_slice(&u32::from(byte).wrapping_mul(0x0101_0107).to_le_bytes());
        })
    }

    fn new(
        element: usize,
        elements: usize,
        rows: usize,
        seed: u64,
        write: impl Fn(u8, &mut Vec<u8>),
    ) -> Self {
        let span = rows.next_power_of_two();
        let mut counter = Counter::new(Purpose::Token, &[seed, element as u64, elements as u64]);
        let mut bytes = Vec::with_capacity((span + elements) * element);
        let (mut word, mut left) = (0, 0);
        for _ in 0..span + elements {
            if left == 0 {
                (word, left) = (counter.next(), 8);
            }
            write(word as u8, &mut bytes);
            (word, left) = (word >> 8, left - 1);
        }
        Self { bytes, element, row: elements * element, span }
    }

    /// The row of this number, which is below the number of rows that the tape was made for.
    pub fn row(&self, number: usize) -> &[u8] {
        let place = number.wrapping_mul(STRIDE) % self.span;
        &self.bytes[place * self.element..][..self.row]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn rows_differ_and_have_their_length() {
        for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
            let tape = Tape::of_values(dtype, 16, 1000, 3);
            let rows: HashSet<&[u8]> = (0..1000).map(|number| tape.row(number)).collect();
            assert_eq!(rows.len(), 1000, "{dtype}");
            assert!(rows.iter().all(|row| row.len() == 16 * dtype.bytes()));
            let mut values = [0.0; 16];
            dtype.decode(tape.row(5), &mut values);
            assert!(values.iter().all(|value| (-16.0..16.0).contains(value)));
            assert!(values.iter().all(|value| (value * 8.0).fract() == 0.0));
        }
        let tape = Tape::of_bytes(32, 100, 3);
        let rows: HashSet<&[u8]> = (0..100).map(|number| tape.row(number)).collect();
        assert_eq!(rows.len(), 100);
    }

    #[test]
    fn there_is_a_row_even_where_there_are_none() {
        assert_eq!(Tape::of_bytes(16, 0, 0).row(0).len(), 16);
    }
}

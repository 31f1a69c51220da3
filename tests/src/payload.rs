//! What the experts of the suite read from a received row, by the references.

use graph_ep::token_dispatch::reference::fp8;
use graph_ep::{DType, Payload};

use crate::case::Case;
use crate::inputs::decode;

/// The values in a row of bytes with scales: every byte and every scale shows in one of them, and
/// all are exact in f32.
pub fn read_bytes(hidden: usize, row: &[u8], scales: &[u8]) -> Vec<f32> {
    let at = |bytes: &[u8], column: usize| match bytes.len() {
        0 => 0,
        length => bytes[column % length],
    };
    let value = |column| {
        f32::from(at(row, column).cast_signed()) / 64.0 + f32::from(at(scales, column)) / 1024.0
    };
    (0..hidden).map(value).collect()
}

/// The values of a row that arrived with these scales.
pub fn read_row(case: &Case, row: &[u8], scales: &[u8]) -> Vec<f32> {
    match case.payload {
        Payload::Values => decode(case.dtype, row),
        Payload::Bytes { .. } => read_bytes(case.hidden, row, scales),
        Payload::Fp8 => fp8::dequantize(row, &decode(DType::Fp32, scales)),
    }
}

/// The same for several rows.
pub fn read_rows(case: &Case, rows: &[u8], scales: &[u8]) -> Vec<f32> {
    let width = case.scale_bytes();
    let rows = rows.chunks(case.row_bytes()).enumerate();
    rows.flat_map(|(at, row)| read_row(case, row, &scales[at * width..][..width])).collect()
}

/// Rows of values as FP8 rows, and their scales, padded.
pub fn quantized(case: &Case, values: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (mut rows, mut scales) = (Vec::new(), Vec::new());
    for row in values.chunks(case.hidden) {
        let (codes, of_row) = fp8::quantize(row);
        let end = scales.len() + case.scale_bytes();
        rows.extend(codes);
        scales.extend(of_row.iter().flat_map(|scale| scale.to_le_bytes()));
        scales.resize(end, 0);
    }
    (rows, scales)
}

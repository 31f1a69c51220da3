//! What the experts of the suite read from a received row, by the references.

use bytemuck::{Pod, Zeroable};
use graph_ep::token_dispatch::reference::fp8;
use graph_ep::{DType, Payload};
use half::{bf16, f16};

use crate::case::Case;
use crate::inputs::decode;

/// What rows are made of, in a form that a kernel can be given.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RowFormat {
    /// Values that experts read from a row, and of what they make of it.
    pub hidden: u32,
    /// Code of the number format: [`DType`].
    pub dtype: u32,
    /// 0 for values, 1 for bytes, 2 for FP8.
    pub payload: u32,
    /// Bytes of a received row.
    pub row_bytes: u32,
    /// Bytes of a received row of scales.
    pub scale_bytes: u32,
    /// Bytes of a row that experts make, and of a row of gradients.
    pub sum_bytes: u32,
}

impl RowFormat {
    /// That of the rows of `case`.
    pub fn of(case: &Case) -> Self {
        Self {
            hidden: case.hidden as u32,
            dtype: case.dtype as u32,
            payload: match case.payload {
                Payload::Values => 0,
                Payload::Bytes { .. } => 1,
                Payload::Fp8 => 2,
            },
            row_bytes: case.row_bytes() as u32,
            scale_bytes: case.scale_bytes() as u32,
            sum_bytes: case.sum_bytes() as u32,
        }
    }

    /// The number format.
    pub fn number(&self) -> DType {
        DType::from_code(self.dtype).unwrap_or(DType::Fp32)
    }

    /// The number of that format that is nearest to `value`.
    pub fn round(&self, value: f32) -> f32 {
        match self.number() {
            DType::Bf16 => bf16::from_f32(value).to_f32(),
            DType::Fp16 => f16::from_f32(value).to_f32(),
            DType::Fp32 => value,
        }
    }

    /// The values of a row that arrived with these scales.
    pub fn read(&self, row: &[u8], scales: &[u8]) -> Vec<f32> {
        match self.payload {
            0 => decode(self.number(), row),
            1 => read_bytes(self.hidden as usize, row, scales),
            _ => fp8::dequantize(row, &decode(DType::Fp32, scales)),
        }
    }
}

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
    RowFormat::of(case).read(row, scales)
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

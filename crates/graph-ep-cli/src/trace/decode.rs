//! Tensors of a trace as numbers.

use safetensors::Dtype;

use super::TraceError;
use super::container::{Container, Tensor};

/// Expert ids with their shape.
pub(super) struct Ids {
    /// `[steps, layers, tokens, top_k]`.
    pub(super) shape: [usize; 4],
    /// One entry a choice, row-major.
    pub(super) values: Vec<i32>,
}

/// `topk_idx`.
pub(super) fn ids(container: &Container, file: &str) -> Result<Ids, TraceError> {
    const NAME: &str = "topk_idx";
    let Some(tensor) = container.tensor(NAME) else {
        return Err(TraceError::NoIds { file: file.to_owned(), found: container.names() });
    };
    let Ok(shape) = <[usize; 4]>::try_from(tensor.shape) else {
        let expected = "[steps, layers, tokens, top_k]".to_owned();
        return Err(wrong_shape(file, NAME, &tensor, expected));
    };
    let values = match tensor.dtype {
        Dtype::U8 => tensor.bytes.iter().map(|&id| id.into()).collect(),
        Dtype::U16 => numbers(tensor.bytes, |b| u16::from_le_bytes(b).into()),
        Dtype::I32 => numbers(tensor.bytes, i32::from_le_bytes),
        _ => return Err(wrong_type(file, NAME, &tensor, "U8, U16 or I32")),
    };
    Ok(Ids { shape, values })
}

/// `topk_weights`, if there, of the shape that the ids have.
pub(super) fn weights(
    container: &Container,
    shape: &[usize; 4],
    file: &str,
) -> Result<Option<Vec<f32>>, TraceError> {
    const NAME: &str = "topk_weights";
    let Some(tensor) = container.tensor(NAME) else { return Ok(None) };
    if tensor.shape != shape {
        return Err(wrong_shape(file, NAME, &tensor, format!("that of `topk_idx`, {shape:?}")));
    }
    match tensor.dtype {
        Dtype::F32 => Ok(Some(numbers(tensor.bytes, f32::from_le_bytes))),
        _ => Err(wrong_type(file, NAME, &tensor, "F32")),
    }
}

/// A tensor of one integer a step, if there.
pub(super) fn labels(
    container: &Container,
    name: &'static str,
    steps: usize,
    file: &str,
) -> Result<Option<Vec<i64>>, TraceError> {
    let Some(tensor) = container.tensor(name) else { return Ok(None) };
    if tensor.shape != [steps] {
        return Err(wrong_shape(file, name, &tensor, format!("[{steps}], one entry a step")));
    }
    match tensor.dtype {
        Dtype::I32 => Ok(Some(numbers(tensor.bytes, |b| i32::from_le_bytes(b).into()))),
        Dtype::I64 => Ok(Some(numbers(tensor.bytes, i64::from_le_bytes))),
        _ => Err(wrong_type(file, name, &tensor, "I32 or I64")),
    }
}

/// Little-endian numbers of `N` bytes each, at whatever address they start.
fn numbers<const N: usize, T>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&chunk| decode(chunk)).collect()
}

fn wrong_shape(
    file: &str,
    tensor: &'static str,
    found: &Tensor<'_>,
    expected: String,
) -> TraceError {
    TraceError::Shape { file: file.to_owned(), tensor, found: found.shape.to_vec(), expected }
}

fn wrong_type(
    file: &str,
    tensor: &'static str,
    found: &Tensor<'_>,
    allowed: &'static str,
) -> TraceError {
    TraceError::ElementType {
        file: file.to_owned(),
        tensor,
        found: found.dtype.to_string(),
        allowed,
    }
}

//! Arguments that are numbers within limits.

use std::num::{ParseFloatError, ParseIntError};

use graph_ep::ep_context::cuda::OLDEST_CAPABILITY;

/// The largest `--alignment`, the most rows of an expert that a kernel's tile takes.
const MAX_ALIGNMENT: usize = 256;

/// What the engine takes: tokens of a rank, experts of a token, experts and ranks.
pub(crate) const MAX_TOKENS: usize = 1 << 20;
pub(crate) const MAX_TOP_K: usize = 64;
pub(crate) const MAX_EXPERTS: usize = crate::routing::MAX_EXPERTS;
pub(crate) const MAX_RANKS: usize = 1 << 10;

/// Rows are moved in units of 16 bytes, and the smallest element has two.
const HIDDEN_MULTIPLE: usize = 8;

/// The largest `--hidden`, far above any model's.
const MAX_HIDDEN: usize = 1 << 20;

/// Why a number is not accepted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NumberError {
    /// It is not a whole number.
    #[error("not a whole number: {0}")]
    Integer(#[from] ParseIntError),
    /// It is not a number.
    #[error("not a number: {0}")]
    Float(#[from] ParseFloatError),
    /// It must be at least one.
    #[error("it must be at least 1")]
    Zero,
    /// It must be neither zero nor more than can be.
    #[error("it must be from 1 to {most}")]
    Most {
        /// The most.
        most: usize,
    },
    /// A factor must be finite and positive.
    #[error("it must be finite and greater than 0")]
    Factor,
    /// Looking ahead means expecting at least what was.
    #[error("it must be finite and at least 1")]
    LookAhead,
    /// Noise is a fraction.
    #[error("it must be finite and at least 0")]
    Noise,
    /// An alignment is a power of two.
    #[error("it must be a power of two from 1 to {MAX_ALIGNMENT}")]
    Alignment,
    /// A row consists of whole units of 16 bytes.
    #[error("it must be a multiple of {HIDDEN_MULTIPLE} from {HIDDEN_MULTIPLE} to {MAX_HIDDEN}")]
    Hidden,
    /// An architecture has a name, and what kernels are written with.
    #[error("it must be an architecture from sm_{OLDEST_CAPABILITY} on, such as sm_90a")]
    Architecture,
    /// A size in bytes is a whole number with an optional unit.
    #[error("it must be a whole number of bytes, or one followed by KiB, MiB or GiB")]
    Bytes,
    /// A size in bytes is too large to be one.
    #[error("it exceeds what 64 bits can count")]
    TooManyBytes,
}

pub(crate) fn positive(text: &str) -> Result<usize, NumberError> {
    match text.parse()? {
        0 => Err(NumberError::Zero),
        number => Ok(number),
    }
}

/// From 1 to `MOST`. What has a limit is held to it here, so that sizes can be multiplied.
pub(crate) fn up_to<const MOST: usize>(text: &str) -> Result<usize, NumberError> {
    let number = text.parse()?;
    if (1..=MOST).contains(&number) { Ok(number) } else { Err(NumberError::Most { most: MOST }) }
}

pub(crate) fn positive_factor(text: &str) -> Result<f64, NumberError> {
    let factor: f64 = text.parse()?;
    if factor.is_finite() && factor > 0.0 { Ok(factor) } else { Err(NumberError::Factor) }
}

pub(super) fn look_ahead(text: &str) -> Result<f64, NumberError> {
    let factor: f64 = text.parse()?;
    if factor.is_finite() && factor >= 1.0 { Ok(factor) } else { Err(NumberError::LookAhead) }
}

pub(crate) fn alignment(text: &str) -> Result<usize, NumberError> {
    let rows: usize = text.parse()?;
    let right = rows.is_power_of_two() && rows <= MAX_ALIGNMENT;
    if right { Ok(rows) } else { Err(NumberError::Alignment) }
}

pub(crate) fn hidden(text: &str) -> Result<usize, NumberError> {
    let elements: usize = text.parse()?;
    let right = (1..=MAX_HIDDEN).contains(&elements) && elements.is_multiple_of(HIDDEN_MULTIPLE);
    if right { Ok(elements) } else { Err(NumberError::Hidden) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_inclusive() {
        assert_eq!(alignment("1"), Ok(1));
        assert_eq!(alignment("256"), Ok(256));
        assert_eq!(up_to::<64>("1"), Ok(1));
        assert_eq!(up_to::<64>("64"), Ok(64));
        for beyond in ["0", "65"] {
            assert_eq!(up_to::<64>(beyond), Err(NumberError::Most { most: 64 }));
        }
        assert_eq!(hidden("8"), Ok(8));
        assert_eq!(hidden("1048576"), Ok(1 << 20));
        assert_eq!(hidden("1048584"), Err(NumberError::Hidden));
        assert_eq!(look_ahead("1"), Ok(1.0));
        assert_eq!(look_ahead("NaN"), Err(NumberError::LookAhead));
        assert_eq!(positive_factor("1e-9"), Ok(1e-9));
        assert_eq!(positive_factor("1e999"), Err(NumberError::Factor));
        assert!(matches!(positive("99999999999999999999"), Err(NumberError::Integer(_))));
    }
}

//! Sizes in bytes, as a person writes them.

use super::NumberError;

/// Units by the power of two that they stand for. Decimal units are not taken: `MB` is read by some
/// as one thing and by some as the other.
const UNITS: [(&str, u32); 3] = [("KiB", 10), ("MiB", 20), ("GiB", 30)];

/// A whole number of bytes, or of one of the units; case and a space before the unit do not matter.
pub(crate) fn parse(text: &str) -> Result<u64, NumberError> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    if digits.is_empty() {
        return Err(NumberError::Bytes);
    }
    let shift = match unit.trim() {
        "" => 0,
        unit => {
            let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
            known.ok_or(NumberError::Bytes)?.1
        }
    };
    // Only digits are left, so that the only way to fail is to be too large.
    let number: u64 = digits.parse().map_err(|_| NumberError::TooManyBytes)?;
    number.checked_mul(1 << shift).ok_or(NumberError::TooManyBytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_binary() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("3KiB"), Ok(3 << 10));
        assert_eq!(parse("3 mib"), Ok(3 << 20));
        assert_eq!(parse("80GiB"), Ok(80 << 30));
        assert_eq!(parse("17179869183GiB"), Ok(17_179_869_183 << 30));
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "KiB", "-1", "+1", "1.5GiB", "1KB", "1K", "1TiB", "1 GiB more", "é", "1é"]
        {
            assert_eq!(parse(text), Err(NumberError::Bytes), "{text}");
        }
        for text in ["18446744073709551616", "17179869184GiB"] {
            assert_eq!(parse(text), Err(NumberError::TooManyBytes), "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_read_or_refused(text in ".{0,12}") {
            let _ = parse(&text);
        }

        #[test]
        fn plain_bytes_are_themselves(bytes: u64) {
            prop_assert_eq!(parse(&bytes.to_string()), Ok(bytes));
        }
    }
}

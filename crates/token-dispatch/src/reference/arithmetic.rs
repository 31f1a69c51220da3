//! Rounding to the number format, from its definition.
//!
//! Values travel as f32 everywhere in this module tree; a value is *of the format* if the number
//! format represents it. Rounding is to the nearest number of the format, ties to the even one, as IEEE 754
//! defines it, subnormals included.

/// The element types that combine reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE 754 binary32.
    Fp32,
    /// bfloat16: the range of binary32, eight bits of precision.
    Bf16,
    /// IEEE 754 binary16.
    Fp16,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fp32, Self::Bf16, Self::Fp16];

    /// Significant bits, the implicit one included.
    fn precision(self) -> i32 {
        match self {
            Self::Fp32 => 24,
            Self::Bf16 => 8,
            Self::Fp16 => 11,
        }
    }

    /// The exponent of the smallest normal number.
    fn min_exponent(self) -> i32 {
        match self {
            Self::Fp32 | Self::Bf16 => -126,
            Self::Fp16 => -14,
        }
    }

    /// The exponent of the largest finite number.
    fn max_exponent(self) -> i32 {
        match self {
            Self::Fp32 | Self::Bf16 => 127,
            Self::Fp16 => 15,
        }
    }

    /// The largest finite number: `(2 − 2^(1−p)) · 2^max_exponent`.
    pub fn max_finite(self) -> f64 {
        (2.0 - power_of_two(1 - self.precision())) * power_of_two(self.max_exponent())
    }

    /// The unit roundoff of rounding an **f32** to this type: `2^−p`, or 0 where that rounds nothing.
    ///
    /// Rounding x to a normal number gives `x·(1 + δ)` with `|δ| ≤ 2^−p`.
    pub fn unit_roundoff(self) -> f64 {
        if self == Self::Fp32 { 0.0 } else { power_of_two(-self.precision()) }
    }

    /// The most that rounding an **f32** to a subnormal of this type changes it: half their spacing,
    /// or 0 where that rounds nothing.
    pub fn subnormal_roundoff(self) -> f64 {
        if self == Self::Fp32 { 0.0 } else { power_of_two(self.min_exponent() - self.precision()) }
    }

    /// `value` rounded to the nearest number of the format, ties to even; beyond the largest, infinity.
    ///
    /// The numbers of the format around x are the multiples of `2^(e − p + 1)` where e is the exponent of x,
    /// but no smaller than that of the smallest normal number. Of a magnitude that is added to 2^52
    /// times that spacing f64 keeps just these multiples: the addition itself rounds, to the nearest
    /// and to even, and the subtraction is exact. (`round_ties_even` would say it in a word, but is a
    /// call wherever the target need not have the instruction, and took most of the time of a check.)
    pub fn round(self, value: f32) -> f32 {
        if value == 0.0 || !value.is_finite() {
            return value;
        }
        let value = f64::from(value);
        let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        let spacing = power_of_two(exponent.max(self.min_exponent()) - self.precision() + 1);
        let large = power_of_two(52) * spacing;
        let rounded = (value.abs() + large) - large;
        let rounded = if rounded > self.max_finite() { f64::INFINITY } else { rounded };
        // Exact: every number of the format is an f32.
        rounded.copysign(value) as f32
    }

    /// Whether `value` is a number of the format. Infinities are, and so is every NaN.
    pub fn represents(self, value: f32) -> bool {
        value.is_nan() || self.round(value) == value
    }
}

/// `2^exponent`, for the exponents of normal f64 numbers.
pub(super) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The two operations of combine: a product and a sum, each rounded to f32.
///
/// They are apart so that nothing can contract them into one fused, singly rounded operation.
pub fn multiply_then_add(accumulator: f32, weight: f32, value: f32) -> f32 {
    let product: f32 = weight * value;
    accumulator + product
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ties_go_to_even() {
        // BF16 has 7 fraction bits: around 1 the numbers are 2^−7 apart.
        let half_step = 1.0 / 256.0;
        assert_eq!(Format::Bf16.round(1.0 + half_step), 1.0);
        assert_eq!(Format::Bf16.round(1.0 + 3.0 * half_step), 1.0 + 4.0 * half_step);
        assert_eq!(Format::Bf16.round(1.0 + 1.01 * half_step), 1.0 + 2.0 * half_step);
        // FP16 has 10.
        assert_eq!(Format::Fp16.round(2049.0), 2048.0);
        assert_eq!(Format::Fp16.round(2051.0), 2052.0);
        assert_eq!(Format::Fp32.round(1.0 + f32::EPSILON), 1.0 + f32::EPSILON);
    }

    #[test]
    fn the_ends_of_the_range() {
        assert_eq!(Format::Fp16.max_finite(), 65504.0);
        assert_eq!(Format::Bf16.max_finite(), f64::from(bf16::MAX.to_f32()));
        assert_eq!(Format::Fp32.max_finite(), f64::from(f32::MAX));
        // 65520 is halfway between 65504 and the next number, which does not exist.
        assert_eq!(Format::Fp16.round(65519.996), 65504.0);
        assert_eq!(Format::Fp16.round(65520.0), f32::INFINITY);
        assert_eq!(Format::Bf16.round(-f32::MAX), f32::NEG_INFINITY);
        // The smallest FP16 subnormal is 2^−24; half of it ties to zero and keeps its sign.
        let smallest = 2.0_f32.powi(-24);
        assert_eq!(Format::Fp16.round(smallest), smallest);
        assert_eq!(Format::Fp16.round(-smallest / 2.0).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(Format::Fp16.round(smallest * 0.75), smallest);
        assert_eq!(Format::Fp16.subnormal_roundoff(), f64::from(smallest) / 2.0);
    }

    #[test]
    fn what_is_not_a_number_stays_that() {
        for format in Format::ALL {
            assert!(format.round(f32::NAN).is_nan());
            assert_eq!(format.round(f32::NEG_INFINITY), f32::NEG_INFINITY);
            assert_eq!(format.round(-0.0).to_bits(), (-0.0_f32).to_bits());
            assert!(format.represents(f32::NAN) && format.represents(f32::INFINITY));
        }
        assert!(!Format::Bf16.represents(1.001) && Format::Fp32.represents(1.001));
    }

    #[test]
    fn every_half_number_is_represented() {
        for bits in 0..=u16::MAX {
            assert!(Format::Bf16.represents(bf16::from_bits(bits).to_f32()));
            assert!(Format::Fp16.represents(f16::from_bits(bits).to_f32()));
        }
    }

    #[test]
    fn around_every_tie_rounding_agrees_with_a_second_implementation() {
        let pairs = (0..u16::MAX).flat_map(|bits| {
            let (bf16, fp16) =
                (|bits| bf16::from_bits(bits).to_f32(), |bits| f16::from_bits(bits).to_f32());
            [(bf16(bits), bf16(bits + 1)), (fp16(bits), fp16(bits + 1))]
        });
        for (number, next) in pairs.filter(|pair| pair.0.is_finite() && pair.1.is_finite()) {
            // Exact: an f32 has bits to spare. The numbers of either sign lie one after the other.
            let tie = number + (next - number) / 2.0;
            for value in [tie.next_down(), tie, tie.next_up()] {
                let second = (bf16::from_f32(value).to_f32(), f16::from_f32(value).to_f32());
                let bf16 = (Format::Bf16.round(value).to_bits(), second.0.to_bits());
                let fp16 = (Format::Fp16.round(value).to_bits(), second.1.to_bits());
                assert_eq!(bf16.0, bf16.1, "{value:e} to BF16");
                assert_eq!(fp16.0, fp16.1, "{value:e} to FP16");
            }
        }
    }

    #[test]
    fn a_product_is_rounded_before_it_is_added() {
        // (1 + 2^−12)² = 1 + 2^−11 + 2^−24, a tie that rounds down; a fused operation would keep
        // the last term when 1 is taken away.
        let x = 1.0 + 2.0_f32.powi(-12);
        assert_eq!(multiply_then_add(-1.0, x, x), 2.0_f32.powi(-11));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn rounding_agrees_with_a_second_implementation(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            prop_assume!(!value.is_nan());
            let bf16 = bf16::from_f32(value).to_f32();
            let fp16 = f16::from_f32(value).to_f32();
            prop_assert_eq!(Format::Bf16.round(value).to_bits(), bf16.to_bits());
            prop_assert_eq!(Format::Fp16.round(value).to_bits(), fp16.to_bits());
            prop_assert_eq!(Format::Fp32.round(value).to_bits(), bits);
        }

        #[test]
        fn rounding_stays_within_its_roundoff(value in prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL) {
            for format in Format::ALL {
                let rounded = f64::from(format.round(value));
                let value = f64::from(value);
                let bound = format.unit_roundoff() * value.abs() + format.subnormal_roundoff();
                if value.abs() <= format.max_finite() {
                    prop_assert!((rounded - value).abs() <= bound, "{format:?} {value:e}");
                }
            }
        }
    }
}

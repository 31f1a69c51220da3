//! Device addresses as memory of this process, for the host bodies of the kernels here.

/// The pointer behind a device address of the host backend.
pub(super) fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Bytes in which no two places look alike: 64-bit words of a generator that `seed` starts, so that it
/// shows where bytes came from, and no zeros, which some hardware moves faster.
pub(super) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..bytes.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_differ_by_seed_and_have_the_length_asked_for() {
        for bytes in [0, 1, 8, 4099] {
            assert_eq!(pattern(1, bytes).len(), bytes);
        }
        assert_ne!(pattern(0, 64), pattern(2, 64));
        assert_eq!(pattern(3, 64), pattern(3, 65)[..64]);
    }
}

//! How to wait for a record.

use std::time::Duration;

/// First looks again at once, then sleeps, the longer the longer it has waited: a clean step takes
/// microseconds on a device and milliseconds on a host that shares its cores with many ranks. So a record
/// is found late by up to a 64th of its step, or by what the shortest sleep takes, whichever is more: the
/// time asked for, and what a host adds to any, on Linux 50 µs unless it is told otherwise.
pub(super) struct Pause {
    looks: u32,
    looked_around: Duration,
}

impl Pause {
    const SPINS: u32 = 64;
    const PART: u32 = 64;
    const SHORTEST: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);
    /// How often to look at other things.
    const AROUND: Duration = Duration::from_millis(10);

    pub(super) fn new() -> Self {
        Self { looks: 0, looked_around: Duration::ZERO }
    }

    /// Lets time pass before the next look, `waited` having passed so far; true if other things are to be
    /// looked at too.
    pub(super) fn next(&mut self, waited: Duration) -> bool {
        self.looks = self.looks.saturating_add(1);
        if self.looks <= Self::SPINS {
            std::hint::spin_loop();
            return false;
        }
        std::thread::sleep((waited / Self::PART).clamp(Self::SHORTEST, Self::LONGEST));
        let around = waited.saturating_sub(self.looked_around) >= Self::AROUND;
        if around {
            self.looked_around = waited;
        }
        around
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_things_are_looked_at_now_and_then() {
        let mut pause = Pause::new();
        // The first looks let no time pass.
        assert!((0..Pause::SPINS).all(|_| !pause.next(Duration::MAX)));
        assert!(!pause.next(Pause::AROUND / 2));
        assert!(pause.next(Pause::AROUND));
        assert!(!pause.next(Pause::AROUND + Pause::AROUND / 2));
        assert!(pause.next(2 * Pause::AROUND));
    }
}

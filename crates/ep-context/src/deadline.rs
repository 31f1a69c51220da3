//! How long each phase may wait.

use std::time::Duration;

use crate::fault::Phase;

/// A deadline for every phase. No wait of the library is without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    by_phase: [Duration; Phase::COUNT],
}

impl Deadlines {
    /// The same deadline for every phase, rounded up to whole milliseconds, at least one.
    pub fn all(deadline: Duration) -> Self {
        Self { by_phase: [clamp(deadline); Phase::COUNT] }
    }

    /// Sets the deadline of one phase, rounded up to whole milliseconds, at least one.
    #[must_use]
    pub fn with(mut self, phase: Phase, deadline: Duration) -> Self {
        self.by_phase[phase.index()] = clamp(deadline);
        self
    }

    /// The deadline of a phase.
    pub fn of(&self, phase: Phase) -> Duration {
        self.by_phase[phase.index()]
    }

    /// The deadlines in milliseconds, indexed by phase, as kernels read them.
    pub fn milliseconds(&self) -> [u32; Phase::COUNT] {
        self.by_phase.map(|deadline| u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX))
    }
}

impl Default for Deadlines {
    /// A minute to set up and to agree, half a minute for everything that happens in a step: long
    /// enough for a rank that compiles or loads, short enough that an operator sees the error.
    fn default() -> Self {
        Self::all(Duration::from_secs(30))
            .with(Phase::Setup, Duration::from_secs(60))
            .with(Phase::Agreement, Duration::from_secs(60))
            .with(Phase::Record, Duration::from_secs(60))
    }
}

fn clamp(deadline: Duration) -> Duration {
    let milliseconds = deadline.as_nanos().div_ceil(1_000_000).clamp(1, u128::from(u32::MAX));
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::from(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_whole_milliseconds_within_a_word() {
        let deadlines =
            Deadlines::all(Duration::from_micros(1)).with(Phase::Combine, Duration::MAX);
        assert_eq!(deadlines.of(Phase::Setup), Duration::from_millis(1));
        assert_eq!(deadlines.milliseconds()[Phase::Combine.index()], u32::MAX);
        assert_eq!(deadlines.milliseconds()[Phase::Dispatch.index()], 1);
    }
}

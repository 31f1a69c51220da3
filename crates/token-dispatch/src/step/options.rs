//! How a step is to run.

/// How a step receives rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepMode {
    /// One window within the present capacity. Nothing is waited for by the host; what does not fit
    /// is left out and counted.
    Static,
    /// One window of exactly the rows that are required: the host waits for the count in every
    /// dispatch, and grows the row set when it is too small, up to `max_rows`.
    Eager {
        /// The most rows that may be held.
        max_rows: u32,
    },
    /// As many windows within the present capacity as it takes, looped on the device. Recorded steps
    /// only; see [`Lane::rounds`](crate::Lane::rounds).
    Rounds,
}

/// For how many rows a recorded step is shaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowShaping {
    /// For the capacity when recorded: growth makes the recording stale.
    Capacity,
    /// For every row that the set can ever hold, counted on the device: growth changes nothing. Sound
    /// only if everything that the caller does with rows covers so many too.
    DeviceCounted,
}

/// How a step is to run.
#[derive(Clone, Copy, Debug)]
pub struct StepOptions {
    pub(crate) mode: StepMode,
    pub(crate) shaping: RowShaping,
    pub(crate) hold: bool,
}

impl StepOptions {
    /// A static step, shaped by capacity, that holds nothing back.
    pub fn new() -> Self {
        Self { mode: StepMode::Static, shaping: RowShaping::Capacity, hold: false }
    }

    /// How rows are received.
    #[must_use]
    pub fn with_mode(mut self, mode: StepMode) -> Self {
        self.mode = mode;
        self
    }

    /// For how many rows a recording is shaped.
    #[must_use]
    pub fn with_shaping(mut self, shaping: RowShaping) -> Self {
        self.shaping = shaping;
        self
    }

    /// Whether steps behind an over-budget one drain, moving nothing on any rank, until
    /// [`TokenDispatcher::resume`](crate::TokenDispatcher::resume): so that it can be replayed before them.
    #[must_use]
    pub fn with_hold_on_overflow(mut self, hold: bool) -> Self {
        self.hold = hold;
        self
    }

    /// How rows are received.
    pub fn mode(&self) -> StepMode {
        self.mode
    }

    /// For how many rows a recording is shaped.
    pub fn shaping(&self) -> RowShaping {
        self.shaping
    }

    /// Whether steps behind an over-budget one drain.
    pub fn hold_on_overflow(&self) -> bool {
        self.hold
    }

    /// The first option that differs from that of `other`, by its name.
    pub fn differs(&self, other: &Self) -> Option<&'static str> {
        let same = [
            ("mode", self.mode == other.mode),
            ("shaping", self.shaping == other.shaping),
            ("hold_on_overflow", self.hold == other.hold),
        ];
        same.into_iter().find_map(|(option, same)| (!same).then_some(option))
    }
}

impl Default for StepOptions {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_they_were_set_and_told_where_they_differ() {
        let plain = StepOptions::new();
        assert_eq!((plain.mode(), plain.shaping()), (StepMode::Static, RowShaping::Capacity));
        assert!(!plain.hold_on_overflow());
        assert_eq!(plain.differs(&plain), None);
        let rounds = plain.with_mode(StepMode::Rounds);
        assert_eq!((rounds.mode(), plain.differs(&rounds)), (StepMode::Rounds, Some("mode")));
        let counted = plain.with_shaping(RowShaping::DeviceCounted);
        assert_eq!(counted.shaping(), RowShaping::DeviceCounted);
        assert_eq!(plain.differs(&counted), Some("shaping"));
        let holding = plain.with_hold_on_overflow(true);
        assert!(holding.hold_on_overflow());
        assert_eq!(plain.differs(&holding), Some("hold_on_overflow"));
    }
}

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
    pub fn mode(mut self, mode: StepMode) -> Self {
        self.mode = mode;
        self
    }

    /// For how many rows a recording is shaped.
    #[must_use]
    pub fn shaping(mut self, shaping: RowShaping) -> Self {
        self.shaping = shaping;
        self
    }

    /// How rows are received, as set by [`StepOptions::mode`].
    pub fn mode_of_step(&self) -> StepMode {
        self.mode
    }

    /// For how many rows a recording is shaped, as set by [`StepOptions::shaping`].
    pub fn shaping_of_rows(&self) -> RowShaping {
        self.shaping
    }

    /// The first option that differs from that of `other`, named by its setter.
    pub fn differs(&self, other: &Self) -> Option<&'static str> {
        let same = [
            ("mode", self.mode == other.mode),
            ("shaping", self.shaping == other.shaping),
            ("hold_on_overflow", self.hold == other.hold),
        ];
        same.into_iter().find_map(|(option, same)| (!same).then_some(option))
    }

    /// Whether steps behind an over-budget one drain, moving nothing on any rank, until
    /// [`TokenDispatcher::resume`](crate::TokenDispatcher::resume): so that it can be replayed before them.
    #[must_use]
    pub fn hold_on_overflow(mut self, hold: bool) -> Self {
        self.hold = hold;
        self
    }
}

impl Default for StepOptions {
    fn default() -> Self {
        Self::new()
    }
}

//! What ranks found out in their steps, added up.

use std::time::{Duration, Instant};

use graph_ep::{Outcome, StepRecord, StepReport};

use super::kernels::State;
use super::report::Entry;

/// What one rank found out.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) steps: u64,
    pub(super) overflowed: u64,
    pub(super) replays: u64,
    pub(super) eager: u64,
    pub(super) growths: u64,
    pub(super) recordings: u64,
    pub(super) windows: u64,
    pub(super) dropped: u64,
    pub(super) delivered: u64,
    /// Outputs that were compared, as the closed form has it.
    pub(super) expected: u64,
    pub(super) seconds: f64,
    /// Nanoseconds from launch to record of each step that was clean.
    clean: Vec<u64>,
    pub(super) state: Option<State>,
}

impl Tally {
    /// Adds a step.
    pub(super) fn step(&mut self, report: &StepReport) {
        self.record(&report.record);
        self.growths += u64::from(report.growths);
        self.recordings += u64::from(report.recordings);
        self.overflowed += u64::from(report.discarded.is_some());
        match report.outcome {
            Outcome::Recovered { replays, eager } => {
                self.replays += u64::from(replays);
                self.eager += u64::from(eager);
            }
            Outcome::Clean if report.record.windows <= 1 => {
                self.clean.push(nanoseconds(report.times.first_run));
            }
            _ => {}
        }
    }

    /// Adds a step of which there is only the record of the run that counts.
    pub(super) fn record(&mut self, record: &StepRecord) {
        self.steps += 1;
        self.windows = self.windows.max(record.windows.into());
        self.dropped += record.dropped;
        self.delivered += record.delivered;
        self.overflowed += u64::from(record.overflowed() || record.windows > 1);
    }

    /// Adds what another group of the same ranks found out.
    pub(super) fn add(&mut self, other: Self) {
        let Self { steps, overflowed, replays, eager, growths, recordings, .. } = other;
        self.steps += steps;
        self.overflowed += overflowed;
        self.replays += replays;
        self.eager += eager;
        self.growths += growths;
        self.recordings += recordings;
        self.windows = self.windows.max(other.windows);
        self.dropped += other.dropped;
        self.delivered += other.delivered;
        self.expected += other.expected;
        self.seconds += other.seconds;
        self.clean.extend(other.clean);
        self.state = match (self.state, other.state) {
            // The first mismatch stays.
            (Some(own), Some(other)) => {
                let place = if own.claimed != 0 { own } else { other };
                Some(State {
                    step: own.step + other.step,
                    compared: own.compared + other.compared,
                    mismatches: own.mismatches + other.mismatches,
                    missing: own.missing + other.missing,
                    ..place
                })
            }
            (own, other) => own.or(other),
        };
    }

    /// Does some of its work, and adds the time that takes.
    pub(super) fn timed<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let start = Instant::now();
        let result = work(self);
        self.seconds += start.elapsed().as_secs_f64();
        result
    }

    /// Whether the device compared all that there was, and all of it was right.
    fn verified(&self) -> bool {
        self.state.is_some_and(|state| state.mismatches == 0 && state.compared == self.expected)
    }

    fn median_clean_us(&self) -> Option<f64> {
        let mut times = self.clean.clone();
        let middle = times.len() / 2;
        if times.is_empty() {
            return None;
        }
        let (_, median, _) = times.select_nth_unstable(middle);
        Some(*median as f64 / 1000.0)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What all ranks found out together.
pub(super) fn entry(name: String, mode: String, settings: String, ranks: &[Tally]) -> Entry {
    let most = |of: fn(&Tally) -> u64| ranks.iter().map(of).max().unwrap_or(0);
    let sum = |of: fn(&Tally) -> u64| ranks.iter().map(of).sum::<u64>();
    let of_state = |of: fn(&State) -> u64| {
        ranks.iter().filter_map(|rank| rank.state.as_ref()).map(of).sum::<u64>()
    };
    let first = ranks.iter().enumerate().find_map(|(rank, tally)| {
        let state = tally.state.filter(|state| state.mismatches > 0)?;
        Some(format!(
            "rank {rank}, step {}, layer {}, token {}, column {}: {} and not {}",
            state.bad_step,
            state.bad_layer,
            state.bad_token,
            state.bad_column,
            f32::from_bits(state.bad_found),
            f32::from_bits(state.bad_expected)
        ))
    });
    Entry {
        name,
        mode,
        settings,
        verified: !ranks.is_empty() && ranks.iter().all(Tally::verified),
        steps: most(|t| t.steps),
        overflowed: most(|t| t.overflowed),
        replays: most(|t| t.replays),
        eager_runs: most(|t| t.eager),
        growths: sum(|t| t.growths),
        recordings: sum(|t| t.recordings),
        most_windows: most(|t| t.windows),
        delivered: sum(|t| t.delivered),
        dropped: sum(|t| t.dropped),
        missing: of_state(|state| state.missing),
        compared: of_state(|state| state.compared),
        expected: sum(|t| t.expected),
        mismatches: of_state(|state| state.mismatches),
        first_mismatch: first,
        seconds: ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max),
        clean_step_us: ranks.first().and_then(Tally::median_clean_us),
    }
}

//! What a person sees on stderr while a run lasts.
//!
//! A bar, if stderr is a terminal; and one line for each overflow, terminal or not.

use std::fmt;
use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;
use crate::report::Overflow;

/// Ranks that an overflow's line names before it counts the rest.
const RANKS_NAMED: usize = 4;

/// The progress of one run. Dropping it takes the bar away and leaves the lines.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Starts to show `steps` steps.
    pub fn new(steps: usize) -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
        // The template is constant; if it were wrong, indicatif's own is as good.
        if let Ok(style) = ProgressStyle::with_template("step {pos}/{len} [{bar:40}] {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// One more step is done and will not be launched again.
    pub fn step_done(&self) {
        self.bar.inc(1);
    }

    /// Says beside the bar what is going on, "recording" for instance.
    pub fn say(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    /// One line on what overflowed and how it ended, above the bar.
    pub fn overflow(&self, overflow: &Overflow) {
        let line = OverflowLine(overflow).to_string();
        self.bar.suspend(|| output::tell(&line));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// An overflow in one line.
#[derive(Clone, Copy, Debug)]
pub struct OverflowLine<'a>(pub &'a Overflow);

impl fmt::Display for OverflowLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let overflow = self.0;
        write!(f, "step {}: overflow on ", overflow.step)?;
        let ranks: Vec<usize> = overflow.ranks().collect();
        for (place, &rank) in ranks.iter().take(RANKS_NAMED).enumerate() {
            let separator = if place == 0 { "" } else { ", " };
            // Ranks come from both lists.
            let (required, had) = (overflow.required_rows[rank], overflow.capacity_before[rank]);
            write!(f, "{separator}rank {rank} ({required} rows required, {had} there)")?;
        }
        if ranks.len() > RANKS_NAMED {
            write!(f, " and {} more", ranks.len() - RANKS_NAMED)?;
        }
        let both = overflow.capacity_before.iter().zip(&overflow.capacity_after);
        let grown = both.filter(|(before, after)| after > before).count();
        if grown > 0 {
            let to = overflow.capacity_after.iter().max().copied().unwrap_or(0);
            write!(f, "; {grown} grew, the largest to {to}")?;
        }
        match overflow.attempts {
            0 => Ok(()),
            1 => f.write_str("; replayed"),
            attempts => write!(f, "; replayed {attempts} times"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overflow(required: &[usize], after: usize, attempts: u32) -> Overflow {
        Overflow {
            step: 12,
            required_rows: required.to_vec(),
            capacity_before: vec![640; required.len()],
            capacity_after: vec![after; required.len()],
            attempts,
        }
    }

    #[test]
    fn an_overflow_is_one_line() {
        assert_eq!(
            OverflowLine(&overflow(&[640, 656, 912], 1104, 1)).to_string(),
            "step 12: overflow on rank 1 (656 rows required, 640 there), rank 2 (912 rows \
             required, 640 there); 3 grew, the largest to 1104; replayed"
        );
        assert_eq!(
            OverflowLine(&overflow(&[641], 640, 0)).to_string(),
            "step 12: overflow on rank 0 (641 rows required, 640 there)"
        );
        let many = OverflowLine(&overflow(&[700; 9], 720, 2)).to_string();
        assert!(many.contains(" and 5 more") && many.ends_with("; replayed 2 times"), "{many}");
        assert!(!many.contains('\n'));
    }

    #[test]
    fn progress_without_a_terminal_is_silent_and_counts() {
        let progress = Progress { bar: ProgressBar::hidden() };
        progress.say("recording");
        progress.step_done();
        progress.step_done();
        assert_eq!(progress.bar.position(), 2);
    }
}

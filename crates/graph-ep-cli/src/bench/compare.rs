//! `graph-ep bench compare`: what moved between two reports, beyond noise.
//!
//! Two results belong together if every parameter is the same. A time moved if its medians differ by
//! more than a fraction that is called noise and its spreads, from the tenth to the ninetieth
//! percentile, have nothing in common: either alone happens between runs of one program.

mod render;

use std::collections::BTreeMap;
use std::path::Path;

use super::report::{Entry, Limit, LimitKind, ReadError, Report};
use super::stats::Quantiles;
use crate::output;
use crate::verdict::Verdict;

pub use render::render;

/// The fraction by which a median may differ without having moved, unless another is asked for.
pub const NOISE: f64 = 0.03;

/// What became of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing beyond noise.
    Same,
    /// It fell.
    Faster,
    /// It rose.
    Slower,
}

impl Change {
    /// From `before` to `after`, where medians may differ by the fraction `noise` of the first.
    pub fn of(before: &Quantiles, after: &Quantiles, noise: f64) -> Self {
        let (from, to) = (before.median_us, after.median_us);
        if (to - from).abs() <= noise * from {
            return Self::Same;
        }
        if to > from && after.p10_us > before.p90_us {
            Self::Slower
        } else if to < from && after.p90_us < before.p10_us {
            Self::Faster
        } else {
            Self::Same
        }
    }
}

/// Something that both reports have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair<'a, T> {
    /// In the first.
    pub before: &'a T,
    /// In the second.
    pub after: &'a T,
    /// What became of its time.
    pub change: Change,
}

/// Two reports, side by side.
#[derive(Clone, Debug)]
pub struct Comparison<'a> {
    /// The fraction by which medians may differ.
    pub noise: f64,
    /// Results of both, in the order of the second.
    pub results: Vec<Pair<'a, Entry>>,
    /// Results of the first report only, in its order.
    pub only_before: Vec<&'a Entry>,
    /// Results of the second report only, in its order.
    pub only_after: Vec<&'a Entry>,
    /// Limits of both: where these moved, it is the machine that did.
    pub limits: Vec<Pair<'a, Limit>>,
}

impl<'a> Comparison<'a> {
    /// Compares `before` with `after`. A case that occurs several times in a report is matched in the
    /// order in which it occurs.
    pub fn of(before: &'a Report, after: &'a Report, noise: f64) -> Self {
        let (both, only_before, only_after) =
            matched(&before.results, &after.results, |entry| &entry.case);
        let results = both.into_iter().map(|(before, after)| {
            let change = Change::of(&before.time, &after.time, noise);
            Pair { before, after, change }
        });
        let (limits, ..) = matched(&before.limits, &after.limits, limit_key);
        let limits = limits.into_iter().map(|(before, after)| {
            let change = Change::of(&before.time, &after.time, noise);
            Pair { before, after, change }
        });
        Self {
            noise,
            results: results.collect(),
            only_before,
            only_after,
            limits: limits.collect(),
        }
    }

    /// [`Verdict::Failed`] if a result is slower, or is not verified any more, in the second report.
    pub fn verdict(&self) -> Verdict {
        let worse = |pair: &Pair<'_, Entry>| pair.change == Change::Slower || is_wrong(pair);
        if self.results.iter().any(worse) { Verdict::Failed } else { Verdict::Verified }
    }
}

/// Whether outputs were right in the first report and are not in the second.
fn is_wrong(pair: &Pair<'_, Entry>) -> bool {
    pair.before.verified && !pair.after.verified
}

/// Reads two reports, prints what moved on stdout, and says whether something is slower. Blocks on the
/// file system.
///
/// # Errors
///
/// [`ReadError`], if a file is no report.
pub fn run(before: &Path, after: &Path, noise: f64) -> Result<Verdict, ReadError> {
    let (text, verdict) = compared(before, after, noise)?;
    output::show(&text);
    Ok(verdict)
}

fn compared(before: &Path, after: &Path, noise: f64) -> Result<(String, Verdict), ReadError> {
    let (before, after) = (Report::read(before)?, Report::read(after)?);
    let comparison = Comparison::of(&before, &after, noise);
    Ok((render(&before, &after, &comparison), comparison.verdict()))
}

/// What was done to whom, by how many SMs and with how many bytes.
type LimitKey = (LimitKind, usize, Option<usize>, u32, u64);

fn limit_key(limit: &Limit) -> LimitKey {
    (limit.what, limit.from, limit.to, limit.sms, limit.bytes)
}

/// What is in both lists, in the order of the second, then what is only in the first or the second.
type Matched<'a, T> = (Vec<(&'a T, &'a T)>, Vec<&'a T>, Vec<&'a T>);

fn matched<'a, T, K: Ord>(
    before: &'a [T],
    after: &'a [T],
    key: impl Fn(&'a T) -> K,
) -> Matched<'a, T> {
    // Places in the first list, the last occurrence first, so that the next one is at the end.
    let mut places: BTreeMap<K, Vec<usize>> = BTreeMap::new();
    for (place, item) in before.iter().enumerate().rev() {
        places.entry(key(item)).or_default().push(place);
    }
    let (mut both, mut only_after) = (Vec::new(), Vec::new());
    for item in after {
        match places.get_mut(&key(item)).and_then(Vec::pop) {
            Some(place) => both.push((&before[place], item)),
            None => only_after.push(item),
        }
    }
    let mut left: Vec<usize> = places.into_values().flatten().collect();
    left.sort_unstable();
    (both, left.into_iter().map(|place| &before[place]).collect(), only_after)
}

#[cfg(test)]
mod tests;

//! Growth of a receive buffer in place.

use std::time::Instant;

use graph_ep::ep_context::cuda::{CallTime, clock_calls};
use graph_ep::{Backend, BackendError, RowSet};

use super::error::OpError;
use super::part::Part;
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Mismatch;
use crate::table::bytes;

/// Measures mapping so many more bytes and making them usable: calls of the host, on all ranks at once.
/// Between samples the memory is given back. Collective.
pub(super) fn measure<B: Backend>(part: &Part<'_, B>) -> Result<Vec<Entry>, OpError> {
    let (row, few) = (part.shape.row_bytes(), part.shape.alignment as u32);
    let more = part.setup.grow_bytes / row as u64;
    // Rows are counted by signed words on the device.
    let more = u32::try_from(more).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs() - few).max(1);
    let set = RowSet::new(part.group.context(), part.stream(), "rows that grow", few, few + more)?;
    let rows = set.add("rows that grow", row)?;
    let (samples, _) = part.sample(|_| {
        part.meet("growing")?;
        let begin = Instant::now();
        let (grown, calls) = clock_calls(|| grow(part, &set, few + more));
        grown?;
        let us = begin.elapsed().as_secs_f64() * 1e6;
        shrink(part, &set, few)?;
        let parts = PARTS.map(|(_, names)| time_of(&calls, names));
        Ok([&[us, us - parts.iter().sum::<f64>()][..], &parts].concat())
    })?;
    grow(part, &set, few + more)?;
    // The last row is there, and the device knows it.
    let end = row * (few + more) as usize;
    let last = rows.slice().get(end - row..end);
    let mut found = vec![0; row];
    if let Some(last) = last {
        let expected: Vec<u8> = (0..row).map(|at| at as u8).collect();
        // SAFETY: the row is below the capacity, and nothing else knows the buffer.
        unsafe { part.queue().upload(&last, &expected) }?;
        // SAFETY: as above.
        unsafe { part.queue().download(&last, &mut found) }?;
    }
    let mut capacity = [0; 4];
    // SAFETY: the set was committed on this queue.
    unsafe { part.queue().download(&set.capacity_word(), &mut capacity) }?;
    let written = found.iter().enumerate().all(|(at, byte)| *byte == at as u8);
    let right = written && u32::from_le_bytes(capacity) == few + more;
    let wrong = Mismatch {
        rank: part.rank(),
        layer: 0,
        what: "the row that was grown to,",
        at: (few + more) as usize,
    };
    let verified = part.all_right((!right).then_some(wrong))?;
    let grown = bytes(row as u64 * u64::from(more));
    let case = part.case(Op::Grow, &format!("by {grown}"), false, 0);
    let whole: Vec<f64> = samples.iter().step_by(2 + PARTS.len()).copied().collect();
    let mut entry = part.entry(case, &whole, 1, (Work::default(), None), verified)?;
    entry.host_us = Some(entry.time.median_us);
    let [_, rest, parts @ ..] = part.medians::<{ 2 + PARTS.len() }>(&samples)?;
    if parts.iter().any(|us| *us > 0.0) {
        entry = entry.with("rest us", rest);
        for ((name, _), us) in PARTS.iter().zip(parts) {
            entry = entry.with(&format!("{name} us"), us);
        }
    }
    Ok(vec![entry])
}

/// Parts of a growth, and the calls of the driver that each is made of.
const PARTS: [(&str, &[&str]); 4] = [
    ("create", &["cuMemCreate", "cuMemRelease"]),
    ("map", &["cuMemMap"]),
    ("access", &["cuMemSetAccess"]),
    ("tell the device", &["cuMemcpyHtoDAsync_v2"]),
];

/// Microseconds in the calls of these names.
pub(super) fn time_of(calls: &[CallTime], names: &[&str]) -> f64 {
    let named = calls.iter().filter(|time| names.contains(&time.call));
    named.map(|time| time.time.as_secs_f64() * 1e6).sum()
}

/// Changes the capacity of `set` to `rows` rows.
fn grow<B: Backend>(part: &Part<'_, B>, set: &RowSet<B>, rows: u32) -> Result<(), BackendError> {
    // SAFETY: sets of the bench are used on the stream of the group alone.
    unsafe { set.plan(rows)?.commit(&part.queue()) }
}

/// Lowers the capacity of `set` to `rows` and unmaps what is behind. The ranks meet before and after,
/// since that may wait for a device. Collective.
pub(super) fn shrink<B: Backend>(
    part: &Part<'_, B>,
    set: &RowSet<B>,
    rows: u32,
) -> Result<(), OpError> {
    part.backend().synchronize(part.stream())?;
    part.meet("shrinking")?;
    grow(part, set, rows)?;
    part.backend().synchronize(part.stream())?;
    set.trim()?;
    part.meet("shrunk")
}

//! Growth of a receive buffer in place: by fresh memory, and by memory that was given back.
//!
//! A driver may take several times as long to hand out memory that was given back a moment before as memory
//! that was not. A receive buffer that grows in an engine usually finds the second; where memory comes and
//! goes, the first. So each is a result of its own.

mod fresh;

use std::time::Instant;

use graph_ep::ep_context::cuda::{CallTime, clock_calls};
use graph_ep::{Backend, BackendError, RowBuffer, RowSet};

use super::error::OpError;
use super::part::Part;
use crate::bench::growth::{Memory, variant};
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Mismatch;
use crate::gauge::Gauge;

/// Measures mapping so many more bytes and making them usable: calls of the host, on all ranks at once.
/// Without the result of fresh memory if there is none. Collective.
pub(super) fn measure<B: Gauge>(part: &Part<'_, B>) -> Result<Vec<Entry>, OpError> {
    let size = Size::of(part);
    let fresh::Fresh { samples, mut grown, taken } = fresh::measure(part, size)?;
    let mut entries = Vec::new();
    let rows = match grown.pop() {
        Some(rows) => {
            let verified = rows.verify(part, size)?;
            entries.push(entry(part, (size, Memory::Fresh), &samples, verified)?);
            // What this gives back now is what it then grows by.
            shrink(part, &rows.set, size.few)?;
            rows
        }
        None => Rows::new(part, size)?,
    };
    let (samples, _) = part.sample(|_| {
        part.meet("growing")?;
        let sample = rows.grow(part, size)?;
        shrink(part, &rows.set, size.few)?;
        Ok(sample.to_vec())
    })?;
    rows.set_capacity(part, size.most())?;
    let verified = rows.verify(part, size)?;
    entries.push(entry(part, (size, Memory::GivenBack), &samples, verified)?);
    // Given back where ranks wait for each other, and not when the next thing allocates.
    part.backend().synchronize(part.stream())?;
    part.meet("everything has grown")?;
    drop((rows, grown, taken));
    part.backend().free_bytes()?;
    part.meet("everything is given back")?;
    Ok(entries)
}

/// The rows before and behind a growth.
#[derive(Clone, Copy, Debug)]
struct Size {
    row_bytes: usize,
    few: u32,
    more: u32,
}

impl Size {
    fn of<B: Backend>(part: &Part<'_, B>) -> Self {
        let (row_bytes, few) = (part.shape.row_bytes(), part.shape.alignment as u32);
        let more = part.setup.grow_bytes / row_bytes as u64;
        // Rows are counted by signed words on the device.
        let more = u32::try_from(more).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs() - few);
        Self { row_bytes, few, more: more.max(1) }
    }

    fn most(self) -> u32 {
        self.few + self.more
    }

    /// Bytes of the growth alone.
    fn bytes(self) -> u64 {
        self.row_bytes as u64 * u64::from(self.more)
    }

    /// Bytes of all rows.
    fn held(self) -> u64 {
        self.row_bytes as u64 * u64::from(self.most())
    }
}

/// Microseconds of a growth, of what is left of it without its parts, and of its parts.
type Sample = [f64; 2 + PARTS.len()];

/// Parts of a growth, and the calls of the driver that each is made of.
const PARTS: [(&str, &[&str]); 4] = [
    ("create", &["cuMemCreate", "cuMemRelease"]),
    ("map", &["cuMemMap"]),
    ("access", &["cuMemSetAccess"]),
    ("tell the device", &["cuMemcpyHtoDAsync_v2"]),
];

/// A receive buffer that grows.
struct Rows<B: Backend> {
    set: RowSet<B>,
    buffer: RowBuffer<B>,
}

impl<B: Backend> Rows<B> {
    /// With the rows that there are before a growth.
    fn new(part: &Part<'_, B>, size: Size) -> Result<Self, BackendError> {
        let (label, context) = ("rows that grow", part.group.context());
        let set = RowSet::new(context, part.stream(), label, size.few, size.most())?;
        let buffer = set.add(label, size.row_bytes)?;
        Ok(Self { set, buffer })
    }

    /// Grows once, by the clock of the host.
    fn grow(&self, part: &Part<'_, B>, size: Size) -> Result<Sample, BackendError> {
        let begin = Instant::now();
        let (grown, calls) = clock_calls(|| self.set_capacity(part, size.most()));
        grown?;
        let us = begin.elapsed().as_secs_f64() * 1e6;
        let mut sample = [us; 2 + PARTS.len()];
        let [_, rest, parts @ ..] = &mut sample;
        *parts = PARTS.map(|(_, names)| time_of(&calls, names));
        *rest = us - parts.iter().sum::<f64>();
        Ok(sample)
    }

    fn set_capacity(&self, part: &Part<'_, B>, rows: u32) -> Result<(), BackendError> {
        set_capacity(part, &self.set, rows)
    }

    /// Whether on all ranks the last row is there, and the device knows it. Collective.
    fn verify(&self, part: &Part<'_, B>, size: Size) -> Result<bool, OpError> {
        let (row, end) = (size.row_bytes, size.row_bytes * size.most() as usize);
        let mut found = vec![0; row];
        if let Some(last) = self.buffer.slice().get(end - row..end) {
            let expected: Vec<u8> = (0..row).map(|at| at as u8).collect();
            // SAFETY: the row is below the capacity, and nothing else knows the buffer.
            unsafe { part.queue().upload(&last, &expected) }?;
            // SAFETY: as above.
            unsafe { part.queue().download(&last, &mut found) }?;
        }
        let mut capacity = [0; 4];
        // SAFETY: the set was committed on this queue.
        unsafe { part.queue().download(&self.set.capacity_word(), &mut capacity) }?;
        let written = found.iter().enumerate().all(|(at, byte)| *byte == at as u8);
        let right = written && u32::from_le_bytes(capacity) == size.most();
        let wrong = Mismatch {
            rank: part.rank(),
            layer: 0,
            what: "the row that was grown to,",
            at: size.most() as usize,
        };
        part.all_right((!right).then_some(wrong))
    }
}

/// The result of growths by one kind of memory, of which `samples` are this rank's. Collective.
fn entry<B: Backend>(
    part: &Part<'_, B>,
    (size, memory): (Size, Memory),
    samples: &[f64],
    verified: bool,
) -> Result<Entry, OpError> {
    let case = part.case(Op::Grow, &variant(size.bytes(), memory), false, 0);
    let whole: Vec<f64> = samples.iter().step_by(2 + PARTS.len()).copied().collect();
    let mut entry = part.entry(case, &whole, 1, (Work::default(), None), verified)?;
    entry.host_us = Some(entry.time.median_us);
    entry = entry.with("samples", whole.len() as f64);
    let [_, rest, parts @ ..] = part.medians::<{ 2 + PARTS.len() }>(samples)?;
    if parts.iter().any(|us| *us > 0.0) {
        entry = entry.with("rest us", rest);
        for ((name, _), us) in PARTS.iter().zip(parts) {
            entry = entry.with(&format!("{name} us"), us);
        }
    }
    Ok(entry)
}

/// Microseconds in the calls of these names.
pub(super) fn time_of(calls: &[CallTime], names: &[&str]) -> f64 {
    let named = calls.iter().filter(|time| names.contains(&time.call));
    named.map(|time| time.time.as_secs_f64() * 1e6).sum()
}

/// Changes the capacity of `set` to `rows` rows.
fn set_capacity<B: Backend>(
    part: &Part<'_, B>,
    set: &RowSet<B>,
    rows: u32,
) -> Result<(), BackendError> {
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
    set_capacity(part, set, rows)?;
    part.backend().synchronize(part.stream())?;
    set.trim()?;
    part.meet("shrunk")
}

#[cfg(test)]
mod tests;

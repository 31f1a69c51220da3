//! The operations that are measured, on one rank.
//!
//! Every rank calls the same functions in the same order. Ranks may share a device, on which one that
//! allocates would wait for another that waits for it: so they meet on their hosts after whatever
//! allocates, records or gives back, and between such meetings only replay and wait.

mod counters;
mod error;
mod grow;
mod halves;
mod host;
mod layers;
mod part;
mod recover;
mod replay;
mod rival;
mod round;

pub use error::OpError;
pub use part::Setup;
pub use rival::{Join, Rival, nccl};

use graph_ep::Rendezvous;

use super::cases::Measured;
use super::inputs::Given;
use super::report::{Entry, Op};
use crate::gauge::Gauge;
use part::Part;

/// Measures everything of one shape on this rank, and what the library moves whose group `join` joins.
/// Collective; `tell` is given each result, the same on all ranks, as soon as it is there.
///
/// # Errors
///
/// [`OpError`]; the other ranks have been told.
pub fn measure<B: Gauge>(
    backend: B,
    rendezvous: impl Rendezvous + 'static,
    measured: &Measured,
    given: &Given,
    setup: &Setup,
    join: Option<Join<B>>,
    mut tell: impl FnMut(Entry),
) -> Result<(), OpError> {
    let group = measured.shape.group().build(backend, rendezvous)?;
    let part = Part::new(group, measured, given, setup);
    part.and_then(|part| {
        let result = all(&part, measured, join, &mut tell);
        if let Err(error) = &result {
            part.give_up(error);
        }
        result
    })
}

fn all<B: Gauge>(
    part: &Part<'_, B>,
    measured: &Measured,
    join: Option<Join<B>>,
    tell: &mut impl FnMut(Entry),
) -> Result<(), OpError> {
    let ops = &measured.ops;
    let halves: Vec<Op> = ops
        .iter()
        .filter(|op| matches!(op, Op::Dispatch | Op::Combine | Op::Pair))
        .copied()
        .collect();
    if !halves.is_empty() {
        halves::measure(part, &halves)?.into_iter().for_each(&mut *tell);
        if let Some(join) = join.filter(|_| measured.against) {
            rival::measure(part, &halves, join)?.into_iter().for_each(&mut *tell);
        }
    }
    for op in ops {
        let entries = match op {
            Op::Dispatch | Op::Combine | Op::Pair => continue,
            Op::Replay => replay::measure(part)?,
            Op::Grow => grow::measure(part)?,
            Op::Recover => recover::measure(part)?,
            Op::Round => round::measure(part)?,
            Op::Host => host::measure(part)?,
            Op::Counters => counters::measure(part, measured.kernels)?,
        };
        entries.into_iter().for_each(&mut *tell);
    }
    part.most_held();
    // Nobody leaves while another still waits for it on a device.
    part.meet("all is measured")
}

#[cfg(test)]
mod tests;

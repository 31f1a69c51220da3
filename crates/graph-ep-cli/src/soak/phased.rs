//! All ranks from one thread, one operation at a time.
//!
//! Each half of a dispatch or a combine runs on every rank, and is waited for, before the next half
//! runs on any: so whatever waits for a signal finds it, and nothing ever spins. That is what a tool
//! needs that runs one kernel at a time, such as compute-sanitizer. Rows are pulled.

use graph_ep::{Backend, BackendError};

use super::SoakError;
use super::form::Draw;
use super::ranks::on_ranks;
use super::rig::{Half, Rig};
use super::sizes::Sizes;
use super::tally::Tally;

/// Runs so many steps of every rank.
pub(super) fn run<B: Backend>(
    sizes: &Sizes,
    steps: usize,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
) -> Result<Vec<Tally>, SoakError> {
    // Ranks meet as threads, and are left to this one.
    let rigs = on_ranks(sizes.ranks, backend, &|backend, place| Rig::new(backend, place, sizes))?;
    let mut tallies = vec![Tally::default(); rigs.len()];
    for number in 0..steps {
        one(&rigs, sizes, &mut tallies)?;
        for (rank, tally) in (0..).zip(&mut tallies) {
            let tokens = Draw::new(&rigs[0].shape(), number as u64).tokens(rank);
            tally.expected += u64::from(tokens) * sizes.layers as u64;
        }
    }
    for (rig, tally) in rigs.iter().zip(&mut tallies) {
        tally.state = Some(rig.state()?);
    }
    Ok(tallies)
}

fn one<B: Backend>(rigs: &[Rig<B>], sizes: &Sizes, tallies: &mut [Tally]) -> Result<(), SoakError> {
    let mut steps = rigs.iter().map(Rig::begin).collect::<Result<Vec<_>, _>>()?;
    rigs.iter().try_for_each(Rig::settle)?;
    for layer in 0..sizes.layers {
        for half in Half::ALL {
            for (rig, step) in rigs.iter().zip(&mut steps) {
                rig.half(step, layer, half)?;
                rig.settle()?;
            }
        }
    }
    for ((rig, step), tally) in rigs.iter().zip(steps).zip(tallies) {
        rig.compare(&step, true)?;
        let number = step.finish()?.number.unwrap_or_default();
        let record = rig.group.dispatcher().records().wait_on(number, rig.group.stream())?;
        tally.record(&record);
    }
    Ok(())
}

//! Groups that are created, run and dropped over and over.

use std::fs;

use graph_ep::BackendError;
use serde::{Deserialize, Serialize};

use super::SoakError;
use super::replays;
use super::sizes::Sizes;
use super::tally::Tally;
use crate::args::Mode;
use crate::gauge::Gauge;

/// Steps of a cycle.
const STEPS: usize = 4;

/// Bytes by which the free memory of a device may be less without anything having been left behind:
/// a page of what the driver maps.
const SLACK: u64 = 2 << 20;

/// Mappings that the allocator may have more: its arenas and the stacks of threads come and go.
const MAPPINGS: usize = 64;

/// What the process holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Mappings of memory.
    pub mappings: usize,
    /// Bytes that are free on each device; none on the host.
    pub free_bytes: Vec<u64>,
}

impl Held {
    /// What this process holds, and what is free on these devices.
    fn now<B: Gauge>(devices: &[B]) -> Result<Self, SoakError> {
        let read = |source| SoakError::Proc { source };
        let entries = |path: &str| Ok::<_, SoakError>(fs::read_dir(path).map_err(read)?.count());
        let free = devices.iter().map(Gauge::free_bytes).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            descriptors: entries("/proc/self/fd")?,
            threads: entries("/proc/self/task")?,
            mappings: fs::read_to_string("/proc/self/maps").map_err(read)?.lines().count(),
            free_bytes: free.into_iter().flatten().collect(),
        })
    }

    /// Whether `after` holds no more than this.
    pub(super) fn is_all_of(&self, after: &Self) -> bool {
        let free = self.free_bytes.iter().zip(&after.free_bytes);
        after.descriptors <= self.descriptors
            && after.threads <= self.threads
            && after.mappings <= self.mappings + MAPPINGS
            && free.into_iter().all(|(before, after)| after + SLACK >= *before)
    }
}

/// Runs a tenth of `cycles`, then `cycles`; returns what was held before and after these, and what
/// ranks found out in all of them.
pub(super) fn run<B: Gauge>(
    sizes: &Sizes,
    cycles: usize,
    gpus: usize,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
) -> Result<(Held, Held, Vec<Tally>), SoakError> {
    let devices = (0..sizes.ranks.min(gpus.max(1))).map(backend).collect::<Result<Vec<_>, _>>()?;
    let mut total = vec![Tally::default(); sizes.ranks];
    // Until kernels are loaded, and the driver and the allocator have what they keep.
    once_each(sizes, cycles.div_ceil(10), backend, &mut total)?;
    let before = Held::now(&devices)?;
    once_each(sizes, cycles, backend, &mut total)?;
    let after = Held::now(&devices)?;
    Ok((before, after, total))
}

fn once_each<B: Gauge>(
    sizes: &Sizes,
    cycles: usize,
    backend: &(impl Fn(usize) -> Result<B, BackendError> + Sync),
    total: &mut [Tally],
) -> Result<(), SoakError> {
    for cycle in 0..cycles {
        let sizes = Sizes { seed: sizes.seed.wrapping_add(cycle as u64), ..sizes.clone() };
        let ranks = replays::run(&sizes, Mode::Recover, STEPS, backend)?;
        for (total, rank) in total.iter_mut().zip(ranks) {
            total.add(rank);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_behind_is_seen() {
        let before =
            Held { descriptors: 9, threads: 3, mappings: 100, free_bytes: vec![1 << 30, 1 << 30] };
        assert!(before.is_all_of(&before));
        let less = Held { descriptors: 8, mappings: 120, ..before.clone() };
        assert!(before.is_all_of(&less));
        for after in [
            Held { descriptors: 10, ..before.clone() },
            Held { threads: 4, ..before.clone() },
            Held { mappings: 1100, ..before.clone() },
            Held { free_bytes: vec![1 << 30, (1 << 30) - (4 << 20)], ..before.clone() },
        ] {
            assert!(!before.is_all_of(&after), "{after:?}");
        }
    }
}

//! What is measured on.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::args::MeasureArgs;
use super::limits::{self, Places};
use super::nccl;
use crate::run::device::Devices;

/// The devices, and what follows from them for all measurements.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// GPUs; 0 for the host.
    pub(super) gpus: usize,
    /// Multiprocessors of one.
    multiprocessors: u32,
    /// Bytes that the ranks of one device may use together.
    pub(super) memory: u64,
    /// The most bytes that the ranks of one device have held at once.
    pub(super) most_held: Arc<AtomicU64>,
    /// Bytes by which a receive buffer grows.
    grow_bytes: u64,
    /// How much of the limits is measured.
    pub(super) limits: limits::Settings,
    /// Lines for the report.
    pub(super) hardware: Vec<String>,
}

/// Bytes that all ranks on the host may use together.
const HOST_MEMORY: u64 = 1 << 30;

/// Bytes by which a receive buffer grows, unless it was said.
const GROW_BYTES: u64 = 1 << 30;
const GROW_BYTES_ON_HOST: u64 = 64 << 20;
const GROW_BYTES_QUICK: u64 = 1 << 20;

impl Machine {
    pub(super) fn new(devices: &Devices, args: &MeasureArgs) -> Self {
        let on_host = Self {
            gpus: 0,
            multiprocessors: 0,
            memory: HOST_MEMORY,
            most_held: Arc::default(),
            grow_bytes: GROW_BYTES_ON_HOST,
            limits: limits::Settings::HOST,
            hardware: hardware(devices, args),
        };
        let machine = match devices {
            Devices::Host => on_host,
            Devices::Cuda(gpus) => Self {
                gpus: gpus.len(),
                multiprocessors: gpus.iter().map(|gpu| gpu.multiprocessors).min().unwrap_or(0),
                most_held: Arc::default(),
                // Half is left to everything that is not the memory of layers.
                memory: gpus.iter().map(|gpu| gpu.memory / 2).min().unwrap_or(0),
                grow_bytes: GROW_BYTES,
                limits: limits::Settings::FULL,
                hardware: hardware(devices, args),
            },
        };
        let quick = |usual, quick| if args.quick { quick } else { usual };
        Self {
            grow_bytes: args.grow_bytes.unwrap_or(quick(machine.grow_bytes, GROW_BYTES_QUICK)),
            limits: if args.quick { limits::Settings::QUICK } else { machine.limits },
            ..machine
        }
    }

    /// Where `ranks` ranks are.
    pub(super) fn places(&self, ranks: usize) -> Places {
        let devices = (0..ranks).map(|rank| rank % self.gpus.max(1)).collect();
        Places { devices, multiprocessors: self.multiprocessors }
    }

    /// GPUs that `ranks` ranks are on.
    pub(super) fn gpus_of(&self, ranks: usize) -> usize {
        ranks.min(self.gpus)
    }

    /// Bytes by which each of `ranks` ranks grows its buffer.
    pub(super) fn grow_bytes(&self, ranks: usize) -> u64 {
        self.grow_bytes.min(self.memory_of(ranks))
    }

    /// Bytes that each of `ranks` ranks may use.
    pub(super) fn memory_of(&self, ranks: usize) -> u64 {
        let sharing = ranks.div_ceil(self.gpus.max(1)).max(1) as u64;
        self.memory / sharing
    }
}

fn hardware(devices: &Devices, args: &MeasureArgs) -> Vec<String> {
    let mut lines = devices.describe();
    if args.against.is_some() {
        let found = nccl::describe();
        lines.push(found.unwrap_or_else(|error| format!("NCCL cannot be used: {error}")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::parse;
    use super::*;

    fn machine(line: &str) -> Machine {
        Machine::new(&Devices::Host, &parse(line).unwrap().measure)
    }

    #[test]
    fn ranks_share_gpus_in_turn() {
        let host = machine("");
        assert_eq!((host.places(3).devices, host.gpus_of(3)), (vec![0, 0, 0], 0));
        let two = Machine { gpus: 2, ..host };
        assert_eq!(two.places(5).devices, [0, 1, 0, 1, 0]);
        assert_eq!((two.gpus_of(1), two.gpus_of(5)), (1, 2));
    }

    #[test]
    fn growth_is_bounded_by_memory() {
        assert_eq!(machine("").grow_bytes(2), 64 << 20);
        assert_eq!(machine("--grow-bytes 4GiB").grow_bytes(4), HOST_MEMORY / 4);
        assert_eq!(machine("--quick").grow_bytes(1), 1 << 20);
        assert_eq!(machine("--quick --grow-bytes 8KiB").grow_bytes(1), 8 << 10);
    }
}

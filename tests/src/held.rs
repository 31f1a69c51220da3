//! What a process holds that has to be given back: how tests see that nothing was left behind.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::backend::PATIENCE;

/// What a process holds that has to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Threads.
    pub threads: usize,
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings of memory that ranks share.
    pub shared: usize,
}

impl Held {
    /// What this process holds.
    ///
    /// # Panics
    ///
    /// If the system does not say.
    pub fn now() -> Self {
        let entries = |path| fs::read_dir(path).expect("proc is mounted").count();
        let maps = fs::read_to_string("/proc/self/maps").expect("proc is mounted");
        Self {
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
            shared: maps.lines().filter(|line| line.contains("memfd:ep-context")).count(),
        }
    }

    /// Waits until this process holds no more than this again: a thread that was joined may stay in
    /// the system's list for a moment. What graphs of engines kept is given back because this asks for it.
    ///
    /// # Errors
    ///
    /// What it holds, if that stays more.
    pub fn again(&self) -> Result<(), Self> {
        let start = Instant::now();
        loop {
            graph_ep::ep_context::reclaim();
            let now = Self::now();
            // A thread that was about to go may have been counted before.
            if now.threads <= self.threads
                && now.descriptors <= self.descriptors
                && now.shared <= self.shared
            {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(now);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

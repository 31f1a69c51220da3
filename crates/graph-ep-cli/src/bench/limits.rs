//! What the hardware does at best: the limits that results are held against.
//!
//! All of it is measured in the same process as what it is compared with, on the same ranks and
//! devices, by kernels that do nothing else. [`measure`] is collective; the ranks meet before each
//! measurement, so that no rank allocates while another waits for it on a device that they may share.

mod align;
#[cfg(test)]
mod device;
mod memory;
mod replay;
mod rig;
mod signal;
mod transfer;

pub use align::Align;

use graph_ep::ep_context::rendezvous::RendezvousError;
use graph_ep::ep_context::{ContextError, EpContext};
use graph_ep::{Backend, BackendError, Fault};

use super::report::{Limit, LimitKind};
use super::stats::Quantiles;
use rig::Rig;
use transfer::Memory;

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of one transfer: far more than a cache holds. Rounded up to whole pieces of 16 bytes. Each
    /// rank needs twice as many while limits are measured.
    pub bytes: usize,
    /// Samples of each limit.
    pub samples: usize,
    /// Operations of one sample, where one is too short to be timed: replays, trips of a word or of a
    /// loop, barriers.
    pub repeats: u32,
}

impl Settings {
    /// Limits that results can be held against: under two seconds on a GPU.
    pub const FULL: Self = Self { bytes: 256 << 20, samples: 24, repeats: 100 };
    /// The same for ranks that are threads of the host.
    pub const HOST: Self = Self { bytes: 16 << 20, samples: 8, repeats: 16 };
    /// Limits that only show that everything works.
    pub const QUICK: Self = Self { bytes: 1 << 20, samples: 3, repeats: 4 };
}

/// Which ranks share a device, the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The device of each rank.
    pub devices: Vec<usize>,
    /// Multiprocessors of a device; zero where kernels run on threads of the host.
    pub multiprocessors: u32,
}

impl Places {
    /// The ranks that measure transfers between peers: the first on each device; where all ranks share
    /// one, the first two of them. What two ranks of one device reach is not the limit of a link.
    pub fn leads(&self) -> Vec<usize> {
        let first = |rank: &usize| !self.devices[..*rank].contains(&self.devices[*rank]);
        let leads: Vec<usize> = (0..self.devices.len()).filter(first).collect();
        if leads.len() == 1 { (0..self.devices.len().min(2)).collect() } else { leads }
    }

    /// The peer whose memory `rank` reads and writes; none for a rank that is no lead, or alone.
    pub fn peer_of(&self, rank: usize) -> Option<usize> {
        let leads = self.leads();
        let at = leads.iter().position(|lead| *lead == rank)?;
        let next = leads[(at + 1) % leads.len()];
        (next != rank).then_some(next)
    }

    /// Numbers of multiprocessors to measure with, 0 for all.
    fn budgets(&self) -> impl Iterator<Item = u32> + use<> {
        let all = self.multiprocessors;
        [8, 16, 24, 32, 64].into_iter().filter(move |sms| *sms < all).chain([0])
    }
}

/// Why limits could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LimitsError {
    /// The ranks could not share memory.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// The device of this rank refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The ranks did not come together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A wait on a device has ended otherwise than by what it waited for.
    #[error("the group has failed: {0}")]
    Fault(#[from] Fault),
    /// Another number of ranks has places than there are ranks.
    #[error("there are places for {places} ranks, and {ranks} ranks")]
    Places {
        /// Ranks that have places.
        places: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// What was transferred is not there.
    #[error("rank {rank}: after {what} the target holds something else than the source")]
    Wrong {
        /// The transfer.
        what: LimitKind,
        /// The rank that made it.
        rank: usize,
    },
    /// No sample was taken.
    #[error("no sample was taken")]
    Nothing,
    /// A rank sent other samples than it was to take.
    #[error("rank {rank} sent {got} bytes of samples instead of {expected}")]
    Samples {
        /// The rank.
        rank: usize,
        /// Bytes that it sent.
        got: usize,
        /// Bytes of as many samples as were taken.
        expected: usize,
    },
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    all: Vec<Limit>,
    multiprocessors: u32,
}

impl Limits {
    /// Every limit, for the report.
    pub fn all(&self) -> &[Limit] {
        &self.all
    }

    /// 10⁹ bytes a second that a rank reads from a peer with `sms` multiprocessors, 0 for all, while its
    /// own memory is read; of the slowest. Between two numbers that were measured it is what the smaller
    /// one reaches, and below the smallest what that does. None without a peer.
    pub fn peer_read_gbps(&self, sms: u32) -> Option<f64> {
        self.rate(LimitKind::PeerRead, sms)
    }

    /// The same for writing to a peer, while its own memory is written.
    pub fn peer_write_gbps(&self, sms: u32) -> Option<f64> {
        self.rate(LimitKind::PeerWrite, sms)
    }

    /// 10⁹ bytes a second, those read and those written, of a copy within the memory of a device by `sms`
    /// multiprocessors, 0 for all; of the slowest.
    pub fn copy_gbps(&self, sms: u32) -> Option<f64> {
        self.rate(LimitKind::MemoryCopy, sms)
    }

    fn rate(&self, what: LimitKind, sms: u32) -> Option<f64> {
        let measured = |limit: &&Limit| limit.what == what;
        let budgets = self.all.iter().filter(measured).map(|limit| limit.sms);
        let partial = budgets.filter(|budget| *budget != 0);
        let all = sms == 0 || (self.multiprocessors != 0 && sms >= self.multiprocessors);
        let budget = if all {
            0
        } else {
            partial.clone().filter(|budget| *budget <= sms).max().or(partial.min()).unwrap_or(0)
        };
        self.all
            .iter()
            .filter(measured)
            .filter(|limit| limit.sms == budget)
            .filter_map(|limit| limit.gbps)
            .min_by(f64::total_cmp)
    }
}

/// Measures every limit. Collective: every rank calls it with the same arguments, on a thread of its
/// own; all of them return the same. Blocks, allocates, and loads kernels; what it allocates is dropped
/// when it returns.
///
/// # Errors
///
/// [`LimitsError`]; the group cannot be used any more then, so that no other rank waits for this one.
pub fn measure<B: Backend>(
    context: &EpContext<B>,
    places: &Places,
    settings: Settings,
) -> Result<Limits, LimitsError> {
    let (given, ranks) = (places.devices.len(), context.world());
    if given != ranks {
        return Err(LimitsError::Places { places: given, ranks });
    }
    let measured = measure_all(context, places, settings);
    if let Err(error) = &measured {
        context.rendezvous().abort(&error.to_string());
    }
    measured
}

fn measure_all<B: Backend>(
    context: &EpContext<B>,
    places: &Places,
    settings: Settings,
) -> Result<Limits, LimitsError> {
    let rig = Rig::new(context, settings)?;
    let memory = Memory::new(&rig)?;
    let mut all = transfer::measure(&rig, &memory, places)?;
    let leads = places.leads();
    if let [one, other, ..] = leads[..] {
        all.push(signal::measure(&rig, (one, other))?);
    }
    all.extend(replay::measure(&rig, &memory)?);
    Ok(Limits { all, multiprocessors: places.multiprocessors })
}

#[cfg(test)]
mod tests;

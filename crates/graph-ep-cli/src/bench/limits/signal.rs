//! How long a word takes from one rank to another.

use bytemuck::{Pod, Zeroable};
use graph_ep::ep_context::signal::{HostWaiter, WaitParams};
use graph_ep::ep_context::{KernelSource, Retained, Specialization};
use graph_ep::{Backend, Kernel, LaunchShape, Phase, Rank};
use graph_ep_kernels::{HEADERS, limits};

use super::rig::Rig;
use super::{Limit, LimitKind, LimitsError, Quantiles};

/// Parameters of [`PingPongKernel`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PingPongParams {
    pub(super) wait: WaitParams,
    /// The word of the peer, which is signalled.
    pub(super) theirs: u64,
    /// The word of this rank, which is waited for.
    pub(super) ours: u64,
    pub(super) peer: u32,
    /// The value of the first trip; the words hold the one before it.
    pub(super) first: u32,
    pub(super) trips: u32,
    /// One if this rank signals before it waits, else zero.
    pub(super) serves: u32,
}

/// Sends a word to and fro between two ranks.
#[derive(Debug)]
pub(super) struct PingPongKernel;

impl Kernel for PingPongKernel {
    type Params = PingPongParams;
    const NAME: &'static str = "limit_ping_pong";
    const SOURCE: Option<KernelSource> = Some(KernelSource {
        file: limits::PING_PONG.0,
        text: limits::PING_PONG.1,
        headers: HEADERS,
    });

    unsafe fn run_on_host(p: &PingPongParams) {
        let peer = Rank(p.peer);
        // SAFETY: the launch vouches for the words of both ranks, which are accessed as atomics only;
        // the waiter lives for this call.
        unsafe {
            let waiter = HostWaiter::from_params(&p.wait);
            for trip in 0..p.trips {
                let value = p.first.wrapping_add(trip);
                if p.serves != 0 {
                    waiter.signal(peer, p.theirs, value);
                }
                if waiter.wait(Phase::Agreement, peer, p.ours, value).is_err() {
                    return;
                }
                if p.serves == 0 {
                    waiter.signal(peer, p.theirs, value);
                }
            }
        }
    }
}

/// Measures one way of a word between two ranks, as half of both ways. Collective; the same on all
/// ranks.
pub(super) fn measure<B: Backend>(
    rig: &Rig<'_, B>,
    (one, other): (usize, usize),
) -> Result<Limit, LimitsError> {
    let words = rig.context.share("words of a ping-pong", size_of::<u32>())?;
    let loaded = rig.backend().load::<PingPongKernel>(&Specialization::new());
    let kernel = rig.ready("loading a ping-pong", loaded.map_err(LimitsError::from))?;
    let retained: [Retained; 2] = [words.retain(), rig.context.retain_signals()];
    let rank = rig.rank();
    let peer = match rank {
        _ if rank == one => Some(other),
        _ if rank == other => Some(one),
        _ => None,
    };
    let trips = rig.settings.repeats;
    let mut first = 1_u32;
    let samples = rig.time("signals", |queue| {
        let Some(peer) = peer.map(Rank::from_index) else { return Ok(()) };
        let Some(theirs) = words.address_of(peer) else { return Ok(()) };
        let params = PingPongParams {
            wait: rig.context.wait_params(),
            theirs,
            ours: words.own_address(),
            peer: peer.0,
            first,
            trips,
            serves: u32::from(rank == one),
        };
        first = first.wrapping_add(trips);
        // SAFETY: the words and what the wait needs are retained; the two ranks alone use their words,
        // as signals, each launch going on where the one before it ended.
        unsafe {
            queue.launch::<PingPongKernel>(&kernel, LaunchShape::ONE_WARP, &params, &[], &retained)
        }
    })?;
    let gathered = rig.gather("signals", &samples)?;
    let one_way = 1.0 / (2.0 * f64::from(trips));
    let time = Quantiles::of(gathered[one].iter().copied()).ok_or(LimitsError::Nothing)?;
    Ok(Limit::new(LimitKind::Signal, (one, Some(other)), 1, 0, time.scaled(one_way)))
}

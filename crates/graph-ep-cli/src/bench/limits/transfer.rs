//! Bytes a second: from a peer, to a peer, and within a device.

use bytemuck::{Pod, Zeroable};
use graph_ep::ep_context::{KernelSource, Retained, Specialization, SymmetricBlock};
use graph_ep::{Backend, BackendError, Buffer, Kernel, LaunchShape, Queue, Rank};
use graph_ep_kernels::{HEADERS, limits};

use super::memory::{pattern, pointer};
use super::rig::Rig;
use super::{Limit, LimitKind, LimitsError, Places, Quantiles};

/// Parameters of [`CopyKernel`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CopyParams {
    pub(super) to: u64,
    pub(super) from: u64,
    /// Pieces of 16 bytes.
    pub(super) quads: u64,
}

/// Copies from end to end.
#[derive(Debug)]
pub(super) struct CopyKernel;

impl Kernel for CopyKernel {
    type Params = CopyParams;
    const NAME: &'static str = "limit_copy";
    const SOURCE: Option<KernelSource> =
        Some(KernelSource { file: limits::COPY.0, text: limits::COPY.1, headers: HEADERS });

    unsafe fn run_on_host(p: &CopyParams) {
        let (from, to) = (pointer::<u8>(p.from), pointer::<u8>(p.to));
        // SAFETY: the launch vouches for two ranges of so many pieces, which do not overlap.
        unsafe { from.copy_to_nonoverlapping(to, p.quads as usize * 16) };
    }
}

/// Threads of a block: with one of them on each multiprocessor, a grid of so many blocks takes up so many
/// multiprocessors.
const THREADS: u32 = 1024;

/// Bytes of the pattern that fills the memory: more would only take longer to send.
const PATTERN: usize = 4 << 20;

/// Bytes at the end of a transfer that are compared.
const CHECKED: usize = 4096;

/// The memory of one rank between which bytes are moved: a part that peers map, and one that they do not.
pub(super) struct Memory<B: Backend> {
    kernel: B::Loaded<CopyKernel>,
    shared: SymmetricBlock<B>,
    private: Buffer<B>,
    bytes: usize,
}

impl<B: Backend> Memory<B> {
    /// Collective.
    pub(super) fn new(rig: &Rig<'_, B>) -> Result<Self, LimitsError> {
        let bytes = rig.settings.bytes;
        let shared = rig.context.share("transfers between peers", bytes)?;
        let local = || -> Result<_, LimitsError> {
            let kernel = rig.backend().load::<CopyKernel>(&Specialization::new())?;
            Ok((kernel, rig.context.allocate_uncounted("transfers", bytes)?))
        };
        let (kernel, private) = rig.ready("memory of transfers", local())?;
        Ok(Self { kernel, shared, private, bytes })
    }

    /// Queues a transfer by `blocks` blocks.
    ///
    /// # Safety
    ///
    /// Both addresses are of parts of this memory, here or of a peer, and differ; other work on them is
    /// ordered with this.
    unsafe fn transfer(
        &self,
        queue: &Queue<'_, B>,
        blocks: u32,
        to: u64,
        from: u64,
    ) -> Result<(), BackendError> {
        let params = CopyParams { to, from, quads: self.bytes as u64 / 16 };
        let shape = LaunchShape::new(blocks, THREADS);
        // SAFETY: both parts are retained, with the mappings of peers; the rest is the caller's
        // promise.
        unsafe { queue.launch::<CopyKernel>(&self.kernel, shape, &params, &[], &self.retained()) }
    }

    fn retained(&self) -> [Retained; 2] {
        [self.shared.retain(), self.private.retain()]
    }

    /// Queues a while of work, so that the host is ahead when what is timed begins.
    pub(super) fn occupy(&self, queue: &Queue<'_, B>) -> Result<(), BackendError> {
        let (to, from) = (self.private.address(), self.shared.own_address());
        for _ in 0..8 {
            // SAFETY: two parts of this rank's memory, all of whose transfers are on one stream or
            // between meetings of all ranks; both are retained.
            unsafe {
                queue.backend().copy(queue.stream(), to, from, self.bytes, &self.retained())?;
            }
        }
        Ok(())
    }

    /// Fills the memory at `address` with the bytes that `seed` stands for, without waiting for that.
    fn fill(&self, rig: &Rig<'_, B>, address: u64, seed: u64) -> Result<(), BackendError> {
        let (backend, stream) = (rig.backend(), rig.queue.stream());
        let first = self.bytes.min(PATTERN);
        let retained = self.retained();
        // SAFETY: the ranges lie in one part of this memory, of which all work is on this stream while
        // ranks are not met; those of each copy are disjoint, the source being the first piece.
        unsafe {
            backend.upload(stream, address, &pattern(seed, first), &retained)?;
            for at in (first..self.bytes).step_by(first) {
                let bytes = first.min(self.bytes - at);
                backend.copy(stream, address + at as u64, address, bytes, &retained)?;
            }
        }
        Ok(())
    }

    /// Whether the memory at `address` ends in what [`Memory::fill`] left for `seed`.
    fn holds(&self, rig: &Rig<'_, B>, address: u64, seed: u64) -> Result<bool, LimitsError> {
        let checked = CHECKED.min(self.bytes);
        let begin = self.bytes - checked;
        let mut found = vec![0; checked];
        // SAFETY: the range is the end of one part of this memory, whose work was waited for.
        unsafe {
            rig.backend().download(rig.queue.stream(), address + begin as u64, &mut found)?;
        }
        let first = self.bytes.min(PATTERN);
        let expected = pattern(seed, first);
        Ok(found.iter().zip(begin..).all(|(byte, at)| *byte == expected[at % first]))
    }
}

/// One kind of transfer as this rank makes it.
struct Transfer<'m, B: Backend> {
    memory: &'m Memory<B>,
    what: LimitKind,
    /// The ranks that make it, and the peers whose memory they use.
    makers: Vec<(usize, Option<usize>)>,
    /// From where to where this rank does, if it does.
    way: Option<(u64, u64)>,
    /// What of this rank's memory is copied from, and what to, by whomever.
    source: u64,
    target: u64,
    /// The rank whose bytes are in the target afterwards.
    origin: Option<usize>,
}

/// Measures all transfers, at every number of multiprocessors. Collective; the same on all ranks.
pub(super) fn measure<B: Backend>(
    rig: &Rig<'_, B>,
    memory: &Memory<B>,
    places: &Places,
) -> Result<Vec<Limit>, LimitsError> {
    let mut limits = Vec::new();
    for what in [LimitKind::PeerRead, LimitKind::PeerWrite, LimitKind::MemoryCopy] {
        let transfer = Transfer::new(rig, memory, places, what);
        if transfer.makers.is_empty() {
            continue;
        }
        transfer.prepare(rig)?;
        for sms in places.budgets() {
            limits.extend(transfer.measure(rig, places, sms)?);
        }
        transfer.check(rig)?;
    }
    Ok(limits)
}

impl<'m, B: Backend> Transfer<'m, B> {
    fn new(rig: &Rig<'_, B>, memory: &'m Memory<B>, places: &Places, what: LimitKind) -> Self {
        let rank = rig.rank();
        let (shared, private) = (memory.shared.own_address(), memory.private.address());
        let of_peer = |peer: usize| memory.shared.address_of(Rank::from_index(peer));
        let makers: Vec<(usize, Option<usize>)> = match what {
            LimitKind::MemoryCopy => {
                let first = |at: &usize| !places.devices[..*at].contains(&places.devices[*at]);
                (0..places.devices.len()).filter(first).map(|maker| (maker, None)).collect()
            }
            _ => {
                let peers = places.leads().into_iter();
                peers.filter_map(|lead| Some((lead, Some(places.peer_of(lead)?)))).collect()
            }
        };
        let mine = makers.iter().find(|(maker, _)| *maker == rank).map(|(_, peer)| *peer);
        let peer = mine.flatten().and_then(of_peer);
        let (source, target) =
            if what == LimitKind::PeerWrite { (private, shared) } else { (shared, private) };
        let (way, origin) = match what {
            LimitKind::PeerRead => (peer.map(|peer| (peer, private)), mine.flatten()),
            LimitKind::PeerWrite => {
                let writer = makers.iter().find(|(_, peer)| *peer == Some(rank));
                (peer.map(|peer| (private, peer)), writer.map(|(maker, _)| *maker))
            }
            _ => (mine.map(|_| (shared, private)), mine.map(|_| rank)),
        };
        Self { memory, what, makers, way, source, target, origin }
    }

    /// Lets bytes in the source be known, and none in the target, before ranks are aligned.
    fn prepare(&self, rig: &Rig<'_, B>) -> Result<(), LimitsError> {
        self.memory.fill(rig, self.source, rig.rank() as u64)?;
        // SAFETY: the target is one part of this memory, which is retained, and no peer writes it before
        // ranks are aligned.
        unsafe {
            let (stream, bytes) = (rig.queue.stream(), self.memory.bytes);
            rig.backend().fill(stream, self.target, 0, bytes, &self.memory.retained())?;
        }
        Ok(())
    }

    /// The limits of all ranks that make the transfer, all of them at once.
    fn measure(
        &self,
        rig: &Rig<'_, B>,
        places: &Places,
        sms: u32,
    ) -> Result<Vec<Limit>, LimitsError> {
        let blocks = if sms == 0 { places.multiprocessors.max(1) } else { sms };
        let purpose = format!("{} by {blocks} blocks", self.what);
        let mut ways = vec![self.sample(rig, &purpose, |queue, from, to| {
            // SAFETY: both are parts of memories that are retained, and no other work uses them until
            // all ranks have met again: a part is source or target of all transfers of one kind.
            unsafe { self.memory.transfer(queue, blocks, to, from) }
        })?];
        // The driver's own copy may know better what the whole device can do.
        if self.what == LimitKind::MemoryCopy && sms == 0 {
            ways.push(self.sample(rig, "copies by the driver", |queue, from, to| {
                let (backend, stream) = (queue.backend(), queue.stream());
                // SAFETY: as above.
                unsafe {
                    backend.copy(stream, to, from, self.memory.bytes, &self.memory.retained())
                }
            })?);
        }
        let passes = if self.what == LimitKind::MemoryCopy { 2 } else { 1 };
        let bytes = passes * self.memory.bytes as u64;
        let limit_of = |(rank, peer): &(usize, Option<usize>)| {
            let times = ways.iter().filter_map(|ranks| Quantiles::of(ranks[*rank].iter().copied()));
            let best = times.min_by(|a, b| a.median_us.total_cmp(&b.median_us))?;
            Some(Limit::new(self.what, (*rank, *peer), sms, bytes, best))
        };
        Ok(self.makers.iter().filter_map(limit_of).collect())
    }

    /// The samples of all ranks; of those that do not take part they mean nothing.
    fn sample(
        &self,
        rig: &Rig<'_, B>,
        purpose: &str,
        work: impl Fn(&Queue<'static, B>, u64, u64) -> Result<(), BackendError>,
    ) -> Result<Vec<Vec<f64>>, LimitsError> {
        let samples = rig.time(purpose, |queue| match self.way {
            Some((from, to)) => work(queue, from, to),
            None => Ok(()),
        })?;
        rig.gather(purpose, &samples)
    }

    /// Whether the bytes have come. Collective: a peer may have been the last to write.
    fn check(&self, rig: &Rig<'_, B>) -> Result<(), LimitsError> {
        rig.ready("transfers are over", Ok(()))?;
        let wrong = LimitsError::Wrong { what: self.what, rank: rig.rank() };
        let checked = match self.origin {
            Some(origin) => self.memory.holds(rig, self.target, origin as u64),
            None => Ok(true),
        };
        let checked = checked.and_then(|holds| if holds { Ok(()) } else { Err(wrong) });
        rig.ready("checking transfers", checked)
    }
}

#[cfg(test)]
mod tests {
    use graph_ep::{EpContext, HostBackend, ThreadGroup};

    use super::*;
    use crate::bench::limits::Settings;

    #[test]
    fn a_transfer_that_did_not_come_to_its_end_is_found_out() {
        for bytes in [16, 10_000, PATTERN + 4096 + 16] {
            let place = ThreadGroup::new(1).expect("a group").remove(0);
            let context =
                EpContext::builder(HostBackend::default(), place).build().expect("a group");
            let settings = Settings { bytes, ..Settings::QUICK };
            let rig = Rig::new(&context, settings).expect("a rig");
            let memory = Memory::new(&rig).expect("memory");
            let (shared, private) = (memory.shared.own_address(), memory.private.address());
            let holds = |address, seed| {
                rig.finish().expect("nothing failed");
                memory.holds(&rig, address, seed).expect("read")
            };
            memory.fill(&rig, shared, 5).expect("queued");
            memory.fill(&rig, private, 6).expect("queued");
            assert!(holds(shared, 5) && holds(private, 6) && !holds(private, 5));
            // SAFETY: two parts of one memory, on one stream.
            unsafe { memory.transfer(&rig.queue, 1, private, shared) }.expect("queued");
            assert!(holds(private, 5));
            memory.fill(&rig, shared, 7).expect("queued");
            // SAFETY: the range is the last byte of a part, on the same stream.
            unsafe {
                let last = private + bytes as u64 - 1;
                rig.backend().fill(rig.queue.stream(), last, 0, 1, &[]).expect("queued");
            }
            assert!(!holds(private, 5), "{bytes} bytes");
        }
    }
}

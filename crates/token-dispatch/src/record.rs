//! What a step tells its host: one record in a ring of host-mapped memory.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use ep_context::backend::MappedMemory;
use ep_context::{Backend, EpContext, Fault, Phase, Rank};

use crate::config::DispatchConfig;
use crate::dispatcher::TokenDispatcher;
use crate::error::DispatchError;
use crate::params::{NONE, RecordHeader, STALE};

mod counts;
mod pause;

pub use counts::Counts;

use counts::Pool;
use pause::Pause;

/// What one step did, as its last operation published it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRecord {
    /// The step, counted from 1, modulo 2³².
    pub step: u32,
    /// The step moved nothing, being behind an over-budget step that was not yet acknowledged.
    pub drained: bool,
    /// The first dispatch of the step that was over budget on any rank. The same on every rank.
    pub first_over: Option<u32>,
    /// The most rows, padding included, that a counted dispatch required of each rank. The same on
    /// every rank.
    pub required: Counts,
    /// The rows that each dispatch required of this rank; 0 for one that did not count.
    pub required_by_dispatch: Counts,
    /// The fewest rows that a window could hold on this rank.
    pub capacity: u32,
    /// The most windows that a dispatch took on this rank.
    pub windows: u32,
    /// Pairs (token, expert) that reached this rank's experts.
    pub delivered: u64,
    /// Pairs that did not, for lack of rows on this rank.
    pub dropped: u64,
    /// Expert ids of this rank's tokens that the model does not have; they count as none.
    pub invalid_ids: u64,
    /// Expert ids that a token of this rank named more than once; the first counts.
    pub repeated_ids: u64,
}

impl StepRecord {
    /// Whether any rank was sent more rows than it had.
    pub fn overflowed(&self) -> bool {
        self.first_over.is_some()
    }

    /// The most rows that any rank required.
    pub fn peak(&self) -> u32 {
        self.required.iter().copied().max().unwrap_or(0)
    }
}

/// The ring itself.
pub(crate) struct RecordRing<B: Backend> {
    memory: B::Mapped,
    stride: usize,
    pool: Pool,
}

impl<B: Backend> RecordRing<B> {
    pub(crate) fn new(
        context: &EpContext<B>,
        config: &DispatchConfig,
    ) -> Result<Self, DispatchError> {
        let words = context.world() + config.max_dispatches;
        let stride = (size_of::<RecordHeader>() + words * size_of::<u32>()).next_multiple_of(64);
        let memory = context.backend().allocate_mapped(stride * config.record_ring)?;
        Ok(Self { memory, stride, pool: Pool::new(words) })
    }

    pub(crate) fn memory(&self) -> &B::Mapped {
        &self.memory
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }
}

/// Reads the records of a dispatcher. Reading makes no call to the device.
pub struct Records<'d, B: Backend> {
    dispatcher: &'d TokenDispatcher<B>,
}

impl<'d, B: Backend> Records<'d, B> {
    pub(crate) fn new(dispatcher: &'d TokenDispatcher<B>) -> Self {
        Self { dispatcher }
    }

    /// Whether the record of `step` is published and still there. Reads one word of host memory.
    pub fn is_published(&self, step: u32) -> bool {
        let inner = &self.dispatcher.inner;
        let (config, ring) = (&inner.config, &inner.shared.ring);
        let slot = step as usize % config.record_ring;
        // SAFETY: the slot lies inside the ring, which lives as long as the dispatcher; records are
        // aligned to 64 bytes, and their first word is only accessed atomically.
        let sequence = unsafe {
            AtomicU64::from_ptr(ring.memory.host_address().add(slot * ring.stride).cast())
        };
        sequence.load(Ordering::Acquire) == RecordHeader::sequence_of(step)
    }

    /// The records of all steps from the next one on, in the order of the device, whoever launches
    /// them: for steps that an engine replays without telling. The record of each has to be read before
    /// the ring has come round.
    pub fn follow(&self) -> Follower<B> {
        self.dispatcher.catch_up();
        let next = self.dispatcher.counted_steps().wrapping_add(1);
        Follower { dispatcher: self.dispatcher.clone(), next }
    }

    /// The record of `step`, or `None` if it is not published yet.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Fault`] if the group failed before or in that step,
    /// [`DispatchError::RecordLost`] if a later step has taken its place,
    /// [`DispatchError::StaleGraph`] if a rank ran the step from a graph that was recorded for another
    /// capacity than it has; the group goes on.
    pub fn poll(&self, step: u32) -> Result<Option<StepRecord>, DispatchError> {
        let inner = &self.dispatcher.inner;
        let (config, ring) = (&inner.config, &inner.shared.ring);
        let slot = step as usize % config.record_ring;
        // SAFETY: the slot lies inside the ring, which lives as long as the dispatcher.
        let record = unsafe { ring.memory.host_address().add(slot * ring.stride) };
        // SAFETY: records are aligned to 64 bytes, and their first word is only accessed atomically.
        let sequence = unsafe { AtomicU64::from_ptr(record.cast()) };
        let wanted = RecordHeader::sequence_of(step);
        let found = sequence.load(Ordering::Acquire);
        if found != wanted {
            // Sequences of one slot rise by the length of the ring: a later one has passed ours.
            let ahead = RecordHeader::step_of(found).wrapping_sub(step);
            if found != 0 && ahead < u32::MAX / 2 {
                return Err(self.lost(step, found));
            }
            return Ok(None);
        }
        // SAFETY: the header lies inside the slot. The device may start to overwrite it: it then clears
        // the sequence first, which is looked at again below, and what was read is discarded.
        let header = unsafe { record.cast::<RecordHeader>().read_volatile() };
        let world = inner.context.world();
        let kept = (header.dispatches as usize).min(config.max_dispatches);
        let [required, required_by_dispatch] = ring.pool.lists([world, world + kept], |words| {
            for (at, word) in words.iter_mut().enumerate() {
                // SAFETY: as for the header, behind which there is room for a word of every rank
                // and of as many dispatches as can be kept.
                *word = unsafe {
                    let source = record.add(size_of::<RecordHeader>()).cast::<u32>();
                    source.add(at).read_volatile()
                };
            }
        });
        fence(Ordering::Acquire);
        let after = sequence.load(Ordering::Relaxed);
        if after != wanted {
            return Err(self.lost(step, after));
        }
        if let Some(fault) = Fault::from_word(header.fault) {
            return Err(fault.into());
        }
        if let Some((rank, said)) =
            required.iter().enumerate().find(|(_, said)| **said & STALE != 0)
        {
            return Err(DispatchError::StaleGraph {
                rank: Rank::from_index(rank),
                step: header.step,
                recorded: u64::from((said & !STALE) >> 16),
                now: u64::from(said & 0xffff),
            });
        }
        Ok(Some(StepRecord {
            step: header.step,
            drained: header.drained != 0,
            first_over: (header.first_over != NONE).then_some(header.first_over),
            required,
            required_by_dispatch,
            capacity: header.capacity,
            windows: header.windows,
            delivered: header.delivered,
            dropped: header.dropped,
            invalid_ids: header.invalid_ids,
            repeated_ids: header.repeated_ids,
        }))
    }

    /// The record of `step`, polling until it is published or the deadline of
    /// [`Phase::Record`] has passed. Sleeps between looks; makes no call to the device.
    ///
    /// # Errors
    ///
    /// As for [`Records::poll`], and [`DispatchError::RecordTimeout`].
    pub fn wait(&self, step: u32) -> Result<StepRecord, DispatchError> {
        self.wait_with(step, || Ok(()))
    }

    /// The same, for a step that runs on `stream`: what breaks the stream ends the wait.
    ///
    /// # Errors
    ///
    /// As for [`Records::wait`], and [`DispatchError::Backend`] with the operation that failed.
    pub fn wait_on(&self, step: u32, stream: &B::Stream) -> Result<StepRecord, DispatchError> {
        let backend = self.dispatcher.inner.context.backend();
        self.wait_with(step, || Ok(backend.check(stream)?))
    }

    fn wait_with(
        &self,
        step: u32,
        check: impl Fn() -> Result<(), DispatchError>,
    ) -> Result<StepRecord, DispatchError> {
        let context = &self.dispatcher.inner.context;
        let deadline = context.deadlines().of(Phase::Record);
        let start = Instant::now();
        let mut pause = Pause::new();
        loop {
            if let Some(record) = self.poll(step)? {
                return Ok(record);
            }
            let waited = start.elapsed();
            if waited > deadline {
                return Err(match context.fault() {
                    Some(fault) => fault.into(),
                    None => DispatchError::RecordTimeout { rank: context.rank(), step, waited },
                });
            }
            if pause.next(waited) {
                check()?;
            }
        }
    }

    fn lost(&self, step: u32, sequence: u64) -> DispatchError {
        let ring = self.dispatcher.inner.config.record_ring;
        DispatchError::RecordLost {
            rank: self.dispatcher.rank(),
            step,
            // One that is being written is that of the next step which has this place.
            found: match sequence {
                0 => step.wrapping_add(ring as u32),
                _ => RecordHeader::step_of(sequence),
            },
            ring,
        }
    }
}

impl<B: Backend> fmt::Debug for Records<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Records").field("dispatcher", self.dispatcher).finish()
    }
}

/// Reads the records of steps one after the other, as the device numbers them. Reading makes no call to
/// the device.
pub struct Follower<B: Backend> {
    dispatcher: TokenDispatcher<B>,
    next: u32,
}

impl<B: Backend> Follower<B> {
    /// The number of the step whose record comes next.
    pub fn next_step(&self) -> u32 {
        self.next
    }

    /// The record of the next step, or `None` if it is not published yet.
    ///
    /// # Errors
    ///
    /// As for [`Records::poll`]. A stale graph and a lost record are a step's as any other, and the next
    /// call is for the step behind it.
    pub fn poll(&mut self) -> Result<Option<StepRecord>, DispatchError> {
        let polled = self.dispatcher.records().poll(self.next);
        self.pass(matches!(polled, Ok(Some(_))), polled.as_ref().err());
        polled
    }

    /// The record of the next step, as [`Records::wait_on`] waits for one.
    ///
    /// # Errors
    ///
    /// As for [`Follower::poll`] and [`Records::wait_on`].
    pub fn wait_on(&mut self, stream: &B::Stream) -> Result<StepRecord, DispatchError> {
        let waited = self.dispatcher.records().wait_on(self.next, stream);
        self.pass(waited.is_ok(), waited.as_ref().err());
        waited
    }

    /// Goes on to the next step where there is no more to come of this one.
    fn pass(&mut self, read: bool, error: Option<&DispatchError>) {
        let over = matches!(
            error,
            Some(DispatchError::StaleGraph { .. } | DispatchError::RecordLost { .. })
        );
        if read || over {
            self.next = self.next.wrapping_add(1);
        }
    }
}

impl<B: Backend> fmt::Debug for Follower<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follower").field("next", &self.next).finish_non_exhaustive()
    }
}

//! What every measurement needs: a stream, the barrier, and samples of all ranks.

use graph_ep::ep_context::rendezvous::all_or_none;
use graph_ep::{Backend, BackendError, EpContext, Phase, Queue};

use super::super::interval::Interval;
use super::{Align, LimitsError, Settings};

/// One rank's part in measuring.
pub(super) struct Rig<'c, B: Backend> {
    pub(super) context: &'c EpContext<B>,
    pub(super) settings: Settings,
    pub(super) queue: Queue<'static, B>,
    pub(super) align: Align<B>,
}

impl<'c, B: Backend> Rig<'c, B> {
    /// Collective.
    pub(super) fn new(context: &'c EpContext<B>, settings: Settings) -> Result<Self, LimitsError> {
        let bytes = settings.bytes.next_multiple_of(16).max(16);
        let settings =
            Settings { bytes, samples: settings.samples.max(1), repeats: settings.repeats.max(1) };
        let stream = context.stream("limits")?;
        let queue = Queue::direct(context.backend(), &stream);
        Ok(Self { context, settings, queue, align: Align::new(context)? })
    }

    pub(super) fn backend(&self) -> &B {
        self.context.backend()
    }

    pub(super) fn rank(&self) -> usize {
        self.context.rank().index()
    }

    /// Collective: waits for every rank, and gives each what it has made if all could make theirs. From
    /// then on nobody calls what may wait for a device, until all have waited for their work.
    pub(super) fn ready<T>(
        &self,
        purpose: &str,
        made: Result<T, LimitsError>,
    ) -> Result<T, LimitsError> {
        let deadline = self.context.deadlines().of(Phase::Setup);
        Ok(all_or_none(self.context.rendezvous(), purpose, made, deadline)?)
    }

    /// Waits for this rank's work; whether it came to an end as it should.
    pub(super) fn finish(&self) -> Result<(), LimitsError> {
        self.backend().synchronize(self.queue.stream())?;
        self.context.fault().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// The samples of all ranks, by rank. Collective: as many on each.
    pub(super) fn gather(
        &self,
        purpose: &str,
        samples: &[f64],
    ) -> Result<Vec<Vec<f64>>, LimitsError> {
        let deadline = self.context.deadlines().of(Phase::Setup);
        let bytes: &[u8] = bytemuck::cast_slice(samples);
        let gathered = self.context.rendezvous().all_gather(purpose, bytes, deadline)?;
        gathered
            .iter()
            .enumerate()
            .map(|(rank, theirs)| match theirs.len() == bytes.len() {
                true => Ok(theirs
                    .chunks_exact(size_of::<f64>())
                    .map(bytemuck::pod_read_unaligned::<f64>)
                    .collect()),
                false => {
                    Err(LimitsError::Samples { rank, got: theirs.len(), expected: bytes.len() })
                }
            })
            .collect()
    }

    /// Times `work` once a sample, in microseconds. Collective; every rank is aligned with the others
    /// before each sample. One more goes before them, to warm up.
    pub(super) fn time(
        &self,
        purpose: &str,
        mut work: impl FnMut(&Queue<'static, B>) -> Result<(), BackendError>,
    ) -> Result<Vec<f64>, LimitsError> {
        let marks = (0..=self.settings.samples).map(|_| Interval::new(self.backend()));
        let marks =
            self.ready(purpose, marks.collect::<Result<Vec<_>, _>>().map_err(Into::into))?;
        for mark in &marks {
            self.align.queue(&self.queue)?;
            mark.around(&self.queue, &mut work)?;
        }
        self.finish()?;
        let times = marks[1..].iter().map(|mark| mark.microseconds(self.backend()));
        Ok(times.collect::<Result<_, _>>()?)
    }
}

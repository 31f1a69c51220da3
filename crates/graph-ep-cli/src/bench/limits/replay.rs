//! What graphs cost that do nothing: their replay, a trip of a loop, a barrier, and the time between two
//! marks.

use bytemuck::{Pod, Zeroable};
use graph_ep::ep_context::{KernelSource, QueueScope, Retained, Specialization, host};
use graph_ep::{Backend, BackendError, Buffer, Kernel, LaunchShape, Queue};
use graph_ep_kernels::{HEADERS, limits};

use super::super::interval::Interval;
use super::memory::pointer;
use super::rig::Rig;
use super::transfer::Memory;
use super::{Limit, LimitKind, LimitsError, Quantiles};
use crate::bench::stats::slowest;

/// Parameters of [`EmptyKernel`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct EmptyParams {
    pub(super) nothing: u64,
}

/// Does nothing.
#[derive(Debug)]
pub(super) struct EmptyKernel;

impl Kernel for EmptyKernel {
    type Params = EmptyParams;
    const NAME: &'static str = "limit_empty";
    const SOURCE: Option<KernelSource> =
        Some(KernelSource { file: limits::EMPTY.0, text: limits::EMPTY.1, headers: HEADERS });

    unsafe fn run_on_host(_params: &EmptyParams) {}
}

/// Parameters of [`TripKernel`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TripParams {
    /// A 64-bit word: how many trips are left.
    pub(super) left: u64,
    pub(super) condition: u64,
    /// Trips to begin with; zero in the body of the loop.
    pub(super) begin: u64,
}

/// Begins a loop of so many trips, or makes one of them.
#[derive(Debug)]
pub(super) struct TripKernel;

impl Kernel for TripKernel {
    type Params = TripParams;
    const NAME: &'static str = "limit_trip";
    const SOURCE: Option<KernelSource> =
        Some(KernelSource { file: limits::TRIP.0, text: limits::TRIP.1, headers: HEADERS });

    unsafe fn run_on_host(p: &TripParams) {
        let left = pointer::<u64>(p.left);
        // SAFETY: the launch vouches for the word, which one stream alone uses, and the kernel runs in
        // a replay of the graph that the condition belongs to.
        unsafe {
            let now = if p.begin != 0 { p.begin } else { left.read() - 1 };
            left.write(now);
            host::set_condition(p.condition, u32::from(now != 0));
        }
    }
}

/// Replays of a graph in one sample where the graph itself is long.
const FEW: u32 = 4;

/// What the first rank alone has taken, one list of samples each.
struct Alone {
    replay: Vec<f64>,
    trip: Vec<f64>,
}

/// Measures all of it. Collective; the same on all ranks. What concerns one device is measured on that
/// of rank 0, while all other ranks wait on their hosts.
pub(super) fn measure<B: Backend>(
    rig: &Rig<'_, B>,
    memory: &Memory<B>,
) -> Result<[Limit; 4], LimitsError> {
    let parts = rig.ready("recording graphs that do nothing", Parts::new(rig))?;
    let alone = match rig.rank() {
        0 => parts.alone(rig, memory)?,
        // As many, so that samples can be gathered.
        _ => Alone::silent(rig.settings.samples),
    };
    let of_first = |purpose: &str, samples: &[f64]| {
        let ranks = rig.gather(purpose, samples)?;
        Quantiles::of(ranks[0].iter().copied()).ok_or(LimitsError::Nothing)
    };
    let replay = of_first("replays", &alone.replay)?;
    let trip = of_first("trips", &alone.trip)?;
    let together = |purpose: &str, samples: &[f64]| {
        Quantiles::of(slowest(&rig.gather(purpose, samples)?)).ok_or(LimitsError::Nothing)
    };
    let barrier = together("barriers", &parts.barriers(rig)?)?;
    let interval = together("intervals", &parts.intervals(rig)?)?;
    let limits = [
        (LimitKind::Barrier, barrier),
        (LimitKind::EmptyReplay, replay),
        (LimitKind::EmptyTrip, trip),
        (LimitKind::EmptyInterval, interval),
    ];
    Ok(limits.map(|(what, time)| Limit::new(what, (0, None), 0, 0, time)))
}

/// Graphs that do nothing, and what they need.
struct Parts<B: Backend> {
    one_kernel: B::Executable,
    one_trip: B::Executable,
    more_trips: B::Executable,
    barriers: (B::Executable, Interval<B>),
    intervals: (B::Executable, Vec<Interval<B>>),
}

impl<B: Backend> Parts<B> {
    fn new(rig: &Rig<'_, B>) -> Result<Self, LimitsError> {
        let none = Specialization::new();
        let empty = rig.backend().load::<EmptyKernel>(&none)?;
        let trip = rig.backend().load::<TripKernel>(&none)?;
        let left = rig.context.allocate_uncounted("trips that are left", size_of::<u64>())?;
        let trips = |count: u32| record(rig, |queue| repeat(queue, &trip, &left, count));
        let repeats = rig.settings.repeats;
        let interval = Interval::new(rig.backend())?;
        let barriers = record(rig, |queue| {
            rig.align.queue(queue)?;
            interval.around(queue, |queue| (0..repeats).try_for_each(|_| rig.align.queue(queue)))
        })?;
        let marks = (0..rig.settings.samples).map(|_| Interval::new(rig.backend()));
        let marks = marks.collect::<Result<Vec<_>, _>>()?;
        let intervals = record(rig, |queue| {
            marks.iter().try_for_each(|mark| {
                rig.align.queue(queue)?;
                mark.around(queue, |_| Ok(()))
            })
        })?;
        Ok(Self {
            one_kernel: record(rig, |queue| launch_empty(queue, &empty))?,
            one_trip: trips(1)?,
            more_trips: trips(1 + repeats)?,
            barriers: (barriers, interval),
            intervals: (intervals, marks),
        })
    }

    /// What concerns this rank's device alone.
    fn alone(&self, rig: &Rig<'_, B>, memory: &Memory<B>) -> Result<Alone, LimitsError> {
        let repeats = rig.settings.repeats;
        let replay = sample(rig, memory, &self.one_kernel, repeats)?;
        let short = sample(rig, memory, &self.one_trip, FEW)?;
        let short = Quantiles::of(short).ok_or(LimitsError::Nothing)?.median_us;
        let long = sample(rig, memory, &self.more_trips, FEW)?;
        let trip = long.into_iter().map(|long| (long - short) / f64::from(repeats)).collect();
        Ok(Alone { replay, trip })
    }

    /// Barriers of all ranks, on this one.
    fn barriers(&self, rig: &Rig<'_, B>) -> Result<Vec<f64>, LimitsError> {
        let (graph, interval) = &self.barriers;
        let sample = || -> Result<f64, LimitsError> {
            rig.backend().replay(rig.queue.stream(), graph)?;
            rig.finish()?;
            Ok(interval.microseconds(rig.backend())? / f64::from(rig.settings.repeats))
        };
        // The first warms up.
        sample()?;
        (0..rig.settings.samples).map(|_| sample()).collect()
    }

    /// Times between marks with nothing between them, on this rank.
    fn intervals(&self, rig: &Rig<'_, B>) -> Result<Vec<f64>, LimitsError> {
        let (graph, marks) = &self.intervals;
        // The second replay is the one whose times are left.
        for _ in 0..2 {
            rig.backend().replay(rig.queue.stream(), graph)?;
            rig.finish()?;
        }
        let times = marks.iter().map(|mark| mark.microseconds(rig.backend()));
        Ok(times.collect::<Result<_, _>>()?)
    }
}

impl Alone {
    fn silent(samples: usize) -> Self {
        Self { replay: vec![0.0; samples], trip: vec![0.0; samples] }
    }
}

/// Samples of one replay among `count`: microseconds of the device, which has other work to do until the
/// host has queued all of them.
fn sample<B: Backend>(
    rig: &Rig<'_, B>,
    memory: &Memory<B>,
    graph: &B::Executable,
    count: u32,
) -> Result<Vec<f64>, LimitsError> {
    let (backend, stream) = (rig.backend(), rig.queue.stream());
    let interval = Interval::new(backend)?;
    let mut samples = Vec::new();
    for _ in 0..=rig.settings.samples {
        memory.occupy(&rig.queue)?;
        interval
            .around(&rig.queue, |_| (0..count).try_for_each(|_| backend.replay(stream, graph)))?;
        rig.finish()?;
        samples.push(interval.microseconds(backend)? / f64::from(count));
    }
    // The first warms up.
    samples.remove(0);
    Ok(samples)
}

/// Records what `work` queues.
fn record<B: Backend>(
    rig: &Rig<'_, B>,
    work: impl FnOnce(&Queue<'static, B>) -> Result<(), BackendError>,
) -> Result<B::Executable, LimitsError> {
    let (backend, stream) = (rig.backend(), rig.queue.stream());
    let key = backend.begin_recording(stream)?;
    let scope = QueueScope::new();
    // SAFETY: the stream records until the queue is gone, and what is queued on it retains what it uses.
    let queue = unsafe { Queue::recording(backend, stream, &scope) };
    if let Err(error) = work(&queue) {
        backend.abandon_recording(&key);
        return Err(error.into());
    }
    drop(scope);
    let recording = backend.end_recording(&key)?;
    Ok(backend.instantiate(recording)?)
}

fn launch_empty<B: Backend>(
    queue: &Queue<'_, B>,
    kernel: &B::Loaded<EmptyKernel>,
) -> Result<(), BackendError> {
    let params = EmptyParams { nothing: 0 };
    // SAFETY: the kernel touches no memory.
    unsafe { queue.launch::<EmptyKernel>(kernel, LaunchShape::ONE_WARP, &params, &[], &[]) }
}

/// Records a loop of `trips` trips that do nothing, at least one.
fn repeat<B: Backend>(
    queue: &Queue<'static, B>,
    kernel: &B::Loaded<TripKernel>,
    left: &Buffer<B>,
    trips: u32,
) -> Result<(), BackendError> {
    let (backend, stream) = (queue.backend(), queue.stream());
    let condition = backend.condition(stream)?;
    let retained: [Retained; 1] = [left.retain()];
    let launch = |queue: &Queue<'static, B>, begin: u64| {
        let params = TripParams { left: left.address(), condition: condition.0, begin };
        // SAFETY: the word is retained and used by the graphs here alone, which are replayed one after
        // the other on one stream.
        unsafe {
            queue.launch::<TripKernel>(kernel, LaunchShape::ONE_WARP, &params, &[], &retained)
        }
    };
    launch(queue, trips.into())?;
    let body = backend.begin_while(stream, condition)?;
    launch(&Queue::direct(backend, &body), 0)?;
    backend.end_while(stream, body)
}

#[cfg(test)]
mod tests {
    use graph_ep::{EpContext, HostBackend, ThreadGroup};

    use super::*;
    use crate::bench::limits::Settings;

    #[test]
    fn loops_end_and_begin_anew_with_each_replay() {
        let place = ThreadGroup::new(1).expect("a group").remove(0);
        let context = EpContext::builder(HostBackend::default(), place).build().expect("a group");
        let rig = Rig::new(&context, Settings::QUICK).expect("a rig");
        let kernel = rig.backend().load::<TripKernel>(&Specialization::new()).expect("compiled in");
        let left = context.allocate("trips", 8).expect("memory");
        for trips in [1, 7] {
            let graph =
                record(&rig, |queue| repeat(queue, &kernel, &left, trips)).expect("a graph");
            assert_eq!(rig.backend().node_count(&graph), 3);
            for _ in 0..2 {
                // SAFETY: the word lives to the end of the test, and other work on it is of the stream.
                unsafe { rig.queue.upload(&left.slice(), &[9; 8]) }.expect("queued");
                rig.backend().replay(rig.queue.stream(), &graph).expect("queued");
                rig.finish().expect("the loop ends");
                let mut word = [1; 8];
                // SAFETY: as above.
                unsafe { rig.queue.download(&left.slice(), &mut word) }.expect("read");
                assert_eq!(word, [0; 8]);
            }
        }
    }
}

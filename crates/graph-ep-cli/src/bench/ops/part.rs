//! One rank's part in measuring: its group, the barrier of all devices, and samples of all ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use graph_ep::ep_context::error::chain;
use graph_ep::{Backend, ExpertParallel, Phase, Queue, StepGraph, StepRecord};

use super::error::OpError;
use super::layers::Layers;
use crate::bench::bytes::Halves;
use crate::bench::cases::{Measured, Shape};
use crate::bench::inputs::{Given, ROUTINGS};
use crate::bench::limits::{Align, Limits};
use crate::bench::report::{Bound, Case, Entry, Op, Work};
use crate::bench::stats::{Quantiles, slowest};
use crate::bench::verify::{Mismatch, Results};
use crate::gauge::Gauge;

/// What is the same for all shapes of a number of ranks.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The device of each rank.
    pub devices: Vec<usize>,
    /// GPUs that these are; 0 on the host.
    pub gpus: usize,
    /// What the hardware was measured to do.
    pub limits: Limits,
    /// Samples of each result, if that was said.
    pub samples: Option<usize>,
    /// Few samples, after which nothing is known but that it works.
    pub quick: bool,
    /// Bytes by which a receive buffer grows.
    pub grow_bytes: u64,
    /// Bytes that a rank may use.
    pub memory: u64,
    /// The most bytes that the ranks of one device have held at once, in this bench so far.
    pub most_held: Arc<AtomicU64>,
}

/// Replays before the first that counts, at least one of each routing.
const WARM_UP: usize = 2 * ROUTINGS;

/// How long the samples of one result take together, unless their number was said.
const PATIENCE: Duration = Duration::from_millis(500);

/// Samples of one result, unless their number was said.
const SAMPLES: std::ops::RangeInclusive<usize> = 10..=200;

/// Samples where times mean nothing.
const QUICK_SAMPLES: usize = 3;

/// One rank's part in measuring a shape.
pub(super) struct Part<'p, B: Backend> {
    pub(super) group: ExpertParallel<B>,
    pub(super) align: Align<B>,
    pub(super) shape: &'p Shape,
    pub(super) given: &'p Given,
    pub(super) setup: &'p Setup,
    pub(super) halves: Halves,
    layers: usize,
    step_layers: usize,
}

impl<'p, B: Backend> Part<'p, B> {
    /// Collective.
    pub(super) fn new(
        group: ExpertParallel<B>,
        measured: &'p Measured,
        given: &'p Given,
        setup: &'p Setup,
    ) -> Result<Self, OpError> {
        let shape = &measured.shape;
        let align = Align::new(group.context())?;
        let halves = Halves::mean(shape, given.inputs.all_counts(), &setup.devices);
        let Measured { layers, step_layers, .. } = *measured;
        Ok(Self { group, align, shape, given, setup, halves, layers, step_layers })
    }

    /// Layers of a step that is replayed or recovered.
    pub(super) fn step_layers(&self) -> usize {
        self.step_layers
    }

    /// Layers of one replay.
    pub(super) fn layers(&self) -> usize {
        self.layers
    }

    pub(super) fn rank(&self) -> usize {
        self.group.context().rank().index()
    }

    pub(super) fn backend(&self) -> &B {
        self.group.context().backend()
    }

    pub(super) fn stream(&self) -> &B::Stream {
        self.group.stream()
    }

    pub(super) fn queue(&self) -> Queue<'static, B> {
        Queue::direct(self.backend(), self.stream())
    }

    /// Waits for every rank on its host.
    pub(super) fn meet(&self, purpose: &str) -> Result<(), OpError> {
        let deadline = self.group.context().deadlines().of(Phase::Setup);
        Ok(self.group.context().rendezvous().barrier(purpose, deadline)?)
    }

    /// What every rank has to say, by rank: as many numbers each.
    pub(super) fn gather(&self, purpose: &str, own: &[f64]) -> Result<Vec<Vec<f64>>, OpError> {
        let deadline = self.group.context().deadlines().of(Phase::Setup);
        let bytes: &[u8] = bytemuck::cast_slice(own);
        let all = self.group.context().rendezvous().all_gather(purpose, bytes, deadline)?;
        let read = |(rank, theirs): (usize, &Vec<u8>)| match theirs.len() == bytes.len() {
            true => Ok(theirs
                .chunks_exact(size_of::<f64>())
                .map(bytemuck::pod_read_unaligned::<f64>)
                .collect()),
            false => Err(OpError::Samples {
                purpose: purpose.to_owned(),
                rank,
                got: theirs.len(),
                expected: bytes.len(),
            }),
        };
        all.iter().enumerate().map(read).collect()
    }

    /// The largest of what the ranks have.
    pub(super) fn most(&self, purpose: &str, own: f64) -> Result<f64, OpError> {
        let all = self.gather(purpose, &[own])?;
        Ok(all.into_iter().flatten().fold(f64::NEG_INFINITY, f64::max))
    }

    /// Whether it is so on all ranks, of which this one says what it finds. Collective.
    pub(super) fn all(&self, purpose: &str, own: bool) -> Result<bool, OpError> {
        Ok(self.most(purpose, f64::from(u8::from(!own)))? == 0.0)
    }

    /// Ranks on the device of this one.
    pub(super) fn sharing(&self) -> u64 {
        let devices = &self.setup.devices;
        let own = devices.get(self.rank());
        devices.iter().filter(|device| Some(*device) == own).count().max(1) as u64
    }

    /// Spoils all that a step of `layers` writes, so that nothing is right for having been right before,
    /// does `run`, which runs the step of `check` and waits for it, and says whether all ranks found in the
    /// layers what they should. Collective.
    pub(super) fn verified(
        &self,
        layers: &Layers<B>,
        check: Check,
        run: impl FnOnce() -> Result<(), OpError>,
    ) -> Result<bool, OpError> {
        layers.poison(self)?;
        self.backend().synchronize(self.stream())?;
        self.meet("everything is spoilt")?;
        run()?;
        self.meet("the last step is over")?;
        self.all_right(layers.check(self, check)?)
    }

    /// Whether all ranks found everything as it should be. One that did not says so on stderr.
    pub(super) fn all_right(&self, wrong: Option<Mismatch>) -> Result<bool, OpError> {
        if let Some(mismatch) = &wrong {
            tracing::error!(shape = ?self.shape, "{mismatch}");
        }
        self.all("what is right", wrong.is_none())
    }

    /// How many samples all ranks take of something that took this one `each`.
    pub(super) fn samples(&self, each: Duration) -> Result<usize, OpError> {
        if let Some(samples) = self.setup.samples {
            return Ok(samples);
        }
        if self.setup.quick {
            return Ok(QUICK_SAMPLES);
        }
        let each = self.most("how long a sample takes", each.as_secs_f64())?;
        let samples = (PATIENCE.as_secs_f64() / each.max(1e-9)) as usize;
        Ok(samples.clamp(*SAMPLES.start(), *SAMPLES.end()))
    }

    /// Calls `sample` for warming up, and then once for each sample, with the routing that is its turn;
    /// returns what the later calls have taken, and the routing whose turn is next. Collective.
    pub(super) fn sample(
        &self,
        mut sample: impl FnMut(usize) -> Result<Vec<f64>, OpError>,
    ) -> Result<(Vec<f64>, usize), OpError> {
        let warm_up = if self.setup.quick { ROUTINGS } else { WARM_UP };
        let mut last = Duration::ZERO;
        for turn in 0..warm_up {
            let begin = Instant::now();
            sample(turn % ROUTINGS)?;
            last = begin.elapsed();
        }
        let samples = self.samples(last)?;
        let mut times = Vec::new();
        for turn in 0..samples {
            times.extend(sample((warm_up + turn) % ROUTINGS)?);
        }
        Ok((times, (warm_up + samples) % ROUTINGS))
    }

    /// Replays `graph` on `routing` and waits for it.
    pub(super) fn replay(
        &self,
        layers: &Layers<B>,
        graph: &StepGraph<'static, B>,
        routing: usize,
    ) -> Result<StepRecord, OpError> {
        layers.give(&self.queue(), routing)?;
        let step = graph.replay(self.stream())?;
        self.wait(step)
    }

    /// Waits for a step and everything behind it. It must not have overflowed.
    pub(super) fn wait(&self, step: u32) -> Result<StepRecord, OpError> {
        let record = self.group.dispatcher().records().wait_on(step, self.stream())?;
        self.backend().synchronize(self.stream())?;
        if record.overflowed() {
            return Err(OpError::Step {
                rank: self.rank(),
                operation: "a step with room for everything",
                found: format!("over budget, requiring {:?} rows", record.required),
                expected: "within its budget",
            });
        }
        Ok(record)
    }

    /// The case of an operation of this shape.
    pub(super) fn case(&self, op: Op, variant: &str, captured: bool, layers: usize) -> Case {
        self.shape.case((op, variant), self.setup.gpus, captured, layers)
    }

    /// A result from this rank's samples, each of which holds `per` operations. Collective.
    pub(super) fn entry(
        &self,
        case: Case,
        own: &[f64],
        per: usize,
        (work, bound): (Work, Option<Bound>),
        verified: bool,
    ) -> Result<Entry, OpError> {
        let time = self.quantiles(own)?.scaled(1.0 / per.max(1) as f64);
        Ok(Entry::new(case, time, work, bound, verified))
    }

    /// The quantiles over samples, each of the slowest rank. Collective.
    pub(super) fn quantiles(&self, own: &[f64]) -> Result<Quantiles, OpError> {
        let all = self.gather("samples", own)?;
        Quantiles::of(slowest(&all)).ok_or(OpError::NoTime { operation: "samples" })
    }

    /// Medians of `N` numbers of each sample, each of the rank with the most. Collective.
    pub(super) fn medians<const N: usize>(&self, own: &[f64]) -> Result<[f64; N], OpError> {
        let mut medians = [0.0; N];
        for (column, median) in medians.iter_mut().enumerate() {
            let column: Vec<f64> = own.iter().skip(column).step_by(N).copied().collect();
            *median = self.quantiles(&column)?.median_us;
        }
        Ok(medians)
    }

    /// Tells the other ranks, on the device and on the host, that this one is gone.
    pub(super) fn give_up(&self, error: &OpError) {
        // A rank that stops for lack of an answer is the first to know.
        if self.group.context().fault().is_none() {
            let told = self.group.dispatcher().abandon(&self.queue(), Phase::Shutdown);
            if let Err(error) = told {
                tracing::debug!(error = %chain(&error), "could not tell the other ranks");
            }
        }
        self.group.context().rendezvous().abort(&chain(error));
    }
}

impl<B: Gauge> Part<'_, B> {
    /// The most bytes that a rank has held at once since the bench began, this one or one of those that had
    /// its device before; from now on this one's are known to those that have it later.
    pub(super) fn most_held(&self) -> u64 {
        let (own, sharing) = (self.backend().account().peak(), self.sharing());
        let all = own.saturating_mul(sharing);
        own.max(self.setup.most_held.fetch_max(all, Ordering::Relaxed) / sharing)
    }
}

/// What the layers of a step have to hold when it was run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Check {
    /// The routing that it ran on.
    pub(super) routing: usize,
    /// What its experts made.
    pub(super) results: Results,
    /// Whether received rows are still there, and are looked at beside the outputs.
    pub(super) rows_kept: bool,
}

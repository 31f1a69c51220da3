//! The same bytes, moved by another library between the same ranks.
//!
//! It is spared what dispatch and combine do beside: who sends how much was known when the exchange was
//! recorded, rows lie ready one behind the other and stay as they arrive, and nothing is added up. Rows
//! that stay on their rank are not moved at all.

use graph_ep::ep_context::cuda::CudaStream;
use graph_ep::ep_context::{CudaBackend, QueueScope};
use graph_ep::{Backend, Buffer, EpContext, Queue, Rank};

use super::super::interval::Interval;
use super::error::OpError;
use super::part::Part;
use crate::bench::bytes::{Halves, combine_bound, dispatch_bound, pair_bound};
use crate::bench::nccl::{Group, NcclError, ReceiveFrom, SendTo};
use crate::bench::report::{By, Entry, Op, Padding, Work};
use crate::bench::verify::Mismatch;

/// A membership of another library's group of ranks.
pub trait Rival<B: Backend> {
    /// Queues or records one exchange.
    ///
    /// # Safety
    ///
    /// As for [`Group::exchange`].
    ///
    /// # Errors
    ///
    /// What the library reports.
    unsafe fn exchange(
        &self,
        stream: &B::Stream,
        sends: &[SendTo],
        receives: &[ReceiveFrom],
    ) -> Result<(), NcclError>;

    /// Leaves the group, after all graphs that hold exchanges are gone. Collective.
    ///
    /// # Errors
    ///
    /// What the library reports.
    fn leave(self: Box<Self>) -> Result<(), NcclError>;
}

/// How a rank joins such a group. Collective.
pub type Join<B> = fn(&EpContext<B>) -> Result<Box<dyn Rival<B>>, NcclError>;

impl Rival<CudaBackend> for Group {
    unsafe fn exchange(
        &self,
        stream: &CudaStream,
        sends: &[SendTo],
        receives: &[ReceiveFrom],
    ) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        unsafe { Group::exchange(self, stream, sends, receives) }
    }

    fn leave(self: Box<Self>) -> Result<(), NcclError> {
        Group::leave(*self)
    }
}

/// Joins NCCL's group.
///
/// # Errors
///
/// [`NcclError`], as for [`Group::join`].
pub fn nccl(context: &EpContext<CudaBackend>) -> Result<Box<dyn Rival<CudaBackend>>, NcclError> {
    Ok(Box::new(Group::join(context)?))
}

/// The routing whose bytes are moved: what is recorded knows only one.
const ROUTING: usize = 0;

/// Moves the bytes of those of `ops` that are halves of an exchange, or both. Collective.
pub(super) fn measure<B: Backend>(
    part: &Part<'_, B>,
    ops: &[Op],
    join: Join<B>,
) -> Result<Vec<Entry>, OpError> {
    let layers = (0..part.layers()).map(|layer| Layer::new(part, layer));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    part.backend().synchronize(part.stream())?;
    part.meet("memory of exchanges")?;
    let mut entries = Vec::new();
    if ops.contains(&Op::Dispatch) || ops.contains(&Op::Combine) {
        entries.extend(Exchanges { part, layers: &layers, apart: true }.measure(join)?);
        entries.retain(|entry| ops.contains(&entry.case.op));
    }
    if ops.contains(&Op::Pair) {
        entries.extend(Exchanges { part, layers: &layers, apart: false }.measure(join)?);
    }
    Ok(entries)
}

/// One way of a layer's rows: what this rank sends and receives, and where.
struct Way<B: Backend> {
    /// What lies in `from`, one peer behind the other.
    sends: Vec<SendTo>,
    receives: Vec<ReceiveFrom>,
    to: Buffer<B>,
    /// What the addresses in `sends` need.
    _from: Buffer<B>,
    /// What has to lie in `to`.
    expected: Vec<u8>,
}

/// The rows of a layer to their experts, and back.
struct Layer<B: Backend> {
    dispatch: Way<B>,
    combine: Way<B>,
}

impl<B: Backend> Layer<B> {
    fn new(part: &Part<'_, B>, layer: usize) -> Result<Self, OpError> {
        let counts = part.given.inputs.counts(ROUTING, layer);
        Ok(Self {
            dispatch: Way::new(
                part,
                layer,
                part.shape.row_bytes() + part.shape.scale_bytes(),
                |from, to| counts.items(from, to),
            )?,
            combine: Way::new(part, layer, part.shape.sum_bytes(), |from, to| {
                counts.items(to, from)
            })?,
        })
    }
}

impl<B: Backend> Way<B> {
    fn new(
        part: &Part<'_, B>,
        layer: usize,
        row: usize,
        rows: impl Fn(usize, usize) -> usize,
    ) -> Result<Self, OpError> {
        let (rank, ranks) = (part.rank(), part.shape.ranks);
        let peers: Vec<usize> = (0..ranks).filter(|peer| *peer != rank).collect();
        // Each rank knows what the others have in front of it.
        let bytes = |from: usize, to: usize| -> Vec<u8> {
            let tokens = part.shape.tokens;
            let token = |at: usize| part.given.rows.token(layer, from, (at + to) % tokens);
            let needed = rows(from, to) * row;
            let mut bytes = Vec::with_capacity(needed + part.shape.row_bytes());
            for at in 0.. {
                if bytes.len() >= needed {
                    break;
                }
                bytes.extend_from_slice(token(at));
            }
            bytes.truncate(needed);
            bytes
        };
        let total = |sizes: &mut dyn Iterator<Item = usize>| sizes.sum::<usize>().max(1);
        let from = total(&mut peers.iter().map(|peer| rows(rank, *peer) * row));
        let to = total(&mut peers.iter().map(|peer| rows(*peer, rank) * row));
        let (from, to) = (part.group.allocate(from)?, part.group.allocate(to)?);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        let (mut sent, mut expected) = (Vec::new(), Vec::new());
        for peer in peers {
            let address = from.address() + sent.len() as u64;
            let ours = bytes(rank, peer);
            sends.push(SendTo { peer: Rank::from_index(peer), address, bytes: ours.len() });
            sent.extend(ours);
            let address = to.address() + expected.len() as u64;
            let theirs = bytes(peer, rank);
            receives.push(ReceiveFrom {
                peer: Rank::from_index(peer),
                address,
                bytes: theirs.len(),
            });
            expected.extend(theirs);
        }
        part.group.write(&from, &sent)?;
        Ok(Self { sends, receives, to, _from: from, expected })
    }

    /// Whether everything has come.
    fn arrived(&self, part: &Part<'_, B>) -> Result<bool, OpError> {
        let mut found = vec![0; self.expected.len()];
        part.group.read(&self.to.slice(), &mut found)?;
        Ok(found == self.expected)
    }
}

/// Exchanges of all layers: each timed by itself, or only all of them.
struct Exchanges<'e, 'p, B: Backend> {
    part: &'e Part<'p, B>,
    layers: &'e [Layer<B>],
    apart: bool,
}

impl<B: Backend> Exchanges<'_, '_, B> {
    fn measure(&self, join: Join<B>) -> Result<Vec<Entry>, OpError> {
        let part = self.part;
        let intervals = if self.apart { 2 * self.layers.len() } else { 1 };
        let marks = (0..intervals).map(|_| Interval::new(part.backend()));
        let marks = marks.collect::<Result<Vec<_>, _>>()?;
        let mut rival = join(part.group.context())?;
        let graph = self.record(rival.as_ref(), &marks);
        let failed = graph.as_ref().err().map(ToString::to_string);
        let any = part.most("recording exchanges", f64::from(u8::from(failed.is_some())))? > 0.0;
        if let Some(failure) = &failed {
            tracing::warn!(rank = part.rank(), failure, "exchanges are launched, not replayed");
        }
        let graph = match any {
            false => graph.ok(),
            // A group in which recording has failed is not to be used any more; it lasts until the
            // process ends.
            true => {
                drop(graph);
                rival = join(part.group.context())?;
                None
            }
        };
        let run = || -> Result<(), OpError> {
            match &graph {
                Some(graph) => part.backend().replay(part.stream(), graph)?,
                None => self.queue(rival.as_ref(), &part.queue(), &marks)?,
            }
            part.backend().synchronize(part.stream())?;
            part.group
                .context()
                .fault()
                .map_or(Ok(()), |fault| Err(graph_ep::DispatchError::from(fault).into()))
        };
        let (samples, _) = part.sample(|_| {
            run()?;
            let taken = marks.iter().map(|marks| marks.microseconds(part.backend()));
            Ok(taken.collect::<Result<Vec<_>, _>>()?)
        })?;
        part.meet("exchanges are timed")?;
        let verified = self.verify(&run)?;
        let captured = graph.is_some();
        drop(graph);
        part.meet("exchanges are over")?;
        rival.leave()?;
        self.entries(&samples, captured, verified)
    }

    fn record(
        &self,
        rival: &dyn Rival<B>,
        marks: &[Interval<B>],
    ) -> Result<B::Executable, OpError> {
        let (backend, stream) = (self.part.backend(), self.part.stream());
        let key = backend.begin_recording(stream)?;
        let scope = QueueScope::new();
        // SAFETY: the stream records while the queue lives, and what is queued outlives the graph.
        let queue = unsafe { Queue::recording(backend, stream, &scope) };
        if let Err(error) = self.queue(rival, &queue, marks) {
            backend.abandon_recording(&key);
            return Err(error);
        }
        drop(scope);
        let recording = backend.end_recording(&key)?;
        Ok(backend.instantiate(recording)?)
    }

    fn queue(
        &self,
        rival: &dyn Rival<B>,
        queue: &Queue<'static, B>,
        marks: &[Interval<B>],
    ) -> Result<(), OpError> {
        let ways = self.layers.iter().flat_map(|layer| [&layer.dispatch, &layer.combine]);
        let last = 2 * self.layers.len() - 1;
        for (at, way) in ways.enumerate() {
            let marks = if self.apart { &marks[at] } else { &marks[0] };
            if self.apart || at == 0 {
                self.part.align.queue(queue)?;
                queue.reach(&marks.from)?;
            }
            // SAFETY: the stream is this rank's, the ranges lie in buffers that outlive graph and work
            // and that nothing else uses, and all ranks make the matching calls in this order.
            unsafe { rival.exchange(queue.stream(), &way.sends, &way.receives)? };
            if self.apart || at == last {
                queue.reach(&marks.to)?;
            }
        }
        Ok(())
    }

    /// Exchanges once more over spoilt memory.
    fn verify(&self, run: &impl Fn() -> Result<(), OpError>) -> Result<bool, OpError> {
        let part = self.part;
        let ways = || self.layers.iter().flat_map(|layer| [&layer.dispatch, &layer.combine]);
        for way in ways() {
            let (address, bytes) = (way.to.address(), way.to.bytes());
            // SAFETY: a buffer of this rank, used on the stream of the group alone, and retained.
            unsafe {
                part.backend().fill(part.stream(), address, 0xa5, bytes, &[way.to.retain()])?;
            }
        }
        part.backend().synchronize(part.stream())?;
        part.meet("everything is spoilt")?;
        run()?;
        part.meet("the last exchange is over")?;
        for (at, way) in ways().enumerate() {
            if !way.arrived(part)? {
                let what = "what was exchanged in";
                let (rank, layer) = (part.rank(), at / 2);
                return part.all_right(Some(Mismatch { rank, layer, what, at: at % 2 }));
            }
        }
        part.all_right(None)
    }

    fn entries(
        &self,
        samples: &[f64],
        captured: bool,
        verified: bool,
    ) -> Result<Vec<Entry>, OpError> {
        let (part, count) = (self.part, self.layers.len());
        let (limits, devices) = (&part.setup.limits, &part.setup.devices);
        let counts: Vec<_> =
            (0..count).map(|layer| part.given.inputs.counts(ROUTING, layer).clone()).collect();
        let halves = Halves::mean(part.shape, &counts, devices);
        // Of memory nothing is needed but the two ends of the wire.
        let wire = |work: Work| Work { memory_bytes: 0, ..work };
        let halves = Halves { dispatch: wire(halves.dispatch), combine: wire(halves.combine) };
        let entry = |op, samples: &[f64], per, work, bound| {
            let mut case = part.case(op, "", captured, count);
            // The library takes what it likes, knows sizes beforehand, and nothing of padding.
            (case.by, case.sms, case.variant) = (By::Nccl, 0, "sizes known".to_owned());
            case.padding = Padding::Cleared;
            part.entry(case, samples, per, (work, bound), verified)
        };
        if !self.apart {
            let bound = pair_bound(limits, 0, true, &halves);
            return Ok(vec![entry(Op::Pair, samples, count, halves.pair(), bound)?]);
        }
        let half =
            |first: usize| -> Vec<f64> { samples.iter().skip(first).step_by(2).copied().collect() };
        let bounds = (
            dispatch_bound(limits, 0, true, halves.dispatch),
            combine_bound(limits, 0, halves.combine),
        );
        Ok(vec![
            entry(Op::Dispatch, &half(0), 1, halves.dispatch, bounds.0)?,
            entry(Op::Combine, &half(1), 1, halves.combine, bounds.1)?,
        ])
    }
}

#[cfg(test)]
mod tests;

//! The memory of several layers on one rank, and what a step does with it.

use std::ops::Range;

use graph_ep::{
    Backend, BackendError, Buffer, Combine, DeviceSlice, Dispatch, DispatchError, Handle, Lane,
    Queue, Received, RowBuffer, RowSet, Step, TokenCount, TopKIds,
};

use super::error::OpError;
use super::part::{Check, Part};
use crate::bench::inputs::{ROUTINGS, Rows};
use crate::bench::verify::{Found, Mismatch, Oracle, Part as RowPart};

/// How layers receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive<'r> {
    /// Layers.
    pub(super) layers: usize,
    /// Receive rows that each layer of this rank has at first.
    pub(super) capacity: &'r [u32],
    /// The most that it can ever have.
    pub(super) max_rows: u32,
    /// Whether layers receive into the same rows in turn, and leave results apart from them.
    pub(super) shared: bool,
    /// Whether all layers have the choices of the first.
    pub(super) alike: bool,
}

/// Several layers.
pub(super) struct Layers<B: Backend> {
    pub(super) layers: Vec<Layer<B>>,
    /// The ids and weights that layers read.
    inputs: Buffer<B>,
    /// Those of every routing, and at the end one in which no token has an expert.
    pool: Vec<Buffer<B>>,
}

/// What one layer is given, and where it leaves what it makes. Row buffers are turned into slices only
/// when something is queued: a set of which a slice exists cannot be trimmed.
#[derive(Clone)]
pub(super) struct Layer<B: Backend> {
    tokens: Buffer<B>,
    scales: Option<Buffer<B>>,
    ids: DeviceSlice<'static, B>,
    weights: DeviceSlice<'static, B>,
    output: Buffer<B>,
    count: usize,
    received: Receiver<B>,
}

/// Where rows arrive.
#[derive(Clone)]
pub(super) struct Receiver<B: Backend> {
    pub(super) set: RowSet<B>,
    handle: Handle<B>,
    rows: RowBuffer<B>,
    scales: Option<RowBuffer<B>>,
    /// What experts make of them, where that is not the rows themselves.
    results: Option<RowBuffer<B>>,
}

/// The routing of no token to any expert, behind all others.
pub(super) const NOBODY: usize = ROUTINGS;

/// A byte that is in no right place by itself.
const POISON: u8 = 0xa5;

/// Device memory that starts anywhere is aligned to so many bytes.
const ALIGNED: usize = 256;

impl<B: Backend> Layers<B> {
    /// Allocates and writes everything. Collective in that the ranks meet at its end.
    pub(super) fn new(part: &Part<'_, B>, receive: Receive<'_>) -> Result<Self, OpError> {
        let (shape, rank) = (part.shape, part.rank());
        let rows = &part.given.rows;
        let choices = (shape.tokens * shape.top_k * size_of::<i32>()).next_multiple_of(ALIGNED);
        let inputs = part.group.allocate(2 * receive.layers * choices)?;
        let range = |at: usize| at..at + shape.tokens * shape.top_k * size_of::<i32>();
        let slice = |at: usize| {
            let slice = inputs.slice().get(range(at * choices));
            slice.ok_or_else(|| OpError::Setup("inputs lie outside their buffer".to_owned()))
        };
        let mut layers: Vec<Layer<B>> = Vec::with_capacity(receive.layers);
        for layer in 0..receive.layers {
            let choice = if receive.alike { 0 } else { 2 * layer };
            let received = match layers.first() {
                Some(first) if receive.shared => first.received.clone(),
                _ => Receiver::new(part, receive, layer)?,
            };
            let tokens = part.group.allocate(shape.tokens * shape.row_bytes())?;
            let bytes = Rows::all(shape.tokens, |token| Some(rows.token(layer, rank, token)));
            part.group.write(&tokens, &bytes)?;
            let bytes = Rows::all(shape.tokens, |token| rows.scales(layer, rank, token));
            let scales = match bytes.is_empty() {
                true => None,
                false => Some(part.group.allocate(bytes.len())?),
            };
            if let Some(scales) = &scales {
                part.group.write(scales, &bytes)?;
            }
            layers.push(Layer {
                tokens,
                scales,
                ids: slice(choice)?,
                weights: slice(choice + 1)?,
                output: part.group.allocate(shape.tokens * shape.sum_bytes())?,
                count: shape.tokens,
                received,
            });
        }
        let mut pool = Vec::with_capacity(NOBODY + 1);
        for routing in 0..=NOBODY {
            let mut block = vec![0; inputs.bytes()];
            for (layer, block) in block.chunks_mut(2 * choices).enumerate() {
                let (ids, weights) = block.split_at_mut(choices);
                if routing == NOBODY {
                    ids.fill(0xff);
                    continue;
                }
                let given = &part.given.inputs;
                ids[range(0)]
                    .copy_from_slice(bytemuck::cast_slice(given.ids(routing, layer, rank)));
                let values = given.weights(routing, layer, rank);
                weights[range(0)].copy_from_slice(bytemuck::cast_slice(values));
            }
            let buffer = part.group.allocate(block.len())?;
            part.group.write(&buffer, &block)?;
            pool.push(buffer);
        }
        part.backend().synchronize(part.stream())?;
        part.meet("memory of layers")?;
        Ok(Self { layers, inputs, pool })
    }

    /// Queues putting the choices of `routing` where the layers read them.
    pub(super) fn give(&self, queue: &Queue<'static, B>, routing: usize) -> Result<(), OpError> {
        // SAFETY: two buffers of this value, which are used on the stream of the group alone.
        unsafe { queue.copy(&self.inputs.slice(), &self.pool[routing].slice()) }?;
        Ok(())
    }

    /// Queues spoiling all that a step writes, up to the capacities of now.
    pub(super) fn poison(&self, part: &Part<'_, B>) -> Result<(), OpError> {
        for layer in &self.layers {
            let received = &layer.received;
            let capacity = received.set.capacity() as usize;
            let mut spoil = vec![layer.output.slice()];
            // Results that no expert of ours makes stay as they are.
            let made = received.results.as_ref().filter(|_| part.shape.plain());
            let buffers = [Some(&received.rows), received.scales.as_ref(), made];
            let beside = [received.handle.row_experts(), received.handle.row_weights()];
            for rows in buffers.into_iter().chain(beside).flatten() {
                spoil.extend(rows.slice().get(0..capacity * rows.row_bytes()));
            }
            for slice in spoil.iter().filter(|slice| slice.bytes() > 0) {
                let kept: Vec<_> = slice.retained().cloned().into_iter().collect();
                // SAFETY: rows below the capacity are mapped, all of it is used on the stream of the
                // group alone, and its owner is retained.
                unsafe {
                    let (address, bytes) = (slice.address(), slice.bytes());
                    part.backend().fill(part.stream(), address, POISON, bytes, &kept)?;
                }
            }
        }
        Ok(())
    }

    /// What is wrong in what the last step left, if something is.
    pub(super) fn check(
        &self,
        part: &Part<'_, B>,
        check: Check,
    ) -> Result<Option<Mismatch>, OpError> {
        let Check { routing, results, rows_kept } = check;
        let oracle = Oracle::new(part.shape, part.given, part.rank())?;
        let alike = self.layers.iter().all(|layer| layer.ids.address() == self.inputs.address());
        for (index, layer) in self.layers.iter().enumerate() {
            let place = (routing, if alike { 0 } else { index });
            if rows_kept {
                let found = layer.received.found(part)?;
                let wrong = oracle.received(place, &found, |which, range| {
                    layer.received.read(part, which, range)
                })?;
                if wrong.is_some() {
                    return Ok(wrong);
                }
            }
            let size = part.shape.sum_bytes();
            let wrong = oracle.outputs(place, (index, self.layers.len()), results, |token| {
                let range = token * size..(token + 1) * size;
                read(part, &layer.output.slice(), range)
            })?;
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
        Ok(None)
    }
}

impl<B: Backend> Receiver<B> {
    fn new(part: &Part<'_, B>, receive: Receive<'_>, layer: usize) -> Result<Self, OpError> {
        let (shape, context) = (part.shape, part.group.context());
        let capacity =
            receive.capacity.get(layer).or(receive.capacity.last()).copied().unwrap_or(0);
        let most = receive.max_rows.max(capacity);
        let set = RowSet::new(context, part.stream(), "rows of a layer", capacity, most)?;
        let handle = Handle::new(part.group.dispatcher(), &set)?;
        let rows = set.add("received rows", shape.row_bytes())?;
        let scales = match shape.scale_bytes() {
            0 => None,
            bytes => Some(set.add("received scales", bytes)?),
        };
        let results = match receive.shared || !shape.plain() {
            true => Some(set.add("results", shape.sum_bytes())?),
            false => None,
        };
        if let (Some(results), false) = (&results, shape.plain()) {
            let result = |row| part.given.rows.result(layer, part.rank(), row);
            let bytes = Rows::all(capacity as usize, result);
            // SAFETY: as many rows are mapped, and nothing else knows them.
            unsafe { part.queue().upload(&results.slice(), &bytes) }?;
        }
        Ok(Self { set, handle, rows, scales, results })
    }

    /// What experts are given.
    pub(super) fn received(&self, row_limit: u32) -> Received<'_, B> {
        Received {
            rows: &self.rows,
            scales: self.scales.as_ref(),
            outputs: self.results.as_ref().unwrap_or(&self.rows),
            handle: &self.handle,
            row_limit,
        }
    }

    fn found(&self, part: &Part<'_, B>) -> Result<Found, OpError> {
        let words = |slice: DeviceSlice<'static, B>| -> Result<Vec<i32>, OpError> {
            let mut words = vec![0; slice.bytes() / size_of::<i32>()];
            let into = bytemuck::cast_slice_mut(&mut words);
            // SAFETY: all work on the layers is queued on the part's stream.
            unsafe { part.queue().download(&slice, into) }?;
            Ok(words)
        };
        Ok(Found {
            offsets: words(self.handle.expert_offsets())?,
            counts: words(self.handle.tokens_per_expert())?,
            total: words(self.handle.total())?.first().copied().unwrap_or(0),
        })
    }

    fn read(
        &self,
        part: &Part<'_, B>,
        which: RowPart,
        rows: Range<usize>,
    ) -> Result<Vec<u8>, OpError> {
        let buffer = match which {
            RowPart::Row => Some(&self.rows),
            RowPart::Scales => self.scales.as_ref(),
            RowPart::Experts => self.handle.row_experts(),
            RowPart::Weights => self.handle.row_weights(),
        };
        let Some(buffer) = buffer else { return Ok(Vec::new()) };
        let size = buffer.row_bytes();
        read(part, &buffer.slice(), rows.start * size..rows.end * size)
    }
}

/// Reads a range of a buffer whose work was waited for.
fn read<B: Backend>(
    part: &Part<'_, B>,
    from: &DeviceSlice<'static, B>,
    range: Range<usize>,
) -> Result<Vec<u8>, OpError> {
    let mut bytes = vec![0; range.len()];
    let (value, limit) = (range.end as u64, format!("the {} bytes of a buffer", from.bytes()));
    let outside = BackendError::Invalid { what: "end of a range in bytes", value, limit };
    let from = from.get(range).ok_or(outside)?;
    // SAFETY: all work on the layers is queued on the part's stream.
    unsafe { part.queue().download(&from, &mut bytes) }?;
    Ok(bytes)
}

impl<B: Backend> Layer<B> {
    /// Where its rows arrive.
    pub(super) fn receiver(&self) -> &Receiver<B> {
        &self.received
    }

    fn arguments(&self) -> Dispatch<'_, 'static, B> {
        Dispatch {
            tokens: self.tokens.slice(),
            scales: self.scales.as_ref().map(Buffer::slice),
            count: TokenCount::Fixed(self.count),
            topk_ids: TopKIds::I32(self.ids.clone()),
            topk_weights: Some(self.weights.clone()),
            rows: &self.received.rows,
            received_scales: self.received.scales.as_ref(),
            handle: &self.received.handle,
        }
    }

    /// Queues the dispatch.
    pub(super) fn dispatch(
        &self,
        lane: &Lane<B>,
        step: &mut Step<'static, B>,
    ) -> Result<(), DispatchError> {
        lane.dispatch(step, &self.arguments())
    }

    /// Queues the combine.
    pub(super) fn combine(
        &self,
        lane: &Lane<B>,
        step: &mut Step<'static, B>,
    ) -> Result<(), DispatchError> {
        let expert_rows = self.results();
        let output = self.output.slice();
        lane.combine(step, &Combine { handle: &self.received.handle, expert_rows, output })
    }

    /// Records both as a loop over windows, with `experts` between them.
    pub(super) fn rounds<E: From<DispatchError>>(
        &self,
        lane: &Lane<B>,
        step: &mut Step<'static, B>,
        experts: impl FnOnce(&mut Step<'static, B>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (rows, output) = (self.results(), self.output.slice());
        lane.rounds(step, &self.arguments(), &rows, &output, experts)
    }

    /// What combine adds up.
    fn results(&self) -> DeviceSlice<'static, B> {
        self.received.results.as_ref().unwrap_or(&self.received.rows).slice()
    }
}

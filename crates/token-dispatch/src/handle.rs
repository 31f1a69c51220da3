//! What one dispatch leaves behind: where rows came from, and where their sums go.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_context::{Backend, Buffer, DeviceSlice, Retained, RowBuffer, RowSet};
use smallvec::SmallVec;

use crate::dispatcher::TokenDispatcher;
use crate::error::DispatchError;
use crate::geometry::Geometry;
use crate::memory::handle_row_memory;
use crate::params::{Destination, HandleParams, WindowState};

/// The private memory of one dispatch: routing lists, row counts, window. A clone is the same handle.
///
/// A handle is filled by a dispatch and read by its combine. One handle serves all layers of an
/// inference step in turn; training keeps one for each layer until its backward pass.
pub struct Handle<B: Backend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: Backend> {
    id: u64,
    dispatcher: u64,
    rows: RowSet<B>,
    /// The lists, of which there is an entry for each row.
    lists: SmallVec<[RowBuffer<B>; 4]>,
    row_weights: Option<RowBuffer<B>>,
    row_experts: Option<RowBuffer<B>>,
    filled: Mutex<Option<Fill>>,
    memory: Buffer<B>,
    layout: HandleParams,
    local_experts: usize,
}

/// The last dispatch that was queued or recorded into a handle. Which one has run last, the host cannot know
/// where graphs are replayed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    /// Counts those that ran as they were queued.
    pub(crate) number: u64,
    /// The most tokens that it sends.
    pub(crate) tokens: u32,
    /// Whether it leaves one window of several.
    pub(crate) in_rounds: bool,
    /// How often the rows had been trimmed.
    pub(crate) trims: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl<B: Backend> Handle<B> {
    /// A handle whose rows lie in buffers of `rows`, to which it adds its lists; see
    /// [`memory::handle_row_memory`](crate::memory::handle_row_memory).
    /// Allocates; local.
    ///
    /// # Errors
    ///
    /// Out of memory.
    pub fn new(dispatcher: &TokenDispatcher<B>, rows: &RowSet<B>) -> Result<Self, DispatchError> {
        let geometry = &dispatcher.inner.geometry;
        let (offsets, bytes) = arrange(geometry);
        let local = geometry.local_experts as usize;
        let memory = dispatcher.context().allocate("handle", bytes)?;
        let config = dispatcher.config();
        let mut lists = SmallVec::new();
        let (mut row_weights, mut row_experts) = (None, None);
        let mut addresses = [0; 4];
        for (place, (label, bytes)) in handle_row_memory(config, local).into_iter().enumerate() {
            let list = rows.add(label, bytes)?;
            addresses[place] = list.address();
            match place {
                2 => row_weights = Some(list.clone()),
                3 => row_experts = Some(list.clone()),
                _ => {}
            }
            lists.push(list);
        }
        let [items, pairs, weights, experts] = addresses;
        let base = memory.address();
        let layout = HandleParams {
            fanouts: base + offsets.fanouts,
            destinations: base + offsets.destinations,
            window: base + offsets.window,
            expert_offsets: base + offsets.expert_offsets,
            tokens_per_expert: base + offsets.tokens_per_expert,
            total: base + offsets.total,
            source_items: base + offsets.source_items,
            source_pairs: base + offsets.source_pairs,
            bases: base + offsets.bases,
            taken: base + offsets.taken,
            items,
            pairs,
            row_weights: weights,
            row_experts: experts,
        };
        Ok(Self {
            inner: Arc::new(Inner {
                id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
                dispatcher: dispatcher.id(),
                rows: rows.clone(),
                lists,
                row_weights,
                row_experts,
                filled: Mutex::new(None),
                memory,
                layout,
                local_experts: local,
            }),
        })
    }

    /// The row set whose capacity bounds what this handle's dispatch receives.
    pub fn rows(&self) -> &RowSet<B> {
        &self.inner.rows
    }

    /// The first row of each of this rank's experts, and the end of the last: `[local_experts + 1]`
    /// i32 in device memory, multiples of the alignment.
    pub fn expert_offsets(&self) -> DeviceSlice<'static, B> {
        self.part(self.inner.layout.expert_offsets, 4 * (self.inner.local_experts + 1))
    }

    /// Rows of each of this rank's experts, without padding: `[local_experts]` i32 in device memory.
    pub fn tokens_per_expert(&self) -> DeviceSlice<'static, B> {
        self.part(self.inner.layout.tokens_per_expert, 4 * self.inner.local_experts)
    }

    /// Rows of the window, padding included: one i32 in device memory. Rows at or behind it hold
    /// nothing.
    pub fn total(&self) -> DeviceSlice<'static, B> {
        self.part(self.inner.layout.total, 4)
    }

    /// The weight of each received row, where the caller multiplies by them: f32 `[capacity]`, in the
    /// flat layout `[capacity, flat_width]` beside [`Handle::row_experts`]; zero for padding,
    /// unless that is left as it is.
    pub fn row_weights(&self) -> Option<&RowBuffer<B>> {
        self.inner.row_weights.as_ref()
    }

    /// The slots of each received row's experts in the flat layout: i32 `[capacity, flat_width]`, in
    /// ascending order of the experts' ids, −1 behind the last.
    pub fn row_experts(&self) -> Option<&RowBuffer<B>> {
        self.inner.row_experts.as_ref()
    }

    /// Takes note of a dispatch that is queued or, unless it `runs`, recorded into this handle; returns its number.
    pub(crate) fn fill(&self, tokens: u32, in_rounds: bool, runs: bool) -> u64 {
        let trims = self.inner.rows.trims();
        let mut filled = self.lock();
        let number = filled.map_or(0, |last| last.number) + u64::from(runs);
        *filled = Some(Fill { number, tokens, in_rounds, trims });
        number
    }

    /// The last of these dispatches.
    pub(crate) fn filled(&self) -> Option<Fill> {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Fill>> {
        self.inner.filled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What keeps the rows of the handle's set from being trimmed.
    pub(crate) fn hold_rows(&self) -> Option<Retained> {
        self.inner.lists.first().map(RowBuffer::retain)
    }

    pub(crate) fn window(&self) -> DeviceSlice<'static, B> {
        self.part(self.inner.layout.window, size_of::<WindowState>())
    }

    fn part(&self, address: u64, bytes: usize) -> DeviceSlice<'static, B> {
        // SAFETY: 1. the part lies in the handle's memory, and the owner keeps that alive. 2. Only
        // operations of the stream that the handle is used on write it.
        unsafe { DeviceSlice::owned_by(self.inner.memory.retain(), address, bytes) }
    }

    pub(crate) fn params(&self) -> HandleParams {
        self.inner.layout
    }

    /// The dispatcher that it was made for.
    pub(crate) fn dispatcher(&self) -> u64 {
        self.inner.dispatcher
    }

    pub(crate) fn id(&self) -> u64 {
        self.inner.id
    }

    /// What operations on this handle need to stay mapped.
    pub(crate) fn retained(&self) -> SmallVec<[Retained; 5]> {
        let lists = self.inner.lists.iter().map(RowBuffer::retain);
        lists.chain([self.inner.memory.retain()]).collect()
    }
}

/// Where the parts of a handle start, from its first byte, and the bytes of all of them.
fn arrange(g: &Geometry) -> (HandleParams, usize) {
    let (world, slots) = (g.world as usize, g.slots as usize);
    let (tokens, local) = (g.max_tokens as usize, g.local_experts as usize);
    let word = size_of::<u32>();
    let mut end = 0u64;
    let mut region = |bytes: usize| {
        let start = end;
        end = (start + bytes as u64).next_multiple_of(256);
        start
    };
    let offsets = HandleParams {
        fanouts: region(word * tokens),
        destinations: region(size_of::<Destination>() * tokens * g.fanout as usize),
        window: region(size_of::<WindowState>()),
        expert_offsets: region(word * (local + 1)),
        tokens_per_expert: region(word * local),
        total: region(word),
        source_items: region(word * (world + 1)),
        source_pairs: region(word * (world + 1)),
        bases: region(word * world * slots),
        taken: region(word * slots),
        items: 0,
        pairs: 0,
        row_weights: 0,
        row_experts: 0,
    };
    (offsets, end as usize)
}

/// Bytes of a handle that do not depend on routing.
pub(crate) fn handle_bytes(geometry: &Geometry) -> usize {
    arrange(geometry).1
}

impl<B: Backend> Clone for Handle<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<B: Backend> fmt::Debug for Handle<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("id", &self.inner.id)
            .field("rows", &self.inner.rows)
            .finish_non_exhaustive()
    }
}

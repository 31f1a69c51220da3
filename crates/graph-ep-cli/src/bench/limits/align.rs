//! A barrier of all ranks on their devices, so that what is timed begins everywhere at once.

use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use graph_ep::ep_context::rendezvous::all_or_none;
use graph_ep::ep_context::signal::{HostWaiter, WaitParams};
use graph_ep::ep_context::{ContextError, KernelSource, Retained, Specialization, SymmetricBlock};
use graph_ep::{Backend, BackendError, Buffer, EpContext, Kernel, LaunchShape, Phase, Queue, Rank};
use graph_ep_kernels::{HEADERS, limits};

use super::memory::pointer;

/// Parameters of [`AlignKernel`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AlignParams {
    pub(super) wait: WaitParams,
    /// `[world]` addresses of every rank's `[2, world]` words, as mapped here.
    pub(super) blocks: u64,
    /// A 64-bit word: how many barriers have begun.
    pub(super) begun: u64,
}

/// Waits until every rank has come to the same barrier; words are used in two sets in turn.
#[derive(Debug)]
pub(super) struct AlignKernel;

impl Kernel for AlignKernel {
    type Params = AlignParams;
    const NAME: &'static str = "limit_align";
    const SOURCE: Option<KernelSource> =
        Some(KernelSource { file: limits::ALIGN.0, text: limits::ALIGN.1, headers: HEADERS });

    unsafe fn run_on_host(p: &AlignParams) {
        let (rank, world) = (u64::from(p.wait.rank), u64::from(p.wait.world));
        // SAFETY: the launch vouches for the words and the table, which this rank alone reads, and
        // for the blocks of all ranks, whose words are accessed as atomics only; the waiter lives
        // for this call.
        unsafe {
            let barrier = pointer::<u64>(p.begun).read();
            pointer::<u64>(p.begun).write(barrier + 1);
            let set = (barrier & 1) * world;
            let value = ((barrier >> 1) as u32).wrapping_add(1);
            let block = |of: u64| pointer::<u64>(p.blocks).add(of as usize).read();
            let waiter = HostWaiter::from_params(&p.wait);
            for peer in (rank + 1..world).chain(0..=rank) {
                waiter.signal(Rank(peer as u32), block(peer) + 4 * (set + rank), value);
            }
            // A fault is with the host of this rank already, which looks when it has waited.
            let _ = waiter.wait_all(Phase::Agreement, block(rank) + 4 * set, value);
        }
    }
}

/// A barrier of all ranks of a group, to be queued or recorded by all of them in the same order. A
/// clone is the same barrier.
#[derive(Clone)]
pub struct Align<B: Backend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: Backend> {
    kernel: B::Loaded<AlignKernel>,
    params: AlignParams,
    world: u32,
    /// What the addresses in `params` need.
    retained: [Retained; 3],
}

impl<B: Backend> Align<B> {
    /// A barrier of the group. Collective; loads a kernel, allocates a few words, and synchronises.
    ///
    /// # Errors
    ///
    /// The same on every rank when one cannot load, allocate or map, or is missing.
    pub fn new(context: &EpContext<B>) -> Result<Self, ContextError> {
        let world = context.world();
        let block = context.share("words of a barrier", 2 * world * size_of::<u32>())?;
        let deadline = context.deadlines().of(Phase::Setup);
        // Nobody queues a barrier before all are done with what may wait for a device.
        let (kernel, state) = all_or_none(
            context.rendezvous(),
            "preparing a barrier",
            Self::prepare(context, &block),
            deadline,
        )?;
        let params = AlignParams {
            wait: context.wait_params(),
            blocks: state.address(),
            begun: state.address() + (world * size_of::<u64>()) as u64,
        };
        let retained = [block.retain(), state.retain(), context.retain_signals()];
        let world = params.wait.world;
        Ok(Self { inner: Arc::new(Inner { kernel, params, world, retained }) })
    }

    fn prepare(
        context: &EpContext<B>,
        block: &SymmetricBlock<B>,
    ) -> Result<(B::Loaded<AlignKernel>, Buffer<B>), BackendError> {
        let backend = context.backend();
        let kernel = backend.load::<AlignKernel>(&Specialization::new())?;
        let table: &[u8] = bytemuck::cast_slice(block.addresses());
        let bytes = table.len() + size_of::<u64>();
        let state = context.allocate_uncounted("state of a barrier", bytes)?;
        let stream = context.stream("barrier")?;
        let queue = Queue::direct(backend, &stream);
        // SAFETY: nothing else knows the memory.
        unsafe { queue.upload(&state.slice(), table)? };
        backend.synchronize(&stream)?;
        Ok((kernel, state))
    }

    /// Queues or records one barrier: work behind it starts on all ranks at nearly the same time. It
    /// waits no longer than the deadline of [`Phase::Agreement`]; whether all have come, tells
    /// [`EpContext::fault`] once the stream has been waited for.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn queue(&self, queue: &Queue<'_, B>) -> Result<(), BackendError> {
        let Inner { kernel, params, world, retained } = &*self.inner;
        let shape = LaunchShape::new(1, world.next_multiple_of(32).min(1024));
        // SAFETY: every address lies in what is retained. This rank's state is used by barriers
        // alone, which its callers queue in one order; the words of the blocks are signals.
        unsafe { queue.launch::<AlignKernel>(kernel, shape, params, &[], retained) }
    }
}

impl<B: Backend> fmt::Debug for Align<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Align").field("world", &self.inner.world).finish_non_exhaustive()
    }
}

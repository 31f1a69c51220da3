//! NCCL's send and receive, to compare with: the same bytes between the same GPUs in the same process.
//!
//! The library is loaded at run time, from where [`GRAPH_EP_NCCL`](Group::join) says, where the loader
//! finds it, or where the wheel that PyTorch depends on puts it. NVLink multicast stays off, see
//! [`forbid_multicast`].
//!
//! Communicators are made so that no call waits for other ranks; whether the work that it began has
//! ended is asked for, with a deadline.

mod card;
mod current;
mod error;
mod library;
mod search;

use std::env;
use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use graph_ep::ep_context::cuda::{CudaBackend, CudaStream};
use graph_ep::ep_context::rendezvous::all_or_none;
use graph_ep::{Backend, Buffer, EpContext, Phase, Rank};

pub use error::NcclError;

use card::Card;
use current::Current;
use library::{
    Comm, Config, DriverContext, IN_PROGRESS, Libraries, SUCCESS, Stream, UINT8, UniqueId,
};

/// The variable by which NCCL is told to use NVLink multicast or not.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// Turns NVLink multicast off for every communicator of this process: a program that uses it can leave
/// GPUs that others share out of service. [`Group::join`] refuses to go on without.
///
/// # Safety
///
/// No other thread reads or writes the environment meanwhile: call it before there are any.
pub unsafe fn forbid_multicast() {
    // SAFETY: the caller's promise.
    unsafe { env::set_var(MULTICAST, "0") };
}

/// Where NCCL was found and its version, for a report. Loads it.
///
/// # Errors
///
/// [`NcclError::Unavailable`] says where it was looked for.
pub fn describe() -> Result<String, NcclError> {
    Ok(Libraries::find()?.describe())
}

/// Bytes that go to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendTo {
    /// The rank that receives them.
    pub peer: Rank,
    /// Device address of the first.
    pub address: u64,
    /// How many; none are neither sent nor waited for.
    pub bytes: usize,
}

/// Bytes that come from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveFrom {
    /// The rank that sends them.
    pub peer: Rank,
    /// Device address of the first.
    pub address: u64,
    /// How many: as many as that rank sends.
    pub bytes: usize,
}

/// One rank's membership of a communicator. [`Group::leave`] ends it; dropping it leaves it to the end
/// of the process, since no destructor here waits for other ranks.
pub struct Group {
    context: EpContext<CudaBackend>,
    libraries: &'static Libraries,
    driver_context: DriverContext,
    comm: Comm,
    deadline: Duration,
}

// SAFETY: a communicator and a context may be used by any thread, one at a time, which is what an owner
// that is not `Sync` ensures; the context is made current for each call.
unsafe impl Send for Group {}

impl Group {
    /// Joins a communicator of the ranks of `context`, and connects each to each. Collective; blocks for
    /// at most the deadline of set-up for each step, and waits for the device. The first call loads the
    /// library: `GRAPH_EP_NCCL` may name it, or its folder. NCCL allocates device memory of its own.
    ///
    /// # Errors
    ///
    /// [`NcclError`], on every rank if one of them fails; the group of `context` can still be used.
    pub fn join(context: &EpContext<CudaBackend>) -> Result<Self, NcclError> {
        let rendezvous = context.rendezvous();
        let deadline = context.deadlines().of(Phase::Setup);
        let prepared = prepare(context);
        let failure = prepared.as_ref().map(drop);
        all_or_none(rendezvous, "NCCL", failure, deadline)?;
        let (libraries, driver_context, id) = prepared?;
        let card = Card { gpu: context.backend().properties().ordinal, id };
        let cards = rendezvous.all_gather("NCCL's id", &card.to_bytes(), deadline)?;
        let id = card::meet(&cards)?;

        let mut group = Self {
            context: context.clone(),
            libraries,
            driver_context,
            comm: ptr::null_mut(),
            deadline,
        };
        let joined = group.initialise(id);
        if let Err(error) = all_or_none(rendezvous, "NCCL's communicator", joined, deadline) {
            group.abort();
            return Err(error.into());
        }
        // Waited for only once every rank has queued its part: else there would be no end to it.
        let queued = group.connect();
        match all_or_none(rendezvous, "NCCL's connections", queued, deadline) {
            Ok((stream, _memory)) => context.backend().synchronize(&stream)?,
            Err(error) => {
                group.abort();
                return Err(error.into());
            }
        }
        Ok(group)
    }

    /// Queues, or records if `stream` records, all of an exchange as one group of sends and receives.
    /// Returns when the work is queued, for which other ranks are not needed. A rank may send to itself.
    ///
    /// What is recorded belongs to a graph that must be gone, on every rank, before [`Group::leave`].
    ///
    /// # Safety
    ///
    /// `stream` is one of this rank's device. All addresses are those of that device's memory, or memory
    /// that it reaches; each range is valid and, where it is written, used by nothing else, from now
    /// until the work has run, or until the graph that it was recorded in is gone. Every rank makes the
    /// calls that match in the same order: what one receives another sends, with as many bytes.
    ///
    /// # Errors
    ///
    /// [`NcclError::Peer`] for a rank outside of the group, before anything is queued; else what NCCL
    /// reports, after which the communicator is not to be used any more.
    pub unsafe fn exchange(
        &self,
        stream: &CudaStream,
        sends: &[SendTo],
        receives: &[ReceiveFrom],
    ) -> Result<(), NcclError> {
        let world = self.context.world();
        let mut peers = sends.iter().map(|s| s.peer).chain(receives.iter().map(|r| r.peer));
        if let Some(peer) = peers.find(|peer| peer.index() >= world) {
            return Err(NcclError::Peer { peer, world });
        }
        let stream: Stream = stream.raw().cast();
        let calls = &self.libraries.nccl;
        let _current = self.current()?;
        // SAFETY: takes nothing.
        self.begun("ncclGroupStart", unsafe { (calls.ncclGroupStart)() })?;
        let mut queued = Ok(());
        for &SendTo { peer, address, bytes } in sends.iter().filter(|send| send.bytes > 0) {
            let (from, peer) =
                (ptr::with_exposed_provenance(address as usize), number(peer.index()));
            // SAFETY: the communicator is this value's, and its context current; range and stream are
            // good by the caller's promise, and the peer is one of the group.
            let code = unsafe { (calls.ncclSend)(from, bytes, UINT8, peer, self.comm, stream) };
            queued = queued.and(self.begun("ncclSend", code));
        }
        for &ReceiveFrom { peer, address, bytes } in receives.iter().filter(|from| from.bytes > 0) {
            let (to, peer) =
                (ptr::with_exposed_provenance_mut(address as usize), number(peer.index()));
            // SAFETY: as above.
            let code = unsafe { (calls.ncclRecv)(to, bytes, UINT8, peer, self.comm, stream) };
            queued = queued.and(self.begun("ncclRecv", code));
        }
        // A group that was begun must be ended, even one that has failed; it queues nothing then.
        // SAFETY: takes nothing; the group was begun on this thread.
        let ended = self.begun("ncclGroupEnd", unsafe { (calls.ncclGroupEnd)() });
        queued?;
        ended?;
        self.settle("ncclGroupEnd")
    }

    /// Leaves the communicator. Collective; blocks for at most the deadline of set-up. Everything that
    /// was queued must have run, and graphs that hold exchanges must have been dropped, on every rank.
    ///
    /// # Errors
    ///
    /// [`NcclError::Late`] if another rank does not leave, or a graph is still there: the communicator
    /// then lasts until the process ends. Else what NCCL reports.
    pub fn leave(self) -> Result<(), NcclError> {
        // Graphs that were dropped still hold on to the communicator until the driver is told.
        self.context.backend().collect()?;
        let calls = &self.libraries.nccl;
        let _current = self.current()?;
        // SAFETY: the communicator is this value's, which is consumed; its context is current.
        self.begun("ncclCommFinalize", unsafe { (calls.ncclCommFinalize)(self.comm) })?;
        self.settle("ncclCommFinalize")?;
        // SAFETY: as above; nothing of it is in progress, and it is not used again.
        self.begun("ncclCommDestroy", unsafe { (calls.ncclCommDestroy)(self.comm) })
    }

    /// Makes the communicator. Collective.
    fn initialise(&mut self, id: UniqueId) -> Result<(), NcclError> {
        let (ranks, rank) = (number(self.context.world()), number(self.context.rank().index()));
        let mut config = Config::nonblocking();
        let current = self.current()?;
        let comm = &raw mut self.comm;
        // SAFETY: the places are valid, and the library copies the configuration before it returns; the
        // rank is one of so many, the id the same on all of them, and the device's context current.
        let code = unsafe {
            (self.libraries.nccl.ncclCommInitRankConfig)(comm, ranks, id, rank, &raw mut config)
        };
        self.begun("ncclCommInitRankConfig", code)?;
        self.settle("ncclCommInitRankConfig")?;
        drop(current);
        Ok(())
    }

    /// Queues an exchange of a little with every rank, on the stream and in the memory that it returns.
    /// Connections are made by the first exchange, which allocates: nothing to be left for one that is
    /// recorded or measured.
    fn connect(&self) -> Result<(CudaStream, Buffer<CudaBackend>), NcclError> {
        // Apart, so that each lies as an allocation would.
        const BYTES: usize = 256;
        let world = self.context.world();
        let memory = self.context.allocate_uncounted("NCCL's first exchange", 2 * world * BYTES)?;
        let stream = self.context.stream("nccl")?;
        let place = |slot: usize| memory.address() + (slot * BYTES) as u64;
        let ranks = (0..world).map(Rank::from_index);
        let sends: Vec<SendTo> = ranks
            .clone()
            .map(|peer| SendTo { peer, address: place(peer.index()), bytes: BYTES })
            .collect();
        let receives: Vec<ReceiveFrom> = ranks
            .map(|peer| ReceiveFrom { peer, address: place(world + peer.index()), bytes: BYTES })
            .collect();
        // SAFETY: the stream is of this device, the ranges are parts of an allocation that nothing else
        // uses, and every rank does the same. The caller keeps the allocation until it has waited, or has
        // given up the communicator, which ends what was queued.
        unsafe { self.exchange(&stream, &sends, &receives)? };
        Ok((stream, memory))
    }

    /// Gives a communicator up whose ranks cannot go on together.
    fn abort(&self) {
        if self.comm.is_null() {
            return;
        }
        if let Ok(_current) = self.current() {
            // SAFETY: the communicator is this value's, which its only caller drops; its context is
            // current.
            let code = unsafe { (self.libraries.nccl.ncclCommAbort)(self.comm) };
            tracing::debug!(code, "a communicator of NCCL's was given up");
        }
    }

    /// Makes the device's context the calling thread's, as long as the result lives.
    fn current(&self) -> Result<Current, NcclError> {
        Current::push(&self.libraries.driver, self.driver_context)
    }

    /// The result of a call whose work may go on.
    fn begun(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        self.libraries.outcome(call, if code == IN_PROGRESS { SUCCESS } else { code })
    }

    /// Waits until what `call` began has ended, on this rank's host, for at most the deadline.
    fn settle(&self, call: &'static str) -> Result<(), NcclError> {
        // Most calls are over at once; the first of their kind take far longer than this.
        const SPINS: u32 = 1000;
        let start = Instant::now();
        for round in 0_u32.. {
            let mut state = SUCCESS;
            // SAFETY: the communicator is this value's, and the place valid.
            let code =
                unsafe { (self.libraries.nccl.ncclCommGetAsyncError)(self.comm, &raw mut state) };
            self.libraries.outcome("ncclCommGetAsyncError", code)?;
            if state != IN_PROGRESS {
                return self.libraries.outcome(call, state);
            }
            if start.elapsed() > self.deadline {
                break;
            }
            if round < SPINS {
                thread::yield_now()
            } else {
                thread::sleep(Duration::from_micros(50))
            }
        }
        Err(NcclError::Late { call, deadline: self.deadline })
    }
}

/// What a rank needs before it can meet the others: the libraries, the context of its device, and, on
/// rank 0, the id of the communicator.
fn prepare(
    context: &EpContext<CudaBackend>,
) -> Result<(&'static Libraries, DriverContext, UniqueId), NcclError> {
    if env::var_os(MULTICAST).is_none_or(|value| value != "0") {
        return Err(NcclError::Multicast);
    }
    let libraries = Libraries::find()?;
    let stream = context.stream("nccl")?;
    let driver_context = current::context_of(&libraries.driver, stream.raw().cast())?;
    let mut id = UniqueId([0; 128]);
    if context.rank() == Rank(0) {
        let _current = Current::push(&libraries.driver, driver_context)?;
        // SAFETY: the place is valid.
        let code = unsafe { (libraries.nccl.ncclGetUniqueId)(&raw mut id) };
        libraries.outcome("ncclGetUniqueId", code)?;
    }
    Ok((libraries, driver_context, id))
}

/// Ranks are far fewer than this can hold.
fn number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.context.rank())
            .field("world", &self.context.world())
            .field("library", &self.libraries.describe())
            .finish_non_exhaustive()
    }
}

//! What the protocol asks of a device: memory, ordered queues, kernels, and recorded graphs.
//!
//! Everything above this trait is written once. A device address is a plain `u64` that is valid on
//! the device of the rank that holds it; on the host backend it is an address of this process.

use std::any::Any;
use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::kernel::Kernel;

/// Something that must outlive the work that uses it: a buffer, a mapping, a module.
///
/// Queued work holds these until it has run, a recording until it and every graph made of it is gone.
pub type Retained = Arc<dyn Any + Send + Sync>;

/// A device as one rank sees it.
///
/// Cloning gives another handle of the same device. Nothing here talks to other ranks, except that
/// memory of [`Backend::Shared`] can be exported as a descriptor and imported by a peer.
pub trait Backend: Clone + Debug + Send + Sync + 'static {
    /// `host` or `cuda`, as the program's `--backend` names it.
    const NAME: &'static str;
    /// Whether threads of this process may touch device memory at its device address.
    const HOST_REACHES_DEVICE_MEMORY: bool;

    /// An ordered queue of work; a clone is the same queue, and equal to it.
    type Stream: Clone + Debug + Eq + Send + Sync + 'static;
    /// Memory that only this rank addresses.
    type Private: Memory;
    /// Private memory with addresses reserved for its largest size and pages for its present one.
    type Growable: GrowableMemory;
    /// Memory of this rank that peers map.
    type Shared: SharedMemory;
    /// Memory of a peer, mapped here.
    type Peer: Memory;
    /// Host memory that the device reads and writes while both run.
    type Mapped: MappedMemory;
    /// A kernel ready to be launched; a clone is the same kernel.
    type Loaded<K: Kernel>: Clone + Debug + Send + Sync + 'static;
    /// The right to end a recording. It is only had by beginning one, so that code which is merely given
    /// the stream, such as the body of a step that is recorded, cannot end the recording under those who
    /// rely on it.
    type RecordingKey: Debug + Send + Sync + 'static;
    /// A finished recording that is not executable yet. It owns what was retained while recording.
    type Recording: Debug + Send + 'static;
    /// A graph ready to be replayed. It owns what its recording owned.
    type Executable: Debug + Send + Sync + 'static;
    /// A place in a stream's work whose time can be taken; a clone is the same place.
    type Mark: Clone + Debug + Send + Sync + 'static;

    /// A new stream. `name` appears in thread names, traces and errors.
    fn stream(&self, name: &str) -> Result<Self::Stream, BackendError>;

    /// Zeroed private memory of `bytes` bytes, aligned to at least 256 bytes. May synchronise.
    fn allocate(&self, bytes: usize) -> Result<Self::Private, BackendError>;

    /// Reserves addresses for `bytes` bytes and maps nothing. What pages hold that are mapped later is
    /// unspecified until it is written.
    fn reserve(&self, bytes: usize) -> Result<Self::Growable, BackendError>;

    /// Zeroed memory that can be exported to peers.
    fn allocate_shared(&self, bytes: usize) -> Result<Self::Shared, BackendError>;

    /// Maps the memory behind a peer's exported descriptor; `bytes` is the length that the peer
    /// allocated. Refuses a descriptor whose object is shorter.
    fn import(&self, descriptor: OwnedFd, bytes: usize) -> Result<Self::Peer, BackendError>;

    /// Zeroed host memory that kernels reach at [`Memory::address`].
    fn allocate_mapped(&self, bytes: usize) -> Result<Self::Mapped, BackendError>;

    /// Makes a kernel ready, specialised by `constants`. Compiles and loads where the backend has
    /// to, so it is never called while a rank of the group may be waiting on the device.
    fn load<K: Kernel>(&self, constants: &Specialization) -> Result<Self::Loaded<K>, BackendError>;

    /// Queues or records one launch of a kernel.
    ///
    /// # Safety
    ///
    /// 1. Every address in `params` is valid for what the kernel does with it until the launch (or,
    ///    when recorded, every replay) has run; `retained` holds what keeps it so.
    /// 2. No other work touches these bytes at the same time, except as the kernel's own signalling
    ///    orders it.
    unsafe fn launch<K: Kernel>(
        &self,
        stream: &Self::Stream,
        kernel: &Self::Loaded<K>,
        shape: LaunchShape,
        params: &K::Params,
        retained: &[Retained],
    ) -> Result<(), BackendError>;

    /// Queues or records a copy of `bytes` bytes between two device addresses.
    ///
    /// # Safety
    ///
    /// As for [`Backend::launch`]; the two ranges do not overlap.
    unsafe fn copy(
        &self,
        stream: &Self::Stream,
        to: u64,
        from: u64,
        bytes: usize,
        retained: &[Retained],
    ) -> Result<(), BackendError>;

    /// Queues or records setting `bytes` bytes at `to` to `value`.
    ///
    /// # Safety
    ///
    /// As for [`Backend::launch`].
    unsafe fn fill(
        &self,
        stream: &Self::Stream,
        to: u64,
        value: u8,
        bytes: usize,
        retained: &[Retained],
    ) -> Result<(), BackendError>;

    /// Queues a copy from the host. `data` is copied before this returns. Refused while recording,
    /// since a replay would read bytes that are long gone.
    ///
    /// # Safety
    ///
    /// As for [`Backend::launch`].
    unsafe fn upload(
        &self,
        stream: &Self::Stream,
        to: u64,
        data: &[u8],
        retained: &[Retained],
    ) -> Result<(), BackendError>;

    /// Waits for the stream and copies to the host. A blocking call; refused while recording.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads of `into.len()` bytes once the stream's work has run, and no other work
    /// writes them from then until this returns.
    unsafe fn download(
        &self,
        stream: &Self::Stream,
        from: u64,
        into: &mut [u8],
    ) -> Result<(), BackendError>;

    /// Waits until everything queued on the stream has run. A blocking call; refused while recording.
    /// Returns the failure of an operation that ran before, if there was one.
    fn synchronize(&self, stream: &Self::Stream) -> Result<(), BackendError>;

    /// Orders two streams: work queued on `after` from now on runs after everything that is queued
    /// on `before` so far. A stream is always ordered with itself. Neither waits on the host nor
    /// allocates device memory. Where work on `before` fails, `after` fails with it rather than
    /// running on without its input.
    ///
    /// While `before` records and `after` does not, `after` becomes a *branch* of that recording:
    /// what is queued on it is recorded into the same graph, until the branch is joined by ordering
    /// the stream that began the recording behind it. Then it takes nothing until it is forked again
    /// or the recording has ended. In a graph, work on two branches runs at the same time or in the
    /// order in which it was recorded: it may wait for other work of the graph only if that was
    /// recorded before it.
    ///
    /// # Errors
    ///
    /// The failure of earlier work, and [`BackendError::Recording`]: for a stream that records
    /// behind one that does not, whose work no replay would wait for; for streams of two recordings;
    /// for the body of a loop, and while one is recorded. Nothing has changed then.
    fn order(&self, before: &Self::Stream, after: &Self::Stream) -> Result<(), BackendError>;

    /// Looks, without waiting, whether work on the stream has failed. Allowed while recording.
    ///
    /// # Errors
    ///
    /// The failure of an operation that ran before.
    fn check(&self, stream: &Self::Stream) -> Result<(), BackendError> {
        // A backend that cannot look tells by its next call.
        let _ = stream;
        Ok(())
    }

    /// What kernels of this rank run on.
    fn processors(&self) -> Processors;

    /// How many blocking calls this device handle and its clones have made.
    fn blocking_calls(&self) -> u64;

    /// Whether work queued on the stream is being recorded.
    fn is_recording(&self, stream: &Self::Stream) -> bool;

    /// Starts to record: from here to [`Backend::end_recording`] what is queued on the stream is
    /// kept instead of run. Whoever has the key that is returned can end the recording, and nobody else.
    /// Where the key is lost, the stream records until its last handle is dropped, which no key is; the
    /// recording is dropped with it.
    ///
    /// # Errors
    ///
    /// [`BackendError::Recording`] on a stream that records already, a branch and the body of a loop
    /// included, and the failure of earlier work.
    fn begin_recording(&self, stream: &Self::Stream) -> Result<Self::RecordingKey, BackendError>;

    /// Ends the recording and returns it. Every branch runs its work again afterwards.
    ///
    /// # Errors
    ///
    /// [`BackendError::Recording`] where a loop is open, a branch was not joined, see [`Backend::order`],
    /// or a part was [spoilt](Backend::spoil_recording): the stream no longer records then, and what was
    /// recorded is dropped. The same where the recording has ended before, and while somebody
    /// [takes part](Backend::enter_recording); this changes nothing, so that the key is still good for it.
    fn end_recording(&self, key: &Self::RecordingKey) -> Result<Self::Recording, BackendError>;

    /// Ends the recording and drops it, branches included. Does nothing where the recording has ended
    /// before, and while somebody [takes part](Backend::enter_recording).
    fn abandon_recording(&self, key: &Self::RecordingKey);

    /// Takes part in a recording that the owner of `stream` began on it, by this trait or by means of
    /// the device's own: from here to [`Backend::leave_recording`] what is queued on the stream is
    /// recorded there, loops and branches included. What it retains is kept for as long as that
    /// recording and every graph that is made of it, and given to [`reclaim`](crate::reclaim) when the
    /// last of them is gone. Allocates no device memory and waits for nothing.
    ///
    /// Parts have no keys: ending or spoiling one lets nothing escape that was recorded. Only the owner
    /// knows when the graph runs, so whoever takes part records work that keeps alive all it uses.
    ///
    /// # Errors
    ///
    /// [`BackendError::Recording`] if nobody records on the stream, for a branch and the body of a loop
    /// that were begun here, and if somebody takes part already. Nothing has changed then.
    fn enter_recording(&self, stream: &Self::Stream) -> Result<(), BackendError>;

    /// Ends the part that [`Backend::enter_recording`] began, on the same thread. The recording goes
    /// on, and is its owner's to end.
    ///
    /// # Errors
    ///
    /// [`BackendError::Recording`] if there is no such part, if the owner has ended the recording
    /// meanwhile, and if a loop is open or a branch was not joined. In the last cases the part has
    /// ended and the recording is [spoilt](Backend::spoil_recording).
    fn leave_recording(&self, stream: &Self::Stream) -> Result<(), BackendError>;

    /// The same for a part that could not be recorded as a whole: no graph must come of the recording,
    /// so that ending it is an error, for its owner too. Harmless where there is no such part.
    fn spoil_recording(&self, stream: &Self::Stream);

    /// Creates the condition of a loop in the recording of `stream`. The returned handle goes into
    /// the parameters of the kernels that set it: by [`crate::host::set_condition`] on the host, by
    /// `set_condition` of `loop.cuh` on a GPU. Refused on a branch: loops stand on the stream that
    /// began the recording.
    fn condition(&self, stream: &Self::Stream) -> Result<Condition, BackendError>;

    /// Begins the body of a loop that runs while its condition is nonzero; the condition is looked
    /// at before each trip. Returns the stream on which the body is recorded.
    fn begin_while(
        &self,
        stream: &Self::Stream,
        condition: Condition,
    ) -> Result<Self::Stream, BackendError>;

    /// Ends the body that `body` records and appends the loop to the recording of `stream`.
    fn end_while(&self, stream: &Self::Stream, body: Self::Stream) -> Result<(), BackendError>;

    /// Makes a recording executable. May allocate and synchronise.
    fn instantiate(&self, recording: Self::Recording) -> Result<Self::Executable, BackendError>;

    /// Replaces what `executable` runs by `recording`, in place where the backend can. Replays that
    /// are queued already run what they were queued with.
    fn update(
        &self,
        executable: &mut Self::Executable,
        recording: Self::Recording,
    ) -> Result<Update, BackendError>;

    /// Queues one replay. Neither allocates device memory nor waits.
    fn replay(
        &self,
        stream: &Self::Stream,
        executable: &Self::Executable,
    ) -> Result<(), BackendError>;

    /// The number of operations in the graph, those of loop bodies included.
    fn node_count(&self, executable: &Self::Executable) -> usize;

    /// A new mark, that nothing has reached yet. May allocate.
    fn mark(&self) -> Result<Self::Mark, BackendError>;

    /// Queues or records: the time at which the stream gets here is kept in `mark`, until it gets
    /// here again. A recording and its graphs keep the mark alive. Refused in the body of a loop,
    /// which no graph of a GPU can time.
    fn reach(&self, stream: &Self::Stream, mark: &Self::Mark) -> Result<(), BackendError>;

    /// Microseconds from one mark to another of this device; negative where `to` was reached first.
    /// Waits for nothing: both were reached by work that was waited for.
    ///
    /// # Errors
    ///
    /// [`BackendError::Unreached`] if one was not, [`BackendError::Invalid`] for marks of another
    /// device.
    fn microseconds(&self, from: &Self::Mark, to: &Self::Mark) -> Result<f64, BackendError>;
}

/// What the kernels of a rank run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors {
    /// What tells the device from every other of its machine; empty where ranks that use the same
    /// processors do not get into each other's way.
    pub device: Vec<u8>,
    /// How many blocks can have a processor of their own.
    pub multiprocessors: u32,
    /// The most bytes of shared memory that a block can have, its own variables included.
    pub shared_bytes_per_block: u32,
}

/// Memory with a device address.
pub trait Memory: Debug + Send + Sync + 'static {
    /// The address of the first byte on the device of this rank.
    fn address(&self) -> u64;
    /// The length in bytes.
    fn bytes(&self) -> usize;
}

/// Private memory that grows in place.
///
/// Addresses stay valid over growth, and growing waits for nothing, so a running graph may use the
/// memory that was mapped before.
pub trait GrowableMemory: Debug + Send + Sync + 'static {
    /// The address of the first byte.
    fn address(&self) -> u64;
    /// The bytes for which addresses are reserved.
    fn reserved(&self) -> usize;
    /// The bytes that are mapped: a multiple of [`GrowableMemory::granularity`].
    fn mapped(&self) -> usize;
    /// The size of one page, in bytes.
    fn granularity(&self) -> usize;
    /// Maps pages until at least `bytes` bytes are usable. What the new ones hold is unspecified:
    /// clearing them would take longer than mapping them. On an error nothing has changed.
    fn grow(&self, bytes: usize) -> Result<(), BackendError>;
    /// Unmaps the pages that lie wholly behind `bytes` bytes.
    ///
    /// # Safety
    ///
    /// No queued, running or later work touches the bytes behind `bytes`.
    unsafe fn trim(&self, bytes: usize) -> Result<(), BackendError>;
}

/// Memory that can be exported to a peer.
pub trait SharedMemory: Memory {
    /// A descriptor by which a peer maps this memory. The caller closes it.
    fn export(&self) -> Result<OwnedFd, BackendError>;
}

/// Host memory that kernels reach too.
pub trait MappedMemory: Memory {
    /// The address at which the host finds the same bytes.
    fn host_address(&self) -> *mut u8;
}

/// The condition of a recorded loop, as kernels receive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition(pub u64);

/// How an executable graph took a new recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// The graph was changed in place.
    InPlace,
    /// The graph was instantiated anew.
    Reinstantiated,
}

/// Compile-time constants of a kernel: names and values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Specialization {
    constants: SmallVec<[(&'static str, u64); 8]>,
}

impl Specialization {
    /// No constants.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a constant, or gives another value to the one of this name.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: u64) -> Self {
        match self.constants.iter_mut().find(|(there, _)| *there == name) {
            Some((_, old)) => *old = value,
            None => self.constants.push((name, value)),
        }
        self
    }

    /// The constants in the order in which they were added.
    pub fn constants(&self) -> &[(&'static str, u64)] {
        &self.constants
    }
}

/// The grid of a launch. The host backend runs the whole kernel as one call and ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks in the grid.
    pub blocks: u32,
    /// Threads in a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// One block of one warp.
    pub const ONE_WARP: Self = Self { blocks: 1, threads: 32, shared_bytes: 0 };

    /// A grid without dynamic shared memory.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }
}

/// A failure of a device or of the operating system beneath it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A system call failed.
    #[error("{call} failed for {what}")]
    Os {
        /// The call.
        call: &'static str,
        /// What it was made for.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A call of the device's driver failed.
    #[error("{call} failed with {name} ({code}): {description}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's code.
        code: u32,
        /// The driver's name for the code.
        name: &'static str,
        /// What the driver says it means.
        description: &'static str,
    },
    /// Memory ran out.
    #[error(
        "out of memory: {what} needs {requested} bytes{}",
        limit.map_or(String::new(), |limit| format!(", of which {limit} are available"))
    )]
    OutOfMemory {
        /// What was being allocated or grown.
        what: String,
        /// Bytes asked for.
        requested: usize,
        /// Bytes that could have been had, where known.
        limit: Option<usize>,
    },
    /// An operation that a recording cannot hold, or a recording in the wrong state.
    #[error("{operation} cannot be done here: {reason}")]
    Recording {
        /// The operation that was asked for.
        operation: &'static str,
        /// Why it was refused.
        reason: String,
    },
    /// Work queued earlier failed; the stream runs nothing more.
    #[error("stream {stream}: {operation} failed: {reason}")]
    Failed {
        /// The stream's name.
        stream: String,
        /// The operation.
        operation: String,
        /// What it reported.
        reason: String,
    },
    /// A mark has no time.
    #[error("the time between two marks is not known: {reason}")]
    Unreached {
        /// Which mark it is, or what it still waits for.
        reason: String,
    },
    /// A size or range that the device cannot take.
    #[error("{what}: {value} is outside {limit}")]
    Invalid {
        /// What was out of range.
        what: &'static str,
        /// The value.
        value: u64,
        /// The limit, in words.
        limit: String,
    },
    /// The device or its software lacks something.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// Why, and where it was looked for.
        reason: String,
    },
}

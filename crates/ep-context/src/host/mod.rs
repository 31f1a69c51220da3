//! Ranks without a device: the same protocol on threads, anonymous memory and memfds.
//!
//! A stream is a thread that runs a queue in order; a graph is a list of operations that it runs
//! again; memory that peers map is a memfd whose descriptor is passed to them. A device address is an
//! address of this process.
//!
//! A kernel that never returns blocks whoever waits for its stream: kernels bound their own waits.

use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::account::MemoryAccount;
use crate::backend::{
    Backend, BackendError, Condition, LaunchShape, Processors, Retained, Specialization, Update,
};
use crate::keepsake::reclaim;
use crate::kernel::{Kernel, KernelSource};
use crate::sync::lock;

mod event;
mod graph;
mod key;
mod mapping;
mod mark;
mod memory;
mod operation;
mod options;
mod order;
mod part;
mod recorder;
mod shared;
mod stream;
#[cfg(test)]
mod testing;
mod worker;

pub use graph::{HostExecutable, HostRecording};
pub use key::HostRecordingKey;
pub use mark::HostMark;
pub use memory::{HostGrowable, HostMemory};
pub use operation::pointer;
pub use options::HostOptions;
pub use shared::{HostPeer, HostShared};
pub use stream::HostStream;

use operation::Operation;

/// The host as a device. A clone is the same device.
#[derive(Clone, Debug)]
pub struct HostBackend {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    options: HostOptions,
    blocking_calls: AtomicU64,
    loaded: Mutex<Vec<LoadedKernel>>,
}

/// A kernel as it was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedKernel {
    /// Its name.
    pub name: &'static str,
    /// Its device code.
    pub source: Option<KernelSource>,
    /// The constants that its device code would be compiled with.
    pub constants: Specialization,
}

impl HostBackend {
    /// A device for one rank. Starts no thread and allocates no memory that kernels use.
    pub fn new(options: HostOptions) -> Self {
        let (blocking_calls, loaded) = (AtomicU64::new(0), Mutex::default());
        Self { inner: Arc::new(Inner { options, blocking_calls, loaded }) }
    }

    /// Every kernel that was loaded, once for each choice of constants. Nothing is compiled here; on a
    /// GPU each of them would be, so this says what can be compiled ahead of time.
    pub fn loaded(&self) -> Vec<LoadedKernel> {
        lock(&self.inner.loaded).clone()
    }

    fn describe(&self, kind: &str) -> String {
        format!("{kind} of {}", self.inner.options.label)
    }

    /// Counts the device memory of this rank, of all groups together.
    pub fn account(&self) -> &MemoryAccount {
        &self.inner.options.memory
    }

    fn blocks(&self) {
        self.inner.blocking_calls.fetch_add(1, Ordering::Relaxed);
    }
}

impl Default for HostBackend {
    fn default() -> Self {
        Self::new(HostOptions::default())
    }
}

/// A kernel on the host: its type is all there is to it.
pub struct HostKernel<K>(PhantomData<fn() -> K>);

impl<K> Clone for HostKernel<K> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<K: Kernel> fmt::Debug for HostKernel<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostKernel").field(&K::NAME).finish()
    }
}

/// Sets the condition of a recorded loop, from the host body of a kernel.
///
/// A condition is zero when a replay begins, and a loop is entered and repeated while it is not.
///
/// # Safety
///
/// `handle` is that of a [`Condition`] of the host backend, and the recording or graph that it was
/// created for is alive: it is while a replay of it runs.
pub unsafe fn set_condition(handle: u64, value: u32) {
    let word = ptr::with_exposed_provenance::<AtomicU32>(handle as usize);
    // SAFETY: by the caller's promise the handle is the address of a word that a recording or graph
    // owns; it is only ever accessed atomically.
    unsafe { &*word }.store(value, Ordering::Relaxed);
}

impl Backend for HostBackend {
    const NAME: &'static str = "host";
    const HOST_REACHES_DEVICE_MEMORY: bool = true;

    type Stream = HostStream;
    type Private = HostMemory;
    type Growable = HostGrowable;
    type Shared = HostShared;
    type Peer = HostPeer;
    type Mapped = HostMemory;
    type Loaded<K: Kernel> = HostKernel<K>;
    type RecordingKey = HostRecordingKey;
    type Recording = HostRecording;
    type Executable = HostExecutable;
    type Mark = HostMark;

    fn stream(&self, name: &str) -> Result<HostStream, BackendError> {
        HostStream::new(&self.inner.options.label, name)
    }

    fn allocate(&self, bytes: usize) -> Result<HostMemory, BackendError> {
        reclaim();
        HostMemory::new(&self.describe("private memory"), self.account(), bytes)
    }

    fn reserve(&self, bytes: usize) -> Result<HostGrowable, BackendError> {
        reclaim();
        HostGrowable::new(self.describe("growable memory"), self.account(), bytes)
    }

    fn allocate_shared(&self, bytes: usize) -> Result<HostShared, BackendError> {
        HostShared::new(self.describe("shared memory"), self.account(), bytes)
    }

    fn import(&self, descriptor: OwnedFd, bytes: usize) -> Result<HostPeer, BackendError> {
        // The mapping keeps the object alive; the descriptor is closed here.
        HostPeer::new(&self.describe("memory of a peer"), &descriptor, bytes)
    }

    fn allocate_mapped(&self, bytes: usize) -> Result<HostMemory, BackendError> {
        HostMemory::new(&self.describe("host-mapped memory"), self.account(), bytes)
    }

    /// Every kernel is compiled in, and its constants come with its parameters.
    fn load<K: Kernel>(&self, constants: &Specialization) -> Result<HostKernel<K>, BackendError> {
        let mut loaded = lock(&self.inner.loaded);
        // Names tell kernels apart; their texts are long to compare.
        if !loaded.iter().any(|other| other.name == K::NAME && other.constants == *constants) {
            let (source, constants) = (K::SOURCE, constants.clone());
            loaded.push(LoadedKernel { name: K::NAME, source, constants });
        }
        Ok(HostKernel(PhantomData))
    }

    unsafe fn launch<K: Kernel>(
        &self,
        stream: &HostStream,
        _kernel: &HostKernel<K>,
        _shape: LaunchShape,
        params: &K::Params,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { stream.submit(Operation::launch::<K>(params), retained) }
    }

    unsafe fn copy(
        &self,
        stream: &HostStream,
        to: u64,
        from: u64,
        bytes: usize,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { stream.submit(Operation::Copy { to, from, bytes }, retained) }
    }

    unsafe fn fill(
        &self,
        stream: &HostStream,
        to: u64,
        value: u8,
        bytes: usize,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { stream.submit(Operation::Fill { to, value, bytes }, retained) }
    }

    unsafe fn upload(
        &self,
        stream: &HostStream,
        to: u64,
        data: &[u8],
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        stream.refuse_recording("upload", "a replay would read host bytes that are long gone")?;
        // SAFETY: the caller's promise.
        unsafe { stream.submit(Operation::Upload { to, data: data.into() }, retained) }
    }

    /// Waits without a deadline of its own: kernels bound their waits. Refused on the thread of a
    /// stream, where destructors of retained objects run.
    unsafe fn download(
        &self,
        stream: &HostStream,
        from: u64,
        into: &mut [u8],
    ) -> Result<(), BackendError> {
        stream.refuse_recording("download", "recorded work has not run when the call returns")?;
        self.blocks();
        stream.wait()?;
        // SAFETY: by the caller's promise `from` is valid for reads now that the stream's work has
        // run, and `into` is exclusively borrowed, so that the two cannot overlap.
        unsafe { operation::copy(into.as_mut_ptr(), operation::pointer(from), into.len()) };
        Ok(())
    }

    /// Waits without a deadline of its own: kernels bound their waits. Refused on the thread of a
    /// stream, where destructors of retained objects run.
    fn synchronize(&self, stream: &HostStream) -> Result<(), BackendError> {
        stream.refuse_recording("synchronize", "recorded work does not run")?;
        self.blocks();
        stream.wait()
    }

    /// Queues a wait on the thread of `after`, which a failure on `before` ends: `after` fails then
    /// too. In a recording the operations of all branches are replayed by one thread, in the order in
    /// which they were recorded.
    fn order(&self, before: &HostStream, after: &HostStream) -> Result<(), BackendError> {
        order::order(before, after)
    }

    fn check(&self, stream: &HostStream) -> Result<(), BackendError> {
        stream.check()
    }

    fn processors(&self) -> Processors {
        // An operation is one thread, whatever its grid.
        Processors {
            device: self.inner.options.device.clone(),
            multiprocessors: 1 << 10,
            shared_bytes_per_block: 1 << 16,
        }
    }

    fn blocking_calls(&self) -> u64 {
        self.inner.blocking_calls.load(Ordering::Relaxed)
    }

    fn is_recording(&self, stream: &HostStream) -> bool {
        stream.is_recording()
    }

    fn begin_recording(&self, stream: &HostStream) -> Result<HostRecordingKey, BackendError> {
        stream.begin_recording()
    }

    fn end_recording(&self, key: &HostRecordingKey) -> Result<HostRecording, BackendError> {
        key.end()
    }

    fn abandon_recording(&self, key: &HostRecordingKey) {
        key.abandon();
    }

    fn enter_recording(&self, stream: &HostStream) -> Result<(), BackendError> {
        stream.enter_recording()
    }

    fn leave_recording(&self, stream: &HostStream) -> Result<(), BackendError> {
        stream.leave_recording()
    }

    fn spoil_recording(&self, stream: &HostStream) {
        stream.spoil_recording();
    }

    fn condition(&self, stream: &HostStream) -> Result<Condition, BackendError> {
        stream.condition()
    }

    /// The condition must have been created for `stream` itself, and serves one loop. Until the
    /// body ends `stream` takes no operation.
    fn begin_while(
        &self,
        stream: &HostStream,
        condition: Condition,
    ) -> Result<HostStream, BackendError> {
        stream.begin_while(condition)
    }

    /// On an error the loop stays open.
    fn end_while(&self, stream: &HostStream, body: HostStream) -> Result<(), BackendError> {
        stream.end_while(&body)
    }

    fn instantiate(&self, recording: HostRecording) -> Result<HostExecutable, BackendError> {
        reclaim();
        Ok(HostExecutable::new(recording))
    }

    /// Always in place.
    fn update(
        &self,
        executable: &mut HostExecutable,
        recording: HostRecording,
    ) -> Result<Update, BackendError> {
        executable.update(recording);
        Ok(Update::InPlace)
    }

    /// On a stream that records, the graph as it is now becomes part of the recording.
    fn replay(&self, stream: &HostStream, executable: &HostExecutable) -> Result<(), BackendError> {
        // SAFETY: the operations were recorded under the promise that it holds for every replay, and
        // the graph, which the replay holds, keeps alive what they retained.
        unsafe { stream.submit(Operation::Replay(executable.replay()), &[]) }
    }

    /// A loop, or a graph within the graph, counts as one operation beside those in it.
    fn node_count(&self, executable: &HostExecutable) -> usize {
        executable.replay().count()
    }

    fn mark(&self) -> Result<HostMark, BackendError> {
        Ok(HostMark::default())
    }

    fn reach(&self, stream: &HostStream, mark: &HostMark) -> Result<(), BackendError> {
        stream.refuse_body("reach", "no graph of a GPU takes a time there")?;
        // SAFETY: the operation holds its mark and touches no memory of a device.
        unsafe { stream.submit(Operation::Reach(mark.clone()), &[]) }
    }

    /// All devices of the host have one clock, so that marks of any of them can be compared.
    fn microseconds(&self, from: &HostMark, to: &HostMark) -> Result<f64, BackendError> {
        mark::microseconds(from, to)
    }
}

#[cfg(test)]
mod tests;

//! Ranks on NVIDIA GPUs, over the CUDA driver; kernels are compiled by NVRTC at run time.
//!
//! Building this needs no CUDA toolkit. The driver is loaded when the first device is asked for and
//! NVRTC when the first kernel is; where one is missing, that is an error that says what was looked
//! for. The driver must be one for CUDA 12.4 or later.
//!
//! # The context
//!
//! A device is used through its primary context, the one that PyTorch, candle and the CUDA runtime
//! use. It is retained when the first [`CudaBackend`] of the device is made and stays for the life of
//! the process. Every call makes it current for the calling thread, and afterwards makes current again
//! what was before.
//!
//! # What is dropped
//!
//! No destructor here calls the driver: it might run while its thread records, or while a rank spins
//! on the device, and freeing memory waits for the device. What is dropped is given back by later calls
//! of the same device: memory by those that may wait anyway, which are every allocation and reservation,
//! [`CudaBackend::new`], [`Backend::import`], [`Backend::load`] of a kernel that was not loaded before, and
//! [`CudaBackend::collect`]; streams, events and graphs by these, by [`Backend::stream`] and by
//! [`Backend::instantiate`]. None of these gives anything back on a thread that records. Loaded kernels
//! and the context stay for the life of the process.
//!
//! Work that is queued holds what it retains until it has run. Nobody is told when that is, so it may
//! be held longer: until a later operation of the stream finds it finished, the stream is waited for,
//! or one of the calls above is made.
//!
//! # Recording
//!
//! A recording is a capture of the driver in the mode in which other threads may do as they like.
//! Branches are streams that the capture has spread to, by [`Backend::order`]. It is ended, or
//! abandoned, on the thread that began it; another thread is refused, and the recording goes on. A
//! stream that is dropped while it records is ended by the next call of that thread that gives things
//! back. A call that fails may make the driver give the recording up; ending it is an error then.
//!
//! Others may capture on a stream as well, one that is [borrowed](CudaBackend::borrow_stream) or whose
//! [handle](CudaStream::raw) they know. Operations are refused meanwhile, except between
//! [`Backend::enter_recording`] and [`Backend::leave_recording`], where they become part of that capture
//! and a user object of its graph keeps what they use. The destructor of that object, which the driver
//! calls, only hands this on to [`reclaim`](crate::reclaim); so do the calls that give back what was
//! dropped. Calls that concern no capture are made so that they do not harm one of another thread,
//! whatever its mode.
//!
//! # Several ranks on one device
//!
//! Ranks that are threads of one process can share a device if all their blocks that wait for each
//! other are resident at the same time, see [`CudaKernel::resident_blocks`]. The driver maps streams
//! to a few hardware queues, eight unless the variable `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise
//! (at most 32) before the process first uses the driver; where two streams share one, work of the
//! second waits for a kernel of the first. Set it to at least twice the number of streams in use, and
//! allocate nothing while a rank waits for another on the device.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;

use crate::account::MemoryAccount;
use crate::backend::{
    Backend, BackendError, Condition, LaunchShape, Processors, Retained, Specialization, Update,
};
use crate::kernel::Kernel;

mod architectures;
mod cache;
mod calls;
mod clock;
mod compile;
mod conditional;
mod device;
mod driver;
mod graph;
mod graveyard;
mod growable;
mod in_flight;
mod key;
mod launch;
mod mapping;
mod mark;
mod memory;
mod module;
mod nvrtc;
mod options;
mod order;
mod packages;
mod part;
mod recorder;
mod remains;
mod shared;
mod staging;
mod stream;

pub use architectures::{OLDEST_CAPABILITY, architectures, compiles_for};
pub use cache::CacheFolder;
pub use clock::{CallTime, clock_calls};
pub use compile::{Compiled, architecture, compile};
pub use device::{DeviceProperties, driver_version};
pub use driver::DriverCalls;
pub use graph::{CudaExecutable, CudaRecording};
pub use growable::CudaGrowable;
pub use key::CudaRecordingKey;
pub use launch::CudaKernel;
pub use mark::CudaMark;
pub use memory::{CudaMapped, CudaMemory};
pub use nvrtc::nvrtc_version;
pub use options::CudaOptions;
pub use packages::python_packages;
pub use shared::{CudaPeer, CudaShared};
pub use stream::CudaStream;

use device::Device;
use driver::Handle;
use module::KernelCache;
use staging::StagingArea;

/// A GPU as one rank uses it. A clone is the same rank's.
#[derive(Clone)]
pub struct CudaBackend {
    inner: Arc<Inner>,
}

struct Inner {
    device: Arc<Device>,
    options: CudaOptions,
    staging: Arc<StagingArea>,
    blocking_calls: AtomicU64,
}

impl CudaBackend {
    /// A rank on a GPU. The first on a GPU makes its primary context, unless the process has used it
    /// before, and waits for it. Each allocates 4 MiB of page-locked memory for its uploads, which may
    /// wait for the device.
    ///
    /// # Errors
    ///
    /// [`BackendError::Unavailable`] without a driver that will do or without that GPU, or if the GPU
    /// lacks what is needed; [`BackendError::Driver`] for what the driver reports.
    pub fn new(options: CudaOptions) -> Result<Self, BackendError> {
        let device = Device::get(options.ordinal)?;
        device.collect()?;
        let staging = StagingArea::new(&device)?;
        let blocking_calls = AtomicU64::new(0);
        Ok(Self { inner: Arc::new(Inner { device, options, staging, blocking_calls }) })
    }

    /// What the GPU is and can do.
    pub fn properties(&self) -> &DeviceProperties {
        &self.inner.device.properties
    }

    /// The bytes of the GPU's memory that are free, and all of them.
    ///
    /// # Errors
    ///
    /// What the driver reports.
    pub fn free_memory(&self) -> Result<(u64, u64), BackendError> {
        self.device().enter_beside_recordings(|driver| {
            let (mut free, mut total) = (0_usize, 0_usize);
            // SAFETY: both places are valid.
            unsafe { driver.cuMemGetInfo_v2(&raw mut free, &raw mut total)? };
            Ok((free as u64, total as u64))
        })
    }

    /// A stream that belongs to the caller, for work in the order of the caller's own.
    ///
    /// While the caller captures on it, work that is queued here is refused, unless it takes part in
    /// the capture: see [`Backend::enter_recording`].
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the primary context of this backend's device, not the default stream of
    /// another, and stays valid until the last clone of what is returned is dropped.
    pub unsafe fn borrow_stream(&self, stream: sys::CUstream, name: &str) -> CudaStream {
        // SAFETY: the caller's promise.
        unsafe { CudaStream::borrow(self.device(), Handle(stream), self.name_of(name)) }
    }

    /// Gives back to the driver what was dropped, on all ranks of this process on the device, and
    /// releases what finished work held. May wait for the device, and for another thread that does this;
    /// does nothing on a thread that records, but for ending what it recorded on streams that are gone.
    /// Destructors of what was retained run here, and must not wait for another thread's.
    ///
    /// # Errors
    ///
    /// What the driver reports.
    pub fn collect(&self) -> Result<(), BackendError> {
        self.device().collect()
    }

    /// How many resources were dropped and not yet given back.
    pub fn uncollected(&self) -> usize {
        self.inner.device.graveyard.len()
    }

    fn device(&self) -> &Arc<Device> {
        &self.inner.device
    }

    fn describe(&self, kind: &str) -> String {
        format!("{kind} of {}", self.inner.options.label)
    }

    fn name_of(&self, stream: &str) -> String {
        format!("{}/{stream}", self.inner.options.label)
    }

    /// Counts the device memory of this rank, of all groups together.
    pub fn account(&self) -> &MemoryAccount {
        &self.inner.options.memory
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend")
            .field("options", &self.inner.options)
            .field("device", &self.inner.device)
            .field("blocking_calls", &self.inner.blocking_calls)
            .finish()
    }
}

impl Backend for CudaBackend {
    const NAME: &'static str = "cuda";
    const HOST_REACHES_DEVICE_MEMORY: bool = false;

    type Stream = CudaStream;
    type Private = CudaMemory;
    type Growable = CudaGrowable;
    type Shared = CudaShared;
    type Peer = CudaPeer;
    type Mapped = CudaMapped;
    type Loaded<K: Kernel> = CudaKernel<K>;
    type RecordingKey = CudaRecordingKey;
    type Recording = CudaRecording;
    type Executable = CudaExecutable;
    type Mark = CudaMark;

    fn stream(&self, name: &str) -> Result<CudaStream, BackendError> {
        self.device().collect_all_but_memory()?;
        CudaStream::create(self.device(), self.name_of(name))
    }

    fn allocate(&self, bytes: usize) -> Result<CudaMemory, BackendError> {
        self.collect()?;
        CudaMemory::new(self.device(), self.account(), &self.describe("private memory"), bytes)
    }

    fn reserve(&self, bytes: usize) -> Result<CudaGrowable, BackendError> {
        self.collect()?;
        CudaGrowable::new(self.device(), self.account(), self.describe("growable memory"), bytes)
    }

    fn allocate_shared(&self, bytes: usize) -> Result<CudaShared, BackendError> {
        self.collect()?;
        CudaShared::new(self.device(), self.account(), self.describe("shared memory"), bytes)
    }

    fn import(&self, descriptor: OwnedFd, bytes: usize) -> Result<CudaPeer, BackendError> {
        self.collect()?;
        // The mapping keeps the memory alive; the descriptor is closed here.
        CudaPeer::new(self.device(), &self.describe("memory of a peer"), &descriptor, bytes)
    }

    fn allocate_mapped(&self, bytes: usize) -> Result<CudaMapped, BackendError> {
        self.collect()?;
        CudaMapped::new(self.device(), &self.describe("host-mapped memory"), bytes)
    }

    /// Compiles, unless the process or the cache has the kernel, and puts its code on the device now.
    fn load<K: Kernel>(&self, constants: &Specialization) -> Result<CudaKernel<K>, BackendError> {
        let options = &self.inner.options;
        let added = options.constants.constants().iter();
        let constants = added.fold(constants.clone(), |all, (name, value)| all.with(name, *value));
        let loaded = KernelCache::get::<K>(self.device(), &options.cache, &constants)?;
        Ok(CudaKernel::new(loaded))
    }

    unsafe fn launch<K: Kernel>(
        &self,
        stream: &CudaStream,
        kernel: &CudaKernel<K>,
        shape: LaunchShape,
        params: &K::Params,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { launch::launch(stream, kernel, shape, params, retained) }
    }

    unsafe fn copy(
        &self,
        stream: &CudaStream,
        to: u64,
        from: u64,
        bytes: usize,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { launch::copy(stream, to, from, bytes, retained) }
    }

    unsafe fn fill(
        &self,
        stream: &CudaStream,
        to: u64,
        value: u8,
        bytes: usize,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { launch::fill(stream, to, value, bytes, retained) }
    }

    /// Waits for nothing while the copies of this rank that are on their way have 4 MiB and 64 pieces of
    /// 64 KiB in all, of which each upload takes at least one. Then it waits for the stream, which is a
    /// blocking call; and if other streams of the rank hold them all, allocates more, which may wait for
    /// the device. What fails may have queued some of the copies.
    unsafe fn upload(
        &self,
        stream: &CudaStream,
        to: u64,
        data: &[u8],
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        let reason = "a replay would read host bytes that are long gone";
        stream.refuse_recording("upload", reason)?;
        let mut held = retained.to_vec();
        for (to, piece) in (to..).step_by(staging::PIECE).zip(data.chunks(staging::PIECE)) {
            let area = &self.inner.staging;
            let staging = match area.stage(piece) {
                Some(staging) => staging,
                None => {
                    stream.wait("upload", reason, &self.inner.blocking_calls)?;
                    area.stage(piece).map_or_else(|| area.stage_apart(piece), Ok)?
                }
            };
            let from = staging.start();
            held.push(Arc::new(staging));
            stream.submit("upload", &held, |driver, stream| {
                // SAFETY: the target is valid by the caller's promise; the source, as long as the piece,
                // is held until the copy has run.
                unsafe { driver.cuMemcpyHtoDAsync_v2(to, from, piece.len(), stream) }
            })?;
            held.pop();
        }
        Ok(())
    }

    unsafe fn download(
        &self,
        stream: &CudaStream,
        from: u64,
        into: &mut [u8],
    ) -> Result<(), BackendError> {
        let reason = "recorded work has not run when the call returns";
        stream.wait("download", reason, &self.inner.blocking_calls)?;
        // SAFETY: by the caller's promise the range is valid now that the stream's work has run.
        unsafe { self.device().read(from, into) }
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<(), BackendError> {
        stream.wait("synchronize", "recorded work does not run", &self.inner.blocking_calls)
    }

    /// Streams of two devices are refused, and so is a borrowed stream that its owner captures.
    fn order(&self, before: &CudaStream, after: &CudaStream) -> Result<(), BackendError> {
        order::order(before, after)
    }

    fn check(&self, stream: &CudaStream) -> Result<(), BackendError> {
        stream.check()
    }

    fn processors(&self) -> Processors {
        let DeviceProperties { place, multiprocessors, shared_bytes_per_block, .. } =
            *self.properties();
        let device = place.to_le_bytes().to_vec();
        Processors { device, multiprocessors, shared_bytes_per_block }
    }

    fn blocking_calls(&self) -> u64 {
        self.inner.blocking_calls.load(Ordering::Relaxed)
    }

    fn is_recording(&self, stream: &CudaStream) -> bool {
        stream.is_recording()
    }

    fn begin_recording(&self, stream: &CudaStream) -> Result<CudaRecordingKey, BackendError> {
        stream.begin_recording()
    }

    /// On another thread than the one that began it this is an error too, and the recording goes on.
    fn end_recording(&self, key: &CudaRecordingKey) -> Result<CudaRecording, BackendError> {
        key.end()
    }

    /// Does nothing on another thread than the one that began the recording.
    fn abandon_recording(&self, key: &CudaRecordingKey) {
        key.abandon();
    }

    /// A capture by other means may be in any mode, and the stream one that it has spread to. What is
    /// recorded is kept by a user object of the graph that is captured. The first loops that are
    /// recorded on a device create streams.
    fn enter_recording(&self, stream: &CudaStream) -> Result<(), BackendError> {
        stream.enter_recording()
    }

    fn leave_recording(&self, stream: &CudaStream) -> Result<(), BackendError> {
        stream.leave_recording()
    }

    fn spoil_recording(&self, stream: &CudaStream) {
        stream.spoil_recording();
    }

    fn condition(&self, stream: &CudaStream) -> Result<Condition, BackendError> {
        stream.condition()
    }

    /// The condition must have been created for `stream` itself, and serves one loop; every condition
    /// must get its loop. Until the body ends `stream` takes no operation. Loops nest at most four
    /// deep.
    fn begin_while(
        &self,
        stream: &CudaStream,
        condition: Condition,
    ) -> Result<CudaStream, BackendError> {
        stream.begin_while(condition)
    }

    /// On an error the loop stays open, unless the body holds what the driver refuses in a loop: then
    /// nothing more can be recorded, and ending the recording is an error.
    fn end_while(&self, stream: &CudaStream, body: CudaStream) -> Result<(), BackendError> {
        stream.end_while(&body)
    }

    fn instantiate(&self, recording: CudaRecording) -> Result<CudaExecutable, BackendError> {
        // Not memory: a rank that records again must not wait for one that has launched already.
        self.device().collect_all_but_memory()?;
        CudaExecutable::instantiate(recording)
    }

    /// In place if kernels, their order and loops are those of before and only parameters, grids and
    /// addresses differ, as the driver judges. On an error the graph is the old one.
    fn update(
        &self,
        executable: &mut CudaExecutable,
        recording: CudaRecording,
    ) -> Result<Update, BackendError> {
        executable.update(recording)
    }

    /// On a stream that records, the graph as it is now becomes part of the recording, unless it has
    /// loops, which the driver does not nest.
    fn replay(&self, stream: &CudaStream, executable: &CudaExecutable) -> Result<(), BackendError> {
        executable.replay(stream)
    }

    /// A loop, or a graph within the graph, counts as one operation beside those in it.
    fn node_count(&self, executable: &CudaExecutable) -> usize {
        executable.node_count()
    }

    fn mark(&self) -> Result<CudaMark, BackendError> {
        CudaMark::new(self.device())
    }

    fn reach(&self, stream: &CudaStream, mark: &CudaMark) -> Result<(), BackendError> {
        mark.reach(stream)
    }

    /// To half a microsecond or better.
    fn microseconds(&self, from: &CudaMark, to: &CudaMark) -> Result<f64, BackendError> {
        mark::microseconds(self.device(), from, to)
    }
}

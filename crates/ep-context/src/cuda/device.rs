//! One GPU of this process: its primary context, and what all ranks on it share.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::sys;

use super::architectures;
use super::driver::{
    Driver, DriverError, EventHandle, Handle, StreamHandle, ask, ask_handle, attribute,
};
use super::graveyard::Graveyard;
use super::module::KernelCache;
use super::stream::StreamInner;
use crate::backend::BackendError;
use crate::keepsake::reclaim;
use crate::sync::lock;

thread_local! {
    /// Recordings that the calling thread has open, on whatever device.
    static RECORDINGS: Cell<usize> = const { Cell::new(0) };
    /// Whether the calling thread collects, on whatever device.
    static COLLECTS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread records.
pub(super) fn thread_records() -> bool {
    // Unknown only while the thread is torn down; not to call the driver is right then.
    RECORDINGS.try_with(Cell::get).map_or(true, |open| open > 0)
}

pub(super) fn recording_begins() {
    let _ = RECORDINGS.try_with(|open| open.set(open.get() + 1));
}

pub(super) fn recording_ends() {
    let _ = RECORDINGS.try_with(|open| open.set(open.get().saturating_sub(1)));
}

/// A thread's turn to collect.
struct Collecting;

impl Collecting {
    /// `None` on a thread that collects already, in a destructor of what it gives back: that finds the
    /// rest as well, and must not wait for itself.
    fn begin() -> Option<Self> {
        let collects = COLLECTS.try_with(|collects| collects.replace(true)).unwrap_or(true);
        (!collects).then_some(Self)
    }
}

impl Drop for Collecting {
    fn drop(&mut self) {
        let _ = COLLECTS.try_with(|collects| collects.set(false));
    }
}

/// Makes calls that concern no recording: neither one of this thread nor, in the mode that forbids
/// them to every thread, one of another. The context is current.
pub(super) fn beside_recordings<T>(
    driver: &Driver,
    calls: impl FnOnce() -> T,
) -> Result<T, DriverError> {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the place is valid and receives the mode that this thread had, one of three.
    unsafe { driver.cuThreadExchangeStreamCaptureMode(&raw mut mode)? };
    let result = calls();
    // SAFETY: as above.
    let _ = unsafe { driver.cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    Ok(result)
}

/// What a GPU is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its number as the driver counts, after `CUDA_VISIBLE_DEVICES`.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its compute capability, major and minor.
    pub capability: (u32, u32),
    /// Its place on the machine: PCI domain, bus and device, of 16 bits each, from the highest.
    pub place: u64,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// Its memory in bytes.
    pub memory: u64,
    /// The most dynamic shared memory that a block can be given, in bytes.
    pub shared_bytes_per_block: u32,
    /// Whether memory can be mapped behind reserved addresses.
    pub maps_memory: bool,
    /// Whether the driver says that memory can be exported as a descriptor. Some machines refuse it
    /// all the same.
    pub exports_descriptors: bool,
}

impl DeviceProperties {
    fn read(driver: &Driver, ordinal: u32) -> Result<(sys::CUdevice, Self), BackendError> {
        use sys::CUdevice_attribute as A;
        let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: the place is valid.
        let device = ask(|device| unsafe { driver.cuDeviceGet(device, number) })?;
        let mut name = [0; 128];
        // SAFETY: the place is valid for as many bytes as it says.
        unsafe { driver.cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 128, device)? };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        // SAFETY: the place is valid.
        let memory = ask(|bytes| unsafe { driver.cuDeviceTotalMem_v2(bytes, device) })?;
        let number = |which| u32::try_from(attribute(driver, device, which)).unwrap_or(0);
        let properties = Self {
            ordinal,
            name: name.to_string_lossy().into_owned(),
            capability: (
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            ),
            place: [
                A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
                A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
                A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
            ]
            .into_iter()
            .fold(0, |place, which| place << 16 | u64::from(number(which) & 0xffff)),
            multiprocessors: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory: memory as u64,
            shared_bytes_per_block: number(
                A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            ),
            maps_memory: number(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0,
            exports_descriptors: number(
                A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            ) != 0,
        };
        Ok((device, properties))
    }

    /// Every GPU that the driver shows this process. Makes no context.
    ///
    /// # Errors
    ///
    /// [`BackendError::Unavailable`] without a driver that will do, saying what was looked for.
    pub fn all() -> Result<Vec<Self>, BackendError> {
        let driver = Driver::find()?;
        // SAFETY: the place is valid.
        let count = ask(|count| unsafe { driver.cuDeviceGetCount(count) })?;
        (0..u32::try_from(count).unwrap_or(0))
            .map(|ordinal| Self::read(driver, ordinal).map(|(_, properties)| properties))
            .collect()
    }

    /// Whether this GPU can read and write memory of `peer` directly.
    ///
    /// # Errors
    ///
    /// What the driver reports.
    pub fn reaches(&self, peer: &Self) -> Result<bool, BackendError> {
        let driver = Driver::find()?;
        let (here, _) = Self::read(driver, self.ordinal)?;
        let (there, _) = Self::read(driver, peer.ordinal)?;
        // SAFETY: the place is valid, and both are devices that the driver named.
        let can = ask(|can| unsafe { driver.cuDeviceCanAccessPeer(can, here, there) })?;
        Ok(here == there || can != 0)
    }
}

/// The version of CUDA that the driver is for, as `13.0`.
///
/// # Errors
///
/// [`BackendError::Unavailable`] without a driver that will do, saying what was looked for.
pub fn driver_version() -> Result<String, BackendError> {
    Ok(Driver::find()?.version())
}

/// A GPU as this process uses it. There is one for each, and it lasts as long as the process.
pub(super) struct Device {
    pub(super) driver: &'static Driver,
    pub(super) properties: DeviceProperties,
    pub(super) context: Handle<sys::CUctx_st>,
    /// For what the backend itself queues and waits for; no work of a rank comes here.
    service: StreamHandle,
    pub(super) graveyard: Graveyard,
    pub(super) kernels: KernelCache,
    streams: Mutex<Vec<Weak<StreamInner>>>,
    events: Mutex<Vec<EventHandle>>,
    bodies: Mutex<Vec<StreamHandle>>,
    /// Held by the thread that collects: another waits until what was dropped is given back, rather
    /// than find nothing to give back and run out of memory for it.
    collects: Mutex<()>,
}

static DEVICES: Mutex<BTreeMap<u32, Arc<Device>>> = Mutex::new(BTreeMap::new());

impl Device {
    /// The GPU of this number. The first call for it in the process retains its primary context,
    /// which PyTorch, candle and the CUDA runtime use too.
    pub(super) fn get(ordinal: u32) -> Result<Arc<Self>, BackendError> {
        let driver = Driver::find()?;
        let mut devices = lock(&DEVICES);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        // SAFETY: the place is valid.
        let count = ask(|count| unsafe { driver.cuDeviceGetCount(count) })?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(BackendError::Unavailable {
                what: format!("GPU {ordinal}"),
                reason: format!("the driver shows this process {count} of them"),
            });
        }
        let device = Arc::new(Self::open(driver, ordinal)?);
        device.warm_up()?;
        devices.insert(ordinal, device.clone());
        Ok(device)
    }

    fn open(driver: &'static Driver, ordinal: u32) -> Result<Self, BackendError> {
        let (handle, properties) = DeviceProperties::read(driver, ordinal)?;
        let lacks = (!properties.maps_memory)
            .then(|| "it cannot map memory behind reserved addresses".to_owned());
        if let Some(reason) = architectures::refusal(properties.capability).or(lacks) {
            let what = format!("GPU {ordinal} ({})", properties.name);
            return Err(BackendError::Unavailable { what, reason });
        }
        let context =
            // SAFETY: the place is valid. The context is never released: what is retained in graphs
            // and by other libraries may outlive every handle of this crate.
            ask_handle(|context| unsafe { driver.cuDevicePrimaryCtxRetain(context, handle) })?;
        let mut device = Self {
            driver,
            properties,
            context,
            service: Handle(std::ptr::null_mut()),
            graveyard: Graveyard::default(),
            kernels: KernelCache::default(),
            streams: Mutex::default(),
            events: Mutex::default(),
            bodies: Mutex::default(),
            collects: Mutex::default(),
        };
        device.service = device.create_stream()?;
        Ok(device)
    }

    /// Lets the driver load its own kernels for copying and filling now: loading one later might wait
    /// for a device on which a rank spins.
    fn warm_up(&self) -> Result<(), BackendError> {
        const BYTES: usize = 1 << 16;
        self.enter_beside_recordings(|driver| {
            // SAFETY: the place is valid.
            let address = ask(|address| unsafe { driver.cuMemAlloc_v2(address, BYTES) })?;
            let touch = || -> Result<(), DriverError> {
                for (at, bytes) in [(0, BYTES / 2), (1, 3), (4, 64)] {
                    // SAFETY: all ranges lie in one half of the allocation, or go from one to the
                    // other, and it is freed below, after the stream was waited for.
                    unsafe {
                        driver.cuMemsetD8Async(address + at, 0, bytes, self.service.0)?;
                        let to = address + BYTES as u64 / 2 + at;
                        let bytes = bytes.min(BYTES / 4);
                        driver.cuMemcpyAsync(to, address + at, bytes, self.service.0)?;
                    }
                }
                // SAFETY: the stream is this device's.
                unsafe { driver.cuStreamSynchronize(self.service.0) }
            };
            let touched = touch();
            // SAFETY: allocated above and used by nothing any more.
            unsafe { driver.cuMemFree_v2(address)? };
            Ok(touched?)
        })
    }

    /// Runs `calls` with the context current. The caller's context, if it is another, is current
    /// again afterwards: other libraries remember which one they made current.
    pub(super) fn enter<T>(
        &self,
        calls: impl FnOnce(&'static Driver) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let driver = self.driver;
        // SAFETY: the place is valid.
        let current = ask_handle(|context| unsafe { driver.cuCtxGetCurrent(context) })?;
        if current.0 == self.context.0 {
            return calls(driver);
        }
        // SAFETY: the primary context is retained for the life of the process.
        unsafe { driver.cuCtxPushCurrent_v2(self.context.0)? };
        let result = calls(driver);
        // An error here would be that of earlier work, which the next call reports as well.
        // SAFETY: the place is valid.
        let _ = ask_handle(|context| unsafe { driver.cuCtxPopCurrent_v2(context) });
        result
    }

    /// Copies device memory that no queued work writes to the host, and waits until it is there.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads of `into.len()` bytes.
    pub(super) unsafe fn read(&self, from: u64, into: &mut [u8]) -> Result<(), BackendError> {
        if into.is_empty() {
            return Ok(());
        }
        self.enter_beside_recordings(|driver| {
            let place = into.as_mut_ptr().cast::<c_void>();
            // SAFETY: the source is valid by the caller's promise, the target is borrowed until the
            // stream, which is this device's, has been waited for.
            unsafe {
                driver.cuMemcpyDtoHAsync_v2(place, from, into.len(), self.service.0)?;
                driver.cuStreamSynchronize(self.service.0)?;
            }
            Ok(())
        })
    }

    /// As [`Device::enter`], for calls that concern no recording but that the driver refuses to a
    /// thread that records, or holds against its recording, unless told otherwise. Others may record
    /// in this process in the mode that forbids such calls to all of its threads.
    pub(super) fn enter_beside_recordings<T>(
        &self,
        calls: impl FnOnce(&'static Driver) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        self.enter(|driver| beside_recordings(driver, || calls(driver))?)
    }

    /// Sets memory to zero and waits until it is. Waits for no work of any rank.
    pub(super) fn zero(&self, address: u64, bytes: usize) -> Result<(), BackendError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter_beside_recordings(|driver| {
            // SAFETY: the callers give memory that they have just allocated or mapped.
            unsafe { driver.cuMemsetD8Async(address, 0, bytes, self.service.0)? };
            // SAFETY: the stream is this device's.
            unsafe { driver.cuStreamSynchronize(self.service.0)? };
            Ok(())
        })
    }

    /// Sends what an executable graph needs to the device ahead of its first replay, and waits for
    /// that.
    pub(super) fn upload_graph(&self, exec: super::driver::ExecHandle) -> Result<(), BackendError> {
        self.enter_beside_recordings(|driver| {
            // SAFETY: the caller owns the graph, which has not been launched.
            unsafe { driver.cuGraphUpload(exec.0, self.service.0)? };
            // SAFETY: the stream is this device's.
            unsafe { driver.cuStreamSynchronize(self.service.0)? };
            Ok(())
        })
    }

    /// A stream that does not wait for the default stream, nor it for this.
    pub(super) fn create_stream(&self) -> Result<StreamHandle, BackendError> {
        self.enter_beside_recordings(|driver| {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the place is valid.
            Ok(ask_handle(|stream| unsafe { driver.cuStreamCreate(stream, flags) })?)
        })
    }

    /// Remembers a stream, so that [`Device::collect`] finds what its finished work holds.
    pub(super) fn register(&self, stream: &Arc<StreamInner>) {
        let mut streams = lock(&self.streams);
        streams.retain(|known| known.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// An event that nobody uses, for streams that do not record. The context is current.
    pub(super) fn take_event(&self, driver: &Driver) -> Result<EventHandle, DriverError> {
        if let Some(event) = lock(&self.events).pop() {
            return Ok(event);
        }
        Self::create_event(driver)
    }

    /// A new event that takes no times. The context is current.
    pub(super) fn create_event(driver: &Driver) -> Result<EventHandle, DriverError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the place is valid.
        ask_handle(|event| unsafe { driver.cuEventCreate(event, flags) })
    }

    /// Takes an event back.
    pub(super) fn return_event(&self, event: EventHandle) {
        lock(&self.events).push(event);
    }

    /// Makes sure that there are `count` streams on which bodies of loops can be recorded, so that
    /// none has to be made while a recording goes on, unless several need them at once. Nothing runs
    /// on them, but streams are given the few queues of the GPU in turn, which ranks share that share
    /// it: so there are no more than these for all of them. The context is current.
    pub(super) fn reserve_body_streams(
        &self,
        driver: &Driver,
        count: usize,
    ) -> Result<(), DriverError> {
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // Held meanwhile, lest each of several ranks make all that are missing.
        let mut bodies = lock(&self.bodies);
        if bodies.len() >= count {
            return Ok(());
        }
        beside_recordings(driver, || {
            while bodies.len() < count {
                // SAFETY: the place is valid.
                bodies.push(ask_handle(|place| unsafe { driver.cuStreamCreate(place, flags) })?);
            }
            Ok(())
        })?
    }

    /// A stream on which the body of a loop can be recorded.
    pub(super) fn take_body_stream(&self) -> Option<StreamHandle> {
        lock(&self.bodies).pop()
    }

    /// Takes a stream back on which nothing is recorded any more.
    pub(super) fn return_body_stream(&self, stream: StreamHandle) {
        lock(&self.bodies).push(stream);
    }

    /// Gives back to the driver what was dropped, and releases what finished work held; what was dropped
    /// before is given back when this returns, also if another thread does it. Does nothing on a thread
    /// that records, nor in a destructor that this runs.
    pub(super) fn collect(&self) -> Result<(), BackendError> {
        self.give_back(true)
    }

    /// The same without memory, so that it waits for no work of the device.
    pub(super) fn collect_all_but_memory(&self) -> Result<(), BackendError> {
        self.give_back(false)
    }

    fn give_back(&self, memory: bool) -> Result<(), BackendError> {
        self.enter(|driver| {
            self.graveyard.end_orphaned_recordings(driver);
            if thread_records() {
                return Ok(());
            }
            let Some(_turn) = Collecting::begin() else { return Ok(()) };
            let _alone = lock(&self.collects);
            let streams: Vec<_> = lock(&self.streams).iter().filter_map(Weak::upgrade).collect();
            Ok(beside_recordings(driver, || {
                for stream in streams {
                    stream.reap(driver);
                }
                reclaim();
                self.graveyard.clear(self, driver, memory);
            })?)
        })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.properties.ordinal)
            .field("name", &self.properties.name)
            .field("buried", &self.graveyard.len())
            .finish_non_exhaustive()
    }
}

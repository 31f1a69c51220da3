//! Kernels and helpers for the tests of this backend.

use std::fmt::Debug;
use std::panic::panic_any;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};

use super::operation::pointer;
use super::{
    HostBackend, HostExecutable, HostOptions, HostRecordingKey, HostStream, set_condition,
};
use crate::backend::{Backend, BackendError, LaunchShape, Retained, Specialization};
use crate::kernel::Kernel;
use crate::sync::lock;

/// Far beyond what any wait of a test takes; reached only when the code is wrong.
const BOUND: Duration = Duration::from_secs(60);

/// Why a call on a recording was refused.
pub(super) fn reason<T: Debug>(result: Result<T, BackendError>) -> String {
    match result {
        Err(BackendError::Recording { reason, .. }) => reason,
        other => panic!("expected a refusal, not {other:?}"),
    }
}

pub(super) struct Device {
    pub(super) backend: HostBackend,
}

impl Device {
    pub(super) fn new() -> Self {
        Self { backend: HostBackend::new(HostOptions::new("test")) }
    }

    pub(super) fn stream(&self, name: &str) -> HostStream {
        self.backend.stream(name).expect("threads are left")
    }

    pub(super) fn begin(&self, stream: &HostStream) -> HostRecordingKey {
        self.backend.begin_recording(stream).expect("the stream runs")
    }

    pub(super) fn end(&self, key: &HostRecordingKey) -> HostExecutable {
        let recording = self.backend.end_recording(key).expect("a whole recording");
        self.backend.instantiate(recording).expect("the host instantiates anything")
    }

    pub(super) fn replay(&self, stream: &HostStream, graph: &HostExecutable) {
        self.backend.replay(stream, graph).expect("the stream runs");
    }

    pub(super) fn wait(&self, stream: &HostStream) {
        self.backend.synchronize(stream).expect("nothing failed");
    }

    pub(super) fn try_launch<K: Kernel>(
        &self,
        stream: &HostStream,
        params: K::Params,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        let kernel = self.backend.load::<K>(&Specialization::new())?;
        // SAFETY: the tests give the objects whose addresses stand in `params` as `retained`, or
        // keep them until the stream is idle; each word is accessed atomically or under a lock.
        unsafe { self.backend.launch(stream, &kernel, LaunchShape::ONE_WARP, &params, retained) }
    }

    pub(super) fn launch<K: Kernel>(
        &self,
        stream: &HostStream,
        params: K::Params,
        retained: &[Retained],
    ) {
        self.try_launch::<K>(stream, params, retained).expect("the stream takes it");
    }

    /// Queues adding `value` to `log`.
    pub(super) fn append(&self, stream: &HostStream, log: &Log, value: u64) {
        let params = AppendParams { log: address_of(&log.values), value };
        self.launch::<Append>(stream, params, &keep(&log.values));
    }

    /// Queues a wait for `gate`.
    pub(super) fn close(&self, stream: &HostStream, gate: &Gate) {
        let params = GateParams { open: address_of(&gate.open) };
        self.launch::<AwaitGate>(stream, params, &keep(&gate.open));
    }
}

/// The values that kernels added, in order.
#[derive(Clone, Default)]
pub(super) struct Log {
    pub(super) values: Arc<Mutex<Vec<u64>>>,
}

impl Log {
    pub(super) fn values(&self) -> Vec<u64> {
        lock(&self.values).clone()
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct AppendParams {
    log: u64,
    value: u64,
}

pub(super) struct Append;

impl Kernel for Append {
    type Params = AppendParams;
    const NAME: &'static str = "append";

    unsafe fn run_on_host(params: &AppendParams) {
        // SAFETY: the launch retains the list behind this address.
        let log = unsafe { &*pointer::<Mutex<Vec<u64>>>(params.log) };
        lock(log).push(params.value);
    }
}

/// A word that keeps a stream waiting until it is opened.
#[derive(Default)]
pub(super) struct Gate {
    open: Arc<AtomicU32>,
}

impl Gate {
    pub(super) fn open(&self) {
        self.open.store(1, Ordering::Release);
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct GateParams {
    open: u64,
}

pub(super) struct AwaitGate;

impl Kernel for AwaitGate {
    type Params = GateParams;
    const NAME: &'static str = "await_gate";

    unsafe fn run_on_host(params: &GateParams) {
        // SAFETY: the launch retains the word behind this address.
        await_word(unsafe { &*pointer::<AtomicU32>(params.open) });
    }
}

/// Says that it runs and waits until another kernel says so.
pub(super) struct Meet;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MeetParams {
    pub(super) own: u64,
    pub(super) other: u64,
}

impl Kernel for Meet {
    type Params = MeetParams;
    const NAME: &'static str = "meet";

    unsafe fn run_on_host(params: &MeetParams) {
        // SAFETY: the launch retains the words behind both addresses.
        let (own, other) =
            unsafe { (&*pointer::<AtomicU32>(params.own), &*pointer::<AtomicU32>(params.other)) };
        own.store(1, Ordering::Release);
        await_word(other);
    }
}

fn await_word(word: &AtomicU32) {
    let deadline = Instant::now() + BOUND;
    while word.load(Ordering::Acquire) == 0 {
        assert!(Instant::now() < deadline, "nobody opened the gate");
        thread::yield_now();
    }
}

/// Panics: with text, with text made on the way, or with something else.
pub(super) struct Panic;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PanicParams {
    pub(super) kind: u32,
}

/// A panic payload whose destructor panics too.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped the payload");
    }
}

impl Kernel for Panic {
    type Params = PanicParams;
    const NAME: &'static str = "panicking";

    unsafe fn run_on_host(params: &PanicParams) {
        match params.kind {
            0 => panic!("fixed text"),
            1 => panic!("text with {}", params.kind),
            2 => panic_any(17_u32),
            _ => panic_any(Bomb),
        }
    }
}

/// Sets a condition to what a word holds, and takes one from the word if it holds anything.
pub(super) struct CountDown;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct CountDownParams {
    pub(super) word: u64,
    pub(super) condition: u64,
}

impl Kernel for CountDown {
    type Params = CountDownParams;
    const NAME: &'static str = "count_down";

    unsafe fn run_on_host(params: &CountDownParams) {
        // SAFETY: the launch retains the word behind this address.
        let word = unsafe { &*pointer::<AtomicU64>(params.word) };
        let left = word.load(Ordering::Relaxed);
        // SAFETY: the kernel runs in a replay of the graph that the condition belongs to.
        unsafe { set_condition(params.condition, u32::from(left > 0)) };
        word.store(left.saturating_sub(1), Ordering::Relaxed);
    }
}

/// Sets a condition to one if a word holds anything, and leaves it alone otherwise.
pub(super) struct RaiseIfNonzero;

impl Kernel for RaiseIfNonzero {
    type Params = CountDownParams;
    const NAME: &'static str = "raise_if_nonzero";

    unsafe fn run_on_host(params: &CountDownParams) {
        // SAFETY: the launch retains the word behind this address.
        let word = unsafe { &*pointer::<AtomicU64>(params.word) };
        if word.load(Ordering::Relaxed) > 0 {
            // SAFETY: the kernel runs in a replay of the graph that the condition belongs to.
            unsafe { set_condition(params.condition, 1) };
        }
    }
}

/// Stores a value in a word.
pub(super) struct Store;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct StoreParams {
    pub(super) word: u64,
    pub(super) value: u64,
}

impl Kernel for Store {
    type Params = StoreParams;
    const NAME: &'static str = "store";

    unsafe fn run_on_host(params: &StoreParams) {
        // SAFETY: the launch retains the word behind this address.
        let word = unsafe { &*pointer::<AtomicU64>(params.word) };
        word.store(params.value, Ordering::Relaxed);
    }
}

/// What keeps an object alive for a launch.
pub(super) fn keep<T: Send + Sync + 'static>(object: &Arc<T>) -> [Retained; 1] {
    [object.clone()]
}

/// The address of an object that kernels of the tests get at.
pub(super) fn address_of<T>(object: &Arc<T>) -> u64 {
    Arc::as_ptr(object).expose_provenance() as u64
}

/// Reads a byte of memory that no kernel uses now.
pub(super) fn peek(address: u64) -> u8 {
    // SAFETY: the tests give addresses inside memory that they hold; volatile, because another
    // mapping of the same page may have changed it.
    unsafe { pointer::<u8>(address).read_volatile() }
}

/// Writes a byte of memory that no kernel uses now.
pub(super) fn poke(address: u64, value: u8) {
    // SAFETY: as for `peek`.
    unsafe { pointer::<u8>(address).write_volatile(value) };
}

//! A device for a test, and the kernels that tests launch.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};
use ep_context::backend::{Condition, Memory};
use ep_context::cuda::{
    CacheFolder, CudaExecutable, CudaMemory, CudaRecordingKey, CudaStream, DeviceProperties,
};
use ep_context::{
    Backend, CudaBackend, CudaOptions, Kernel, KernelSource, LaunchShape, Retained, Specialization,
};
use graph_ep_kernels::{HEADERS, probes};

// A test that frees memory waits for the device, and another's kernel may spin on it: one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A device, and a stream of it, for one test.
pub(crate) struct Gpu {
    pub(crate) backend: CudaBackend,
    pub(crate) stream: CudaStream,
    pub(crate) cache: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Gpu {
    /// The first device; `None` where there is none, which is said past the harness, since that hides
    /// what passing tests print.
    pub(crate) fn find(test: &str) -> Option<Self> {
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        match DeviceProperties::all() {
            Ok(devices) if !devices.is_empty() => {}
            Ok(_) => {
                say(&format!("{test}: skipped: the CUDA driver shows no GPU"));
                return None;
            }
            Err(error) => {
                say(&format!("{test}: skipped: no CUDA driver: {error}"));
                return None;
            }
        }
        let cache = tempfile::tempdir().expect("a folder");
        let options = CudaOptions::new(0).with_cache(CacheFolder::at(cache.path()));
        let backend = CudaBackend::new(options).expect("a device that will do");
        let stream = backend.stream("test").expect("a stream");
        Some(Self { backend, stream, cache, _alone: alone })
    }

    /// A rank on another device, where there is one.
    pub(crate) fn second(&self) -> Option<CudaBackend> {
        let devices = DeviceProperties::all().expect("known to be there");
        let reaches = |pair: &[DeviceProperties]| pair[1].reaches(&pair[0]).expect("answered");
        if devices.len() < 2 || !reaches(&devices[..2]) {
            return None;
        }
        let options = CudaOptions::new(1).with_cache(CacheFolder::at(self.cache.path()));
        Some(CudaBackend::new(options).expect("a device that will do"))
    }

    pub(crate) fn words(&self, values: &[u32]) -> Arc<CudaMemory> {
        let memory = self.backend.allocate(size_of_val(values)).expect("memory");
        self.write(memory.address(), values);
        Arc::new(memory)
    }

    pub(crate) fn write<T: Pod>(&self, to: u64, values: &[T]) {
        // SAFETY: the tests give addresses of memory that they hold and that nothing else uses now.
        unsafe { self.backend.upload(&self.stream, to, bytemuck::cast_slice(values), &[]) }
            .expect("uploaded");
        self.wait();
    }

    pub(crate) fn read(&self, from: u64, count: usize) -> Vec<u32> {
        let mut values = vec![0_u32; count];
        let into = bytemuck::cast_slice_mut(&mut values);
        // SAFETY: the tests give addresses of memory that they hold, with at least this many words.
        unsafe { self.backend.download(&self.stream, from, into) }.expect("downloaded");
        values
    }

    pub(crate) fn wait(&self) {
        self.backend.synchronize(&self.stream).expect("nothing failed");
    }

    /// Queues adding to the first `count` words at an address.
    pub(crate) fn add_at(
        &self,
        stream: &CudaStream,
        words: u64,
        count: u32,
        addend: u32,
        retained: &[Retained],
    ) {
        let kernel = self.backend.load::<Add>(&Specialization::new()).expect("compiles");
        let params = AddParams { words, count, addend };
        let shape = LaunchShape::new(count.div_ceil(256).clamp(1, 1024), 256);
        // SAFETY: the tests retain the memory or hold it until the stream is idle; other work on it is
        // ordered by its stream.
        unsafe { self.backend.launch(stream, &kernel, shape, &params, retained) }.expect("queued");
    }

    pub(crate) fn add(&self, stream: &CudaStream, words: &Arc<CudaMemory>, addend: u32) {
        let count = u32::try_from(words.bytes() / 4).expect("small");
        self.add_at(stream, words.address(), count, addend, &keep(words));
    }

    /// Queues taking one from a 64-bit word and setting a condition by it.
    pub(crate) fn count_down(
        &self,
        stream: &CudaStream,
        word: &Arc<CudaMemory>,
        condition: Condition,
    ) {
        let kernel = self.backend.load::<CountDown>(&Specialization::new()).expect("compiles");
        let params = CountDownParams { word: word.address(), condition: condition.0 };
        let retained = keep(word);
        // SAFETY: the launch retains the word; other work on it is ordered by its stream.
        unsafe { self.backend.launch(stream, &kernel, LaunchShape::ONE_WARP, &params, &retained) }
            .expect("queued");
    }

    /// Records what `record` queues and makes it executable.
    pub(crate) fn graph(&self, record: impl FnOnce(&CudaStream)) -> CudaExecutable {
        self.graph_by_key(|stream, _| record(stream))
    }

    /// The same for a `record` that is given the right to end the recording.
    pub(crate) fn graph_by_key(
        &self,
        record: impl FnOnce(&CudaStream, &CudaRecordingKey),
    ) -> CudaExecutable {
        let key = self.backend.begin_recording(&self.stream).expect("the stream runs");
        record(&self.stream, &key);
        let recording = self.backend.end_recording(&key).expect("a whole recording");
        self.backend.instantiate(recording).expect("instantiates")
    }

    pub(crate) fn replay(&self, graph: &CudaExecutable) {
        self.backend.replay(&self.stream, graph).expect("queued");
    }
}

/// What keeps an object alive for a launch.
pub(crate) fn keep<T: Send + Sync + 'static>(object: &Arc<T>) -> [Retained; 1] {
    [object.clone()]
}

/// Writes a line to the terminal, past the harness.
pub(crate) fn say(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Adds to words.
pub(crate) struct Add;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AddParams {
    pub(crate) words: u64,
    pub(crate) count: u32,
    pub(crate) addend: u32,
}

pub(crate) const fn source_of(probe: (&'static str, &'static str)) -> Option<KernelSource> {
    Some(KernelSource { file: probe.0, text: probe.1, headers: HEADERS })
}

impl Kernel for Add {
    type Params = AddParams;
    const NAME: &'static str = "add";
    const SOURCE: Option<KernelSource> = source_of(probes::ADD);

    unsafe fn run_on_host(_params: &AddParams) {}
}

/// Counts a word down and repeats a loop while it was not zero.
pub(crate) struct CountDown;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct CountDownParams {
    pub(crate) word: u64,
    pub(crate) condition: u64,
}

impl Kernel for CountDown {
    type Params = CountDownParams;
    const NAME: &'static str = "count_down";
    const SOURCE: Option<KernelSource> = source_of(probes::COUNT_DOWN);

    unsafe fn run_on_host(_params: &CountDownParams) {}
}

//! Streams and kernels: compiling, loading, launching, and what queued work keeps alive.

use std::fs;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use ep_context::backend::Memory;
use ep_context::cuda::{CacheFolder, DriverCalls};
use ep_context::{
    Backend, BackendError, CudaBackend, CudaOptions, Kernel, KernelSource, LaunchShape,
    Specialization,
};

use crate::gpu::{Add, AddParams, Gpu, keep, say, source_of};

#[test]
fn work_runs_in_the_order_in_which_it_was_queued() {
    let Some(gpu) = Gpu::find("work_runs_in_the_order_in_which_it_was_queued") else { return };
    let words = gpu.words(&[0; 1000]);
    for round in 0..100_u32 {
        gpu.add(&gpu.stream, &words, round);
        if round == 49 {
            // SAFETY: the launch before is ordered by the stream.
            unsafe { gpu.backend.fill(&gpu.stream, words.address(), 0, 4000, &keep(&words)) }
                .expect("queued");
        }
    }
    assert_eq!(gpu.read(words.address(), 1000), vec![(50..100).sum::<u32>(); 1000]);
}

#[test]
fn constants_specialise_a_kernel() {
    let Some(gpu) = Gpu::find("constants_specialise_a_kernel") else { return };
    let words = gpu.words(&[0; 8]);
    let constants = Specialization::new().with("STRIDE", 3);
    let kernel = gpu.backend.load::<Add>(&constants).expect("compiles");
    say(&format!("    {kernel:?}"));
    assert!(kernel.registers() > 0);
    assert_eq!(kernel.local_bytes(), 0);
    assert!(kernel.resident_blocks(LaunchShape::new(1, 256)).expect("answered") > 0);
    let params = AddParams { words: words.address(), count: 8, addend: 1 };
    let retained = keep(&words);
    // SAFETY: the launch retains the memory, which nothing else uses.
    unsafe { gpu.backend.launch(&gpu.stream, &kernel, LaunchShape::ONE_WARP, &params, &retained) }
        .expect("queued");
    assert_eq!(gpu.read(words.address(), 8), [1, 0, 0, 1, 0, 0, 1, 0]);
}

#[test]
fn compiled_kernels_are_kept_and_a_damaged_one_is_built_again() {
    let name = "compiled_kernels_are_kept_and_a_damaged_one_is_built_again";
    let Some(gpu) = Gpu::find(name) else { return };
    // A constant of its own, since the process keeps what it has loaded.
    let constants = Specialization::new().with("STRIDE", 5);
    gpu.backend.load::<Add>(&constants).expect("compiles");
    let entries = || -> Vec<_> {
        let entries = fs::read_dir(gpu.cache.path()).expect("the folder");
        entries.map(|entry| entry.expect("an entry").path()).collect()
    };
    let [entry] = &entries()[..] else { panic!("one entry, not {:?}", entries()) };
    let whole = fs::read(entry).expect("readable");
    fs::write(entry, &whole[..whole.len() / 2]).expect("written");
    // The same source under another name is another entry point of the process, not of the cache.
    struct Again;
    impl Kernel for Again {
        type Params = AddParams;
        const NAME: &'static str = "add";
        const SOURCE: Option<KernelSource> = Add::SOURCE;
        unsafe fn run_on_host(_params: &AddParams) {}
    }
    gpu.backend.load::<Again>(&constants).expect("built again");
    assert_eq!(fs::read(entry).expect("readable"), whole);
    assert_eq!(entries().len(), 1);

    // A folder that cannot be made costs nothing but time.
    let nowhere = CacheFolder::at(entry.join("below a file"));
    let backend = CudaBackend::new(CudaOptions::new(0).with_cache(nowhere)).expect("a device");
    backend.load::<Add>(&Specialization::new().with("STRIDE", 6)).expect("compiles all the same");
}

#[test]
fn kernels_that_cannot_be_loaded_say_why() {
    #[derive(Clone, Copy, Pod, Zeroable)]
    #[repr(C)]
    struct Short {
        words: u64,
    }
    struct WrongParams;
    impl Kernel for WrongParams {
        type Params = Short;
        const NAME: &'static str = "add";
        const SOURCE: Option<KernelSource> = Add::SOURCE;
        unsafe fn run_on_host(_params: &Short) {}
    }
    struct WrongName;
    impl Kernel for WrongName {
        type Params = AddParams;
        const NAME: &'static str = "subtract";
        const SOURCE: Option<KernelSource> = Add::SOURCE;
        unsafe fn run_on_host(_params: &AddParams) {}
    }
    struct NoSource;
    impl Kernel for NoSource {
        type Params = AddParams;
        const NAME: &'static str = "add";
        unsafe fn run_on_host(_params: &AddParams) {}
    }
    struct Broken;
    impl Kernel for Broken {
        type Params = AddParams;
        const NAME: &'static str = "broken";
        const SOURCE: Option<KernelSource> = source_of(("broken.cu", "this is not C++"));
        unsafe fn run_on_host(_params: &AddParams) {}
    }
    fn said<K: Kernel>(gpu: &Gpu) -> String {
        match gpu.backend.load::<K>(&Specialization::new()) {
            Err(error @ BackendError::Unavailable { .. }) => error.to_string(),
            other => panic!("expected a refusal, not {other:?}"),
        }
    }
    let Some(gpu) = Gpu::find("kernels_that_cannot_be_loaded_say_why") else { return };
    let expectations = [
        (said::<WrongParams>(&gpu), "16 bytes, its Rust twin 8"),
        (said::<WrongName>(&gpu), "no such entry"),
        (said::<NoSource>(&gpu), "host backend alone"),
        (said::<Broken>(&gpu), "broken.cu"),
    ];
    for (said, expected) in expectations {
        assert!(said.contains(expected), "{said}");
    }
    gpu.wait();
}

#[test]
fn shapes_that_the_device_cannot_run_are_refused() {
    let Some(gpu) = Gpu::find("shapes_that_the_device_cannot_run_are_refused") else { return };
    let kernel = gpu.backend.load::<Add>(&Specialization::new()).expect("compiles");
    let most = gpu.backend.properties().shared_bytes_per_block;
    let launch = |shape| {
        let params = AddParams { words: 0, count: 0, addend: 0 };
        // SAFETY: the kernel touches no word.
        unsafe { gpu.backend.launch(&gpu.stream, &kernel, shape, &params, &[]) }
    };
    for shape in [
        LaunchShape::new(0, 32),
        LaunchShape::new(1, 0),
        LaunchShape::new(1, 1025),
        LaunchShape { shared_bytes: most + 1, ..LaunchShape::ONE_WARP },
    ] {
        let refused = launch(shape);
        assert!(matches!(refused, Err(BackendError::Invalid { .. })), "{shape:?}: {refused:?}");
    }
    launch(LaunchShape { shared_bytes: most, ..LaunchShape::ONE_WARP }).expect("all there is");
    gpu.wait();
}

#[test]
fn queued_work_holds_what_it_retains_until_it_has_run() {
    let name = "queued_work_holds_what_it_retains_until_it_has_run";
    let Some(gpu) = Gpu::find(name) else { return };
    let words = gpu.words(&vec![0; 1 << 20]);
    let weak = Arc::downgrade(&words);
    for _ in 0..100 {
        gpu.add(&gpu.stream, &words, 1);
    }
    drop(words);
    assert!(weak.upgrade().is_some(), "the stream was not waited for");
    gpu.wait();
    assert!(weak.upgrade().is_none(), "nothing uses it any more");

    // Many objects, each used once: those whose work has run go before the stream is waited for.
    let all: Vec<_> = (0..200).map(|value| gpu.words(&[value])).collect();
    let weak: Vec<_> = all.iter().map(Arc::downgrade).collect();
    all.iter().for_each(|words| gpu.add(&gpu.stream, words, 1));
    drop(all);
    gpu.wait();
    assert!(weak.iter().all(|weak| weak.upgrade().is_none()));

    // A stream that goes with work queued lets it run, and what it held goes after that.
    let words = gpu.words(&vec![0; 1 << 20]);
    let weak = Arc::downgrade(&words);
    let other = gpu.backend.stream("other").expect("a stream");
    gpu.add(&other, &words, 1);
    drop((other, words));
    while weak.upgrade().is_some() {
        gpu.backend.collect().expect("collected");
    }
}

#[test]
fn blocking_calls_are_counted_over_clones() {
    let Some(gpu) = Gpu::find("blocking_calls_are_counted_over_clones") else { return };
    let options = CudaOptions::new(0).with_cache(CacheFolder::at(gpu.cache.path()));
    let backend = CudaBackend::new(options).expect("a device");
    let stream = backend.stream("s").expect("a stream");
    let other = backend.clone();
    assert_eq!(backend.blocking_calls(), 0);
    backend.synchronize(&stream).expect("idle");
    let memory = backend.allocate(4).expect("memory");
    // SAFETY: the range is the memory's.
    unsafe { other.download(&stream, memory.address(), &mut [0; 4]) }.expect("read");
    assert_eq!((backend.blocking_calls(), other.blocking_calls()), (2, 2));
    let key = other.begin_recording(&stream).expect("idle");
    other.synchronize(&stream).expect_err("recording");
    assert_eq!(other.blocking_calls(), 2, "a refused call does not wait");
    other.abandon_recording(&key);
}

#[test]
fn queueing_neither_waits_nor_allocates() {
    let Some(gpu) = Gpu::find("queueing_neither_waits_nor_allocates") else { return };
    let words = gpu.words(&[0; 1024]);
    let graph = gpu.graph(|stream| (0..10).for_each(|_| gpu.add(stream, &words, 1)));
    let kernel = gpu.backend.load::<Add>(&Specialization::new()).expect("compiles");
    let params = AddParams { words: words.address(), count: 1024, addend: 1 };
    let retained = keep(&words);
    let step = || {
        gpu.replay(&graph);
        // SAFETY: the launch retains the memory; the stream orders all work on it.
        unsafe {
            gpu.backend
                .launch(&gpu.stream, &kernel, LaunchShape::new(4, 256), &params, &retained)
                .expect("queued");
        }
    };
    step();
    gpu.wait();
    let before = DriverCalls::of_this_thread();
    (0..100).for_each(|_| step());
    let after = DriverCalls::of_this_thread();
    assert_eq!((after.wait, after.allocate), (before.wait, before.allocate));
    assert_eq!(after.queue - before.queue, 200);
    say(&format!(
        "    200 operations queued by {} calls",
        after.query + after.queue - before.query - before.queue
    ));
    assert_eq!(gpu.read(words.address(), 1024), vec![101 * 11; 1024]);
}

#[test]
fn a_stream_of_the_callers_takes_work() {
    let Some(gpu) = Gpu::find("a_stream_of_the_callers_takes_work") else { return };
    let words = gpu.words(&[0; 64]);
    // SAFETY: the stream lives to the end of the test, which drops the borrowed one before.
    let borrowed = unsafe { gpu.backend.borrow_stream(gpu.stream.raw(), "callers") };
    gpu.add(&borrowed, &words, 1);
    gpu.add(&gpu.stream, &words, 2);
    gpu.backend.synchronize(&borrowed).expect("nothing failed");
    assert_eq!(gpu.read(words.address(), 64), [3; 64]);
    // What its owner captures on it has nobody who keeps it alive.
    let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
    let params = AddParams { words: words.address(), count: 64, addend: 1 };
    let kernel = gpu.backend.load::<Add>(&Specialization::new()).expect("loaded");
    // SAFETY: the test holds the memory.
    let refused = unsafe {
        gpu.backend.launch(&borrowed, &kernel, LaunchShape::ONE_WARP, &params, &keep(&words))
    };
    assert!(matches!(refused, Err(BackendError::Recording { .. })), "{refused:?}");
    gpu.backend.end_recording(&key).expect("untouched");
}

//! Memory: private, growing, shared with peers, mapped for the host.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ep_context::backend::{GrowableMemory, MappedMemory, Memory, SharedMemory};
use ep_context::cuda::{CacheFolder, DeviceProperties, driver_version};
use ep_context::{Backend, BackendError, CudaBackend, CudaOptions, MemoryAccount};

use crate::gpu::{Gpu, keep, say};

#[test]
fn a_device_says_what_it_is() {
    let Some(gpu) = Gpu::find("a_device_says_what_it_is") else { return };
    let properties = gpu.backend.properties();
    say(&format!("driver for CUDA {}: {properties:?}", driver_version().expect("there")));
    assert!(properties.capability >= (8, 0) && properties.multiprocessors > 0);
    let (free, total) = gpu.backend.free_memory().expect("answered");
    assert!(free <= total && total <= properties.memory);
    let devices = DeviceProperties::all().expect("there");
    assert_eq!(&devices[0], properties);
    for pair in devices.windows(2) {
        say(&format!(
            "{} reaches {}: {:?}",
            pair[0].ordinal,
            pair[1].ordinal,
            pair[0].reaches(&pair[1])
        ));
    }
    let beyond = u32::try_from(devices.len()).expect("few");
    let missing = CudaBackend::new(CudaOptions::new(beyond));
    assert!(matches!(missing, Err(BackendError::Unavailable { .. })), "{missing:?}");
}

#[test]
fn private_memory_is_zeroed_aligned_and_holds_what_is_written() {
    let name = "private_memory_is_zeroed_aligned_and_holds_what_is_written";
    let Some(gpu) = Gpu::find(name) else { return };
    for bytes in [0, 4, 4096, (8 << 20) + 4] {
        let memory = gpu.backend.allocate(bytes).expect("memory");
        assert_eq!((memory.bytes(), memory.address() % 256), (bytes, 0));
        assert!(gpu.read(memory.address(), bytes / 4).iter().all(|word| *word == 0), "{bytes}");
        let values: Vec<u32> = (0..u32::try_from(bytes / 4).expect("small")).collect();
        gpu.write(memory.address(), &values);
        assert_eq!(gpu.read(memory.address(), values.len()), values);
    }
    let words = gpu.words(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let at = words.address();
    // SAFETY: all ranges lie in the memory, and the halves do not overlap.
    unsafe {
        gpu.backend.copy(&gpu.stream, at + 16, at, 12, &[]).expect("queued");
        gpu.backend.fill(&gpu.stream, at + 1, 0xff, 2, &[]).expect("queued");
        gpu.backend.copy(&gpu.stream, at, at, 0, &[]).expect("nothing to do");
        gpu.backend.fill(&gpu.stream, at, 9, 0, &[]).expect("nothing to do");
        gpu.backend.upload(&gpu.stream, at, &[], &[]).expect("nothing to do");
    }
    assert_eq!(gpu.read(at, 8), [0x00ff_ff01, 2, 3, 4, 1, 2, 3, 8]);
}

#[test]
fn memory_that_cannot_be_had_is_an_error_that_says_so() {
    let Some(gpu) = Gpu::find("memory_that_cannot_be_had_is_an_error_that_says_so") else { return };
    let huge = gpu.backend.allocate(1 << 46);
    assert!(matches!(huge, Err(BackendError::OutOfMemory { .. })), "{huge:?}");
    let account = MemoryAccount::new(Some(1 << 20));
    let options = CudaOptions::new(0).with_memory(account.clone()).with_cache(CacheFolder::none());
    let limited = CudaBackend::new(options).expect("a device");
    let held = limited.allocate(1 << 19).expect("within the limit");
    let refused = limited.allocate(1 << 20);
    assert!(matches!(refused, Err(BackendError::OutOfMemory { .. })), "{refused:?}");
    assert_eq!(account.used(), 1 << 19);
    drop(held);
    assert_eq!(account.used(), 0);
    limited.allocate(1 << 20).expect("within the limit again");
}

#[test]
fn dropped_memory_goes_back_when_something_collects() {
    let Some(gpu) = Gpu::find("dropped_memory_goes_back_when_something_collects") else { return };
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0);
    let free = || gpu.backend.free_memory().expect("answered").0;
    let before = free();
    for _ in 0..64 {
        // 64 GiB in all: without giving back, most devices would run out.
        drop(gpu.backend.allocate(1 << 30).expect("what was dropped is given back"));
        assert_eq!(gpu.backend.uncollected(), 1);
    }
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0);
    assert!(free() + (64 << 20) >= before, "{} of {before} are free", free());
}

#[test]
fn growable_memory_grows_in_place_under_a_recorded_graph() {
    let name = "growable_memory_grows_in_place_under_a_recorded_graph";
    let Some(gpu) = Gpu::find(name) else { return };
    let memory = Arc::new(gpu.backend.reserve(1 << 30).expect("addresses"));
    let (page, at) = (memory.granularity(), memory.address());
    assert_eq!((memory.reserved(), memory.mapped()), (1 << 30, 0));
    memory.grow(3 << 20).expect("a few pages");
    assert!(memory.mapped() >= 3 << 20 && memory.mapped().is_multiple_of(page));
    let first = memory.mapped();
    // New pages hold whatever was there before.
    let clear = |from: u64, bytes: usize| {
        // SAFETY: the range is mapped and used on the stream alone.
        unsafe { gpu.backend.fill(&gpu.stream, at + from, 0, bytes, &keep(&memory)) }
    };
    clear(0, first).expect("queued");
    assert!(gpu.read(at, first / 4).iter().all(|word| *word == 0));
    // The graph writes more than is mapped when it is recorded and instantiated.
    let more = 100 << 20;
    let count = u32::try_from(more / 4).expect("small");
    let graph = gpu.graph(|stream| gpu.add_at(stream, at, count, 5, &keep(&memory)));
    gpu.add_at(&gpu.stream, at, 1024, 2, &keep(&memory));
    memory.grow(more).expect("more pages");
    memory.grow(1).expect("nothing to do");
    clear(first as u64, more - first).expect("queued");
    assert!(memory.mapped() >= more && memory.address() == at);
    gpu.replay(&graph);
    let words = gpu.read(at, more / 4);
    assert!(words[..1024].iter().all(|word| *word == 7), "what was there stays");
    assert!(words[1024..].iter().all(|word| *word == 5), "what is new was cleared");

    let beyond = memory.grow((1 << 30) + 1);
    assert!(matches!(beyond, Err(BackendError::Invalid { .. })), "{beyond:?}");
    let before = memory.mapped();
    // SAFETY: the stream is idle, and nothing behind 4 MiB is touched before it is mapped again.
    unsafe { memory.trim(4 << 20) }.expect("trimmed");
    let after = memory.mapped();
    assert!(after < before && after >= 4 << 20, "{before} to {after}");
    assert!(gpu.read(at, after / 4).iter().all(|word| matches!(word, 5 | 7)), "what is left stays");
    memory.grow(before).expect("mapped again");
    clear(after as u64, before - after).expect("queued");
    assert!(gpu.read(at + after as u64, (before - after) / 4).iter().all(|word| *word == 0));
    // SAFETY: the stream is idle, and the memory is not used again.
    unsafe { memory.trim(0) }.expect("trimmed");
    assert_eq!(memory.mapped(), 0);
}

#[test]
fn growth_that_is_refused_changes_nothing() {
    let Some(_gpu) = Gpu::find("growth_that_is_refused_changes_nothing") else { return };
    let account = MemoryAccount::new(Some(64 << 20));
    let options = CudaOptions::new(0).with_memory(account.clone()).with_cache(CacheFolder::none());
    let backend = CudaBackend::new(options).expect("a device");
    let memory = backend.reserve(1 << 40).expect("addresses for a terabyte");
    memory.grow(32 << 20).expect("within the limit");
    let refused = memory.grow(1 << 30);
    assert!(matches!(refused, Err(BackendError::OutOfMemory { .. })), "{refused:?}");
    assert_eq!((memory.mapped(), account.used()), (32 << 20, 32 << 20));
    // SAFETY: nothing uses the memory.
    unsafe { memory.trim(0) }.expect("trimmed");
    assert_eq!((memory.mapped(), account.used()), (0, 0));
    memory.grow(48 << 20).expect("within the limit");
    account.set_limit(None);
    // More than any device has: fails somewhere on the way and gives back what it had mapped.
    let free = backend.free_memory().expect("answered").0;
    let refused = memory.grow(1 << 40);
    assert!(matches!(refused, Err(BackendError::OutOfMemory { .. })), "{refused:?}");
    assert_eq!((memory.mapped(), account.used()), (48 << 20, 48 << 20));
    assert!(backend.free_memory().expect("answered").0 + (64 << 20) >= free);
}

#[test]
fn shared_memory_is_reached_through_its_descriptor() {
    let Some(gpu) = Gpu::find("shared_memory_is_reached_through_its_descriptor") else { return };
    let bytes = (3 << 20) + 64;
    let own = gpu.backend.allocate_shared(bytes).expect("shared memory");
    assert_eq!(own.bytes(), bytes);
    assert!(gpu.read(own.address(), bytes / 4).iter().all(|word| *word == 0));
    let export = || own.export().expect("exported");
    let peer = gpu.backend.import(export(), bytes).expect("imported");
    assert_ne!(peer.address(), own.address());
    assert_eq!(peer.bytes(), bytes);
    gpu.write(peer.address() + bytes as u64 - 8, &[3_u32, 4]);
    assert_eq!(gpu.read(own.address() + bytes as u64 - 8, 2), [3, 4]);

    let too_long = gpu.backend.import(export(), 64 << 20);
    assert!(matches!(too_long, Err(BackendError::Invalid { .. })), "{too_long:?}");
    let wrong = OwnedFd::from(tempfile::tempfile().expect("a file"));
    let wrong = gpu.backend.import(wrong, 4096);
    assert!(matches!(wrong, Err(BackendError::Unavailable { .. })), "{wrong:?}");

    match gpu.second() {
        None => say("    with one device the memory of another cannot be imported"),
        Some(second) => {
            let there = second.import(export(), bytes).expect("imported on another device");
            let stream = second.stream("second").expect("a stream");
            // SAFETY: the range lies in the memory, which lives to the end of the test, and the two
            // devices take turns.
            unsafe { second.upload(&stream, there.address(), &[9, 0, 0, 0], &[]) }.expect("queued");
            second.synchronize(&stream).expect("nothing failed");
            assert_eq!(gpu.read(own.address(), 1), [9]);
            gpu.write(own.address(), &[7_u32]);
            let mut seen = [0; 4];
            // SAFETY: as above.
            unsafe { second.download(&stream, there.address(), &mut seen) }.expect("read");
            assert_eq!(seen, [7, 0, 0, 0]);
        }
    }
    // The mapping of a peer keeps the memory when its owner is gone.
    drop(own);
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.read(peer.address() + bytes as u64 - 8, 2), [3, 4]);
}

#[test]
fn the_host_and_the_device_share_mapped_memory() {
    let Some(gpu) = Gpu::find("the_host_and_the_device_share_mapped_memory") else { return };
    let memory = Arc::new(gpu.backend.allocate_mapped(4096).expect("memory"));
    let word = |index: usize| {
        // SAFETY: the index is inside the memory, which nothing else uses while the stream is idle.
        unsafe { memory.host_address().cast::<u32>().add(index).read_volatile() }
    };
    assert!((0..1024).all(|index| word(index) == 0));
    // SAFETY: as above.
    unsafe { memory.host_address().cast::<u32>().add(7).write_volatile(40) };
    gpu.add_at(&gpu.stream, memory.address(), 1024, 2, &keep(&memory));
    gpu.wait();
    assert_eq!((word(6), word(7), word(1023)), (2, 42, 2));
}

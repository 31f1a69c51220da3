//! The backend as a whole: what its calls count, and that nothing is left behind.

use std::env;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::testing::{Device, Log};
use super::*;
use crate::backend::{GrowableMemory, SharedMemory};

#[test]
fn blocking_calls_are_counted_over_clones() {
    let device = Device::new();
    let stream = device.stream("s");
    let other = device.backend.clone();
    device.backend.synchronize(&stream).expect("idle");
    let mut nothing = [];
    // SAFETY: no byte is read.
    unsafe { other.download(&stream, 0, &mut nothing) }.expect("idle");
    assert_eq!((device.backend.blocking_calls(), other.blocking_calls()), (2, 2));
    // A refused call does not wait, so it does not count.
    let _key = other.begin_recording(&stream).expect("idle");
    other.synchronize(&stream).expect_err("recording");
    assert_eq!(other.blocking_calls(), 2);
}

#[test]
fn names_with_zero_bytes_are_taken() {
    let device = Device::new();
    device.backend.synchronize(&device.stream("a\0b")).expect("idle");
}

fn entries(directory: &str) -> usize {
    fs::read_dir(directory).expect("procfs is mounted").count()
}

fn cycle() {
    let device = Device::new();
    let stream = device.stream("cycle");
    let log = Log::default();
    let shared = device.backend.allocate_shared(4096).expect("memory");
    let peer = device
        .backend
        .import(shared.export().expect("descriptors are left"), 4096)
        .expect("own memory");
    let growable = device.backend.reserve(1 << 20).expect("addresses");
    growable.grow(1).expect("a page");
    let key = device.begin(&stream);
    device.append(&stream, &log, 1);
    let graph = device.end(&key);
    device.backend.replay(&stream, &graph).expect("runs");
    drop((peer, shared, growable, graph));
    drop(stream);
    assert_eq!(log.values(), [1], "a stream finishes its work before it goes");
}

/// Counts what the whole process holds, so it runs in a process where no other test does.
#[test]
fn a_thousand_cycles_leave_no_descriptor_thread_or_mapping() {
    const CHILD: &str = "EP_CONTEXT_LEAK_TEST_CHILD";
    if env::var_os(CHILD).is_none() {
        let output = Command::new(env::current_exe().expect("the test binary has a path"))
            .args(["--exact", "--test-threads=1"])
            .arg("host::tests::a_thousand_cycles_leave_no_descriptor_thread_or_mapping")
            .env(CHILD, "1")
            .output()
            .expect("the test binary runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let maps = || fs::read_to_string("/proc/self/maps").expect("procfs").lines().count();
    cycle();
    let before = (entries("/proc/self/fd"), entries("/proc/self/task"), maps());
    for _ in 0..1000 {
        cycle();
    }
    // A joined thread may stand in the process table for a moment longer.
    let deadline = Instant::now() + Duration::from_secs(20);
    while entries("/proc/self/task") > before.1 && Instant::now() < deadline {
        thread::yield_now();
    }
    assert_eq!(entries("/proc/self/fd"), before.0, "descriptors");
    assert_eq!(entries("/proc/self/task"), before.1, "threads");
    let after = maps();
    // The allocator and thread stacks may move by a few.
    assert!(after < before.2 + 50, "mappings: {} before, {after} after", before.2);
}

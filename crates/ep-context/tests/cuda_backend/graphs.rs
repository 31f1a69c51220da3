//! Recording, replaying and updating graphs.

use std::fs;
use std::sync::Arc;
use std::thread;

use ep_context::backend::{Memory, Update};
use ep_context::cuda::CudaRecording;
use ep_context::{Backend, BackendError};

use crate::gpu::{Gpu, keep};

fn recorded(gpu: &Gpu, queue: impl FnOnce()) -> CudaRecording {
    let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
    queue();
    gpu.backend.end_recording(&key).expect("a whole recording")
}

#[test]
fn a_graph_runs_as_often_as_it_is_replayed_and_on_any_stream() {
    let name = "a_graph_runs_as_often_as_it_is_replayed_and_on_any_stream";
    let Some(gpu) = Gpu::find(name) else { return };
    let words = gpu.words(&[0; 1024]);
    let graph = gpu.graph(|stream| {
        assert!(gpu.backend.is_recording(stream));
        (1..=3).for_each(|addend| gpu.add(stream, &words, addend));
    });
    assert!(!gpu.backend.is_recording(&gpu.stream));
    assert_eq!(gpu.backend.node_count(&graph), 3);
    assert_eq!(gpu.read(words.address(), 1), [0], "recording runs nothing");
    gpu.replay(&graph);
    gpu.add(&gpu.stream, &words, 100);
    gpu.replay(&graph);
    assert_eq!(gpu.read(words.address(), 1024), [112; 1024]);
    // Replays of one graph do not overlap, on whatever streams they are queued.
    let others = ["a", "b", "c"].map(|name| gpu.backend.stream(name).expect("a stream"));
    for _ in 0..50 {
        others.iter().for_each(|other| gpu.backend.replay(other, &graph).expect("queued"));
    }
    others.iter().for_each(|other| gpu.backend.synchronize(other).expect("nothing failed"));
    assert_eq!(gpu.read(words.address(), 1024), [112 + 150 * 6; 1024]);
    let drawing = gpu.cache.path().join("graph.dot");
    graph.write_dot(&drawing).expect("written");
    assert!(fs::read_to_string(&drawing).expect("readable").contains("digraph"));
}

#[test]
fn copies_and_fills_are_recorded() {
    let Some(gpu) = Gpu::find("copies_and_fills_are_recorded") else { return };
    let words = gpu.words(&[7; 512]);
    let at = words.address();
    let graph = gpu.graph(|stream| {
        // SAFETY: the ranges lie in the memory, which the recording retains, and do not overlap.
        unsafe {
            gpu.backend.fill(stream, at, 1, 1024, &keep(&words)).expect("recorded");
            gpu.backend.copy(stream, at + 1024, at, 1024, &keep(&words)).expect("recorded");
        }
    });
    assert_eq!(gpu.backend.node_count(&graph), 2);
    gpu.replay(&graph);
    assert_eq!(gpu.read(at, 512), [0x0101_0101; 512]);
}

#[test]
fn an_empty_graph_replays() {
    let Some(gpu) = Gpu::find("an_empty_graph_replays") else { return };
    let graph = gpu.graph(|_| {});
    gpu.replay(&graph);
    gpu.wait();
    assert_eq!(gpu.backend.node_count(&graph), 0);
}

#[test]
fn what_was_recorded_is_alive_until_the_last_replay_has_run() {
    let name = "what_was_recorded_is_alive_until_the_last_replay_has_run";
    let Some(gpu) = Gpu::find(name) else { return };
    let words = gpu.words(&vec![0; 1 << 20]);
    let weak = Arc::downgrade(&words);
    let recording = recorded(&gpu, || (0..50).for_each(|_| gpu.add(&gpu.stream, &words, 1)));
    drop(words);
    assert!(weak.upgrade().is_some(), "the recording holds it");
    let graph = gpu.backend.instantiate(recording).expect("instantiates");
    assert!(weak.upgrade().is_some(), "the graph holds it");
    gpu.replay(&graph);
    drop(graph);
    assert!(weak.upgrade().is_some(), "the queued replay holds it");
    gpu.wait();
    assert!(weak.upgrade().is_none(), "nothing holds it any more");
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0);

    let words = gpu.words(&[0; 4]);
    let weak = Arc::downgrade(&words);
    let recording = recorded(&gpu, || gpu.add(&gpu.stream, &words, 1));
    drop((words, recording));
    assert!(weak.upgrade().is_none(), "a recording that is dropped holds nothing");
}

#[test]
fn an_update_concerns_later_replays_only() {
    let Some(gpu) = Gpu::find("an_update_concerns_later_replays_only") else { return };
    let (old, new) = (gpu.words(&vec![0; 1 << 20]), gpu.words(&vec![0; 1 << 20]));
    let weak = Arc::downgrade(&old);
    let mut graph = gpu.graph(|stream| (0..20).for_each(|_| gpu.add(stream, &old, 1)));
    (0..10).for_each(|_| gpu.replay(&graph));
    let recording = recorded(&gpu, || (0..20).for_each(|_| gpu.add(&gpu.stream, &new, 2)));
    let updated = gpu.backend.update(&mut graph, recording).expect("updates");
    assert_eq!(updated, Update::InPlace, "only parameters differ");
    gpu.replay(&graph);
    assert_eq!(gpu.read(old.address(), 1 << 20), vec![200; 1 << 20]);
    assert_eq!(gpu.read(new.address(), 1 << 20), vec![40; 1 << 20]);
    drop(old);
    assert!(weak.upgrade().is_none(), "the graph holds only what it runs");

    let recording = recorded(&gpu, || {
        gpu.add(&gpu.stream, &new, 1);
        // SAFETY: the recording retains the memory.
        unsafe { gpu.backend.fill(&gpu.stream, new.address(), 0, 4, &keep(&new)) }
            .expect("recorded");
    });
    let updated = gpu.backend.update(&mut graph, recording).expect("updates");
    assert_eq!(updated, Update::Reinstantiated, "other operations");
    assert_eq!(gpu.backend.node_count(&graph), 2);
    gpu.replay(&graph);
    assert_eq!(gpu.read(new.address(), 2), [0, 41]);
}

#[test]
fn a_graph_may_stand_in_another() {
    let Some(gpu) = Gpu::find("a_graph_may_stand_in_another") else { return };
    let words = gpu.words(&[0; 32]);
    let inner = gpu.graph(|stream| (0..2).for_each(|_| gpu.add(stream, &words, 1)));
    let weak = Arc::downgrade(&words);
    let outer = gpu.graph(|stream| {
        gpu.add(stream, &words, 10);
        gpu.backend.replay(stream, &inner).expect("recorded");
        gpu.backend.replay(stream, &inner).expect("recorded");
    });
    assert_eq!(gpu.backend.node_count(&outer), 7);
    drop(inner);
    gpu.replay(&outer);
    gpu.replay(&outer);
    assert_eq!(gpu.read(words.address(), 32), [28; 32]);
    drop((words, outer));
    gpu.backend.collect().expect("collected");
    assert!(weak.upgrade().is_none());
}

fn refused<T: std::fmt::Debug>(result: Result<T, BackendError>) {
    assert!(matches!(result, Err(BackendError::Recording { .. })), "{result:?}");
}

#[test]
fn what_a_recording_cannot_hold_is_refused_and_does_it_no_harm() {
    let name = "what_a_recording_cannot_hold_is_refused_and_does_it_no_harm";
    let Some(gpu) = Gpu::find(name) else { return };
    let backend = &gpu.backend;
    let words = gpu.words(&[0; 32]);
    let graph = gpu.graph_by_key(|stream, key| {
        gpu.add(stream, &words, 1);
        refused(backend.begin_recording(stream));
        refused(backend.synchronize(stream));
        // SAFETY: the memory lives to the end of the test.
        unsafe {
            refused(backend.upload(stream, words.address(), &[0; 4], &[]));
            refused(backend.download(stream, words.address(), &mut [0; 4]));
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                refused(backend.end_recording(key));
                backend.abandon_recording(key);
                refused(backend.condition(stream));
            });
        });
        assert!(backend.is_recording(stream));
        // What concerns no recording goes on beside it, on this thread and on others.
        let other = backend.stream("beside").expect("a stream");
        let beside = gpu.backend.allocate(1 << 20).expect("memory beside a recording");
        gpu.backend.reserve(1 << 22).expect("addresses beside a recording");
        // SAFETY: the memory lives until the stream is idle.
        unsafe { backend.fill(&other, beside.address(), 1, 1 << 20, &[]) }.expect("queued");
        backend.synchronize(&other).expect("nothing failed");
        thread::scope(|scope| {
            scope.spawn(|| drop(backend.allocate(1 << 20).expect("memory on another thread")));
        });
        gpu.add(stream, &words, 2);
    });
    assert_eq!(gpu.backend.node_count(&graph), 2);
    gpu.replay(&graph);
    assert_eq!(gpu.read(words.address(), 32), [3; 32]);
}

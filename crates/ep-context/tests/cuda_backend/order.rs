//! Streams that are ordered with each other, and branches of recordings.

use std::fmt::Debug;
use std::sync::Arc;
use std::thread;

use ep_context::backend::{Memory, Update};
use ep_context::cuda::{CudaMemory, CudaStream};
use ep_context::{Backend, BackendError, Retained};

use crate::gpu::Gpu;

/// Words that take a device long enough that a stream which does not wait for them is found out.
const MANY: usize = 1 << 22;

fn refused<T: Debug>(result: Result<T, BackendError>, why: &str) {
    match result {
        Err(BackendError::Recording { reason, .. }) => assert!(reason.contains(why), "{reason}"),
        other => panic!("expected a refusal, not {other:?}"),
    }
}

fn order(gpu: &Gpu, before: &CudaStream, after: &CudaStream) {
    gpu.backend.order(before, after).expect("two streams that can be ordered");
}

fn copy(gpu: &Gpu, stream: &CudaStream, to: &Arc<CudaMemory>, from: &Arc<CudaMemory>) {
    let retained: [Retained; 2] = [to.clone(), from.clone()];
    // SAFETY: both are retained, different, and of one length; what else touches them is ordered.
    unsafe { gpu.backend.copy(stream, to.address(), from.address(), from.bytes(), &retained) }
        .expect("queued");
}

fn branch_of(gpu: &Gpu) -> CudaStream {
    gpu.backend.stream("branch").expect("a stream")
}

#[test]
fn what_is_ordered_behind_a_stream_waits_for_it() {
    let Some(gpu) = Gpu::find("what_is_ordered_behind_a_stream_waits_for_it") else { return };
    let (from, to) = (gpu.words(&vec![0; MANY]), gpu.words(&vec![0; MANY]));
    let other = branch_of(&gpu);
    let calls = gpu.backend.blocking_calls();
    for _ in 0..20 {
        (0..10).for_each(|_| gpu.add(&gpu.stream, &from, 1));
        order(&gpu, &gpu.stream, &other);
        copy(&gpu, &other, &to, &from);
        gpu.add(&other, &from, 1);
        order(&gpu, &other, &gpu.stream);
        order(&gpu, &other, &other);
    }
    assert_eq!(gpu.backend.blocking_calls(), calls, "ordering waits for nothing");
    gpu.backend.synchronize(&other).expect("nothing failed");
    assert_eq!(gpu.read(from.address(), MANY), vec![220; MANY]);
    assert_eq!(gpu.read(to.address(), MANY), vec![219; MANY]);
}

#[test]
fn a_branch_is_recorded_with_the_stream_that_it_forked_from() {
    let name = "a_branch_is_recorded_with_the_stream_that_it_forked_from";
    let Some(gpu) = Gpu::find(name) else { return };
    let (backend, branch) = (&gpu.backend, branch_of(&gpu));
    let [one, two, three] = [0_u32; 3].map(|word| gpu.words(&vec![word; MANY]));
    let weak = Arc::downgrade(&two);
    let graph = gpu.graph(|stream| {
        gpu.add(stream, &one, 1);
        assert!(!backend.is_recording(&branch));
        order(&gpu, stream, &branch);
        assert!(backend.is_recording(&branch));
        copy(&gpu, &branch, &two, &one);
        gpu.add(&branch, &two, 1);
        gpu.add(stream, &three, 7);
        refused(backend.synchronize(&branch), "records");
        backend.check(&branch).expect("allowed while recording");
        order(&gpu, &branch, stream);
        // The sum of what both sides did; joined, the branch takes nothing until it forks again.
        assert!(!backend.is_recording(&branch));
        // SAFETY: the call is refused.
        let filled = unsafe { backend.fill(&branch, one.address(), 0, 4, &[]) };
        refused(filled, "has been joined");
        copy(&gpu, stream, &one, &two);
        order(&gpu, stream, &branch);
        gpu.add(&branch, &one, 1);
        order(&gpu, &branch, stream);
    });
    assert_eq!(backend.node_count(&graph), 6, "orders are edges");
    assert_eq!(gpu.read(one.address(), 1), [0], "recording runs nothing");
    (0..5).for_each(|_| gpu.replay(&graph));
    // Each replay adds three to the first, and leaves the second one behind it.
    assert_eq!(gpu.read(one.address(), MANY), vec![15; MANY]);
    assert_eq!(gpu.read(two.address(), MANY), vec![14; MANY]);
    assert_eq!(gpu.read(three.address(), MANY), vec![35; MANY]);
    drop(two);
    assert!(weak.upgrade().is_some(), "the graph holds what the branch used");
    drop(graph);
    backend.collect().expect("collected");
    assert!(weak.upgrade().is_none(), "nothing holds it any more");
    gpu.add(&branch, &one, 1);
    backend.synchronize(&branch).expect("it runs again");
    assert_eq!(gpu.read(one.address(), 1), [16]);
}

#[test]
fn branches_fork_from_branches_and_take_graphs() {
    let Some(gpu) = Gpu::find("branches_fork_from_branches_and_take_graphs") else { return };
    let (a, b) = (gpu.words(&vec![0; MANY]), gpu.words(&vec![0; MANY]));
    let inner = gpu.graph(|stream| gpu.add(stream, &a, 1));
    let [one, two] = [branch_of(&gpu), branch_of(&gpu)];
    let record = |addend| {
        let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
        order(&gpu, &gpu.stream, &one);
        gpu.backend.replay(&one, &inner).expect("recorded");
        order(&gpu, &one, &two);
        copy(&gpu, &two, &b, &a);
        order(&gpu, &two, &one);
        gpu.add(&one, &b, addend);
        order(&gpu, &two, &gpu.stream);
        order(&gpu, &one, &gpu.stream);
        gpu.backend.end_recording(&key).expect("a whole recording")
    };
    let mut graph = gpu.backend.instantiate(record(5)).expect("instantiates");
    (0..3).for_each(|_| gpu.replay(&graph));
    assert_eq!(gpu.read(b.address(), MANY), vec![8; MANY]);
    let updated = gpu.backend.update(&mut graph, record(10)).expect("updates");
    assert_eq!(updated, Update::InPlace, "only parameters differ");
    gpu.replay(&graph);
    assert_eq!(gpu.read(b.address(), MANY), vec![14; MANY]);
}

/// What one thread's recording forks with means nothing to those of others.
#[test]
fn recordings_of_many_threads_fork_at_once() {
    const RECORDINGS: usize = 300;
    const FORKS: usize = 8;
    let Some(gpu) = Gpu::find("recordings_of_many_threads_fork_at_once") else { return };
    let word = gpu.words(&[0]);
    thread::scope(|scope| {
        for _ in 0..4 {
            let (gpu, word) = (&gpu, &word);
            scope.spawn(move || {
                let [stream, branch] = [branch_of(gpu), branch_of(gpu)];
                for _ in 0..RECORDINGS {
                    let key = gpu.backend.begin_recording(&stream).expect("idle");
                    for _ in 0..FORKS {
                        order(gpu, &stream, &branch);
                        gpu.add(&branch, word, 1);
                        order(gpu, &branch, &stream);
                    }
                    let recording = gpu.backend.end_recording(&key).expect("a whole one");
                    let graph = gpu.backend.instantiate(recording).expect("instantiates");
                    assert_eq!(gpu.backend.node_count(&graph), FORKS);
                }
            });
        }
    });
}

#[test]
fn loops_stand_beside_branches() {
    let Some(gpu) = Gpu::find("loops_stand_beside_branches") else { return };
    let (backend, branch) = (&gpu.backend, branch_of(&gpu));
    let (looped, beside) = (gpu.words(&[0; 1024]), gpu.words(&[0; 1024]));
    let trips = gpu.words(&[4, 0]);
    let graph = gpu.graph(|stream| {
        order(&gpu, stream, &branch);
        refused(backend.condition(&branch), "loops stand on");
        gpu.add(&branch, &beside, 1);
        let condition = backend.condition(stream).expect("recording");
        gpu.count_down(stream, &trips, condition);
        let body = backend.begin_while(stream, condition).expect("recording");
        for (before, after) in [(&body, &branch), (stream, &branch), (&branch, stream)] {
            refused(backend.order(before, after), "no branches");
        }
        gpu.add(&body, &looped, 1);
        gpu.count_down(&body, &trips, condition);
        backend.end_while(stream, body).expect("the innermost loop");
        gpu.add(&branch, &beside, 1);
        order(&gpu, &branch, stream);
        gpu.add(stream, &beside, 10);
    });
    for _ in 0..3 {
        gpu.write(trips.address(), &[4_u32, 0]);
        gpu.replay(&graph);
    }
    assert_eq!(gpu.read(looped.address(), 1024), [12; 1024]);
    assert_eq!(gpu.read(beside.address(), 1024), [36; 1024]);
}

#[test]
fn a_branch_that_was_not_joined_makes_the_recording_an_error() {
    let name = "a_branch_that_was_not_joined_makes_the_recording_an_error";
    let Some(gpu) = Gpu::find(name) else { return };
    let (backend, branch) = (&gpu.backend, branch_of(&gpu));
    let words = gpu.words(&[0; 1024]);
    let weak = Arc::downgrade(&words);
    for round in 0..4 {
        let key = backend.begin_recording(&gpu.stream).expect("idle");
        order(&gpu, &gpu.stream, &branch);
        // With and without work on it.
        if round % 2 == 0 {
            gpu.add(&branch, &words, 100);
        }
        if round < 2 {
            refused(backend.end_recording(&key), "branch, a branch of it, was not joined");
        } else {
            backend.abandon_recording(&key);
        }
        for stream in [&gpu.stream, &branch] {
            assert!(!backend.is_recording(stream));
            gpu.add(stream, &words, 1);
            backend.synchronize(stream).expect("it runs");
        }
        let key = backend.begin_recording(&branch).expect("it can record");
        backend.end_recording(&key).expect("a whole recording");
    }
    assert_eq!(gpu.read(words.address(), 1024), [8; 1024]);
    drop(words);
    backend.collect().expect("collected");
    assert!(weak.upgrade().is_none(), "nothing that was recorded is held");
}

#[test]
fn streams_may_be_dropped_while_they_record() {
    let Some(gpu) = Gpu::find("streams_may_be_dropped_while_they_record") else { return };
    let backend = &gpu.backend;
    let words = gpu.words(&[0; 1024]);
    // The branch goes first: it cannot be joined any more.
    let (origin, branch) = (branch_of(&gpu), branch_of(&gpu));
    let key = backend.begin_recording(&origin).expect("idle");
    order(&gpu, &origin, &branch);
    gpu.add(&branch, &words, 100);
    drop(branch);
    backend.collect().expect("it leaves what records alone");
    gpu.add(&origin, &words, 100);
    refused(backend.end_recording(&key), "was not joined");
    // The stream that began goes first: the next call that gives things back ends the recording.
    let branch = branch_of(&gpu);
    let lost = backend.begin_recording(&origin).expect("idle");
    order(&gpu, &origin, &branch);
    gpu.add(&branch, &words, 100);
    drop(origin);
    refused(backend.end_recording(&lost), "is gone");
    backend.collect().expect("collected");
    assert!(!backend.is_recording(&branch));
    gpu.add(&branch, &words, 1);
    backend.synchronize(&branch).expect("it runs");
    assert_eq!(gpu.read(words.address(), 1024), [1; 1024]);
    drop(branch);
    backend.collect().expect("collected");
    assert_eq!(backend.uncollected(), 0, "all streams are given back");
}

#[test]
fn orders_that_no_graph_could_keep_are_refused_and_do_it_no_harm() {
    let name = "orders_that_no_graph_could_keep_are_refused_and_do_it_no_harm";
    let Some(gpu) = Gpu::find(name) else { return };
    let (backend, stream) = (&gpu.backend, &gpu.stream);
    let [second, runs, beside] = [branch_of(&gpu), branch_of(&gpu), branch_of(&gpu)];
    let words = gpu.words(&[0; 1024]);
    let key = backend.begin_recording(stream).expect("idle");
    let key_of_second = backend.begin_recording(&second).expect("idle");
    refused(backend.order(&runs, stream), "no replay would wait");
    refused(backend.order(&second, stream), "record two graphs");
    // Streams that do not record are ordered beside those that do.
    gpu.add(&runs, &words, 1);
    order(&gpu, &runs, &beside);
    gpu.add(&beside, &words, 1);
    backend.synchronize(&beside).expect("nothing failed");
    order(&gpu, stream, &runs);
    refused(backend.begin_recording(&runs), "records already");
    gpu.add(&runs, &words, 10);
    order(&gpu, &runs, stream);
    backend.end_recording(&key_of_second).expect("a whole recording");
    let recording = backend.end_recording(&key).expect("a whole recording");
    let graph = backend.instantiate(recording).expect("instantiates");
    assert_eq!(backend.node_count(&graph), 1);
    gpu.replay(&graph);
    assert_eq!(gpu.read(words.address(), 1024), [12; 1024]);
    if let Some(other) = gpu.second() {
        let elsewhere = other.stream("elsewhere").expect("a stream");
        refused(backend.order(stream, &elsewhere), "two devices");
    }
}

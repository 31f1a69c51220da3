//! The times at which a device comes to places in its work.

use ep_context::backend::Memory;
use ep_context::cuda::CudaMark;
use ep_context::{Backend, BackendError, Queue};

use crate::gpu::Gpu;

/// Words that take a device longer than the steps of its clock.
const MANY: usize = 1 << 22;

fn marks<const N: usize>(gpu: &Gpu) -> [CudaMark; N] {
    std::array::from_fn(|_| gpu.backend.mark().expect("a mark"))
}

fn between(gpu: &Gpu, from: &CudaMark, to: &CudaMark) -> f64 {
    gpu.backend.microseconds(from, to).expect("both were reached")
}

fn unreached(gpu: &Gpu, from: &CudaMark, to: &CudaMark) {
    let time = gpu.backend.microseconds(from, to);
    assert!(matches!(time, Err(BackendError::Unreached { .. })), "{time:?}");
}

#[test]
fn marks_are_reached_in_the_order_of_the_stream() {
    let Some(gpu) = Gpu::find("marks_are_reached_in_the_order_of_the_stream") else { return };
    let words = gpu.words(&vec![0; MANY]);
    let queue = Queue::direct(&gpu.backend, &gpu.stream);
    let [early, late] = marks(&gpu);
    unreached(&gpu, &early, &late);
    queue.reach(&early).expect("queued");
    (0..10).for_each(|_| gpu.add(&gpu.stream, &words, 1));
    let calls = gpu.backend.blocking_calls();
    queue.reach(&late).expect("queued");
    assert_eq!(gpu.backend.blocking_calls(), calls, "reaching waits for nothing");
    gpu.wait();
    let time = between(&gpu, &early, &late);
    assert!(time > 0.0, "{time} us");
    assert_eq!(between(&gpu, &late, &early), -time);
    assert_eq!(between(&gpu, &late, &late), 0.0);
}

#[test]
fn a_replay_reaches_what_was_recorded_again() {
    let Some(gpu) = Gpu::find("a_replay_reaches_what_was_recorded_again") else { return };
    let words = gpu.words(&vec![0; MANY]);
    let [before, first, second, after] = marks(&gpu);
    let reach = |mark: &CudaMark| gpu.backend.reach(&gpu.stream, mark).expect("queued");
    let record = || {
        reach(&first);
        gpu.add(&gpu.stream, &words, 1);
        reach(&second);
    };
    let mut graph = gpu.graph(|_| record());
    assert_eq!(gpu.backend.node_count(&graph), 3);
    unreached(&gpu, &first, &second);
    let replay_and_look = |graph: &_, lasts: bool| {
        reach(&before);
        gpu.replay(graph);
        reach(&after);
        gpu.wait();
        // The time within is of this replay, since it lies between marks that were reached anew.
        let parts = [(&before, &first), (&first, &second), (&second, &after)]
            .map(|(from, to)| between(&gpu, from, to));
        assert!(parts.iter().all(|part| *part >= 0.0), "{parts:?}");
        assert!(!lasts || parts[1] > 0.0, "{parts:?}");
    };
    (0..3).for_each(|_| replay_and_look(&graph, true));
    assert_eq!(gpu.read(words.address(), 1), [3]);

    // Of the same operations on other marks.
    let [third, fourth] = marks(&gpu);
    let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
    reach(&third);
    gpu.add(&gpu.stream, &words, 1);
    reach(&fourth);
    let recording = gpu.backend.end_recording(&key).expect("a whole recording");
    gpu.backend.update(&mut graph, recording).expect("updates");
    unreached(&gpu, &third, &fourth);
    gpu.replay(&graph);
    gpu.wait();
    assert!(between(&gpu, &third, &fourth) > 0.0);
    assert!(between(&gpu, &second, &third) >= 0.0);

    // Within another graph.
    let inner = gpu.graph(|_| record());
    let outer = gpu.graph(|stream| gpu.backend.replay(stream, &inner).expect("recorded"));
    drop(inner);
    replay_and_look(&outer, true);
}

#[test]
fn what_is_to_reach_a_mark_keeps_it() {
    let Some(gpu) = Gpu::find("what_is_to_reach_a_mark_keeps_it") else { return };
    gpu.backend.collect().expect("collected");
    let [direct, recorded] = marks(&gpu);
    gpu.backend.reach(&gpu.stream, &direct).expect("queued");
    let graph = gpu.graph(|stream| gpu.backend.reach(stream, &recorded).expect("recorded"));
    drop((direct, recorded));
    gpu.wait();
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0);
    gpu.replay(&graph);
    gpu.wait();
    drop(graph);
    assert!(gpu.backend.uncollected() > 0, "the graph and its mark wait to be given back");
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0);
}

#[test]
fn places_that_have_no_time_are_refused() {
    let Some(gpu) = Gpu::find("places_that_have_no_time_are_refused") else { return };
    let word = gpu.words(&[0; 2]);
    let [mark] = marks(&gpu);
    let graph = gpu.graph(|stream| {
        let condition = gpu.backend.condition(stream).expect("recording");
        let body = gpu.backend.begin_while(stream, condition).expect("recording");
        let refused = gpu.backend.reach(&body, &mark);
        assert!(matches!(refused, Err(BackendError::Recording { .. })), "{refused:?}");
        gpu.count_down(&body, &word, condition);
        gpu.backend.end_while(stream, body).expect("the innermost loop");
        gpu.backend.reach(stream, &mark).expect("behind the loop");
    });
    gpu.replay(&graph);
    gpu.wait();
    assert_eq!(between(&gpu, &mark, &mark), 0.0);
    if let Some(second) = gpu.second() {
        let stream = second.stream("other device").expect("a stream");
        for refused in [second.reach(&stream, &mark), second.microseconds(&mark, &mark).map(drop)] {
            assert!(matches!(refused, Err(BackendError::Invalid { .. })), "{refused:?}");
        }
    }
}

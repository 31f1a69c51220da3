//! Loops on the device.

use std::sync::Arc;

use ep_context::backend::{Condition, Memory, Update};
use ep_context::cuda::{CudaMemory, CudaStream};
use ep_context::{Backend, BackendError};

use crate::gpu::{Gpu, keep};

struct Loops {
    gpu: Gpu,
    /// How many trips are left: a 64-bit word.
    trips: Arc<CudaMemory>,
    /// What the body has added to.
    sum: Arc<CudaMemory>,
}

impl Loops {
    fn find(test: &str) -> Option<Self> {
        let gpu = Gpu::find(test)?;
        let (trips, sum) = (gpu.words(&[0; 2]), gpu.words(&[0; 4]));
        Some(Self { gpu, trips, sum })
    }

    /// Records a loop whose body is what `body` records, as often as `word` says.
    fn repeat(&self, on: &CudaStream, word: &Arc<CudaMemory>, body: impl FnOnce(&CudaStream)) {
        let backend = &self.gpu.backend;
        let condition = backend.condition(on).expect("recording");
        self.gpu.count_down(on, word, condition);
        let inside = backend.begin_while(on, condition).expect("recording");
        assert!(backend.is_recording(&inside) && backend.is_recording(on));
        body(&inside);
        self.gpu.count_down(&inside, word, condition);
        backend.end_while(on, inside).expect("the innermost loop");
    }

    fn set_trips(&self, word: &Arc<CudaMemory>, trips: u64) {
        self.gpu.write(word.address(), &[trips]);
    }

    fn take_sum(&self) -> u32 {
        let sum = self.gpu.read(self.sum.address(), 1)[0];
        self.gpu.write(self.sum.address(), &[0_u32]);
        sum
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T, BackendError>, because: &str) {
    match result {
        Err(BackendError::Recording { reason, .. }) if reason.contains(because) => {}
        other => panic!("expected a refusal because of '{because}', not {other:?}"),
    }
}

#[test]
fn a_loop_makes_as_many_trips_as_its_condition_says_in_each_replay() {
    let name = "a_loop_makes_as_many_trips_as_its_condition_says_in_each_replay";
    let Some(loops) = Loops::find(name) else { return };
    let gpu = &loops.gpu;
    let graph = gpu.graph(|stream| {
        loops.repeat(stream, &loops.trips, |body| gpu.add(body, &loops.sum, 1));
        gpu.add(stream, &loops.sum, 1000);
    });
    assert_eq!(gpu.backend.node_count(&graph), 5);
    for trips in [0, 1, 5, 0, 300] {
        loops.set_trips(&loops.trips, trips);
        gpu.replay(&graph);
        assert_eq!(u64::from(loops.take_sum()), 1000 + trips);
    }
    loops.set_trips(&loops.trips, 3);
    (0..10).for_each(|_| gpu.replay(&graph));
    assert_eq!(loops.take_sum(), 10_003, "a condition starts at zero in every replay");
    let drawing = gpu.cache.path().join("loop.dot");
    graph.write_dot(&drawing).expect("written");
}

#[test]
fn inner_loops_start_anew_on_every_trip() {
    let Some(loops) = Loops::find("inner_loops_start_anew_on_every_trip") else { return };
    let gpu = &loops.gpu;
    let inner = gpu.words(&[0; 2]);
    let graph = gpu.graph(|stream| {
        loops.repeat(stream, &loops.trips, |body| {
            gpu.add(body, &loops.sum, 100);
            gpu.add_at(body, inner.address(), 1, 3, &keep(&inner));
            loops.repeat(body, &inner, |body| {
                gpu.add(body, &loops.sum, 1);
                // SAFETY: the recording retains the memory; the body orders the work on it.
                unsafe {
                    let at = loops.sum.address();
                    gpu.backend
                        .copy(body, at + 8, at, 8, &keep(&loops.sum))
                        .expect("a copy in a body");
                    gpu.backend
                        .fill(body, at + 8, 0, 8, &keep(&loops.sum))
                        .expect("a fill in a body");
                }
            });
        });
    });
    loops.set_trips(&loops.trips, 2);
    gpu.replay(&graph);
    assert_eq!(loops.take_sum(), 206);
}

#[test]
fn a_graph_with_a_loop_is_updated() {
    let Some(loops) = Loops::find("a_graph_with_a_loop_is_updated") else { return };
    let gpu = &loops.gpu;
    let record = |addend| {
        let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
        loops.repeat(&gpu.stream, &loops.trips, |body| gpu.add(body, &loops.sum, addend));
        gpu.backend.end_recording(&key).expect("a whole recording")
    };
    let mut graph = gpu.backend.instantiate(record(1)).expect("instantiates");
    for addend in [10, 100] {
        let updated = gpu.backend.update(&mut graph, record(addend)).expect("updates");
        crate::gpu::say(&format!("    a graph with a loop was updated: {updated:?}"));
        assert!(matches!(updated, Update::InPlace | Update::Reinstantiated));
        for trips in [4, 0, 2] {
            loops.set_trips(&loops.trips, trips);
            gpu.replay(&graph);
            assert_eq!(u64::from(loops.take_sum()), trips * u64::from(addend));
        }
    }
}

#[test]
fn a_graph_may_stand_in_a_body_and_one_with_a_loop_nowhere() {
    let name = "a_graph_may_stand_in_a_body_and_one_with_a_loop_nowhere";
    let Some(loops) = Loops::find(name) else { return };
    let gpu = &loops.gpu;
    let plain = gpu.graph(|stream| (0..2).for_each(|_| gpu.add(stream, &loops.sum, 1)));
    let looping = gpu.graph(|stream| {
        loops.repeat(stream, &loops.trips, |body| {
            gpu.backend.replay(body, &plain).expect("recorded");
        });
    });
    assert_eq!(gpu.backend.node_count(&looping), 6);
    loops.set_trips(&loops.trips, 5);
    gpu.replay(&looping);
    assert_eq!(loops.take_sum(), 10);
    let outer = gpu.graph(|stream| {
        refused(gpu.backend.replay(stream, &looping), "loops");
        gpu.add(stream, &loops.sum, 7);
    });
    gpu.replay(&outer);
    assert_eq!(loops.take_sum(), 7, "the refusal did the recording no harm");
}

#[test]
fn misused_loops_are_refused() {
    let Some(loops) = Loops::find("misused_loops_are_refused") else { return };
    let gpu = &loops.gpu;
    let (backend, stream) = (&gpu.backend, &gpu.stream);
    refused(backend.condition(stream), "does not record");
    let mut ended = None;
    let graph = gpu.graph(|stream| {
        refused(backend.begin_while(stream, Condition(12345)), "another recording");
        let condition = backend.condition(stream).expect("recording");
        gpu.count_down(stream, &loops.trips, condition);
        let body = backend.begin_while(stream, condition).expect("recording");
        refused(backend.end_while(stream, body.clone()), "empty");
        refused(backend.end_while(stream, stream.clone()), "no body");
        refused(backend.condition(stream), "inside it");
        // SAFETY: the memory lives to the end of the test.
        let outside = unsafe { backend.fill(stream, loops.sum.address(), 0, 4, &[]) };
        refused(outside, "inside it");
        refused(backend.begin_while(&body, condition), "another body");
        gpu.add(&body, &loops.sum, 1);
        gpu.count_down(&body, &loops.trips, condition);
        backend.end_while(stream, body.clone()).expect("the innermost loop");
        refused(backend.begin_while(stream, condition), "earlier loop");
        ended = Some(body);
    });
    let body = ended.expect("recorded");
    // SAFETY: as above.
    let late = unsafe { backend.fill(&body, loops.sum.address(), 0, 4, &[]) };
    refused(late, "has ended");
    assert!(!backend.is_recording(&body));
    loops.set_trips(&loops.trips, 2);
    gpu.replay(&graph);
    assert_eq!(loops.take_sum(), 2);
}

#[test]
fn a_recording_with_an_open_loop_is_dropped_whole() {
    let Some(loops) = Loops::find("a_recording_with_an_open_loop_is_dropped_whole") else { return };
    let gpu = &loops.gpu;
    let backend = &gpu.backend;
    for end in 0..3 {
        let key = backend.begin_recording(&gpu.stream).expect("the stream is usable");
        let condition = backend.condition(&gpu.stream).expect("recording");
        if end == 0 {
            refused(backend.end_recording(&key), "no loop");
            continue;
        }
        gpu.count_down(&gpu.stream, &loops.trips, condition);
        let body = backend.begin_while(&gpu.stream, condition).expect("recording");
        gpu.add(&body, &loops.sum, 1);
        match end {
            1 => refused(backend.end_recording(&key), "no end"),
            _ => backend.abandon_recording(&key),
        }
        assert!(!backend.is_recording(&gpu.stream) && !backend.is_recording(&body));
    }
    gpu.add(&gpu.stream, &loops.sum, 5);
    assert_eq!(loops.take_sum(), 5);
}

#[test]
fn loops_nest_as_deep_as_is_said() {
    let Some(loops) = Loops::find("loops_nest_as_deep_as_is_said") else { return };
    let gpu = &loops.gpu;
    let backend = &gpu.backend;
    let words: Vec<_> = (0..4).map(|_| gpu.words(&[0; 2])).collect();
    fn nest(loops: &Loops, on: &CudaStream, words: &[Arc<CudaMemory>]) {
        let Some((word, rest)) = words.split_first() else {
            let condition = loops.gpu.backend.condition(on).expect("recording");
            refused(loops.gpu.backend.begin_while(on, condition), "at most 4");
            loops.gpu.add(on, &loops.sum, 1);
            return;
        };
        loops.gpu.add_at(on, word.address(), 1, 2, &keep(word));
        loops.repeat(on, word, |body| nest(loops, body, rest));
    }
    // The condition that found no room has no loop, so this recording cannot be ended.
    let key = backend.begin_recording(&gpu.stream).expect("idle");
    nest(&loops, &gpu.stream, &words);
    refused(backend.end_recording(&key), "no loop");
    fn whole(loops: &Loops, on: &CudaStream, words: &[Arc<CudaMemory>]) {
        let Some((word, rest)) = words.split_first() else {
            return loops.gpu.add(on, &loops.sum, 1);
        };
        loops.gpu.add_at(on, word.address(), 1, 2, &keep(word));
        loops.repeat(on, word, |body| whole(loops, body, rest));
    }
    let graph = gpu.graph(|stream| whole(&loops, stream, &words));
    gpu.replay(&graph);
    assert_eq!(loops.take_sum(), 16);
}

//! Errors and panics while a stream records, and streams that go while they do.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ep_context::backend::Memory;
use ep_context::{Backend, BackendError};

use crate::gpu::Gpu;

#[test]
fn an_abandoned_recording_leaves_nothing_behind() {
    let Some(gpu) = Gpu::find("an_abandoned_recording_leaves_nothing_behind") else { return };
    let words = gpu.words(&[0; 32]);
    let weak = std::sync::Arc::downgrade(&words);
    let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
    gpu.add(&gpu.stream, &words, 1);
    gpu.backend.abandon_recording(&key);
    gpu.backend.abandon_recording(&key);
    assert!(!gpu.backend.is_recording(&gpu.stream));
    gpu.add(&gpu.stream, &words, 2);
    assert_eq!(gpu.read(words.address(), 32), [2; 32]);
    drop(words);
    assert!(weak.upgrade().is_none());
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0);
}

#[test]
fn a_panic_while_recording_is_abandoned_like_anything_else() {
    let name = "a_panic_while_recording_is_abandoned_like_anything_else";
    let Some(gpu) = Gpu::find(name) else { return };
    let words = gpu.words(&[0; 32]);
    let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
    let recording = catch_unwind(AssertUnwindSafe(|| {
        gpu.add(&gpu.stream, &words, 1);
        panic!("in the middle");
    }));
    recording.expect_err("the panic");
    assert!(gpu.backend.is_recording(&gpu.stream));
    gpu.backend.abandon_recording(&key);
    gpu.add(&gpu.stream, &words, 2);
    assert_eq!(gpu.read(words.address(), 32), [2; 32]);
}

#[test]
fn waiting_for_a_recording_stream_by_its_raw_handle_is_refused() {
    let name = "waiting_for_a_recording_stream_by_its_raw_handle_is_refused";
    let Some(gpu) = Gpu::find(name) else { return };
    let words = gpu.words(&[0; 32]);
    let key = gpu.backend.begin_recording(&gpu.stream).expect("idle");
    gpu.add(&gpu.stream, &words, 1);
    // SAFETY: the stream lives longer than this handle of it.
    let raw = unsafe { gpu.backend.borrow_stream(gpu.stream.raw(), "raw") };
    let refused = gpu.backend.synchronize(&raw);
    assert!(matches!(refused, Err(BackendError::Recording { .. })), "{refused:?}");
    let refused = gpu.backend.begin_recording(&raw);
    assert!(matches!(refused, Err(BackendError::Recording { .. })), "{refused:?}");
    gpu.backend.end_recording(&key).expect("the refusals did no harm");
}

#[test]
fn a_stream_that_goes_while_it_records_is_ended_by_the_next_collection() {
    let name = "a_stream_that_goes_while_it_records_is_ended_by_the_next_collection";
    let Some(gpu) = Gpu::find(name) else { return };
    let words = gpu.words(&[0; 32]);
    let weak = std::sync::Arc::downgrade(&words);
    let trips = gpu.words(&[0; 2]);
    let stream = gpu.backend.stream("gone").expect("a stream");
    let key = gpu.backend.begin_recording(&stream).expect("idle");
    let condition = gpu.backend.condition(&stream).expect("recording");
    gpu.count_down(&stream, &trips, condition);
    let body = gpu.backend.begin_while(&stream, condition).expect("recording");
    gpu.add(&body, &words, 1);
    drop((stream, body, words));
    assert!(weak.upgrade().is_some(), "nothing was given back yet");
    gpu.backend.abandon_recording(&key);
    gpu.backend.collect().expect("collected");
    assert!(weak.upgrade().is_none(), "the recording is gone");
    gpu.backend.collect().expect("collected");
    assert_eq!(gpu.backend.uncollected(), 0, "the thread does not record any more");
    let words = gpu.words(&[1; 4]);
    let graph = gpu.graph(|stream| gpu.add(stream, &words, 1));
    gpu.replay(&graph);
    assert_eq!(gpu.read(words.address(), 4), [2; 4]);
}

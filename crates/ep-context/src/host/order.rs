//! One stream behind another: by an event where both run, by a branch where one records.

use super::event::event;
use super::operation::Operation;
use super::part::Part;
use super::stream::HostStream;
use crate::backend::BackendError;
use crate::recording::{Change, Link, Role, link, refused};
use crate::sync::{lock, lock_both};

const NAME: &str = "order";

/// Orders what is queued on `after` from now on behind what is queued on `before` so far.
pub(super) fn order(before: &HostStream, after: &HostStream) -> Result<(), BackendError> {
    if before == after {
        return Ok(());
    }
    if before.body.is_some() || after.body.is_some() {
        return Err(refused(NAME, "the body of a loop has no branches"));
    }
    let (mut of_before, mut of_after) = lock_both(&before.inner.part, &after.inner.part);
    match link((&of_before, &before.inner.name), (&of_after, &after.inner.name))? {
        Link::Event => queue_event(before, after)?,
        Link::Branch(recording) => {
            after.check()?;
            let id = lock(&recording).fork(&after.inner.name)?;
            *of_after = Part::of(recording, Role::Branch(id));
        }
        Link::Within(recording, change) => {
            let mut recorder = lock(&recording);
            recorder.check_order()?;
            match change {
                Change::Join(id) => {
                    recorder.join(id);
                    *of_before = Part::of(recording.clone(), Role::Joined);
                }
                Change::Branch => {
                    let id = recorder.fork(&after.inner.name)?;
                    *of_after = Part::of(recording.clone(), Role::Branch(id));
                }
                // What is recorded later is replayed later.
                Change::Nothing => {}
            }
        }
    }
    Ok(())
}

fn queue_event(before: &HostStream, after: &HostStream) -> Result<(), BackendError> {
    let (signal, moment) = event(&before.inner.name);
    for (stream, end) in [(before, Operation::Signal(signal)), (after, Operation::Await(moment))] {
        // SAFETY: neither end of an event touches memory of a device.
        unsafe { stream.inner.worker.push(end, &[]) }
            .map_err(|failure| failure.on(&stream.inner.name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use crate::backend::{Backend, BackendError, Retained};
    use crate::host::HostStream;
    use crate::host::testing::{
        Device, Gate, Log, Meet, MeetParams, Panic, PanicParams, address_of, reason,
    };

    fn order(device: &Device, before: &HostStream, after: &HostStream) {
        device.backend.order(before, after).expect("two streams that can be ordered");
    }

    #[test]
    fn what_is_ordered_behind_a_stream_waits_for_it() {
        let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
        let (one, other) = (device.stream("one"), device.stream("other"));
        device.close(&one, &gate);
        device.append(&one, &log, 1);
        device.append(&other, &log, 0);
        device.wait(&other);
        order(&device, &one, &other);
        device.append(&other, &log, 2);
        order(&device, &other, &one);
        device.append(&one, &log, 3);
        order(&device, &one, &one);
        assert_eq!(log.values(), [0], "the gate is closed");
        gate.open();
        device.wait(&one);
        device.wait(&other);
        assert_eq!(log.values(), [0, 1, 2, 3]);
        assert_eq!(device.backend.blocking_calls(), 3, "ordering waits for nothing");
    }

    #[test]
    fn what_is_queued_later_on_the_first_stream_is_not_waited_for() {
        let device = Device::new();
        let streams = [device.stream("a"), device.stream("b")];
        order(&device, &streams[0], &streams[1]);
        let words: [_; 2] = std::array::from_fn(|_| Arc::new(AtomicU32::new(0)));
        for (at, stream) in streams.iter().enumerate() {
            let (own, other) = (address_of(&words[at]), address_of(&words[1 - at]));
            let retained: [Retained; 2] = [words[0].clone(), words[1].clone()];
            device.launch::<Meet>(stream, MeetParams { own, other }, &retained);
        }
        streams.iter().for_each(|stream| device.wait(stream));
    }

    #[test]
    fn a_stream_behind_one_that_fails_fails_too() {
        let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
        let (bad, behind) = (device.stream("bad"), device.stream("behind"));
        device.close(&bad, &gate);
        device.launch::<Panic>(&bad, PanicParams { kind: 0 }, &[]);
        // One wait for the operation that fails, one for what is discarded after it.
        order(&device, &bad, &behind);
        let last = device.stream("last");
        device.append(&bad, &log, 1);
        order(&device, &bad, &last);
        for stream in [&behind, &last] {
            device.append(stream, &log, 2);
        }
        gate.open();
        for (stream, name) in [(&behind, "test/behind"), (&last, "test/last")] {
            let error = device.backend.synchronize(stream).expect_err("it went behind");
            assert_eq!(
                error.to_string(),
                format!(
                    "stream {name}: panicking failed: panicked: fixed text, on stream test/bad, \
                     which goes before"
                )
            );
        }
        assert_eq!(log.values(), []);
        // Once it is known to have failed, nothing is ordered behind it.
        let fine = device.stream("fine");
        let refused = device.backend.order(&bad, &fine);
        assert!(matches!(refused, Err(BackendError::Failed { .. })), "{refused:?}");
        device.append(&fine, &log, 3);
        device.wait(&fine);
        assert_eq!(log.values(), [3]);
    }

    #[test]
    fn a_stream_that_is_dropped_still_lets_others_go_on() {
        let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
        let behind = device.stream("behind");
        let before = device.stream("before");
        device.close(&before, &gate);
        device.append(&before, &log, 1);
        order(&device, &before, &behind);
        device.append(&behind, &log, 2);
        thread::scope(|scope| {
            // Waits for the work of the stream.
            scope.spawn(|| drop(before));
            gate.open();
        });
        device.wait(&behind);
        assert_eq!(log.values(), [1, 2]);
    }

    #[test]
    fn a_branch_is_recorded_with_the_stream_that_it_forked_from() {
        let (device, log) = (Device::new(), Log::default());
        let (origin, branch) = (device.stream("origin"), device.stream("branch"));
        device.append(&branch, &log, 0);
        let key = device.begin(&origin);
        device.append(&origin, &log, 1);
        assert!(!device.backend.is_recording(&branch));
        order(&device, &origin, &branch);
        assert!(device.backend.is_recording(&branch));
        device.append(&branch, &log, 2);
        device.append(&origin, &log, 3);
        let text = reason(device.backend.synchronize(&branch));
        assert!(text.contains("test/branch records"), "{text}");
        order(&device, &branch, &origin);
        device.append(&origin, &log, 4);
        // Joined, it takes nothing, until it is forked again.
        assert!(!device.backend.is_recording(&branch));
        // SAFETY: the call is refused.
        let text = reason(unsafe { device.backend.fill(&branch, 0, 0, 0, &[]) });
        assert!(text.contains("has been joined"), "{text}");
        order(&device, &origin, &branch);
        device.append(&branch, &log, 5);
        order(&device, &branch, &origin);
        let graph = device.end(&key);
        assert_eq!(device.backend.node_count(&graph), 5);
        device.wait(&branch);
        for _ in 0..3 {
            device.replay(&origin, &graph);
        }
        device.wait(&origin);
        let expected: Vec<_> = [0].into_iter().chain([1, 2, 3, 4, 5].repeat(3)).collect();
        assert_eq!(log.values(), expected);
        assert_eq!(Arc::strong_count(&log.values), 2, "the graph holds what the branch used");
        device.append(&branch, &log, 9);
        device.wait(&branch);
        assert_eq!(log.values().last(), Some(&9), "it runs again");
    }

    #[test]
    fn several_branches_follow_each_other_as_they_are_ordered() {
        let (device, log) = (Device::new(), Log::default());
        let origin = device.stream("origin");
        let [one, two] = ["one", "two"].map(|name| device.stream(name));
        let key = device.begin(&origin);
        order(&device, &origin, &one);
        device.append(&one, &log, 1);
        // A branch forks like the stream that began.
        order(&device, &one, &two);
        device.append(&two, &log, 2);
        order(&device, &two, &one);
        device.append(&one, &log, 3);
        order(&device, &one, &origin);
        order(&device, &two, &origin);
        let graph = device.end(&key);
        device.replay(&two, &graph);
        device.wait(&two);
        assert_eq!(log.values(), [1, 2, 3]);
    }

    #[test]
    fn a_branch_that_was_not_joined_makes_the_recording_an_error() {
        let (device, log) = (Device::new(), Log::default());
        let (origin, branch) = (device.stream("origin"), device.stream("branch"));
        for abandoned in [false, true] {
            let key = device.begin(&origin);
            order(&device, &origin, &branch);
            device.append(&branch, &log, 1);
            if abandoned {
                device.backend.abandon_recording(&key);
            } else {
                let text = reason(device.backend.end_recording(&key));
                assert!(text.contains("test/branch, a branch of it, was not joined"), "{text}");
            }
            assert_eq!(Arc::strong_count(&log.values), 1, "what was recorded is dropped");
            for stream in [&origin, &branch] {
                assert!(!device.backend.is_recording(stream));
                device.append(stream, &log, 2);
                device.wait(stream);
            }
            let key = device.begin(&branch);
            device.append(&branch, &log, 3);
            device.end(&key);
        }
        assert_eq!(log.values(), [2; 4]);
    }

    #[test]
    fn a_recording_whose_stream_is_dropped_lets_its_branches_go() {
        let (device, log) = (Device::new(), Log::default());
        let (origin, branch) = (device.stream("origin"), device.stream("branch"));
        let key = device.begin(&origin);
        order(&device, &origin, &branch);
        device.append(&branch, &log, 1);
        drop(origin);
        let text = reason(device.backend.end_recording(&key));
        assert!(text.contains("has ended"), "{text}");
        assert!(!device.backend.is_recording(&branch));
        assert_eq!(Arc::strong_count(&log.values), 1);
        device.append(&branch, &log, 2);
        device.wait(&branch);
        assert_eq!(log.values(), [2]);
    }

    #[test]
    fn a_branch_neither_begins_a_recording_nor_has_loops() {
        let (device, log) = (Device::new(), Log::default());
        let (origin, branch) = (device.stream("origin"), device.stream("branch"));
        let key = device.begin(&origin);
        order(&device, &origin, &branch);
        let text = reason(device.backend.begin_recording(&branch));
        assert!(text.contains("already"), "{text}");
        let text = reason(device.backend.condition(&branch));
        assert!(text.contains("loops stand on"), "{text}");
        device.append(&branch, &log, 1);
        order(&device, &branch, &origin);
        assert_eq!(device.backend.node_count(&device.end(&key)), 1);
    }

    #[test]
    fn orders_that_no_graph_could_keep_are_refused() {
        let (device, log) = (Device::new(), Log::default());
        let [one, two, runs] = ["one", "two", "runs"].map(|name| device.stream(name));
        let [key, second] = [&one, &two].map(|stream| device.begin(stream));
        let text = reason(device.backend.order(&runs, &one));
        assert!(text.contains("no replay would wait for stream test/runs"), "{text}");
        let text = reason(device.backend.order(&two, &one));
        assert!(text.contains("record two graphs"), "{text}");
        let condition = device.backend.condition(&one).expect("recording");
        let body = device.backend.begin_while(&one, condition).expect("recording");
        for (before, after) in [(&body, &runs), (&runs, &body), (&one, &body), (&one, &runs)] {
            let text = reason(device.backend.order(before, after));
            assert!(text.contains("no branches"), "{text}");
        }
        device.append(&body, &log, 1);
        device.backend.end_while(&one, body).expect("the innermost loop");
        // Nothing of this has done any harm.
        assert!(!device.backend.is_recording(&runs));
        device.append(&runs, &log, 2);
        device.wait(&runs);
        assert_eq!(device.backend.node_count(&device.end(&key)), 2);
        assert_eq!(device.backend.node_count(&device.end(&second)), 0);
        assert_eq!(log.values(), [2]);
    }

    #[test]
    fn streams_may_be_ordered_in_both_directions_at_once() {
        let device = Device::new();
        let [one, two] = ["one", "two"].map(|name| device.stream(name));
        thread::scope(|scope| {
            for (before, after) in [(&one, &two), (&two, &one)] {
                let device = &device;
                scope.spawn(move || (0..500).for_each(|_| order(device, before, after)));
            }
        });
        device.wait(&one);
        device.wait(&two);
    }
}

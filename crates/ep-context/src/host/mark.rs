//! Marks: when a stream came to a place in its work.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::backend::BackendError;
use crate::sync::lock;

/// A place in a stream's work, and when the stream came there last. A clone is the same place.
#[derive(Clone, Debug, Default)]
pub struct HostMark {
    reached: Arc<Mutex<Option<Instant>>>,
}

impl HostMark {
    /// The stream is here now.
    pub(super) fn reach(&self) {
        *lock(&self.reached) = Some(Instant::now());
    }

    fn time(&self, which: &str) -> Result<Instant, BackendError> {
        (*lock(&self.reached)).ok_or_else(|| BackendError::Unreached {
            reason: format!("nothing has reached the {which} one yet"),
        })
    }
}

/// Microseconds from one mark to another, negative where the second was reached first.
pub(super) fn microseconds(from: &HostMark, to: &HostMark) -> Result<f64, BackendError> {
    let (from, to) = (from.time("first")?, to.time("second")?);
    let microseconds =
        |later: Instant, earlier| later.saturating_duration_since(earlier).as_secs_f64() * 1e6;
    // One of them is zero.
    Ok(microseconds(to, from) - microseconds(from, to))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::backend::{Backend, BackendError};
    use crate::host::HostMark;
    use crate::host::testing::{Device, Gate, Log};
    use crate::queue::Queue;

    fn between(device: &Device, from: &HostMark, to: &HostMark) -> f64 {
        device.backend.microseconds(from, to).expect("both were reached")
    }

    fn unreached(device: &Device, from: &HostMark, to: &HostMark) -> String {
        match device.backend.microseconds(from, to) {
            Err(BackendError::Unreached { reason }) => reason,
            other => panic!("expected that a mark has no time, not {other:?}"),
        }
    }

    fn marks<const N: usize>(device: &Device) -> [HostMark; N] {
        std::array::from_fn(|_| device.backend.mark().expect("the host has marks"))
    }

    #[test]
    fn marks_are_reached_in_the_order_of_the_stream() {
        let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
        let stream = device.stream("s");
        let queue = Queue::direct(&device.backend, &stream);
        let [early, late, other] = marks(&device);
        queue.reach(&early).expect("queued");
        device.close(&stream, &gate);
        queue.reach(&late).expect("queued");
        // Queued last, and reached before the gate opens.
        let beside = device.stream("beside");
        device.backend.reach(&beside, &other).expect("queued");
        device.append(&beside, &log, 1);
        device.wait(&beside);
        gate.open();
        device.wait(&stream);
        assert!(between(&device, &other, &late) >= 0.0, "the gate was opened in between");
        let time = between(&device, &early, &late);
        assert!(time >= 0.0);
        assert_eq!(between(&device, &late, &early), -time);
        assert_eq!(between(&device, &late, &late), 0.0);
    }

    #[test]
    fn a_mark_that_nothing_has_reached_has_no_time() {
        let (device, gate) = (Device::new(), Gate::default());
        let stream = device.stream("s");
        let [one, other] = marks(&device);
        assert!(unreached(&device, &one, &other).contains("the first one"));
        device.backend.reach(&stream, &one).expect("queued");
        device.close(&stream, &gate);
        device.backend.reach(&stream, &other).expect("queued");
        assert!(unreached(&device, &other, &other).contains("the first one"), "only queued");
        gate.open();
        device.wait(&stream);
        assert!(between(&device, &one, &other) >= 0.0);
    }

    #[test]
    fn a_replay_reaches_what_was_recorded_again() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let [before, first, second, after] = marks(&device);
        let key = device.begin(&stream);
        device.backend.reach(&stream, &first).expect("recorded");
        device.append(&stream, &log, 1);
        device.backend.reach(&stream, &second).expect("recorded");
        let graph = device.end(&key);
        assert_eq!(device.backend.node_count(&graph), 3);
        device.wait(&stream);
        unreached(&device, &first, &second);
        for _ in 0..3 {
            device.backend.reach(&stream, &before).expect("queued");
            device.replay(&stream, &graph);
            device.backend.reach(&stream, &after).expect("queued");
            device.wait(&stream);
            let parts = [(&before, &first), (&first, &second), (&second, &after)]
                .map(|(from, to)| between(&device, from, to));
            assert!(parts.iter().all(|part| *part >= 0.0), "{parts:?}");
        }
        assert_eq!(log.values(), [1, 1, 1]);
    }

    #[test]
    fn what_is_to_reach_a_mark_keeps_it() {
        let device = Device::new();
        let stream = device.stream("s");
        let [mark] = marks(&device);
        let weak = Arc::downgrade(&mark.reached);
        let key = device.begin(&stream);
        device.backend.reach(&stream, &mark).expect("recorded");
        let graph = device.end(&key);
        drop(mark);
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert!(weak.upgrade().is_some(), "the graph holds it");
        drop(graph);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn the_body_of_a_loop_takes_no_mark() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let [mark] = marks(&device);
        let key = device.begin(&stream);
        let condition = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, condition).expect("recording");
        let refused = device.backend.reach(&body, &mark);
        assert!(matches!(refused, Err(BackendError::Recording { .. })), "{refused:?}");
        device.append(&body, &log, 1);
        device.backend.end_while(&stream, body).expect("the innermost loop");
        device.backend.reach(&stream, &mark).expect("behind the loop");
        let graph = device.end(&key);
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert_eq!(between(&device, &mark, &mark), 0.0);
    }
}

//! Taking part in a recording that somebody else began.

use std::sync::Arc;

use super::Recorder;
use crate::backend::BackendError;
use crate::keepsake::{Keeper, Keepsake};
use crate::recording::refused;

/// Whoever takes part in a recording that somebody else began.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) keepsake: Arc<Keepsake>,
    /// Branches that were out, and conditions that there were, when it came.
    branches: usize,
    conditions: usize,
}

impl Recorder {
    /// Lets what is recorded from here on be kept apart.
    pub(in crate::host) fn enter(&mut self) -> Result<(), BackendError> {
        const NAME: &str = "enter_recording";
        if self.guest.is_some() {
            return Err(refused(NAME, "somebody takes part in the recording already"));
        }
        if !self.bodies.is_empty() {
            return Err(refused(NAME, "the body of a loop is being recorded"));
        }
        let keepsake = Keepsake::new();
        self.held.keep(&[Arc::new(Keeper { keepsake: keepsake.clone() })]);
        let (branches, conditions) = (self.branches.len(), self.conditions.len());
        self.guest = Some(Guest { keepsake, branches, conditions });
        Ok(())
    }

    /// Ends what `enter` began.
    pub(in crate::host) fn leave(&mut self) -> Result<(), BackendError> {
        const NAME: &str = "leave_recording";
        let Some(guest) = self.guest.take() else {
            return Err(refused(NAME, "nobody takes part in the recording"));
        };
        let reason = if !self.bodies.is_empty() {
            "a loop has no end"
        } else if self.branches.len() > guest.branches {
            "a branch was not joined"
        } else if self.conditions[guest.conditions..].iter().any(|condition| !condition.used) {
            "a condition has no loop"
        } else {
            return Ok(());
        };
        self.spoil(reason);
        Err(refused(NAME, reason))
    }

    /// Sees to it that no graph comes of this.
    pub(in crate::host) fn spoil(&mut self, reason: &'static str) {
        self.guest = None;
        self.bodies.clear();
        self.spoilt.get_or_insert(reason);
    }

    /// Whether somebody takes part.
    pub(in crate::host) fn has_guest(&self) -> bool {
        self.guest.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::Backend;
    use crate::host::testing::{Device, Log, reason};
    use crate::keepsake::reclaim;

    #[test]
    fn a_guest_keeps_apart_what_it_records() {
        let (device, own, guests) = (Device::new(), Log::default(), Log::default());
        let stream = device.stream("s");
        let text = reason(device.backend.enter_recording(&stream));
        assert!(text.contains("does not record"), "{text}");
        let key = device.begin(&stream);
        let text = reason(device.backend.leave_recording(&stream));
        assert!(text.contains("nobody takes part"), "{text}");
        device.append(&stream, &own, 1);
        device.backend.enter_recording(&stream).expect("recording");
        let text = reason(device.backend.enter_recording(&stream));
        assert!(text.contains("already"), "{text}");
        device.append(&stream, &guests, 2);
        device.backend.leave_recording(&stream).expect("it is whole");
        device.append(&stream, &own, 3);
        let graph = device.end(&key);
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert_eq!((own.values(), guests.values()), (vec![1, 3], vec![2]));
        drop(graph);
        assert_eq!(Arc::strong_count(&own.values), 1, "what the owner recorded is dropped at once");
        // Another test of this process may reclaim first, and still be about to drop it.
        reclaim();
        let start = Instant::now();
        while Arc::strong_count(&guests.values) > 1 && start.elapsed() < Duration::from_secs(60) {
            thread::yield_now();
        }
        assert_eq!(Arc::strong_count(&guests.values), 1);
    }

    #[test]
    fn what_a_guest_left_open_is_in_no_graph() {
        let (device, log) = (Device::new(), Log::default());
        let (stream, branch) = (device.stream("s"), device.stream("branch"));
        let leave = |begin: &dyn Fn()| {
            let key = device.begin(&stream);
            device.backend.enter_recording(&stream).expect("recording");
            begin();
            let text = reason(device.backend.leave_recording(&stream));
            let ended = reason(device.backend.end_recording(&key));
            assert!(ended.contains(&text), "{ended}");
            text
        };
        let loops = leave(&|| {
            let condition = device.backend.condition(&stream).expect("recording");
            let body = device.backend.begin_while(&stream, condition).expect("recording");
            device.append(&body, &log, 1);
        });
        assert!(loops.contains("no end"), "{loops}");
        let condition = leave(&|| {
            device.backend.condition(&stream).expect("recording");
        });
        assert!(condition.contains("no loop"), "{condition}");
        let branches =
            leave(&|| device.backend.order(&stream, &branch).expect("the stream records"));
        assert!(branches.contains("joined"), "{branches}");
        // Spoilt on purpose; and without a guest nothing is spoilt.
        let key = device.begin(&stream);
        device.backend.spoil_recording(&stream);
        device.end(&key);
        let key = device.begin(&stream);
        device.backend.enter_recording(&stream).expect("recording");
        device.backend.spoil_recording(&stream);
        let text = reason(device.backend.end_recording(&key));
        assert!(text.contains("as a whole"), "{text}");
        device.append(&stream, &log, 2);
        device.wait(&stream);
        assert_eq!(log.values(), [2]);
    }
}

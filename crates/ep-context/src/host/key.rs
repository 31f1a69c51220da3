//! The right to end a recording.

use std::fmt;
use std::sync::{Arc, Mutex};

use super::graph::HostRecording;
use super::recorder::Recorder;
use crate::backend::BackendError;
use crate::recording::refused;
use crate::sync::lock;

/// The right to end one recording of a [`HostStream`](super::HostStream).
#[must_use = "nobody can end a recording without its key"]
pub struct HostRecordingKey {
    /// The recording itself, since its stream may have begun another after it.
    recording: Arc<Mutex<Recorder>>,
}

impl HostRecordingKey {
    pub(super) fn new(recording: Arc<Mutex<Recorder>>) -> Self {
        Self { recording }
    }

    pub(super) fn end(&self) -> Result<HostRecording, BackendError> {
        self.take("end_recording")?.finish()
    }

    pub(super) fn abandon(&self) {
        drop(self.take("abandon_recording"));
    }

    /// Ends the recording for all streams that take part in it. What it retains is dropped by the
    /// caller, without a lock held: a destructor may use the stream.
    fn take(&self, operation: &'static str) -> Result<Recorder, BackendError> {
        let mut recorder = lock(&self.recording);
        if recorder.is_over() {
            return Err(refused(operation, "the recording has ended"));
        }
        if recorder.has_guest() {
            return Err(refused(operation, "a step is being recorded, which has to end before"));
        }
        Ok(recorder.take())
    }
}

impl fmt::Debug for HostRecordingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_over = lock(&self.recording).is_over();
        f.debug_struct("HostRecordingKey").field("is_over", &is_over).finish()
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::Backend;
    use crate::host::testing::{Device, Log, reason};

    #[test]
    fn a_key_ends_its_own_recording_and_no_later_one() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let ended = device.begin(&stream);
        device.end(&ended);
        let abandoned = device.begin(&stream);
        device.backend.abandon_recording(&abandoned);
        let key = device.begin(&stream);
        device.append(&stream, &log, 1);
        for old in [&ended, &abandoned] {
            let text = reason(device.backend.end_recording(old));
            assert!(text.contains("has ended"), "{text}");
            device.backend.abandon_recording(old);
            assert!(device.backend.is_recording(&stream));
        }
        drop((ended, abandoned));
        assert_eq!(device.backend.node_count(&device.end(&key)), 1);
        assert_eq!(log.values(), []);
    }

    #[test]
    fn a_key_is_good_again_when_nobody_takes_part_any_more() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let key = device.begin(&stream);
        device.backend.enter_recording(&stream).expect("recording");
        device.append(&stream, &log, 1);
        let text = reason(device.backend.end_recording(&key));
        assert!(text.contains("a step is being recorded"), "{text}");
        device.backend.abandon_recording(&key);
        device.append(&stream, &log, 2);
        device.backend.leave_recording(&stream).expect("it is whole");
        assert_eq!(device.backend.node_count(&device.end(&key)), 2);
        assert_eq!(log.values(), []);
    }

    #[test]
    fn a_stream_whose_key_is_lost_records_until_it_is_dropped() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        drop(device.begin(&stream));
        device.append(&stream, &log, 1);
        assert!(device.backend.is_recording(&stream));
        let text = reason(device.backend.begin_recording(&stream));
        assert!(text.contains("already"), "{text}");
        drop(stream);
        assert_eq!(std::sync::Arc::strong_count(&log.values), 1, "what was recorded is dropped");
        assert_eq!(log.values(), []);
    }
}

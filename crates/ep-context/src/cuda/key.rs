//! The right to end a recording.

use std::fmt;
use std::sync::{Arc, Weak};

use super::graph::CudaRecording;
use super::part::Recording;
use super::recorder::Recorder;
use super::stream::{StreamInner, another_thread};
use crate::backend::BackendError;
use crate::recording::{Ends, refused};
use crate::sync::lock;

/// The right to end one recording of a [`CudaStream`](super::CudaStream), on the thread that began it.
#[must_use = "nobody can end a recording without its key"]
pub struct CudaRecordingKey {
    /// Not held, since the owner of a borrowed stream may destroy it when its handles are gone.
    stream: Weak<StreamInner>,
    /// The recording itself, since the stream may have begun another after it.
    recording: Arc<Recording>,
}

impl CudaRecordingKey {
    pub(super) fn new(stream: &Arc<StreamInner>, recording: Arc<Recording>) -> Self {
        Self { stream: Arc::downgrade(stream), recording }
    }

    pub(super) fn end(&self) -> Result<CudaRecording, BackendError> {
        const NAME: &str = "end_recording";
        let Some(stream) = self.stream.upgrade() else {
            return Err(refused(NAME, "the stream that began the recording is gone"));
        };
        let recorder = self.take(&stream, NAME)?.ok_or_else(|| {
            refused(
                NAME,
                if self.recording.is_over() {
                    "the recording has ended"
                } else {
                    "a step is being recorded, which has to end before"
                },
            )
        })?;
        stream.device.enter(|driver| recorder.finish(driver))
    }

    pub(super) fn abandon(&self) {
        let Some(stream) = self.stream.upgrade() else { return };
        let outcome = self.take(&stream, "abandon_recording").and_then(|recorder| {
            let Some(recorder) = recorder else { return Ok(()) };
            stream.device.enter(|driver| {
                recorder.abandon(driver);
                Ok(())
            })
        });
        if let Err(error) = outcome {
            tracing::warn!(%error, stream = stream.name, "a recording could not be abandoned");
        }
    }

    /// The recorder, unless the recording has ended or somebody takes part in it. Refused on another
    /// thread than its own, where the driver would not end it; it goes on then.
    fn take(
        &self,
        stream: &StreamInner,
        operation: &'static str,
    ) -> Result<Option<Recorder>, BackendError> {
        // No operation is being queued on the stream meanwhile.
        let _state = lock(&stream.state);
        let mut foreign = false;
        let taken = self.recording.lock().take_if(|recorder| {
            // A part that somebody takes ends before the recording.
            let found = !recorder.has_guest();
            foreign = found && !recorder.is_of_this_thread();
            found && !foreign
        });
        if foreign { Err(another_thread(operation)) } else { Ok(taken) }
    }
}

impl fmt::Debug for CudaRecordingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaRecordingKey").field("is_over", &self.recording.is_over()).finish()
    }
}

//! Streams: where an operation goes depends on whether the stream runs or records.

use std::fmt;
use std::sync::{Arc, Mutex};

use super::key::HostRecordingKey;
use super::operation::Operation;
use super::part::Part;
use super::recorder::Recorder;
use super::worker::{Worker, on_worker_thread};
use crate::backend::{BackendError, Condition, Retained};
use crate::recording::{ENDED_BODY, Role, ScopeId, refused};
use crate::sync::{lock, owned};

/// An ordered queue of work, run by a thread of its own, or the body of a loop being recorded on
/// one. A clone is the same stream.
///
/// When the last clone is dropped, what is queued still runs, and the drop waits for it unless it
/// happens on the thread of a stream.
#[derive(Clone)]
pub struct HostStream {
    pub(super) inner: Arc<Inner>,
    pub(super) body: Option<ScopeId>,
}

pub(super) struct Inner {
    pub(super) name: String,
    /// Locked before the recorder in it and before the worker's queue, so that what one thread
    /// queues falls wholly before or wholly after the moment at which another begins to record.
    pub(super) part: Mutex<Part>,
    pub(super) worker: Worker,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody could end the recording any more, and its branches would record for ever.
        let part = owned(&mut self.part);
        drop(part.take_own());
    }
}

/// The same queue or body.
impl PartialEq for HostStream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) && self.body == other.body
    }
}

impl Eq for HostStream {}

impl HostStream {
    pub(super) fn new(label: &str, name: &str) -> Result<Self, BackendError> {
        let name = format!("{label}/{name}");
        let worker = Worker::spawn(&name)?;
        let part = Mutex::new(Part::default());
        Ok(Self { inner: Arc::new(Inner { name, part, worker }), body: None })
    }

    /// Queues or records an operation.
    ///
    /// # Safety
    ///
    /// As for [`crate::Backend::launch`].
    pub(super) unsafe fn submit(
        &self,
        operation: Operation,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        let part = lock(&self.inner.part);
        match part.recorder(operation.name())? {
            Some(mut recorder) => recorder.record(self.body, operation, retained),
            None if self.body.is_some() => Err(refused(operation.name(), ENDED_BODY)),
            // SAFETY: the caller's promise.
            None => unsafe { self.inner.worker.push(operation, retained) }
                .map_err(|failure| failure.on(&self.inner.name)),
        }
    }

    /// Fails while the stream records, saying that `operation` cannot be recorded and why.
    pub(super) fn refuse_recording(
        &self,
        operation: &'static str,
        reason: &str,
    ) -> Result<(), BackendError> {
        match (lock(&self.inner.part).recording().is_some(), self.body) {
            (true, _) => Err(refused(
                operation,
                &format!("stream {} records, and {reason}", self.inner.name),
            )),
            (false, Some(_)) => Err(refused(operation, ENDED_BODY)),
            (false, None) => Ok(()),
        }
    }

    /// Fails on the body of a loop, saying that `operation` cannot stand there and why.
    pub(super) fn refuse_body(
        &self,
        operation: &'static str,
        reason: &str,
    ) -> Result<(), BackendError> {
        if self.body.is_some() {
            return Err(refused(operation, &format!("this is the body of a loop, and {reason}")));
        }
        Ok(())
    }

    /// Waits until everything that is queued now has run. Refused on the thread of a stream.
    pub(super) fn wait(&self) -> Result<(), BackendError> {
        if on_worker_thread() {
            return Err(BackendError::Unavailable {
                what: format!("waiting for stream {}", self.inner.name),
                reason: "the caller is the thread of a stream, for which others wait".to_owned(),
            });
        }
        self.inner.worker.wait().map_err(|failure| failure.on(&self.inner.name))
    }

    /// The failure that ended the work of this stream, if there was one so far.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        self.inner.worker.check().map_err(|failure| failure.on(&self.inner.name))
    }

    pub(super) fn is_recording(&self) -> bool {
        let part = lock(&self.inner.part);
        let recorder = part.recorder("is_recording");
        recorder.is_ok_and(|open| open.is_some_and(|recorder| recorder.is_open(self.body)))
    }

    pub(super) fn begin_recording(&self) -> Result<HostRecordingKey, BackendError> {
        const NAME: &str = "begin_recording";
        let mut part = lock(&self.inner.part);
        if part.recording().is_some() {
            return Err(refused(NAME, &format!("stream {} records already", self.inner.name)));
        }
        if self.body.is_some() {
            return Err(refused(NAME, ENDED_BODY));
        }
        self.check()?;
        let recording = Arc::new(Mutex::new(Recorder::new()));
        *part = Part::of(recording.clone(), Role::Origin);
        Ok(HostRecordingKey::new(recording))
    }

    pub(super) fn enter_recording(&self) -> Result<(), BackendError> {
        self.as_guest("enter_recording", Recorder::enter)
    }

    pub(super) fn leave_recording(&self) -> Result<(), BackendError> {
        self.as_guest("leave_recording", Recorder::leave)
    }

    pub(super) fn spoil_recording(&self) {
        let spoilt = self.as_guest("spoil_recording", |recorder| {
            if recorder.has_guest() {
                recorder.spoil("its owner was told why");
            }
            Ok(())
        });
        if let Err(error) = spoilt {
            tracing::debug!(%error, "no recording to spoil");
        }
    }

    fn as_guest(
        &self,
        operation: &'static str,
        action: impl FnOnce(&mut Recorder) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.body.is_some() {
            return Err(refused(operation, "the stream is the body of a loop"));
        }
        self.with_recorder(operation, action)
    }

    pub(super) fn condition(&self) -> Result<Condition, BackendError> {
        self.with_recorder("condition", |recorder| recorder.condition(self.body))
    }

    pub(super) fn begin_while(&self, condition: Condition) -> Result<Self, BackendError> {
        let body = self
            .with_recorder("begin_while", |recorder| recorder.begin_while(self.body, condition))?;
        Ok(Self { inner: self.inner.clone(), body: Some(body) })
    }

    pub(super) fn end_while(&self, body: &Self) -> Result<(), BackendError> {
        if !Arc::ptr_eq(&self.inner, &body.inner) {
            return Err(refused("end_while", "the body belongs to a recording of another stream"));
        }
        self.with_recorder("end_while", |recorder| recorder.end_while(self.body, body.body))
    }

    fn with_recorder<T>(
        &self,
        operation: &'static str,
        action: impl FnOnce(&mut Recorder) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let part = lock(&self.inner.part);
        if part.is_branch() {
            return Err(refused(operation, "loops stand on the stream that began the recording"));
        }
        match part.recorder(operation)? {
            Some(mut recorder) => action(&mut recorder),
            None if self.body.is_some() => Err(refused(operation, ENDED_BODY)),
            None => Err(refused(operation, &format!("stream {} does not record", self.inner.name))),
        }
    }
}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostStream")
            .field("name", &self.inner.name)
            .field("is_body", &self.body.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::backend::{Backend, BackendError, Memory, Retained};
    use crate::host::HostStream;
    use crate::host::testing::{Device, Log};

    fn assert_refused<T: std::fmt::Debug>(result: Result<T, BackendError>, name: &str, why: &str) {
        match result {
            Err(BackendError::Recording { operation, reason }) => {
                assert_eq!(operation, name);
                assert!(reason.contains(why), "{name}: {reason}");
            }
            other => panic!("expected {name} to be refused, not {other:?}"),
        }
    }

    fn transfer_refusals(device: &Device, stream: &HostStream, why: &str) {
        // SAFETY: both are refused, so no byte is read or written.
        unsafe {
            assert_refused(device.backend.upload(stream, 0, &[1], &[]), "upload", why);
            assert_refused(device.backend.download(stream, 0, &mut [1]), "download", why);
        }
        assert_refused(device.backend.synchronize(stream), "synchronize", why);
    }

    #[test]
    fn bytes_go_up_across_and_down() {
        let device = Device::new();
        let stream = device.stream("s");
        let memory = Arc::new(device.backend.allocate(64).expect("memory"));
        let (start, retained) = (memory.address(), [memory.clone() as Retained]);
        let mut read = [0; 20];
        // SAFETY: all ranges lie in the 64 bytes of `memory`, which is retained; the two ranges of
        // the copy are disjoint.
        unsafe {
            let data = vec![1, 2, 3, 4];
            device.backend.upload(&stream, start, &data, &retained).expect("runs");
            drop(data);
            device.backend.fill(&stream, start + 4, 9, 4, &retained).expect("runs");
            device.backend.copy(&stream, start + 10, start, 8, &retained).expect("runs");
            device.backend.download(&stream, start, &mut read).expect("runs");
        }
        assert_eq!(read, [1, 2, 3, 4, 9, 9, 9, 9, 0, 0, 1, 2, 3, 4, 9, 9, 9, 9, 0, 0]);
    }

    #[test]
    fn what_waits_or_reads_host_bytes_is_refused_while_recording() {
        let (device, log) = (Device::new(), Log::default());
        let (stream, other) = (device.stream("s"), device.stream("other"));
        let key = device.begin(&stream);
        transfer_refusals(&device, &stream, "stream test/s records");
        assert_refused(device.backend.begin_recording(&stream), "begin_recording", "already");
        assert!(device.backend.is_recording(&stream.clone()));
        // Neither another stream nor the recording takes harm.
        assert!(!device.backend.is_recording(&other));
        device.append(&other, &log, 1);
        device.wait(&other);
        device.append(&stream, &log, 2);
        let graph = device.end(&key);
        assert!(!device.backend.is_recording(&stream));
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert_eq!(log.values(), [1, 2]);
    }

    #[test]
    fn what_needs_a_recording_is_refused_without_one() {
        let device = Device::new();
        let stream = device.stream("s");
        assert_refused(device.backend.condition(&stream), "condition", "does not record");
        let key = device.begin(&stream);
        let condition = device.backend.condition(&stream).expect("recording");
        device.end(&key);
        assert_refused(
            device.backend.begin_while(&stream, condition),
            "begin_while",
            "does not record",
        );
        device.wait(&stream);
    }

    #[test]
    fn work_queued_before_a_recording_runs() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        device.append(&stream, &log, 1);
        let key = device.begin(&stream);
        device.append(&stream, &log, 2);
        device.backend.abandon_recording(&key);
        device.wait(&stream);
        assert_eq!(log.values(), [1]);
        assert_eq!(Arc::strong_count(&log.values), 1, "what was recorded is dropped");
    }

    #[test]
    fn a_destructor_may_use_the_stream_whose_recording_held_it() {
        struct Asks(Device, HostStream);
        impl Drop for Asks {
            fn drop(&mut self) {
                assert!(!self.0.backend.is_recording(&self.1));
            }
        }
        let device = Device::new();
        let stream = device.stream("s");
        let key = device.begin(&stream);
        let retained: Retained = Arc::new(Asks(Device::new(), stream.clone()));
        // SAFETY: nothing is written.
        unsafe { device.backend.fill(&stream, 0, 0, 0, &[retained]) }.expect("recording");
        device.backend.abandon_recording(&key);
        device.wait(&stream);
    }

    #[test]
    fn the_body_of_a_loop_takes_nothing_once_it_has_ended() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let key = device.begin(&stream);
        let condition = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, condition).expect("recording");
        assert!(device.backend.is_recording(&body));
        transfer_refusals(&device, &body, "stream test/s records");
        device.append(&body, &log, 1);
        device.backend.end_while(&stream, body.clone()).expect("the innermost loop");
        assert!(!device.backend.is_recording(&body));
        let gone = "the loop whose body the stream recorded has ended";
        assert_refused(device.backend.condition(&body), "condition", gone);
        device.end(&key);
        transfer_refusals(&device, &body, gone);
        assert_refused(device.backend.begin_recording(&body), "begin_recording", gone);
        // SAFETY: the call is refused.
        let filled = unsafe { device.backend.fill(&body, 0, 0, 0, &[]) };
        assert_refused(filled, "fill", gone);
    }

    #[test]
    fn a_body_whose_recording_was_abandoned_is_not_one_of_the_next() {
        let device = Device::new();
        let stream = device.stream("s");
        let key = device.begin(&stream);
        let condition = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, condition).expect("recording");
        assert_refused(device.backend.begin_recording(&body), "begin_recording", "already");
        device.backend.abandon_recording(&key);
        assert!(!device.backend.is_recording(&stream));
        let key = device.begin(&stream);
        assert!(!device.backend.is_recording(&body), "a later recording is another one");
        device.end(&key);
    }
}

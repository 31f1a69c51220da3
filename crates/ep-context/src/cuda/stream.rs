//! Streams: where an operation goes depends on whether the stream runs or records.

use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::device::Device;
use super::driver::{Driver, DriverError, NOT_READY, StreamHandle};
use super::graph::Graph;
use super::graveyard::Grave;
use super::in_flight::InFlight;
use super::key::CudaRecordingKey;
use super::part::{Part, Recording};
use super::recorder::Recorder;
use super::remains::Remains;
use crate::backend::{BackendError, Condition, Retained};
use crate::recording::{ENDED_BODY, ScopeId, refused};
use crate::sync::{lock, owned};

/// An ordered queue of work on a device, or the body of a loop being recorded on one. A clone is the
/// same stream.
///
/// Dropping the last clone waits for nothing: what is queued still runs.
#[derive(Clone)]
pub struct CudaStream {
    pub(super) inner: Arc<StreamInner>,
    pub(super) body: Option<BodyStream>,
}

/// The body of a loop, and the stream that it is recorded on.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyStream {
    pub(super) id: ScopeId,
    pub(super) handle: StreamHandle,
}

pub(super) struct StreamInner {
    pub(super) device: Arc<Device>,
    pub(super) handle: StreamHandle,
    /// Whether the stream belongs to the caller.
    borrowed: bool,
    /// Whether others may have it record: it belongs to them, they know its handle, or their recording
    /// has spread to it. Before it is used it is asked about that then.
    watched: AtomicBool,
    pub(super) name: String,
    /// Locked while an operation is queued, so that what one thread queues falls wholly before or
    /// wholly after the moment at which another begins to record. Locked before the recorder.
    pub(super) state: Mutex<State>,
}

/// The same queue or body.
impl PartialEq for CudaStream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) && self.id() == other.id()
    }
}

impl Eq for CudaStream {}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) part: Part,
    pub(super) in_flight: InFlight,
}

impl CudaStream {
    pub(super) fn create(device: &Arc<Device>, name: String) -> Result<Self, BackendError> {
        let handle = device.create_stream()?;
        Ok(Self::of(device, handle, false, name))
    }

    /// # Safety
    ///
    /// As for [`super::CudaBackend::borrow_stream`].
    pub(super) unsafe fn borrow(device: &Arc<Device>, handle: StreamHandle, name: String) -> Self {
        Self::of(device, handle, true, name)
    }

    fn of(device: &Arc<Device>, handle: StreamHandle, borrowed: bool, name: String) -> Self {
        let state = Mutex::new(State::default());
        let (device, watched) = (device.clone(), AtomicBool::new(borrowed));
        let inner = Arc::new(StreamInner { device, handle, borrowed, watched, name, state });
        let device = &inner.device;
        device.register(&inner);
        Self { inner, body: None }
    }

    /// The driver's handle of the stream: for the body of a loop, of the stream that records it,
    /// which is any recording's on the device once the body has ended.
    ///
    /// Work of the caller's own may be queued on it, in the order of the calls. While the stream
    /// records, that work becomes part of the graph, and what it uses must outlive the graph. While
    /// the caller captures on it by other means, operations of this crate are refused, unless they take
    /// part in that: see [`Backend::enter_recording`](crate::Backend::enter_recording).
    pub fn raw(&self) -> sys::CUstream {
        self.inner.watch();
        self.body.map_or(self.inner.handle, |body| body.handle).0
    }

    /// Queues or records what `call` queues on the stream that it is given.
    pub(super) fn submit(
        &self,
        operation: &'static str,
        retained: &[Retained],
        call: impl FnOnce(&'static Driver, sys::CUstream) -> Result<(), DriverError>,
    ) -> Result<(), BackendError> {
        self.submit_knowing(operation, retained, |driver, stream, _| call(driver, stream))
    }

    /// As [`CudaStream::submit`], for a call that is another where it records: the third argument
    /// says whether it does.
    pub(super) fn submit_knowing(
        &self,
        operation: &'static str,
        retained: &[Retained],
        call: impl FnOnce(&'static Driver, sys::CUstream, bool) -> Result<(), DriverError>,
    ) -> Result<(), BackendError> {
        let inner = &*self.inner;
        let mut state = lock(&inner.state);
        let released = inner.device.enter(|driver| {
            if let Some(mut open) = state.part.open(operation)? {
                let (recorder, target) = open.target(inner.handle, self.id(), operation)?;
                recorder.check_capture(driver, target, operation)?;
                call(driver, target.0, true).map_err(|error| inner.failed(operation, error))?;
                recorder.retain(retained);
                return Ok(Vec::new());
            }
            if self.body.is_some() {
                return Err(refused(operation, ENDED_BODY));
            }
            inner.refuse_foreign_capture(driver, operation)?;
            call(driver, inner.handle.0, false).map_err(|error| inner.failed(operation, error))?;
            let (device, stream) = (&inner.device, inner.handle);
            Ok(state.in_flight.hold(device, driver, stream, inner.is_watched(), retained))
        });
        drop(state);
        released.map(drop)
    }

    /// Fails while the stream records, saying that `operation` cannot be recorded and why.
    pub(super) fn refuse_recording(
        &self,
        operation: &'static str,
        reason: &str,
    ) -> Result<(), BackendError> {
        self.inner.refuse_recording(&lock(&self.inner.state), self.body, operation, reason)
    }

    /// The failure of work that ran, if there was one so far. Does not wait.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        let inner = &*self.inner;
        // Held meanwhile, so that no recording begins: to ask a stream that records would end that.
        let state = lock(&inner.state);
        if inner.refuse_recording(&state, self.body, "check", "it records").is_err() {
            return Ok(());
        }
        inner.device.enter_beside_recordings(|driver| {
            if inner.is_captured_by_others(driver)? {
                return Ok(());
            }
            // SAFETY: the handle is valid, and the stream does not record.
            match unsafe { driver.cuStreamQuery(inner.handle.0) } {
                Err(error) if error.code != NOT_READY => {
                    Err(inner.failed("an operation of the stream", error))
                }
                _ => Ok(()),
            }
        })
    }

    /// Waits until everything that is queued now has run, and counts that in `blocking`.
    pub(super) fn wait(
        &self,
        operation: &'static str,
        reason: &str,
        blocking: &AtomicU64,
    ) -> Result<(), BackendError> {
        let inner = &*self.inner;
        let device = &inner.device;
        let mut state = lock(&inner.state);
        inner.refuse_recording(&state, self.body, operation, reason)?;
        // The wait is for an event, without the lock: another thread may queue, or begin to record,
        // meanwhile, and a stream that records must not be waited for.
        let event = device.enter_beside_recordings(|driver| {
            inner.refuse_foreign_capture(driver, operation)?;
            let event = device.take_event(driver)?;
            // SAFETY: both handles are valid, and the stream does not record.
            if let Err(error) = unsafe { driver.cuEventRecord(event.0, inner.handle.0) } {
                device.return_event(event);
                return Err(inner.failed(operation, error));
            }
            Ok(event)
        })?;
        let held = state.in_flight.take_all(device);
        drop(state);
        let mut over = true;
        blocking.fetch_add(1, Ordering::Relaxed);
        let waited = device.enter_beside_recordings(|driver| {
            // SAFETY: the event was recorded above and is this call's own.
            unsafe { driver.cuEventSynchronize(event.0) }.map_err(|error| {
                over = error.is_fatal();
                inner.failed(operation, error)
            })
        });
        device.return_event(event);
        if !over {
            lock(&inner.state).in_flight.restore(held);
        }
        waited
    }

    pub(super) fn is_recording(&self) -> bool {
        const NAME: &str = "is_recording";
        let state = lock(&self.inner.state);
        let Ok(Some(mut open)) = state.part.open(NAME) else { return false };
        open.recorder(NAME).is_ok_and(|recorder| recorder.is_open(self.id()))
    }

    pub(super) fn begin_recording(&self) -> Result<CudaRecordingKey, BackendError> {
        const NAME: &str = "begin_recording";
        let inner = &*self.inner;
        let mut state = lock(&inner.state);
        if state.part.recording().is_some() {
            return Err(refused(NAME, &format!("stream {} records already", inner.name)));
        }
        if self.body.is_some() {
            return Err(refused(NAME, ENDED_BODY));
        }
        let recorder = inner.device.enter(|driver| {
            inner.refuse_foreign_capture(driver, NAME)?;
            Recorder::begin(&inner.device, driver, inner.handle)
                .map_err(|error| inner.failed(NAME, error))
        })?;
        let recording = Recording::of(recorder);
        state.part = Part::beginning(recording.clone());
        Ok(CudaRecordingKey::new(&self.inner, recording))
    }

    pub(super) fn enter_recording(&self) -> Result<(), BackendError> {
        const NAME: &str = "enter_recording";
        let inner = &*self.inner;
        if self.body.is_some() {
            return Err(refused(NAME, "the stream is the body of a loop"));
        }
        let mut state = lock(&inner.state);
        if state.part.recording().is_some() {
            drop(state);
            return self.as_guest(NAME, |recorder, _| recorder.enter());
        }
        inner.watch();
        let recorder = inner
            .device
            .enter(|driver| Recorder::join_capture(&inner.device, driver, inner.handle))?;
        state.part = Part::beginning(Recording::of(recorder));
        Ok(())
    }

    pub(super) fn leave_recording(&self) -> Result<(), BackendError> {
        self.as_guest("leave_recording", Recorder::leave)
    }

    pub(super) fn spoil_recording(&self) {
        let spoilt = self.as_guest("spoil_recording", |recorder, driver| {
            if recorder.has_guest() {
                recorder.spoil(driver, "what took part in it could not be recorded as a whole");
            }
            Ok(())
        });
        if let Err(error) = spoilt {
            tracing::debug!(%error, stream = self.inner.name, "no recording to spoil");
        }
    }

    fn as_guest(
        &self,
        operation: &'static str,
        action: impl FnOnce(&mut Recorder, &'static Driver) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if self.body.is_some() {
            return Err(refused(operation, "the stream is the body of a loop"));
        }
        self.with_recorder(operation, action)
    }

    pub(super) fn condition(&self) -> Result<Condition, BackendError> {
        self.with_recorder("condition", |recorder, driver| recorder.condition(driver, self.id()))
    }

    pub(super) fn begin_while(&self, condition: Condition) -> Result<Self, BackendError> {
        let body = self.with_recorder("begin_while", |recorder, driver| {
            recorder.begin_while(driver, self.id(), condition)
        })?;
        Ok(Self { inner: self.inner.clone(), body: Some(body) })
    }

    pub(super) fn end_while(&self, body: &Self) -> Result<(), BackendError> {
        if !Arc::ptr_eq(&self.inner, &body.inner) {
            return Err(refused("end_while", "the body belongs to a recording of another stream"));
        }
        self.with_recorder("end_while", |recorder, driver| {
            recorder.end_while(driver, self.id(), body.id())
        })
    }

    /// Runs `action` on the recording that this stream is or is a body of.
    fn with_recorder<T>(
        &self,
        operation: &'static str,
        action: impl FnOnce(&mut Recorder, &'static Driver) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let state = lock(&self.inner.state);
        let Some(mut open) = state.part.open(operation)? else {
            return Err(match self.body {
                Some(_) => refused(operation, ENDED_BODY),
                None => refused(operation, &format!("stream {} does not record", self.inner.name)),
            });
        };
        if open.is_branch() {
            return Err(refused(operation, "loops stand on the stream that began the recording"));
        }
        let recorder = open.recorder(operation)?;
        if !recorder.is_of_this_thread() {
            // Captures of bodies end on the thread that began them, as the recording does.
            return Err(another_thread(operation));
        }
        self.inner.device.enter(|driver| action(recorder, driver))
    }

    /// Appends a graph as one node to what the stream records.
    pub(super) fn append_graph(&self, graph: &Arc<Graph>) -> Result<(), BackendError> {
        const NAME: &str = "replay";
        let state = lock(&self.inner.state);
        let Some(mut open) = state.part.open(NAME)? else {
            return Err(refused(NAME, "the recording has ended meanwhile"));
        };
        let (recorder, target) = open.target(self.inner.handle, self.id(), NAME)?;
        if !recorder.is_of_this_thread() {
            return Err(another_thread(NAME));
        }
        self.inner.device.enter(|driver| recorder.append_graph(driver, target, graph))
    }

    fn id(&self) -> Option<ScopeId> {
        self.body.map(|body| body.id)
    }
}

impl StreamInner {
    fn refuse_recording(
        &self,
        state: &State,
        body: Option<BodyStream>,
        operation: &'static str,
        reason: &str,
    ) -> Result<(), BackendError> {
        match (state.part.recording(), body) {
            (Some(_), _) => {
                Err(refused(operation, &format!("stream {} records, and {reason}", self.name)))
            }
            (None, Some(_)) => Err(refused(operation, ENDED_BODY)),
            (None, None) => Ok(()),
        }
    }

    /// Takes note that others may have the stream record from now on.
    pub(super) fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
    }

    fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// Whether others have the stream record, this crate taking no part in it.
    fn is_captured_by_others(&self, driver: &Driver) -> Result<bool, BackendError> {
        if !self.is_watched() {
            return Ok(false);
        }
        let mut status = 0_u32;
        let place = (&raw mut status).cast::<sys::CUstreamCaptureStatus>();
        // SAFETY: the place is valid for the number behind the enum, and the stream, by the contract
        // of `borrow` where it is borrowed, too.
        unsafe { driver.cuStreamIsCapturing(self.handle.0, place)? };
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32)
    }

    /// Fails while others have the stream record: nothing would keep alive what is recorded then.
    pub(super) fn refuse_foreign_capture(
        &self,
        driver: &Driver,
        operation: &'static str,
    ) -> Result<(), BackendError> {
        if !self.is_captured_by_others(driver)? {
            return Ok(());
        }
        Err(refused(
            operation,
            &format!(
                "stream {} is being captured by others; a step takes part in that as an embedded step",
                self.name
            ),
        ))
    }

    /// The error of a call on this stream: that of earlier work, if the device has failed.
    pub(super) fn failed(&self, operation: &str, error: DriverError) -> BackendError {
        if !error.is_fatal() {
            return error.into();
        }
        BackendError::Failed {
            stream: self.name.clone(),
            operation: format!("{operation}, or work before it,"),
            reason: error.text(),
        }
    }

    /// Releases what finished work held. The context is current and the thread does not record.
    pub(super) fn reap(&self, driver: &Driver) {
        let mut state = lock(&self.state);
        if state.part.recording().is_some() {
            return;
        }
        // A borrowed stream may be gone, and another may record for others; their events are there.
        // SAFETY: the stream is this value's own, and nobody else has it record.
        let idle = !self.is_watched() && unsafe { driver.cuStreamQuery(self.handle.0) }.is_ok();
        let released = if idle {
            state.in_flight.take_all(&self.device)
        } else {
            state.in_flight.reap(&self.device, driver)
        };
        drop(state);
        drop(released);
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        let state = mem::take(owned(&mut self.state));
        let (handle, borrowed) = (self.handle, self.borrowed);
        if borrowed && state.part.recording().is_none() && state.in_flight.is_empty() {
            return;
        }
        let remains = Remains::new(handle, borrowed, state);
        self.device.graveyard.bury(Grave::Stream(Box::new(remains)));
    }
}

pub(super) fn another_thread(operation: &'static str) -> BackendError {
    refused(operation, "another thread began the recording")
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStream")
            .field("name", &self.inner.name)
            .field("is_body", &self.body.is_some())
            .field("borrowed", &self.inner.borrowed)
            .finish()
    }
}

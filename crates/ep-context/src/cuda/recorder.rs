//! A recording while it is made: the driver's capture, and what must be kept alive for the graph.

mod guest;
mod loops;
mod position;

use std::mem;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use cudarc::driver::sys;

use super::conditional::OpenBody;
use super::device::{Device, recording_begins, recording_ends};
use super::driver::{Driver, DriverError, GraphHandle, StreamHandle, ask_handle};
use super::graph::{CudaRecording, Graph};
use super::graveyard::Grave;
use crate::backend::{BackendError, Retained};
use crate::keepsake::Held;
use crate::recording::{self, LoopCondition, ScopeId, refused};

use guest::{Capture, Guest};
use position::position;
pub(super) use position::{Position, continue_behind};

/// How deep loops may nest. Each open body is recorded on a stream of its own. So many are there
/// before a recording begins, for whichever recordings of the device have open bodies.
pub(super) const MAX_DEPTH: usize = 4;

/// Other threads may allocate and load while this one records.
pub(super) const MODE: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// What a stream records, and its branches. It is ended by [`Recorder::finish`] or
/// [`Recorder::abandon`], on the thread that began it.
#[derive(Debug)]
pub(super) struct Recorder {
    device: Arc<Device>,
    thread: ThreadId,
    stream: StreamHandle,
    capture: Capture,
    /// Set when the driver has ended the capture, or this has left it.
    over: Arc<AtomicBool>,
    /// Branches that were not joined, with the names of their streams.
    branches: Vec<(ScopeId, String)>,
    /// The bodies that are open, the innermost last.
    bodies: Vec<OpenBody>,
    /// The graphs of bodies that were ended. They belong to the graph that their loops stand in.
    ended: Vec<GraphHandle>,
    conditions: Vec<LoopCondition<u64>>,
    /// Why no graph can come of this any more.
    broken: Option<String>,
    held: Held,
    guest: Option<Guest>,
}

impl Recorder {
    /// Makes the stream record. The context is current.
    pub(super) fn begin(
        device: &Arc<Device>,
        driver: &Driver,
        stream: StreamHandle,
    ) -> Result<Self, DriverError> {
        device.reserve_body_streams(driver, MAX_DEPTH)?;
        let recorder = Self::of(device, stream, Capture::Own);
        // SAFETY: the stream is valid and does not record.
        unsafe { driver.cuStreamBeginCapture_v2(stream.0, MODE)? };
        recording_begins();
        Ok(recorder)
    }

    fn of(device: &Arc<Device>, stream: StreamHandle, capture: Capture) -> Self {
        Self {
            device: device.clone(),
            thread: thread::current().id(),
            stream,
            capture,
            over: Arc::default(),
            branches: Vec::new(),
            bodies: Vec::new(),
            ended: Vec::new(),
            conditions: Vec::new(),
            broken: None,
            held: Held::default(),
            guest: None,
        }
    }

    pub(super) fn is_of_this_thread(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// What tells the streams that take part that the recording has ended.
    pub(super) fn over(&self) -> Arc<AtomicBool> {
        self.over.clone()
    }

    /// Fails where no stream can be ordered with another.
    pub(super) fn check_order(&self) -> Result<(), BackendError> {
        const NAME: &str = "order";
        if let Some(reason) = &self.broken {
            return Err(refused(NAME, reason));
        }
        recording::check_order(&self.bodies)
    }

    /// Takes note that the capture has spread to the stream of this name.
    pub(super) fn fork(&mut self, name: &str) -> ScopeId {
        let id = ScopeId::fresh();
        self.branches.push((id, name.to_owned()));
        id
    }

    /// Takes note that a branch ended in the stream that began the recording.
    pub(super) fn join(&mut self, branch: ScopeId) {
        self.branches.retain(|(id, _)| *id != branch);
    }

    /// Whether `body`, or the recording itself for `None`, takes operations or is an outer scope of
    /// one that does.
    pub(super) fn is_open(&self, body: Option<ScopeId>) -> bool {
        recording::is_open(&self.bodies, body)
    }

    /// The stream on which operations of `body` are recorded. Order is only defined within one body,
    /// so an outer one takes nothing while another is open inside it.
    pub(super) fn target(
        &self,
        body: Option<ScopeId>,
        operation: &'static str,
    ) -> Result<StreamHandle, BackendError> {
        if let Some(reason) = &self.broken {
            return Err(refused(operation, reason));
        }
        recording::check_innermost(&self.bodies, body, operation)?;
        Ok(self.bodies.last().map_or(self.stream, |open| open.stream))
    }

    /// Keeps what recorded work uses for as long as the graph.
    pub(super) fn retain(&mut self, retained: &[Retained]) {
        match &self.guest {
            Some(guest) => guest.keepsake.keep(retained),
            None => self.held.keep(retained),
        }
    }

    /// Appends a graph as one node to what `stream` records, one of [`Recorder::target`] or a branch.
    pub(super) fn append_graph(
        &mut self,
        driver: &Driver,
        stream: StreamHandle,
        graph: &Arc<Graph>,
    ) -> Result<(), BackendError> {
        const NAME: &str = "replay";
        if graph.has_loops() {
            return Err(refused(
                NAME,
                "the graph has loops, and the driver nests only those without",
            ));
        }
        self.check_capture(driver, stream, NAME)?;
        let at = position(driver, stream)?;
        let mut node = ptr::null_mut();
        // SAFETY: the dependencies are those that the driver has just named; the child is copied.
        unsafe {
            driver.cuGraphAddChildGraphNode(
                &raw mut node,
                at.graph.0,
                at.dependencies,
                at.count,
                graph.handle().0,
            )?;
        }
        continue_behind(driver, stream, node)?;
        let held: Retained = graph.clone();
        self.retain(&[held]);
        Ok(())
    }

    /// Ends the recording and returns it, if no loop is open and every branch was joined. The context is
    /// current.
    pub(super) fn finish(mut self, driver: &Driver) -> Result<CudaRecording, BackendError> {
        const NAME: &str = "end_recording";
        let open = self.bodies.len();
        let graph = self.end(driver);
        let destroy = |graph: Result<GraphHandle, DriverError>| {
            if let Ok(graph) = graph {
                self.device.graveyard.bury(Grave::Graph(graph));
            }
        };
        if open > 0 {
            destroy(graph);
            return Err(refused(NAME, &format!("{open} loops have no end")));
        }
        if let Some((_, name)) = self.branches.first() {
            destroy(graph);
            return Err(refused(NAME, &format!("stream {name}, a branch of it, was not joined")));
        }
        if let Some(reason) = &self.broken {
            destroy(graph);
            return Err(refused(NAME, reason));
        }
        if self.conditions.iter().any(|condition| !condition.used) {
            destroy(graph);
            return Err(refused(NAME, "a condition has no loop, which the driver does not take"));
        }
        let graph = graph.map_err(|error| refused(NAME, &error.text()))?;
        let retained = mem::take(&mut self.held).objects;
        let graph = Graph::new(&self.device, driver, graph, mem::take(&mut self.ended), retained)?;
        Ok(CudaRecording::new(graph))
    }

    /// Ends the recording and drops it. The context is current.
    pub(super) fn abandon(mut self, driver: &Driver) {
        if self.is_foreign() {
            self.spoil(driver, "it was abandoned");
            return;
        }
        if let Ok(graph) = self.end(driver) {
            self.device.graveyard.bury(Grave::Graph(graph));
        }
    }

    /// Ends every capture, the innermost first; never one of others, see [`Recorder::leave`].
    fn end(&mut self, driver: &Driver) -> Result<GraphHandle, DriverError> {
        while !self.bodies.is_empty() {
            // The graph is not used, whatever comes of its bodies.
            let _ = self.end_innermost(driver);
        }
        let ended =
            // SAFETY: the stream records, and this is the thread that made it.
            ask_handle(|graph| unsafe { driver.cuStreamEndCapture(self.stream.0, graph) });
        // Branches, joined or not, have left the capture with it.
        self.over.store(true, Ordering::Release);
        recording_ends();
        ended
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Also where the device failed before the capture could be ended: nobody ends it any more.
        self.step_out();
        self.over.store(true, Ordering::Release);
    }
}

//! A recording while it is made: the driver's capture, and what must be kept alive for the graph.

use std::collections::HashSet;
use std::mem;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, ThreadId};

use cudarc::driver::sys;

use super::conditional::{self, LoopCondition, OpenBody};
use super::device::{Device, recording_begins, recording_ends};
use super::driver::{Driver, DriverError, GraphHandle, Handle, StreamHandle, ask_handle};
use super::graph::{CudaRecording, Graph};
use super::graveyard::Grave;
use super::guest::{self, Capture, Guest};
use super::remains::Remains;
use super::stream::BodyStream;
use crate::backend::{BackendError, Condition, Retained};
use crate::keepsake::Keepsake;

/// How deep loops may nest. Each open body is recorded on a stream of its own, and these are made
/// before a recording begins.
pub(super) const MAX_DEPTH: usize = 4;

/// Other threads may allocate and load while this one records.
pub(super) const MODE: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// A body of a loop or a branch. Unique in the process, so that a handle of a body is never taken for one of a
/// later recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScopeId(u64);

impl ScopeId {
    pub(super) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a stream records, and its branches. It is ended by [`Recorder::finish`] or [`Recorder::abandon`], on the thread
/// that began it.
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
    conditions: Vec<LoopCondition>,
    spare: Vec<StreamHandle>,
    /// Why no graph can come of this any more.
    broken: Option<String>,
    retained: Vec<Retained>,
    /// The addresses of `retained`: a buffer used by a thousand operations is held once.
    held: HashSet<usize>,
    guest: Option<Guest>,
}

/// Where a stream stands in the graph that it records.
pub(super) struct Position {
    /// Tells the capture from every other of the process.
    pub(super) capture: u64,
    pub(super) graph: GraphHandle,
    pub(super) dependencies: *const sys::CUgraphNode,
    pub(super) edges: *const sys::CUgraphEdgeData,
    pub(super) count: usize,
}

impl Recorder {
    /// Makes the stream record. The context is current.
    pub(super) fn begin(
        device: &Arc<Device>,
        driver: &Driver,
        stream: StreamHandle,
    ) -> Result<Self, DriverError> {
        let mut spare = Vec::with_capacity(MAX_DEPTH);
        while spare.len() < MAX_DEPTH
            && let Some(body) = device.take_body_stream()
        {
            spare.push(body);
        }
        let mut recorder = Self::of(device, stream, Capture::Own);
        recorder.spare = spare;
        let begun = recorder.make_spare(driver).and_then(|()| {
            // SAFETY: the stream is valid and does not record.
            unsafe { driver.cuStreamBeginCapture_v2(stream.0, MODE) }
        });
        if let Err(error) = begun {
            recorder.return_streams();
            return Err(error);
        }
        recording_begins();
        Ok(recorder)
    }

    /// Takes part in a capture that was begun on `stream` by other means. The context is current.
    pub(super) fn join_capture(
        device: &Arc<Device>,
        driver: &Driver,
        stream: StreamHandle,
    ) -> Result<Self, BackendError> {
        let at = position(driver, stream)?;
        let keepsake = Keepsake::new();
        guest::keep_for(driver, at.graph, &keepsake)?;
        recording_begins();
        let mut recorder = Self::of(device, stream, Capture::Foreign(at.capture));
        recorder.guest = Some(Guest { keepsake, branches: 0, conditions: 0 });
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
            spare: Vec::new(),
            broken: None,
            retained: Vec::new(),
            held: HashSet::new(),
            guest: None,
        }
    }

    pub(super) fn is_foreign(&self) -> bool {
        self.capture != Capture::Own
    }

    /// Lets what is recorded from here on be kept apart, in a recording of this backend's.
    pub(super) fn enter(&mut self) -> Result<(), BackendError> {
        const NAME: &str = "enter_recording";
        if self.guest.is_some() {
            return Err(refused(NAME, "somebody takes part in the recording already"));
        }
        if !self.bodies.is_empty() {
            return Err(refused(NAME, "the body of a loop is being recorded"));
        }
        let keepsake = Keepsake::new();
        self.retained.push(guest::keeper(&keepsake));
        let (branches, conditions) = (self.branches.len(), self.conditions.len());
        self.guest = Some(Guest { keepsake, branches, conditions });
        Ok(())
    }

    /// Ends what `enter` or `join_capture` began. The context is current.
    pub(super) fn leave(&mut self, driver: &Driver) -> Result<(), BackendError> {
        const NAME: &str = "leave_recording";
        let Some(guest) = self.guest.take() else {
            return Err(refused(NAME, "nobody takes part in the recording"));
        };
        let unused = || self.conditions[guest.conditions..].iter().any(|condition| !condition.used);
        let reason = if let Some(reason) = &self.broken {
            reason.clone()
        } else if !self.bodies.is_empty() {
            "a loop has no end".to_owned()
        } else if let Some((_, name)) = self.branches.get(guest.branches) {
            format!("stream {name}, a branch of it, was not joined")
        } else if unused() {
            "a condition has no loop, which the driver does not take".to_owned()
        } else {
            let left = self.check_capture(driver, self.stream, NAME);
            self.step_out();
            return left;
        };
        self.spoil(driver, &reason);
        Err(refused(NAME, &reason))
    }

    /// Sees to it that no graph comes of the recording. The context is current.
    pub(super) fn spoil(&mut self, driver: &Driver, reason: &str) {
        self.guest = None;
        while !self.bodies.is_empty() {
            // Nobody uses the graph, whatever comes of its bodies.
            let _ = self.end_innermost(driver);
        }
        self.broken.get_or_insert_with(|| reason.to_owned());
        if self.is_foreign() && self.check_capture(driver, self.stream, "spoil_recording").is_ok() {
            // A stream that records must not be asked how far it is; one that is asked all the same
            // has its capture given up, and whoever ends it is told.
            // SAFETY: the handle is valid.
            let _ = unsafe { driver.cuStreamQuery(self.stream.0) };
        }
        self.step_out();
    }

    /// Takes no further part in a capture of others.
    fn step_out(&mut self) {
        if self.is_foreign() && !self.over.swap(true, Ordering::AcqRel) {
            recording_ends();
            self.return_streams();
        }
    }

    /// Whether somebody takes part.
    pub(super) fn has_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Fails where the owner of a capture has ended it meanwhile: what is queued then would run. `stream`
    /// is the one that the operation is for.
    pub(super) fn check_capture(
        &self,
        driver: &Driver,
        stream: StreamHandle,
        operation: &'static str,
    ) -> Result<(), BackendError> {
        let Capture::Foreign(capture) = self.capture else { return Ok(()) };
        if !self.bodies.is_empty() {
            // Bodies are captures of their own.
            return Ok(());
        }
        match position(driver, stream) {
            Ok(at) if at.capture == capture => Ok(()),
            Ok(_) => Err(refused(operation, "the recording that it belongs to has ended")),
            Err(error) => Err(error),
        }
    }

    fn make_spare(&mut self, driver: &Driver) -> Result<(), DriverError> {
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        while self.spare.len() < MAX_DEPTH {
            // SAFETY: the place is valid.
            self.spare.push(ask_handle(|place| unsafe { driver.cuStreamCreate(place, flags) })?);
        }
        Ok(())
    }

    fn return_streams(&mut self) {
        for stream in self.spare.drain(..) {
            self.device.return_body_stream(stream);
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
        if self.bodies.is_empty() {
            return Ok(());
        }
        Err(refused(NAME, "the body of a loop is being recorded, which has no branches"))
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
        body.is_none_or(|id| self.bodies.iter().any(|open| open.id == id))
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
        if !self.is_open(body) {
            return Err(refused(operation, ENDED_BODY));
        }
        if body != self.bodies.last().map(|open| open.id) {
            return Err(refused(operation, "the body of a loop inside it is being recorded"));
        }
        Ok(self.bodies.last().map_or(self.stream, |open| open.stream))
    }

    /// Keeps what recorded work uses for as long as the graph.
    pub(super) fn retain(&mut self, retained: &[Retained]) {
        if let Some(guest) = &self.guest {
            guest.keepsake.keep(retained);
            return;
        }
        for object in retained {
            if self.held.insert(Arc::as_ptr(object).cast::<()>().addr()) {
                self.retained.push(object.clone());
            }
        }
    }

    /// Creates the condition of a loop that will stand in `body`.
    pub(super) fn condition(
        &mut self,
        driver: &Driver,
        body: Option<ScopeId>,
    ) -> Result<Condition, BackendError> {
        let stream = self.target(body, "condition")?;
        let position = position(driver, stream)?;
        let handle = conditional::create_condition(driver, position.graph, self.device.context)?;
        self.conditions.push(LoopCondition { handle, scope: body, used: false });
        Ok(Condition(handle))
    }

    /// Appends a loop to what `body` records, and opens its own body.
    pub(super) fn begin_while(
        &mut self,
        driver: &Driver,
        body: Option<ScopeId>,
        condition: Condition,
    ) -> Result<BodyStream, BackendError> {
        const NAME: &str = "begin_while";
        let stream = self.target(body, NAME)?;
        let known = self.conditions.iter().position(|known| known.handle == condition.0);
        let Some(known) = known else {
            return Err(refused(NAME, "the condition belongs to another recording"));
        };
        if self.conditions[known].scope != body {
            return Err(refused(
                NAME,
                "the condition was created for another body of the recording",
            ));
        }
        if self.conditions[known].used {
            return Err(refused(NAME, "the condition is that of an earlier loop"));
        }
        let at = position(driver, stream)?;
        if self.bodies.len() == MAX_DEPTH {
            return Err(refused(NAME, &format!("loops nest at most {MAX_DEPTH} deep")));
        }
        let inner = match self.spare.pop().or_else(|| self.device.take_body_stream()) {
            Some(stream) => stream,
            None => self.device.create_stream()?,
        };
        self.conditions[known].used = true;
        match conditional::open(driver, self.device.context, stream, &at, inner, condition.0) {
            Ok(graph) => {
                let id = ScopeId::fresh();
                self.bodies.push(OpenBody { id, stream: inner, graph });
                Ok(BodyStream { id, handle: inner })
            }
            Err(error) => {
                self.spare.push(inner);
                self.broken = Some(format!("a loop could not be begun: {}", error.text()));
                Err(error.into())
            }
        }
    }

    /// Closes `body`. On an error the body stays open, or nothing more can be recorded.
    pub(super) fn end_while(
        &mut self,
        driver: &Driver,
        outer: Option<ScopeId>,
        body: Option<ScopeId>,
    ) -> Result<(), BackendError> {
        const NAME: &str = "end_while";
        if let Some(reason) = &self.broken {
            return Err(refused(NAME, reason));
        }
        let Some(body) = body else {
            return Err(refused(NAME, "what was given as the body is no body of a loop"));
        };
        let depth = self.bodies.len();
        let Some(open) = self.bodies.last().filter(|open| open.id == body) else {
            return Err(refused(NAME, "the body is not that of the innermost open loop"));
        };
        if outer != depth.checked_sub(2).map(|parent| self.bodies[parent].id) {
            return Err(refused(NAME, "the loop was not begun on this stream"));
        }
        if position(driver, open.stream)?.count == 0 {
            return Err(refused(NAME, "the body is empty, so nothing in it could end the loop"));
        }
        let graph = open.graph;
        if let Err(error) = self.end_innermost(driver) {
            self.broken = Some(format!("the body of a loop could not be ended: {}", error.text()));
            return Err(error.into());
        }
        if let Some(kind) = conditional::forbidden_in_body(driver, graph)? {
            let reason = format!("the body of a loop holds {kind}, which the driver refuses there");
            self.broken = Some(reason.clone());
            return Err(refused(NAME, &reason));
        }
        self.ended.push(graph);
        Ok(())
    }

    /// Ends what the innermost body records.
    fn end_innermost(&mut self, driver: &Driver) -> Result<(), DriverError> {
        let Some(open) = self.bodies.pop() else { return Ok(()) };
        let ended =
            // SAFETY: the stream records, and this is the thread that made it.
            ask_handle(|graph| unsafe { driver.cuStreamEndCapture(open.stream.0, graph) });
        match ended {
            Ok(_) => self.spare.push(open.stream),
            // It may be left in whatever state; it is not used again.
            Err(_) => {
                self.device.graveyard.bury(Grave::Stream(Box::new(Remains::of_idle(open.stream))));
            }
        }
        ended.map(drop)
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

    /// Ends the recording and returns it, if no loop is open and every branch was joined. The context is current.
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
        let retained = mem::take(&mut self.retained);
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
        self.return_streams();
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

/// Where `stream` stands in what it records.
pub(super) fn position(driver: &Driver, stream: StreamHandle) -> Result<Position, BackendError> {
    let mut status = 0_u32;
    let mut id = 0;
    let mut graph = ptr::null_mut();
    let mut at = Position {
        capture: 0,
        graph: Handle(graph),
        dependencies: ptr::null(),
        edges: ptr::null(),
        count: 0,
    };
    // SAFETY: all places are valid, the first for the number behind the enum. The arrays are the
    // driver's, and last until the next call on the stream.
    unsafe {
        driver.cuStreamGetCaptureInfo_v3(
            stream.0,
            (&raw mut status).cast::<sys::CUstreamCaptureStatus>(),
            &raw mut id,
            &raw mut graph,
            &raw mut at.dependencies,
            &raw mut at.edges,
            &raw mut at.count,
        )?;
    }
    (at.capture, at.graph) = (id, Handle(graph));
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
        return Ok(at);
    }
    if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32 {
        return Err(refused("recording", "nobody records on the stream, or not any more"));
    }
    Err(refused("recording", "an earlier call has made the driver give up the recording"))
}

/// Makes what the stream records next depend on `node` alone.
pub(super) fn continue_behind(
    driver: &Driver,
    stream: StreamHandle,
    mut node: sys::CUgraphNode,
) -> Result<(), DriverError> {
    use sys::CUstreamUpdateCaptureDependencies_flags as F;
    let flags = F::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    // SAFETY: the stream records into the graph that the node was just added to; without edge data
    // the dependency is an ordinary one.
    unsafe {
        driver.cuStreamUpdateCaptureDependencies_v2(stream.0, &raw mut node, ptr::null(), 1, flags)
    }
}

/// Why a handle of a body takes nothing any more.
pub(super) const ENDED_BODY: &str = "the loop whose body the stream recorded has ended";

pub(super) fn refused(operation: &'static str, reason: &str) -> BackendError {
    BackendError::Recording { operation, reason: reason.to_owned() }
}

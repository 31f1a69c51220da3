//! A recording while it is made: open loops, their conditions, and what must be kept alive.

use std::collections::HashSet;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::graph::HostRecording;
use super::operation::Operation;
use crate::backend::{BackendError, Condition, Retained};
use crate::keepsake::{Keeper, Keepsake};

/// A recording, the body of a loop in it, or a branch of it. Unique in the process, so that a handle
/// of a body is never taken for one of a later recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScopeId(u64);

impl ScopeId {
    fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Where the operations of a stream go while it records, and those of its branches.
///
/// All of them are appended in the order in which they are queued, and a replay runs them in that
/// order. Every ordering of one stream behind another concerns only what was queued on the other
/// before, so the list keeps them all. Nor can ranks wait for each other for ever where all of them
/// record the same exchanges in the same order: what an operation waits for is sent by an operation
/// that stands no later in the list of its rank, and so the rank that has come the least far can
/// always go on.
#[derive(Debug)]
pub(super) struct Recorder {
    /// The recording has ended, and this takes nothing more.
    over: bool,
    outermost: Scope,
    /// Branches that were not joined, with the names of their streams.
    branches: Vec<(ScopeId, String)>,
    /// The bodies that are open, the innermost last.
    bodies: Vec<Body>,
    conditions: Vec<LoopCondition>,
    retained: Vec<Retained>,
    /// The addresses of `retained`: a buffer used by a thousand operations is held once.
    held: HashSet<usize>,
    guest: Option<Guest>,
    /// Why no graph can come of this any more.
    spoilt: Option<&'static str>,
}

/// Whoever takes part in a recording that somebody else began.
#[derive(Debug)]
struct Guest {
    keepsake: Arc<Keepsake>,
    /// Branches that were out, and conditions that there were, when it came.
    branches: usize,
    conditions: usize,
}

#[derive(Debug)]
struct Scope {
    id: ScopeId,
    operations: Vec<Operation>,
}

#[derive(Debug)]
struct Body {
    scope: Scope,
    condition: Arc<AtomicU32>,
}

#[derive(Debug)]
struct LoopCondition {
    word: Arc<AtomicU32>,
    /// The recording or body that the loop must stand in.
    scope: ScopeId,
    used: bool,
}

impl Scope {
    fn fresh() -> Self {
        Self { id: ScopeId::fresh(), operations: Vec::new() }
    }
}

impl Recorder {
    pub(super) fn new() -> Self {
        Self {
            over: false,
            outermost: Scope::fresh(),
            branches: Vec::new(),
            bodies: Vec::new(),
            conditions: Vec::new(),
            retained: Vec::new(),
            held: HashSet::new(),
            guest: None,
            spoilt: None,
        }
    }

    /// Lets what is recorded from here on be kept apart.
    pub(super) fn enter(&mut self) -> Result<(), BackendError> {
        const NAME: &str = "enter_recording";
        if self.guest.is_some() {
            return Err(refused(NAME, "somebody takes part in the recording already"));
        }
        if !self.bodies.is_empty() {
            return Err(refused(NAME, "the body of a loop is being recorded"));
        }
        let keepsake = Keepsake::new();
        self.retained.push(Arc::new(Keeper { keepsake: keepsake.clone() }));
        let (branches, conditions) = (self.branches.len(), self.conditions.len());
        self.guest = Some(Guest { keepsake, branches, conditions });
        Ok(())
    }

    /// Ends what `enter` began.
    pub(super) fn leave(&mut self) -> Result<(), BackendError> {
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
    pub(super) fn spoil(&mut self, reason: &'static str) {
        self.guest = None;
        self.bodies.clear();
        self.spoilt.get_or_insert(reason);
    }

    /// Whether somebody takes part.
    pub(super) fn has_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Whether the recording has ended.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// Ends the recording for every stream that takes part in it, and returns what was recorded.
    pub(super) fn take(&mut self) -> Self {
        mem::replace(self, Self { over: true, ..Self::new() })
    }

    /// Fails where no stream can be ordered with another.
    pub(super) fn check_order(&self) -> Result<(), BackendError> {
        if self.over {
            return Err(refused("order", "the recording has ended"));
        }
        if self.bodies.is_empty() {
            return Ok(());
        }
        Err(refused("order", "the body of a loop is being recorded, which has no branches"))
    }

    /// Begins a branch on the stream of this name.
    pub(super) fn fork(&mut self, name: &str) -> Result<ScopeId, BackendError> {
        self.check_order()?;
        let id = ScopeId::fresh();
        self.branches.push((id, name.to_owned()));
        Ok(id)
    }

    /// Ends a branch.
    pub(super) fn join(&mut self, branch: ScopeId) {
        self.branches.retain(|(id, _)| *id != branch);
    }

    /// Whether `body`, or the recording itself for `None`, takes operations or is an outer scope of
    /// one that does.
    pub(super) fn is_open(&self, body: Option<ScopeId>) -> bool {
        body.is_none_or(|id| self.bodies.iter().any(|open| open.scope.id == id))
    }

    /// Appends an operation.
    pub(super) fn record(
        &mut self,
        body: Option<ScopeId>,
        operation: Operation,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        self.innermost(body, operation.name())?.operations.push(operation);
        if let Some(guest) = &self.guest {
            guest.keepsake.keep(retained);
            return Ok(());
        }
        for object in retained {
            if self.held.insert(Arc::as_ptr(object).cast::<()>().addr()) {
                self.retained.push(object.clone());
            }
        }
        Ok(())
    }

    /// Creates the condition of a loop that will stand in `body`.
    pub(super) fn condition(&mut self, body: Option<ScopeId>) -> Result<Condition, BackendError> {
        let scope = self.innermost(body, "condition")?.id;
        let word = Arc::new(AtomicU32::new(0));
        let handle = Condition(handle_of(&word));
        self.conditions.push(LoopCondition { word, scope, used: false });
        Ok(handle)
    }

    /// Opens the body of a loop that stands in `body`.
    pub(super) fn begin_while(
        &mut self,
        body: Option<ScopeId>,
        condition: Condition,
    ) -> Result<ScopeId, BackendError> {
        const NAME: &str = "begin_while";
        let scope = self.innermost(body, NAME)?.id;
        let condition = self
            .conditions
            .iter_mut()
            .find(|candidate| handle_of(&candidate.word) == condition.0)
            .ok_or_else(|| refused(NAME, "the condition belongs to another recording"))?;
        if condition.scope != scope {
            return Err(refused(
                NAME,
                "the condition was created for another body of the recording",
            ));
        }
        if condition.used {
            return Err(refused(NAME, "the condition is that of an earlier loop"));
        }
        condition.used = true;
        let scope = Scope::fresh();
        let id = scope.id;
        self.bodies.push(Body { scope, condition: condition.word.clone() });
        Ok(id)
    }

    /// Closes `body` and appends the loop to `outer`. On an error the body stays open.
    pub(super) fn end_while(
        &mut self,
        outer: Option<ScopeId>,
        body: Option<ScopeId>,
    ) -> Result<(), BackendError> {
        const NAME: &str = "end_while";
        let Some(body) = body else {
            return Err(refused(NAME, "what was given as the body is no body of a loop"));
        };
        let depth = self.bodies.len();
        if self.bodies.last().is_none_or(|open| open.scope.id != body) {
            return Err(refused(NAME, "the body is not that of the innermost open loop"));
        }
        if outer != depth.checked_sub(2).map(|parent| self.bodies[parent].scope.id) {
            return Err(refused(NAME, "the loop was not begun on this stream"));
        }
        if self.bodies[depth - 1].scope.operations.is_empty() {
            return Err(refused(NAME, "the body is empty, so nothing in it could end the loop"));
        }
        if let Some(Body { scope, condition }) = self.bodies.pop() {
            let operation = Operation::While { condition, body: scope.operations };
            self.innermost(outer, NAME)?.operations.push(operation);
        }
        Ok(())
    }

    /// The recording, if no loop is open and every branch was joined.
    pub(super) fn finish(self) -> Result<HostRecording, BackendError> {
        if let Some(reason) = self.spoilt {
            return Err(refused(
                "end_recording",
                &format!("what took part in it could not be recorded as a whole: {reason}"),
            ));
        }
        if let Some((_, name)) = self.branches.first() {
            return Err(refused(
                "end_recording",
                &format!("stream {name}, a branch of it, was not joined"),
            ));
        }
        if !self.bodies.is_empty() {
            return Err(refused(
                "end_recording",
                &format!("{} loops have no end", self.bodies.len()),
            ));
        }
        let conditions = self.conditions.into_iter().map(|condition| condition.word).collect();
        Ok(HostRecording::new(self.outermost.operations, conditions, self.retained))
    }

    /// The scope to append to. Order is only defined within one scope, so an outer one takes
    /// nothing while a body is open.
    fn innermost(
        &mut self,
        body: Option<ScopeId>,
        operation: &'static str,
    ) -> Result<&mut Scope, BackendError> {
        if !self.is_open(body) {
            return Err(refused(operation, ENDED_BODY));
        }
        if body != self.bodies.last().map(|open| open.scope.id) {
            return Err(refused(operation, "the body of a loop inside it is being recorded"));
        }
        Ok(self.bodies.last_mut().map_or(&mut self.outermost, |open| &mut open.scope))
    }
}

/// Why a handle of a body takes nothing any more.
pub(super) const ENDED_BODY: &str = "the loop whose body the stream recorded has ended";

pub(super) fn refused(operation: &'static str, reason: &str) -> BackendError {
    BackendError::Recording { operation, reason: reason.to_owned() }
}

fn handle_of(word: &Arc<AtomicU32>) -> u64 {
    Arc::as_ptr(word).expose_provenance() as u64
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::Backend;
    use crate::host::testing::{Device, Log};
    use crate::reclaim;

    fn reason<T: std::fmt::Debug>(result: Result<T, BackendError>) -> String {
        match result {
            Err(BackendError::Recording { reason, .. }) => reason,
            other => panic!("expected a refusal, not {other:?}"),
        }
    }

    #[test]
    fn what_is_used_often_is_held_once() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        device.begin(&stream);
        for value in 0..50 {
            device.append(&stream, &log, value);
        }
        let graph = device.end(&stream);
        assert_eq!(Arc::strong_count(&log.values), 2);
        assert_eq!(format!("{graph:?}"), "HostExecutable { operations: 50, retained: 1 }");
    }

    #[test]
    fn a_guest_keeps_apart_what_it_records() {
        let (device, own, guests) = (Device::new(), Log::default(), Log::default());
        let stream = device.stream("s");
        let text = reason(device.backend.enter_recording(&stream));
        assert!(text.contains("does not record"), "{text}");
        device.begin(&stream);
        let text = reason(device.backend.leave_recording(&stream));
        assert!(text.contains("nobody takes part"), "{text}");
        device.append(&stream, &own, 1);
        device.backend.enter_recording(&stream).expect("recording");
        let text = reason(device.backend.enter_recording(&stream));
        assert!(text.contains("already"), "{text}");
        device.append(&stream, &guests, 2);
        device.backend.leave_recording(&stream).expect("it is whole");
        device.append(&stream, &own, 3);
        let graph = device.end(&stream);
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
            device.begin(&stream);
            device.backend.enter_recording(&stream).expect("recording");
            begin();
            let text = reason(device.backend.leave_recording(&stream));
            let ended = reason(device.backend.end_recording(&stream));
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
        device.begin(&stream);
        device.backend.spoil_recording(&stream);
        device.end(&stream);
        device.begin(&stream);
        device.backend.enter_recording(&stream).expect("recording");
        device.backend.spoil_recording(&stream);
        let text = reason(device.backend.end_recording(&stream));
        assert!(text.contains("as a whole"), "{text}");
        device.append(&stream, &log, 2);
        device.wait(&stream);
        assert_eq!(log.values(), [2]);
    }

    #[test]
    fn a_condition_serves_one_loop_of_its_own_scope() {
        let (device, log) = (Device::new(), Log::default());
        let (stream, other) = (device.stream("s"), device.stream("other"));
        device.begin(&stream);
        device.begin(&other);
        let foreign = device.backend.condition(&other).expect("recording");
        let text = reason(device.backend.begin_while(&stream, foreign));
        assert!(text.contains("another recording"), "{text}");
        let text = reason(device.backend.begin_while(&stream, Condition(0)));
        assert!(text.contains("another recording"), "{text}");

        let outer = device.backend.condition(&stream).expect("recording");
        let early = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, outer).expect("its own scope");
        let text = reason(device.backend.begin_while(&body, early));
        assert!(text.contains("another body"), "{text}");
        device.append(&body, &log, 1);
        device.backend.end_while(&stream, body).expect("the innermost loop");
        let text = reason(device.backend.begin_while(&stream, outer));
        assert!(text.contains("earlier loop"), "{text}");
        let body = device.backend.begin_while(&stream, early).expect("its own scope");
        device.append(&body, &log, 2);
        device.backend.end_while(&stream, body).expect("the innermost loop");
        assert_eq!(device.backend.node_count(&device.end(&stream)), 4);
        device.backend.abandon_recording(&other);
    }

    #[test]
    fn loops_end_from_the_inside_outwards() {
        let (device, log) = (Device::new(), Log::default());
        let (stream, other) = (device.stream("s"), device.stream("other"));
        device.begin(&stream);
        device.begin(&other);
        let condition = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, condition).expect("recording");
        // While a body is open only the innermost takes anything.
        let text = reason(device.backend.condition(&stream));
        assert!(text.contains("a loop inside it"), "{text}");
        // SAFETY: the call is refused.
        let text = reason(unsafe { device.backend.fill(&stream, 0, 0, 0, &[]) });
        assert!(text.contains("a loop inside it"), "{text}");

        let text = reason(device.backend.end_while(&stream, body.clone()));
        assert!(text.contains("the body is empty"), "{text}");
        device.append(&body, &log, 1);
        let text = reason(device.backend.end_while(&other, body.clone()));
        assert!(text.contains("another stream"), "{text}");
        let text = reason(device.backend.end_while(&stream, stream.clone()));
        assert!(text.contains("no body"), "{text}");
        let text = reason(device.backend.end_while(&body, body.clone()));
        assert!(text.contains("not begun on this stream"), "{text}");

        let condition = device.backend.condition(&body).expect("recording");
        let inner = device.backend.begin_while(&body, condition).expect("recording");
        device.append(&inner, &log, 2);
        let text = reason(device.backend.end_while(&stream, body.clone()));
        assert!(text.contains("innermost"), "{text}");
        let text = reason(device.backend.end_while(&stream, inner.clone()));
        assert!(text.contains("not begun on this stream"), "{text}");
        device.backend.end_while(&body, inner).expect("the innermost loop");
        device.backend.end_while(&stream, body).expect("the innermost loop");
        // Two appends and two loops, whatever was refused in between.
        assert_eq!(device.backend.node_count(&device.end(&stream)), 4);
        device.backend.abandon_recording(&other);
    }

    #[test]
    fn a_recording_with_an_open_loop_is_dropped() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        device.begin(&stream);
        let condition = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, condition).expect("recording");
        device.append(&body, &log, 1);
        let text = reason(device.backend.end_recording(&stream));
        assert!(text.contains("1 loops have no end"), "{text}");
        assert!(!device.backend.is_recording(&stream) && !device.backend.is_recording(&body));
        assert_eq!(Arc::strong_count(&log.values), 1);
        device.append(&stream, &log, 2);
        device.wait(&stream);
        assert_eq!(log.values(), [2]);
    }
}

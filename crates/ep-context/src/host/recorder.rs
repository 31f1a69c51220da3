//! A recording while it is made: where operations go, and what must be kept alive.

mod guest;
mod loops;

use std::collections::HashSet;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::graph::HostRecording;
use super::operation::Operation;
use crate::backend::{BackendError, Retained};

use guest::Guest;
use loops::{Body, LoopCondition};

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

#[derive(Debug)]
struct Scope {
    id: ScopeId,
    operations: Vec<Operation>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Device, Log};

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
}

//! A recording while it is made: where operations go, and what must be kept alive.

mod guest;
mod loops;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::graph::HostRecording;
use super::operation::Operation;
use crate::backend::{BackendError, Retained};
use crate::keepsake::Held;
use crate::recording::{self, LoopCondition, ScopeId, refused};

use guest::Guest;
use loops::OpenBody;

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
    /// What was recorded outside of bodies.
    operations: Vec<Operation>,
    /// Branches that were not joined, with the names of their streams.
    branches: Vec<(ScopeId, String)>,
    /// The bodies that are open, the innermost last.
    bodies: Vec<OpenBody>,
    conditions: Vec<LoopCondition<Arc<AtomicU32>>>,
    held: Held,
    guest: Option<Guest>,
    /// Why no graph can come of this any more.
    spoilt: Option<&'static str>,
}

impl Recorder {
    pub(super) fn new() -> Self {
        Self {
            over: false,
            operations: Vec::new(),
            branches: Vec::new(),
            bodies: Vec::new(),
            conditions: Vec::new(),
            held: Held::default(),
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
        recording::check_order(&self.bodies)
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
        recording::is_open(&self.bodies, body)
    }

    /// Appends an operation.
    pub(super) fn record(
        &mut self,
        body: Option<ScopeId>,
        operation: Operation,
        retained: &[Retained],
    ) -> Result<(), BackendError> {
        self.innermost(body, operation.name())?.push(operation);
        if let Some(guest) = &self.guest {
            guest.keepsake.keep(retained);
            return Ok(());
        }
        self.held.keep(retained);
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
        let conditions = self.conditions.into_iter().map(|condition| condition.handle).collect();
        Ok(HostRecording::new(self.operations, conditions, self.held.objects))
    }

    /// Where to append what is recorded in `body`.
    fn innermost(
        &mut self,
        body: Option<ScopeId>,
        operation: &'static str,
    ) -> Result<&mut Vec<Operation>, BackendError> {
        recording::check_innermost(&self.bodies, body, operation)?;
        Ok(self.bodies.last_mut().map_or(&mut self.operations, |open| &mut open.operations))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Device, Log};

    #[test]
    fn what_is_used_often_is_held_once() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let key = device.begin(&stream);
        for value in 0..50 {
            device.append(&stream, &log, value);
        }
        let graph = device.end(&key);
        assert_eq!(Arc::strong_count(&log.values), 2);
        assert_eq!(format!("{graph:?}"), "HostExecutable { operations: 50, retained: 1 }");
    }
}

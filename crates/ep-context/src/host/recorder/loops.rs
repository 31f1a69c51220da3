//! Loops of a recording: their conditions, and the bodies that are open.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::Recorder;
use crate::backend::{BackendError, Condition};
use crate::host::operation::Operation;
use crate::recording::{Body, LoopCondition, ScopeId, condition_of, ending, refused};

/// The body of a loop while it is recorded.
#[derive(Debug)]
pub(super) struct OpenBody {
    id: ScopeId,
    pub(super) operations: Vec<Operation>,
    condition: Arc<AtomicU32>,
}

impl Body for OpenBody {
    fn id(&self) -> ScopeId {
        self.id
    }
}

impl Recorder {
    /// Creates the condition of a loop that will stand in `body`.
    pub(in crate::host) fn condition(
        &mut self,
        body: Option<ScopeId>,
    ) -> Result<Condition, BackendError> {
        self.innermost(body, "condition")?;
        let handle = Arc::new(AtomicU32::new(0));
        let condition = Condition(handle_of(&handle));
        self.conditions.push(LoopCondition { handle, scope: body, used: false });
        Ok(condition)
    }

    /// Opens the body of a loop that stands in `body`.
    pub(in crate::host) fn begin_while(
        &mut self,
        body: Option<ScopeId>,
        condition: Condition,
    ) -> Result<ScopeId, BackendError> {
        self.innermost(body, "begin_while")?;
        let is = |word: &Arc<AtomicU32>| handle_of(word) == condition.0;
        let condition = condition_of(&mut self.conditions, is, body)?;
        condition.used = true;
        let (id, condition) = (ScopeId::fresh(), condition.handle.clone());
        self.bodies.push(OpenBody { id, operations: Vec::new(), condition });
        Ok(id)
    }

    /// Closes `body` and appends the loop to `outer`. On an error the body stays open.
    pub(in crate::host) fn end_while(
        &mut self,
        outer: Option<ScopeId>,
        body: Option<ScopeId>,
    ) -> Result<(), BackendError> {
        const NAME: &str = "end_while";
        if ending(&self.bodies, outer, body)?.operations.is_empty() {
            return Err(refused(NAME, "the body is empty, so nothing in it could end the loop"));
        }
        if let Some(OpenBody { operations, condition, .. }) = self.bodies.pop() {
            let operation = Operation::While { condition, body: operations };
            self.innermost(outer, NAME)?.push(operation);
        }
        Ok(())
    }
}

fn handle_of(word: &Arc<AtomicU32>) -> u64 {
    Arc::as_ptr(word).expose_provenance() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::host::testing::{Device, Log, reason};

    #[test]
    fn a_condition_serves_one_loop_of_its_own_scope() {
        let (device, log) = (Device::new(), Log::default());
        let (stream, other) = (device.stream("s"), device.stream("other"));
        let key = device.begin(&stream);
        let second = device.begin(&other);
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
        assert_eq!(device.backend.node_count(&device.end(&key)), 4);
        device.backend.abandon_recording(&second);
    }

    #[test]
    fn loops_end_from_the_inside_outwards() {
        let (device, log) = (Device::new(), Log::default());
        let (stream, other) = (device.stream("s"), device.stream("other"));
        let key = device.begin(&stream);
        let second = device.begin(&other);
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
        assert_eq!(device.backend.node_count(&device.end(&key)), 4);
        device.backend.abandon_recording(&second);
    }

    #[test]
    fn a_recording_with_an_open_loop_is_dropped() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let key = device.begin(&stream);
        let condition = device.backend.condition(&stream).expect("recording");
        let body = device.backend.begin_while(&stream, condition).expect("recording");
        device.append(&body, &log, 1);
        let text = reason(device.backend.end_recording(&key));
        assert!(text.contains("1 loops have no end"), "{text}");
        assert!(!device.backend.is_recording(&stream) && !device.backend.is_recording(&body));
        assert_eq!(Arc::strong_count(&log.values), 1);
        device.append(&stream, &log, 2);
        device.wait(&stream);
        assert_eq!(log.values(), [2]);
    }
}

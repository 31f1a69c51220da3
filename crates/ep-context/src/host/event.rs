//! Events: how work on one stream waits for work on another.

use std::sync::{Arc, Condvar, Mutex};

use super::operation::Failure;
use crate::sync::{lock, wait};

/// One moment on one stream, for one wait.
#[derive(Debug)]
struct Event {
    /// The stream that it is a moment of.
    stream: String,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    Ahead,
    Passed,
    Failed(Failure),
}

/// The end that is queued on the stream that goes before. Where it does not come to run, it tells why
/// the moment will not come, so that nobody waits for it for ever.
#[derive(Debug)]
pub(super) struct Signal(Arc<Event>);

/// The end that is queued on the stream that comes after.
#[derive(Debug)]
pub(super) struct Await(Arc<Event>);

/// Both ends of a new event, a moment of `stream`.
pub(super) fn event(stream: &str) -> (Signal, Await) {
    let event = Arc::new(Event {
        stream: stream.to_owned(),
        state: Mutex::new(State::Ahead),
        changed: Condvar::new(),
    });
    (Signal(event.clone()), Await(event))
}

impl Signal {
    /// Everything before has run.
    pub(super) fn pass(&self) {
        self.settle(State::Passed);
    }

    /// Something before has failed, and this will not run.
    pub(super) fn fail(&self, failure: &Failure) {
        self.settle(State::Failed(failure.clone()));
    }

    fn settle(&self, outcome: State) {
        let mut state = lock(&self.0.state);
        if matches!(*state, State::Ahead) {
            *state = outcome;
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        self.settle(State::Failed(Failure {
            operation: "order".to_owned(),
            reason: "the stream gave up its work".to_owned(),
        }));
    }
}

impl Await {
    /// Waits for the moment: as long as the work before it takes, and kernels bound their own waits.
    ///
    /// # Errors
    ///
    /// The failure that kept it from coming: what runs behind it would find half of its input.
    pub(super) fn wait(&self) -> Result<(), Failure> {
        let mut state = lock(&self.0.state);
        loop {
            match &*state {
                State::Passed => return Ok(()),
                State::Failed(Failure { operation, reason }) => {
                    return Err(Failure {
                        operation: operation.clone(),
                        reason: format!("{reason}, on stream {}, which goes before", self.0.stream),
                    });
                }
                State::Ahead => {
                    state = wait(&self.0.changed, state);
                }
            }
        }
    }
}

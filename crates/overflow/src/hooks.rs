//! Where an engine puts back what a discarded step has changed.

use std::fmt;

use graph_capture::BodyError;
use token_dispatch::StepRecord;

/// Called around a replay. A step may change more than its outputs: random state, gradients, cache
/// positions, statistics of the router. A replay has to find these as the discarded run found them.
pub trait RecoveryHooks: Send {
    /// Called before the step is replayed or run eagerly, when the discarded run has ended and memory
    /// is mapped, on every rank. `attempt` counts from 1. An error refuses the replay on all ranks.
    ///
    /// Steps that were launched behind it have moved no rows, but what else their bodies queued has run or
    /// is queued: put back what they have changed too, in the order of the runner's stream. Before the first
    /// attempt that is so of all steps in flight; they are launched again behind the last.
    ///
    /// # Errors
    ///
    /// Whatever keeps the engine from restoring its state.
    fn before_replay(&mut self, discarded: &StepRecord, attempt: u32) -> Result<(), BodyError> {
        let _ = (discarded, attempt);
        Ok(())
    }
}

/// Restores nothing: for steps that change nothing but what they write anew each time.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHooks;

impl RecoveryHooks for NoHooks {}

impl fmt::Debug for dyn RecoveryHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecoveryHooks")
    }
}

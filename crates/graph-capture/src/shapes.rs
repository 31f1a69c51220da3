//! The capacities for which a step was recorded.

use ep_context::{Backend, RowSet, RowShape};
use token_dispatch::TokenDispatcher;

use crate::error::CaptureError;

/// Fails where a set has another capacity by now than that for which a step was recorded.
pub(crate) fn check_current<B: Backend>(
    dispatcher: &TokenDispatcher<B>,
    shapes: &[(RowSet<B>, RowShape)],
) -> Result<(), CaptureError> {
    for (set, recorded) in shapes {
        let now = set.shape();
        if now.generation != recorded.generation {
            let rank = dispatcher.context().rank();
            return Err(CaptureError::Stale { rank, recorded: *recorded, now });
        }
    }
    Ok(())
}

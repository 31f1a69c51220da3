//! The capacities for which a step was recorded.

use ep_context::{Backend, Reshaped, RowSet, RowShape};
use token_dispatch::TokenDispatcher;

use crate::error::CaptureError;

/// Calls `launch` unless a set has another capacity by now than that for which a step was recorded; none
/// changes before `launch` has returned.
pub(crate) fn while_current<B: Backend, R>(
    dispatcher: &TokenDispatcher<B>,
    shapes: &[(RowSet<B>, RowShape)],
    launch: impl FnOnce() -> R,
) -> Result<R, CaptureError> {
    RowSet::while_shaped(shapes, launch).map_err(|Reshaped { wanted: recorded, now }| {
        CaptureError::Stale { rank: dispatcher.context().rank(), recorded, now }
    })
}

/// Fails where a set has another capacity by now than that for which a step was recorded.
pub(crate) fn check_current<B: Backend>(
    dispatcher: &TokenDispatcher<B>,
    shapes: &[(RowSet<B>, RowShape)],
) -> Result<(), CaptureError> {
    while_current(dispatcher, shapes, || ())
}

//! What recordings of every backend have in common: which streams take part in one and as what, and
//! where in it its loops stand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::BackendError;

/// The body of a loop or a branch. Unique in the process, so that a handle of a body is never taken for
/// one of a later recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScopeId(u64);

impl ScopeId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why a handle of a body takes nothing any more.
pub(crate) const ENDED_BODY: &str = "the loop whose body the stream recorded has ended";

/// Why a stream takes nothing for now.
const JOINED: &str = "the stream was a branch of a recording that goes on, and has been joined";

pub(crate) fn refused(operation: &'static str, reason: &str) -> BackendError {
    BackendError::Recording { operation, reason: reason.to_owned() }
}

/// As what a stream takes part in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It began the recording, and ends it.
    Origin,
    /// It is a branch.
    Branch(ScopeId),
    /// It was a branch and has been joined. On a GPU it records until the recording ends.
    Joined,
}

impl Role {
    /// Fails for a stream whose operations the recording does not take.
    pub(crate) fn check(self, operation: &'static str) -> Result<(), BackendError> {
        if self == Self::Joined { Err(refused(operation, JOINED)) } else { Ok(()) }
    }
}

/// A recording, which ends for all streams that take part in it at once.
pub(crate) trait Ends {
    /// Whether it has ended.
    fn is_over(&self) -> bool;
}

/// What a stream records, if it does.
///
/// A recording that has ended is nobody's part any more: the streams that took part in it are not
/// told, but find it over when they next look.
#[derive(Debug)]
pub(crate) struct Part<R> {
    pub(crate) taken: Option<(Arc<R>, Role)>,
}

impl<R> Default for Part<R> {
    fn default() -> Self {
        Self { taken: None }
    }
}

impl<R: Ends> Part<R> {
    pub(crate) fn of(recording: Arc<R>, role: Role) -> Self {
        Self { taken: Some((recording, role)) }
    }

    /// The recording that the stream takes part in, and as what.
    pub(crate) fn recording(&self) -> Option<(Arc<R>, Role)> {
        self.taken.clone().filter(|(recording, _)| !recording.is_over())
    }
}

/// What it takes to have one stream go behind another.
pub(crate) enum Link<R> {
    /// An event: neither records.
    Event,
    /// The later stream becomes a branch of what the earlier records.
    Branch(Arc<R>),
    /// Both take part in this already.
    Within(Arc<R>, Change),
}

/// What becomes of the two streams of a link within a recording.
pub(crate) enum Change {
    /// The earlier was this branch, and is joined.
    Join(ScopeId),
    /// The later was joined before, and becomes a branch again.
    Branch,
    /// They stay what they are.
    Nothing,
}

/// How to have the stream named `after` go behind the one named `before`, which take those parts.
pub(crate) fn link<R: Ends>(
    (of_before, before): (&Part<R>, &str),
    (of_after, after): (&Part<R>, &str),
) -> Result<Link<R>, BackendError> {
    let reason = match (of_before.recording(), of_after.recording()) {
        (None, None) => return Ok(Link::Event),
        (Some((recording, _)), None) => return Ok(Link::Branch(recording)),
        (Some((one, role)), Some((other, behind))) if Arc::ptr_eq(&one, &other) => {
            let change = match (role, behind) {
                (Role::Branch(id), Role::Origin) => Change::Join(id),
                (_, Role::Joined) => Change::Branch,
                (_, Role::Origin | Role::Branch(_)) => Change::Nothing,
            };
            return Ok(Link::Within(one, change));
        }
        (None, Some(_)) => format!(
            "stream {after} records, and no replay would wait for stream {before}, which does not"
        ),
        (Some(_), Some(_)) => format!("streams {before} and {after} record two graphs"),
    };
    Err(refused("order", &reason))
}

/// The body of a loop that is being recorded.
pub(crate) trait Body {
    fn id(&self) -> ScopeId;
}

/// Whether `body`, or the recording itself for `None`, is among those that are `open`, the innermost
/// last: it takes operations, or is an outer scope of one that does.
pub(crate) fn is_open<B: Body>(open: &[B], body: Option<ScopeId>) -> bool {
    body.is_none_or(|id| open.iter().any(|open| open.id() == id))
}

/// Fails unless `body` is the innermost of those that are `open`. Order is only defined within one
/// body, so an outer one takes nothing while another is open inside it.
pub(crate) fn check_innermost<B: Body>(
    open: &[B],
    body: Option<ScopeId>,
    operation: &'static str,
) -> Result<(), BackendError> {
    if !is_open(open, body) {
        return Err(refused(operation, ENDED_BODY));
    }
    if body != open.last().map(Body::id) {
        return Err(refused(operation, "the body of a loop inside it is being recorded"));
    }
    Ok(())
}

/// Fails where a body is `open`, which has no branches.
pub(crate) fn check_order<B: Body>(open: &[B]) -> Result<(), BackendError> {
    if open.is_empty() {
        return Ok(());
    }
    Err(refused("order", "the body of a loop is being recorded, which has no branches"))
}

/// The innermost body of those that are `open`, if that is `body` and its loop was begun in `outer`.
pub(crate) fn ending<B: Body>(
    open: &[B],
    outer: Option<ScopeId>,
    body: Option<ScopeId>,
) -> Result<&B, BackendError> {
    const NAME: &str = "end_while";
    let Some(body) = body else {
        return Err(refused(NAME, "what was given as the body is no body of a loop"));
    };
    let Some((innermost, around)) = open.split_last().filter(|(last, _)| last.id() == body) else {
        return Err(refused(NAME, "the body is not that of the innermost open loop"));
    };
    if outer != around.last().map(Body::id) {
        return Err(refused(NAME, "the loop was not begun on this stream"));
    }
    Ok(innermost)
}

/// The condition of a loop, used or not.
#[derive(Debug)]
pub(crate) struct LoopCondition<H> {
    pub(crate) handle: H,
    /// The body that the loop must stand in; `None` is the recording itself.
    pub(crate) scope: Option<ScopeId>,
    pub(crate) used: bool,
}

/// The condition for which `is` holds, for a loop that is begun in `body`.
pub(crate) fn condition_of<H>(
    conditions: &mut [LoopCondition<H>],
    is: impl Fn(&H) -> bool,
    body: Option<ScopeId>,
) -> Result<&mut LoopCondition<H>, BackendError> {
    const NAME: &str = "begin_while";
    let Some(condition) = conditions.iter_mut().find(|known| is(&known.handle)) else {
        return Err(refused(NAME, "the condition belongs to another recording"));
    };
    if condition.scope != body {
        return Err(refused(NAME, "the condition was created for another body of the recording"));
    }
    if condition.used {
        return Err(refused(NAME, "the condition is that of an earlier loop"));
    }
    Ok(condition)
}

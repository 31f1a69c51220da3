//! One step on a queue: from its beginning to its published record.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use ep_context::backend::Condition;
use ep_context::{Backend, Queue, Retained, RowSet, RowShape};
use smallvec::SmallVec;

use crate::dispatch::Sent;
use crate::dispatcher::TokenDispatcher;
use crate::error::DispatchError;
use crate::handle::Handle;
use crate::kernels;
use crate::lane::Lane;
use crate::launch;
use crate::params::{AcknowledgeParams, MAX_CHECKED_SETS};

mod branches;
mod options;

use branches::Branches;
pub use options::{RowShaping, StepMode, StepOptions};

/// What a step in a graph of others is called in errors.
const EMBEDDED: &str = "embedded step";

/// A step that is being queued or recorded. [`Step::finish`] ends it; merely dropped, it leaves a
/// queue without the end of the step, which is for failures only.
pub struct Step<'a, B: Backend> {
    /// Tells it from every other step of the process.
    id: u64,
    dispatcher: TokenDispatcher<B>,
    queue: Queue<'a, B>,
    options: StepOptions,
    ordinal: u32,
    open: SmallVec<[OpenPair<B>; 2]>,
    shapes: SmallVec<[(RowSet<B>, RowShape); 2]>,
    number: Option<u32>,
    branches: Branches<B>,
    in_loop: bool,
    /// Nothing but the step itself sees whether its shapes hold when it is replayed.
    checks_itself: bool,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A dispatch whose combine has not come yet.
pub(crate) struct OpenPair<B: Backend> {
    pub(crate) lane: Lane<B>,
    pub(crate) handle: Handle<B>,
    /// The number of the dispatch that filled the handle for it.
    pub(crate) fill: u64,
    /// Rows that the window has are not given back before the pair is closed.
    pub(crate) _rows: Option<Retained>,
    pub(crate) ordinal: u32,
    /// What the memory of its operations is checked for.
    pub(crate) bounds: Bounds,
    /// What the sender's half was given, where the receiver's half comes by itself.
    pub(crate) sent: Option<Sent>,
    /// Whether its rows were pushed.
    pub(crate) pushed: bool,
    /// How far it has come.
    pub(crate) part: Part,
}

impl<B: Backend> OpenPair<B> {
    fn is(&self, lane: &Lane<B>, handle: u64) -> bool {
        self.lane.index() == lane.index() && self.handle.id() == handle
    }
}

/// At most so many tokens and rows: what a handle holds may be no more, since memory of the caller's was checked
/// for them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) tokens: u32,
    pub(crate) rows: u32,
}

/// How far an open pair has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Its tokens are sent, and nothing is received.
    Sent,
    /// Its rows are received, or each window of them is on its own.
    Received,
    /// Its sums are sent, and none is received.
    Returned,
}

impl Part {
    /// What has to come next for the pair to be closed.
    fn next(self) -> &'static str {
        match self {
            Part::Sent => "its rows were not received: dispatch_receive comes next",
            Part::Received => "its sums were not sent: combine_send comes next, or combine",
            Part::Returned => "its sums were sent: combine_receive comes next",
        }
    }
}

/// What a finished step used.
#[derive(Debug)]
pub struct StepSummary<B: Backend> {
    /// The step's number, for its record; `None` if it was recorded rather than run.
    pub number: Option<u32>,
    /// Dispatches in the step.
    pub dispatches: u32,
    /// The row sets that it receives into, as they were shaped for it.
    pub shapes: SmallVec<[(RowSet<B>, RowShape); 2]>,
    /// How it was to run.
    pub options: StepOptions,
}

impl<'a, B: Backend> Step<'a, B> {
    /// Begins a step on `queue`. A queue that records gets every operation of the step recorded.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] for an eager step on a queue that records: it needs the host in every
    /// dispatch.
    pub fn begin(
        dispatcher: &TokenDispatcher<B>,
        queue: Queue<'a, B>,
        options: StepOptions,
    ) -> Result<Self, DispatchError> {
        let recording = queue.is_recording();
        if recording {
            Self::check_recordable(dispatcher, &options)?;
        }
        let mut step = Self::new(dispatcher, queue, options);
        if recording {
            dispatcher.launch_begin(&step.queue, &[])?;
        } else {
            let begin = || dispatcher.launch_begin(&step.queue, &[]);
            step.number = Some(dispatcher.launch_step(begin)?);
        }
        Ok(step)
    }

    /// Begins a step that is recorded into a graph which somebody else launches, so that nobody looks
    /// at [`StepSummary::shapes`] before a replay: where it is shaped by capacity, each replay looks by
    /// itself whether `sets` have the capacity for which it was recorded, and one that is stale moves
    /// nothing and is reported on all ranks, as [`DispatchError::StaleGraph`]. The step may receive into
    /// these sets only.
    ///
    /// # Errors
    ///
    /// As for [`Step::check_embeddable`]; [`DispatchError::Order`] on a queue that does not record.
    pub fn begin_embedded(
        dispatcher: &TokenDispatcher<B>,
        queue: Queue<'a, B>,
        options: StepOptions,
        sets: &[&RowSet<B>],
    ) -> Result<Self, DispatchError> {
        Self::check_embeddable(dispatcher, &options, sets)?;
        if !queue.is_recording() {
            let (rank, reason) = (dispatcher.rank(), "the stream does not record".to_owned());
            return Err(DispatchError::Order { operation: EMBEDDED, rank, reason });
        }
        let mut step = Self::new(dispatcher, queue, options);
        step.checks_itself = options.shaping == RowShaping::Capacity;
        if step.checks_itself {
            step.shapes = sets.iter().map(|set| ((*set).clone(), set.recording_shape())).collect();
        }
        dispatcher.launch_begin(&step.queue, &step.shapes)?;
        Ok(step)
    }

    /// Fails for a step that no recording can hold.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] for an eager step.
    pub fn check_recordable(
        dispatcher: &TokenDispatcher<B>,
        options: &StepOptions,
    ) -> Result<(), DispatchError> {
        if !matches!(options.mode, StepMode::Eager { .. }) {
            return Ok(());
        }
        Err(DispatchError::Order {
            operation: "eager step",
            rank: dispatcher.rank(),
            reason: "the host looks at every dispatch, which a recording cannot hold; record a \
                     static step"
                .to_owned(),
        })
    }

    /// Fails for a step that cannot be embedded into a graph of others, before anything of it is recorded.
    ///
    /// # Errors
    ///
    /// As for [`Step::check_recordable`]; [`DispatchError::Argument`] for more `sets` than
    /// [`MAX_CHECKED_SETS`] in a step that is shaped by their capacity.
    pub fn check_embeddable(
        dispatcher: &TokenDispatcher<B>,
        options: &StepOptions,
        sets: &[&RowSet<B>],
    ) -> Result<(), DispatchError> {
        Self::check_recordable(dispatcher, options)?;
        if options.shaping == RowShaping::DeviceCounted || sets.len() <= MAX_CHECKED_SETS {
            return Ok(());
        }
        Err(DispatchError::Argument {
            operation: EMBEDDED,
            rank: dispatcher.rank(),
            argument: "number of row sets",
            value: sets.len().to_string(),
            limit: format!("at most {MAX_CHECKED_SETS}"),
        })
    }

    fn new(dispatcher: &TokenDispatcher<B>, queue: Queue<'a, B>, options: StepOptions) -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            dispatcher: dispatcher.clone(),
            queue,
            options,
            ordinal: 0,
            open: SmallVec::new(),
            shapes: SmallVec::new(),
            number: None,
            branches: Branches::new(),
            in_loop: false,
            checks_itself: false,
        }
    }

    /// Goes on with a step in another recording: a step may be spread over several graphs, which are
    /// then replayed one after the other, all of them in each step.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] if a branch is out, in the body of a loop, if the queue does not record
    /// or the step did not, and if the capacity has changed since the step was begun.
    pub fn continue_on(&mut self, queue: Queue<'a, B>) -> Result<(), DispatchError> {
        const OP: &str = "next piece of a step";
        if self.in_loop || self.branches.any_out() {
            return Err(
                self.order_error(OP, "a branch or a loop ends in the recording in which it began")
            );
        }
        if self.number.is_some() || !queue.is_recording() {
            return Err(self.order_error(OP, "only a step that is recorded comes in pieces"));
        }
        if self.shapes.iter().any(|(set, shape)| set.recording_shape() != *shape) {
            return Err(self.order_error(
                OP,
                "the receive capacity has changed since the step was begun; record all of it again",
            ));
        }
        self.queue = queue;
        Ok(())
    }

    /// Has `body` queue on the step, which has to be there still when it returns: given two steps of one type, as
    /// where it records within another recording, a body can exchange them, and each would end in the place of
    /// the other. Whoever ends a step that it gave to others gives it to them by this.
    ///
    /// # Errors
    ///
    /// What `body` returns; [`DispatchError::Order`] where it has left another step in the place of this one.
    /// That one is then not to be finished.
    pub fn queue_with<E: From<DispatchError>>(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let (id, rank) = (self.id, self.dispatcher.rank());
        body(self)?;
        if self.id == id {
            return Ok(());
        }
        let reason = format!(
            "the body has put another step in the place of the one that it was given: step {} of the process \
             in that of step {id}; each ends where it was begun",
            self.id
        );
        Err(DispatchError::Order { operation: "body of a step", rank, reason }.into())
    }

    /// Where operations of the caller's own go, between those of the step; in the body of a loop,
    /// into the body, and in a branch, on the branch.
    pub fn queue(&self) -> &Queue<'a, B> {
        &self.queue
    }

    /// The dispatcher.
    pub fn dispatcher(&self) -> &TokenDispatcher<B> {
        &self.dispatcher
    }

    /// How the step runs.
    pub fn options(&self) -> &StepOptions {
        &self.options
    }

    /// The rows for which what the caller does with `rows` has to be shaped in this step.
    pub fn row_limit(&self, rows: &RowSet<B>) -> u32 {
        match (self.queue.is_recording(), self.options.shaping) {
            (true, RowShaping::DeviceCounted) => rows.max_rows(),
            (true, RowShaping::Capacity) => rows.recording_shape().rows,
            (false, _) => rows.capacity(),
        }
    }

    /// Ends the step: joins every branch that is out, closes lanes that a dispatch left open, with
    /// one more round of signals, and publishes the record.
    ///
    /// # Errors
    ///
    /// What the backend reports, the failure of work on a branch, and [`DispatchError::Order`] for a
    /// pair of which only the first half of a dispatch or of a combine was queued.
    pub fn finish(mut self) -> Result<StepSummary<B>, DispatchError> {
        if let Some(pair) = self.open.iter().find(|pair| pair.part != Part::Received) {
            let reason = format!("lane {}: {}", pair.lane.index(), pair.part.next());
            return Err(self.order_error("finish", &reason));
        }
        self.join_all()?;
        for pair in std::mem::take(&mut self.open) {
            self.acknowledge(&pair.lane)?;
        }
        self.dispatcher.launch_end(&self.queue, self.options.hold)?;
        Ok(StepSummary {
            number: self.number,
            dispatches: self.ordinal,
            shapes: std::mem::take(&mut self.shapes),
            options: self.options,
        })
    }

    fn acknowledge(&self, lane: &Lane<B>) -> Result<(), DispatchError> {
        let inner = &self.dispatcher.inner;
        let params = AcknowledgeParams {
            geometry: inner.geometry,
            wait: self.dispatcher.wait_params(),
            lane: lane.params(),
            state: inner.shared.state.address(),
            peer_required: inner.shared.peer_required.address(),
            ordinal: self.ordinal,
            reserved: 0,
        };
        let mut retained = self.dispatcher.retained();
        retained.extend(lane.retained());
        // SAFETY: every address lies in what is retained; the lane is this step's.
        Ok(unsafe {
            self.queue.launch::<kernels::Acknowledge>(
                &inner.kernels.acknowledge,
                launch::peers(&inner.geometry),
                &params,
                &[],
                &retained,
            )
        }?)
    }

    /// Creates the condition of a loop.
    pub(crate) fn condition(&self) -> Result<Condition, DispatchError> {
        if self.branches.on_branch() {
            return Err(self.order_error("rounds", "loops stand on the step's own stream"));
        }
        Ok(self.queue.backend().condition(self.queue.stream())?)
    }

    /// Records a loop whose body is what `body` queues on this step.
    pub(crate) fn repeat<E: From<DispatchError>>(
        &mut self,
        condition: Condition,
        body: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let backend = self.queue.backend().clone();
        let outer = self.queue.stream().clone();
        let inner = backend.begin_while(&outer, condition).map_err(DispatchError::from)?;
        // SAFETY: the body was just begun in the recording of the step's queue, and takes nothing once
        // it has ended.
        let queue = unsafe { self.queue.with_stream(inner.clone()) };
        let before = std::mem::replace(&mut self.queue, queue);
        let was_in_loop = std::mem::replace(&mut self.in_loop, true);
        // Should the body fail or panic, the whole recording is abandoned, this loop with it.
        let queued = body(self);
        self.in_loop = was_in_loop;
        self.queue = before;
        queued?;
        Ok(backend.end_while(&outer, inner).map_err(DispatchError::from)?)
    }

    fn pair(&self, lane: &Lane<B>, handle: &Handle<B>) -> Option<&OpenPair<B>> {
        self.open.iter().find(|pair| pair.is(lane, handle.id()))
    }

    /// What the memory of operations on `handle` has to be enough for, where its dispatch is open on `lane`.
    pub(crate) fn bounds_of(&self, lane: &Lane<B>, handle: &Handle<B>) -> Bounds {
        match self.pair(lane, handle) {
            Some(pair) => pair.bounds,
            None => Bounds { tokens: 0, rows: self.row_limit(handle.rows()) },
        }
    }

    /// Takes note of the capacity of now, before the rows of the dispatch that is open on `lane` are received.
    pub(crate) fn renew_bounds(&mut self, lane: &Lane<B>, handle: &Handle<B>) {
        let rows = self.row_limit(handle.rows());
        if let Some(pair) = self.open.iter_mut().find(|pair| pair.is(lane, handle.id())) {
            pair.bounds.rows = rows;
        }
    }

    /// Takes the next place in the step for a dispatch within `bounds`.
    pub(crate) fn open(
        &mut self,
        lane: &Lane<B>,
        handle: &Handle<B>,
        bounds: Bounds,
    ) -> Result<u32, DispatchError> {
        if self.open.iter().any(|pair| pair.handle.id() == handle.id()) {
            return Err(DispatchError::Order {
                operation: "dispatch",
                rank: self.dispatcher.rank(),
                reason:
                    "the handle is filled by a dispatch without its combine; combine first, or \
                         use another handle"
                        .to_owned(),
            });
        }
        self.open_beside(lane, handle, bounds)
    }

    /// The same for a dispatch whose handle another lane's open dispatch has filled.
    pub(crate) fn open_beside(
        &mut self,
        lane: &Lane<B>,
        handle: &Handle<B>,
        bounds: Bounds,
    ) -> Result<u32, DispatchError> {
        let order = |reason: String| DispatchError::Order {
            operation: "dispatch",
            rank: self.dispatcher.rank(),
            reason,
        };
        if !lane.dispatcher().is(&self.dispatcher) {
            return Err(order("the lane is one of another dispatcher than the step's".to_owned()));
        }
        if handle.dispatcher() != self.dispatcher.id() {
            return Err(order("the handle was made for another dispatcher".to_owned()));
        }
        if self.open.iter().any(|pair| pair.lane.index() == lane.index()) {
            return Err(order(format!(
                "lane {} still has a dispatch without its combine; combine first, or configure \
                 another lane",
                lane.index()
            )));
        }
        let rows = handle.rows();
        let is_new = !self.shapes.iter().any(|(set, _)| set.id() == rows.id());
        if is_new && self.checks_itself {
            return Err(order(
                "the handle's row set was not named when the embedded step was begun, so no replay \
                 would find out that its capacity has changed"
                    .to_owned(),
            ));
        }
        self.claim_dispatch(lane, handle)?;
        let ordinal = self.ordinal;
        self.ordinal += 1;
        self.open.push(OpenPair {
            lane: lane.clone(),
            handle: handle.clone(),
            fill: handle.filled().map_or(0, |fill| fill.number),
            _rows: handle.hold_rows(),
            ordinal,
            bounds,
            sent: None,
            pushed: false,
            part: Part::Received,
        });
        if is_new {
            self.shapes.push((rows.clone(), rows.recording_shape()));
        }
        Ok(ordinal)
    }

    /// Notes that what was opened last fills its handle, rather than to go back along what is in it.
    pub(crate) fn note_filled(&mut self) {
        let in_rounds = self.options.mode == StepMode::Rounds;
        let runs = !self.queue.is_recording();
        if let Some(pair) = self.open.last_mut() {
            pair.fill = pair.handle.fill(pair.bounds.tokens, in_rounds, runs);
        }
    }

    /// Notes that the dispatch that was opened last pushes its rows.
    pub(crate) fn note_pushed(&mut self) {
        if let Some(pair) = self.open.last_mut() {
            pair.pushed = true;
        }
    }

    /// Whether the dispatch that is open on `lane` with `handle` pushed its rows.
    pub(crate) fn was_pushed(&self, lane: &Lane<B>, handle: &Handle<B>) -> bool {
        self.pair(lane, handle).is_some_and(|pair| pair.pushed)
    }

    /// Notes that of the dispatch that was opened last only the sender's half is queued.
    pub(crate) fn note_sent(&mut self, sent: Sent) {
        if let Some(pair) = self.open.last_mut() {
            (pair.part, pair.sent) = (Part::Sent, Some(sent));
        }
    }

    /// What the sender's half was given of the dispatch that is open on `lane` with `handle`.
    pub(crate) fn sent(&self, lane: &Lane<B>, handle: &Handle<B>) -> Option<Sent> {
        self.pair(lane, handle)?.sent
    }

    /// The place of the dispatch that fills `handle` on `lane`, whose rows are received next.
    pub(crate) fn receive(
        &mut self,
        lane: &Lane<B>,
        handle: &Handle<B>,
    ) -> Result<u32, DispatchError> {
        let at = self.find("dispatch_receive", lane, handle.id(), Part::Sent)?;
        self.claim_dispatch(lane, handle)?;
        self.open[at].part = Part::Received;
        self.renew_bounds(lane, handle);
        Ok(self.open[at].ordinal)
    }

    /// The place of the dispatch that `handle` was filled by on `lane`, whose sums are sent next.
    pub(crate) fn send_back(&mut self, lane: &Lane<B>, handle: u64) -> Result<u32, DispatchError> {
        let at = self.find("combine_send", lane, handle, Part::Received)?;
        self.claim_combine(lane, handle)?;
        self.open[at].part = Part::Returned;
        Ok(self.open[at].ordinal)
    }

    /// The place of the dispatch that `handle` was filled by on `lane`, which its combine closes.
    pub(crate) fn close(&mut self, lane: &Lane<B>, handle: u64) -> Result<u32, DispatchError> {
        self.close_at("combine", lane, handle, Part::Received)
    }

    /// The same for a combine whose sums are sent already.
    pub(crate) fn close_returned(
        &mut self,
        lane: &Lane<B>,
        handle: u64,
    ) -> Result<u32, DispatchError> {
        self.close_at("combine_receive", lane, handle, Part::Returned)
    }

    fn close_at(
        &mut self,
        operation: &'static str,
        lane: &Lane<B>,
        handle: u64,
        part: Part,
    ) -> Result<u32, DispatchError> {
        let at = self.find(operation, lane, handle, part)?;
        self.claim_combine(lane, handle)?;
        Ok(self.open.remove(at).ordinal)
    }

    /// The pair that is open on `lane` with `handle`, which has to have come so far. Where the step runs as it
    /// is queued, the handle still has to hold what it was filled with for it.
    fn find(
        &self,
        operation: &'static str,
        lane: &Lane<B>,
        handle: u64,
        part: Part,
    ) -> Result<usize, DispatchError> {
        let mut pairs = self.open.iter();
        let at = pairs.position(|pair| pair.is(lane, handle)).ok_or_else(|| {
            let index = lane.index();
            let reason = format!("no dispatch into this handle is open on lane {index}");
            self.order_error(operation, &reason)
        })?;
        let pair = &self.open[at];
        if !self.queue.is_recording()
            && pair.handle.filled().is_some_and(|now| now.number != pair.fill)
        {
            let reason = "another step has filled the handle since; steps that are queued at the same time \
                          need handles of their own";
            return Err(self.order_error(operation, reason));
        }
        match pair.part {
            found if found == part => Ok(at),
            found => Err(self.order_error(operation, found.next())),
        }
    }
}

impl<B: Backend> fmt::Debug for Step<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Step")
            .field("id", &self.id)
            .field("queue", &self.queue)
            .field("options", &self.options)
            .field("dispatches", &self.ordinal)
            .finish_non_exhaustive()
    }
}

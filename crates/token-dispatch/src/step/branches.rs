//! Branches of a step: several lanes in flight at the same time, each on a stream of its own.

use ep_context::Backend;
use smallvec::SmallVec;

use super::{Step, StepMode};
use crate::error::DispatchError;
use crate::handle::Handle;
use crate::lane::Lane;

/// Which branches are out, and which stream used a lane or a handle last.
#[derive(Debug)]
pub(super) struct Branches<B: Backend> {
    /// Branches that were not joined.
    out: SmallVec<[Branch<B>; 2]>,
    /// The branch on which operations are queued now; `None` is the step's own stream.
    current: Option<u32>,
    uses: SmallVec<[Use; 8]>,
    /// Counts forks, joins and uses.
    moment: u32,
    /// Counts branches.
    ids: u32,
}

#[derive(Debug)]
struct Branch<B: Backend> {
    id: u32,
    stream: B::Stream,
    /// When it was last ordered behind the step's own stream.
    forked: u32,
    /// Whether the step's own stream is ordered behind it.
    settled: bool,
}

#[derive(Clone, Copy, Debug)]
struct Use {
    what: Used,
    branch: Option<u32>,
    moment: u32,
}

/// What operations of one dispatch–combine pair write without regard to other streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Used {
    Lane(usize),
    Handle(u64),
    /// The capacity of a row set, which an eager dispatch changes.
    Rows(u64),
}

impl Used {
    fn describe(self) -> String {
        match self {
            Used::Lane(index) => format!("lane {index}"),
            Used::Handle(_) => "the handle".to_owned(),
            Used::Rows(_) => "the row set, which an eager dispatch grows,".to_owned(),
        }
    }
}

impl<B: Backend> Branches<B> {
    pub(super) fn new() -> Self {
        Self { out: SmallVec::new(), current: None, uses: SmallVec::new(), moment: 0, ids: 0 }
    }

    pub(super) fn on_branch(&self) -> bool {
        self.current.is_some()
    }

    /// Whether a branch was not joined.
    pub(super) fn any_out(&self) -> bool {
        !self.out.is_empty()
    }

    /// Takes note of a branch that was just ordered behind the step's own stream.
    fn fork(&mut self, stream: &B::Stream) -> u32 {
        self.moment += 1;
        if let Some(known) = self.out.iter_mut().find(|branch| branch.stream == *stream) {
            (known.forked, known.settled) = (self.moment, false);
            return known.id;
        }
        let id = self.ids;
        self.ids += 1;
        let (stream, forked) = (stream.clone(), self.moment);
        self.out.push(Branch { id, stream, forked, settled: false });
        id
    }

    /// Takes note that the step's own stream was ordered behind a branch that is still out.
    fn settled(&mut self, id: u32) {
        for branch in self.out.iter_mut().filter(|branch| branch.id == id) {
            branch.settled = true;
        }
    }

    /// Takes note that the step's own stream was ordered behind a branch.
    fn joined(&mut self, id: u32) {
        self.moment += 1;
        self.out.retain(|branch| branch.id != id);
        for of_branch in self.uses.iter_mut().filter(|known| known.branch == Some(id)) {
            (of_branch.branch, of_branch.moment) = (None, self.moment);
        }
    }

    /// Takes note that all of `what` is used on the current stream, or says why that would not be
    /// ordered behind the last use.
    fn claim(&mut self, what: &[Used]) -> Result<(), String> {
        for &wanted in what {
            let Some(last) = self.uses.iter().find(|known| known.what == wanted) else { continue };
            let name = wanted.describe();
            match (last.branch, self.current) {
                (last, current) if last == current => {}
                (Some(_), _) => {
                    return Err(format!("{name} is used on a branch that was not joined"));
                }
                (None, current) => {
                    let branch = self.out.iter().find(|branch| Some(branch.id) == current);
                    if branch.is_none_or(|branch| branch.forked < last.moment) {
                        return Err(format!(
                            "{name} was used on the step's own stream after the branch was forked"
                        ));
                    }
                }
            }
        }
        self.moment += 1;
        for &what in what {
            self.uses.retain(|known| known.what != what);
            self.uses.push(Use { what, branch: self.current, moment: self.moment });
        }
        Ok(())
    }
}

impl<'a, B: Backend> Step<'a, B> {
    /// Queues what `body` queues on `stream` instead of the step's own stream: behind what the step
    /// has queued on its own so far, and beside what it queues there from now on, until
    /// [`Step::join`]. A branch that is still out may be given more; that goes behind what is on it
    /// and behind what the step has queued on its own stream meanwhile.
    ///
    /// This is for several lanes in flight: micro-batches side by side, a forward pass beside a
    /// backward pass. Each lane and each handle is used on one branch at a time, and so is a row set
    /// in an eager step; to use one elsewhere, join the branch first. The counters of a step are
    /// atomic, so its record is that of all branches. In an eager step what the host waits for is the
    /// branch alone.
    ///
    /// All ranks queue the same dispatches and combines in the same order, over all branches: streams
    /// may run side by side, but need not. Where the step is recorded, an operation must not wait for
    /// one that is recorded after it on another branch; see [`Backend::order`].
    ///
    /// Where ranks [share a device](crate::TokenDispatcher::shares_devices) they do not: what the step queues on
    /// its own stream from then on goes behind the branch. With two operations of each rank that wait for other
    /// ranks, each would need to run beside all others, and streams of several ranks, like branches of their
    /// graphs, take queues of the device that nobody can choose.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] inside a branch or the body of a loop, and for the step's own stream;
    /// [`DispatchError::Backend`] where the streams cannot be ordered; what `body` returns. The branch
    /// is out in the last case.
    pub fn branch<E: From<DispatchError>>(
        &mut self,
        stream: &B::Stream,
        body: impl FnOnce(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        const OP: &str = "branch";
        self.check_outermost(OP)?;
        if stream == self.queue.stream() {
            return Err(self.order_error(OP, "the stream is the step's own").into());
        }
        let backend = self.queue.backend();
        backend.order(self.queue.stream(), stream).map_err(DispatchError::from)?;
        // SAFETY: the stream was just ordered behind the step's own. So it is a branch of the recording
        // if that records, as the queue of any `'a` but `'static` does; the queue is given up when `body`
        // returns, and `join` is refused until then.
        let queue = unsafe { self.queue.with_stream(stream.clone()) };
        let id = self.branches.fork(stream);
        let own = std::mem::replace(&mut self.queue, queue);
        self.branches.current = Some(id);
        // Should the body panic, the step is good for nothing but being dropped.
        let queued = body(self);
        self.branches.current = None;
        self.queue = own;
        queued?;
        if self.dispatcher.shares_devices() {
            let ordered = self.queue.backend().order(stream, self.queue.stream());
            ordered.map_err(DispatchError::from)?;
            self.branches.settled(id);
        }
        Ok(())
    }

    /// Orders the step's own stream behind the branch on `stream`, which is no longer out. Waits for
    /// nothing on the host.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] if no branch is out on `stream`, and inside a branch or the body of a
    /// loop; the failure of work on the branch.
    pub fn join(&mut self, stream: &B::Stream) -> Result<(), DispatchError> {
        const OP: &str = "join";
        self.check_outermost(OP)?;
        let Some(branch) = self.branches.out.iter().find(|branch| branch.stream == *stream) else {
            return Err(self.order_error(OP, "no branch is out on the stream"));
        };
        let id = branch.id;
        if !branch.settled {
            self.queue.backend().order(&branch.stream, self.queue.stream())?;
        }
        self.branches.joined(id);
        Ok(())
    }

    pub(super) fn join_all(&mut self) -> Result<(), DispatchError> {
        while let Some(branch) = self.branches.out.first() {
            let stream = branch.stream.clone();
            self.join(&stream)?;
        }
        Ok(())
    }

    /// Takes note that a dispatch uses the lane, the handle and the rows of the handle.
    pub(super) fn claim_dispatch(
        &mut self,
        lane: &Lane<B>,
        handle: &Handle<B>,
    ) -> Result<(), DispatchError> {
        let mut what: SmallVec<[Used; 3]> = SmallVec::new();
        what.extend([Used::Lane(lane.index()), Used::Handle(handle.id())]);
        if matches!(self.options.mode, StepMode::Eager { .. }) {
            what.push(Used::Rows(handle.rows().id()));
        }
        let claimed = self.branches.claim(&what);
        claimed.map_err(|reason| self.order_error("dispatch", &reason))
    }

    /// Takes note that a combine uses the lane and the handle.
    pub(super) fn claim_combine(
        &mut self,
        lane: &Lane<B>,
        handle: u64,
    ) -> Result<(), DispatchError> {
        let claimed = self.branches.claim(&[Used::Lane(lane.index()), Used::Handle(handle)]);
        claimed.map_err(|reason| self.order_error("combine", &reason))
    }

    fn check_outermost(&self, operation: &'static str) -> Result<(), DispatchError> {
        if self.in_loop {
            return Err(self.order_error(operation, "the body of a loop has no branches"));
        }
        if self.branches.on_branch() {
            return Err(self.order_error(operation, "a branch has no branches of its own"));
        }
        Ok(())
    }

    pub(super) fn order_error(&self, operation: &'static str, reason: &str) -> DispatchError {
        let rank = self.dispatcher.rank();
        DispatchError::Order { operation, rank, reason: reason.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use ep_context::HostBackend;
    use ep_context::host::HostOptions;

    use super::*;

    const LANE: Used = Used::Lane(0);

    #[test]
    fn what_is_used_elsewhere_was_ordered_before() {
        let backend = HostBackend::new(HostOptions::default());
        let streams = ["one", "two"].map(|name| backend.stream(name).expect("threads are left"));
        let mut branches = Branches::<HostBackend>::new();
        branches.claim(&[LANE]).expect("nobody used it");
        let one = branches.fork(&streams[0]);
        branches.current = Some(one);
        branches.claim(&[LANE]).expect("used before the fork");
        branches.current = None;
        let two = branches.fork(&streams[1]);
        for elsewhere in [None, Some(two)] {
            branches.current = elsewhere;
            let reason = branches.claim(&[Used::Handle(7), LANE]).expect_err("not ordered");
            assert_eq!(reason, "lane 0 is used on a branch that was not joined");
        }
        branches.current = None;
        branches.claim(&[Used::Handle(7)]).expect("what was refused has no effect");
        branches.current = Some(one);
        branches.claim(&[LANE]).expect("it was used here");
        branches.joined(one);
        // The other branch was forked before the join, and the handle used after its fork.
        branches.current = Some(two);
        let reason = branches.claim(&[LANE]).expect_err("not ordered");
        assert_eq!(reason, "lane 0 was used on the step's own stream after the branch was forked");
        branches.claim(&[Used::Handle(7)]).expect_err("not ordered");
        branches.current = None;
        assert_eq!(branches.fork(&streams[1]), two, "the same branch, forked again");
        branches.current = Some(two);
        branches.claim(&[LANE, Used::Handle(7)]).expect("ordered by the fork");
        branches.current = None;
        branches.joined(two);
        branches.claim(&[LANE, Used::Handle(7)]).expect("ordered by the join");
        assert!(branches.out.is_empty());
    }
}

//! A rank that is stalled in the middle of a step, between its dispatch and its combine: every rank
//! says who and where, within its deadline, and nothing is left running.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use graph_ep::ep_context::backend::{MappedMemory, Memory};
use graph_ep::ep_context::{FaultKind, Specialization};
use graph_ep::{
    Backend, BackendError, BodyError, Deadlines, DispatchError, Fault, Kernel, LaunchShape, Phase,
    Queue, Step, StepGraph, StepMode, StepOptions,
};

use super::failure::{short, with};
use crate::backend::{PATIENCE, TestBackend, patient};
use crate::case::Case;
use crate::kernels::{Stall, StallParams};
use crate::oracle::StepOracle;
use crate::rig::Rig;

/// Two ranks, so that they can be processes with a GPU each.
const WORLD: usize = 2;

/// The rank that stalls.
const STALLED: usize = 1;

/// What stalls until it is let go.
struct Stalling<T: TestBackend> {
    kernel: <T::Backend as Backend>::Loaded<Stall>,
    word: Arc<<T::Backend as Backend>::Mapped>,
}

impl<T: TestBackend> Stalling<T> {
    fn new(rig: &Rig<T>) -> Self {
        let backend = rig.group.context().backend();
        let kernel = backend.load::<Stall>(&Specialization::new()).expect("loaded");
        Self { kernel, word: Arc::new(backend.allocate_mapped(4).expect("memory")) }
    }

    /// Queues an operation that stalls.
    fn queue(&self, queue: &Queue<'static, T::Backend>) -> Result<(), BackendError> {
        // It ends by itself before anything else gives up on the test.
        let limit_ns = PATIENCE.as_nanos() as u64 / 2;
        let params = StallParams { word: self.word.address(), limit_ns };
        // SAFETY: the word is retained, and accessed by atomics only.
        unsafe {
            let keep = [self.word.clone() as graph_ep::ep_context::Retained];
            queue.launch::<Stall>(&self.kernel, LaunchShape::ONE_WARP, &params, &[], &keep)
        }
    }

    fn let_go(&self) {
        // SAFETY: the word is mapped while `self` lives, and accessed by atomics only.
        unsafe { AtomicU32::from_ptr(self.word.host_address().cast()) }.store(1, Ordering::Release);
    }
}

/// A step whose experts stall on one rank.
fn body<T: TestBackend>(
    rig: &Rig<T>,
    stalling: &Arc<Stalling<T>>,
) -> impl FnMut(&mut Step<'static, T::Backend>) -> Result<(), BodyError> + Send + 'static {
    let (program, stalling) = (rig.program(), stalling.clone());
    let stalls = rig.rank() == STALLED;
    let (results, output) = (rig.layer(0).results.slice(), rig.layer(0).output.slice());
    move |step| {
        let experts = |step: &mut Step<'static, T::Backend>| -> Result<(), BodyError> {
            if stalls {
                stalling.queue(step.queue())?;
            }
            program.experts(step, 0)
        };
        if step.options().mode() == StepMode::Rounds {
            let arguments = program.arguments(0)?;
            return program.lane(0)?.rounds(step, &arguments, &results, &output, experts);
        }
        program.dispatch(step, 0)?;
        experts(step)?;
        program.combine(step, 0)
    }
}

/// Runs a step that stalls on one rank, and does `then` on every rank once all have launched it. Every
/// rank, the stalled one once it is let go, ends its step with this fault, and has nothing running.
fn ends_in<T: TestBackend>(
    mode: StepMode,
    deadlines: Deadlines,
    expected: (usize, Option<Phase>, FaultKind),
    then: impl Fn(&Rig<T>) + Send + Sync,
) {
    let case = Case::new(WORLD);
    let faults = T::on_ranks(WORLD, |env| {
        let rig = Rig::<T>::with(env, &with(&case, deadlines), &case);
        let stalling = Arc::new(Stalling::new(&rig));
        let (dispatcher, stream) = (rig.group.dispatcher(), rig.group.stream());
        let options = StepOptions::new().with_mode(mode);
        let graph = StepGraph::record(dispatcher, stream, options, body(&rig, &stalling));
        let graph = graph.expect("it can be recorded");
        rig.write(0);
        rig.meet("recorded");
        let suspended = rig.group.context().suspend_deadlines();
        let number = graph.replay(stream).expect("it is queued");
        rig.meet("launched");
        drop(suspended);
        then(&rig);
        let fault_of = || match rig.wait(number) {
            Err(DispatchError::Fault(fault)) => fault,
            other => panic!("{other:?}"),
        };
        let stalled = rig.rank() == STALLED;
        let fault: Option<Fault> = (!stalled).then(fault_of);
        rig.meet("the others have given up");
        stalling.let_go();
        let fault = fault.unwrap_or_else(fault_of);
        rig.group.context().backend().synchronize(stream).expect("nothing is left running");
        rig.meet("nobody is running");
        (fault.culprit.index(), fault.phase.index(), fault.kind == expected.2)
    });
    let (culprit, phase, _) = expected;
    for (rank, fault) in faults.into_iter().enumerate() {
        let phase = phase.map_or(fault.1, Phase::index);
        assert_eq!(fault, (culprit, phase, true), "rank {rank}, {}", Stall::NAME);
    }
}

/// A rank that stalls in its experts is blamed for not combining, by itself too.
pub fn a_rank_that_stalls_in_its_experts_is_blamed<T: TestBackend>() {
    let expected = (STALLED, Some(Phase::Combine), FaultKind::Timeout);
    ends_in::<T>(StepMode::Static, short(), expected, |_| {});
}

/// The same in the body of a loop on the device.
pub fn a_rank_that_stalls_in_rounds_is_blamed<T: TestBackend>() {
    let expected = (STALLED, Some(Phase::Combine), FaultKind::Timeout);
    ends_in::<T>(StepMode::Rounds, short(), expected, |_| {});
}

/// A rank that never launches its rounds is blamed by one whose loop has not begun.
pub fn a_rank_that_never_begins_its_rounds_is_blamed<T: TestBackend>() {
    let case = Case::new(WORLD);
    let faults = T::on_ranks(WORLD, |env| {
        let rig = Rig::<T>::with(env, &with(&case, short()), &case);
        let graph = rig.record_rounds();
        rig.write(0);
        if rig.rank() != STALLED {
            let number = graph.replay(rig.group.stream()).expect("it is queued");
            match rig.wait(number) {
                Err(DispatchError::Fault(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        rig.meet("given up");
        let later = rig.launch(StepOptions::new()).expect("it is queued");
        match rig.wait(later) {
            Err(DispatchError::Fault(fault)) => {
                (fault.culprit.index(), fault.phase.index(), fault.kind == FaultKind::Timeout)
            }
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(faults, [(STALLED, Phase::Dispatch.index(), true); WORLD]);
}

fn aborted<T: TestBackend>(mode: StepMode) {
    // By the rank that waits, long before any deadline; where its wait is, is a matter of time.
    let expected = (0, None, FaultKind::Aborted);
    ends_in::<T>(mode, patient(), expected, |rig| {
        if rig.rank() == 0 {
            rig.group.context().abort();
        }
    });
}

/// A host that gives up while a peer stalls in its experts.
pub fn an_abort_ends_a_step_whose_experts_stall<T: TestBackend>() {
    aborted::<T>(StepMode::Static);
}

/// A host that gives up while a peer stalls in the body of its loop.
pub fn an_abort_ends_rounds_that_stall<T: TestBackend>() {
    aborted::<T>(StepMode::Rounds);
}

/// After a group that stalled another can be built in the same process, and works.
pub fn a_new_group_works_after_one_that_stalled<T: TestBackend>() {
    aborted::<T>(StepMode::Static);
    let case = Case::new(WORLD);
    let runs = T::on_ranks(WORLD, |env| Rig::<T>::new(env, &case).run(0, StepMode::Static));
    StepOracle::new(&case, 0, None).check("the new group", &runs);
}

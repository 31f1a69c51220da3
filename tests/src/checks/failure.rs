//! A rank that does not do its part: every other one says who, where and how, within its deadline.

use std::time::Duration;

use graph_ep::ep_context::rendezvous::RendezvousError;
use graph_ep::ep_context::{ContextError, FaultKind, Specialization};
use graph_ep::{
    Backend, BackendError, Deadlines, DispatchError, ExpertParallelBuilder, Fault, LaunchShape,
    OverflowError, Phase, Queue, Rank, RecoverySettings, Step, StepMode, StepOptions,
};

use crate::backend::{PATIENCE, TestBackend, patient};
use crate::case::{Case, Skew};
use crate::harness;
use crate::kernels::Broken;
use crate::oracle::StepOracle;
use crate::program::Program;
use crate::rig::Rig;

/// Long enough for a peer that is there, on a busy machine, since the clock runs only once all of
/// them have launched; short enough for a test.
const SHORT: Duration = Duration::from_millis(1500);

pub(super) fn short() -> Deadlines {
    Deadlines::all(SHORT).with(Phase::Setup, PATIENCE).with(Phase::Record, PATIENCE)
}

pub(super) fn with(case: &Case, deadlines: Deadlines) -> ExpertParallelBuilder {
    case.builder(Rank(0)).deadlines(deadlines)
}

/// Behind a dispatch that is given up there are no rows, also where the same handle had some before, for which
/// there may be no memory any more.
pub fn a_dispatch_that_is_given_up_brings_no_rows<T: TestBackend>() {
    let case = Case::new(2);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let total = || {
            let mut word = [0_i32];
            let total = rig.layer(0).handle.total();
            rig.group.read(&total, bytemuck::cast_slice_mut(&mut word)).expect("it ran");
            word[0]
        };
        rig.run(0, StepMode::Static);
        assert!(total() > 0, "every rank has experts that are chosen");
        rig.meet("a step ran");
        rig.group.context().abort();
        // A device that need not wait for anybody finds out when its step ends.
        for _ in 0..2 {
            let number = rig.launch(StepOptions::new()).expect("it is queued");
            assert!(rig.wait(number).is_err(), "it was given up");
        }
        assert_eq!(total(), 0);
    });
}

/// The fault that the step launched as `number` ended in.
fn fault_of<T: TestBackend>(rig: &Rig<T>, number: u32) -> Fault {
    match rig.wait(number) {
        Err(DispatchError::Fault(fault)) => {
            assert_eq!(rig.group.context().fault(), Some(fault), "what the rank holds");
            fault
        }
        other => panic!("{other:?}"),
    }
}

/// Rank 1 does only what `partial` queues of a step of `case`, its peers all of it. They have to blame
/// rank 1 for not signalling in `phase`; so does rank 1, once it looks; and so does every later step.
fn blamed<T: TestBackend>(
    case: Case,
    phase: Phase,
    partial: impl Fn(&Rig<T>) -> Option<Step<'static, T::Backend>> + Send + Sync,
) {
    let case = &case.on::<T>();
    let faults = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::with(env, &with(case, short()), case);
        rig.write(0);
        let culprit = rig.rank() == 1;
        let suspended = rig.group.context().suspend_deadlines();
        let number = match culprit {
            true => {
                // Dropped without its end, as by a host that fails in the middle.
                drop(partial(&rig));
                None
            }
            false => Some(rig.launch(StepOptions::new()).expect("it is queued")),
        };
        rig.meet("launched");
        drop(suspended);
        let fault = number.map(|number| fault_of(&rig, number));
        rig.meet("failed");
        let later = rig.launch(StepOptions::new()).expect("it is queued");
        let sticky = match rig.wait(later) {
            Err(DispatchError::Fault(fault)) => fault,
            other => panic!("{other:?}"),
        };
        assert!(fault.is_none_or(|fault| fault == sticky), "{fault:?}, then {sticky:?}");
        (sticky.culprit.0, sticky.phase.index(), sticky.kind == FaultKind::Timeout)
    });
    assert_eq!(faults, vec![(1, phase.index(), true); case.world()]);
}

/// A rank that never launches its step.
pub fn a_rank_that_never_dispatches_is_blamed<T: TestBackend>() {
    blamed::<T>(Case::new(3), Phase::Dispatch, |_| None);
}

/// A rank that dispatches and never combines.
pub fn a_rank_that_never_combines_is_blamed<T: TestBackend>() {
    blamed::<T>(Case::new(3), Phase::Combine, |rig| Some(dispatched(rig)));
}

/// A rank that dispatches and never ends a step that ends in a dispatch.
pub fn a_rank_that_never_acknowledges_is_blamed<T: TestBackend>() {
    let case = Case { ends_in_dispatch: true, ..Case::new(3) };
    blamed::<T>(case, Phase::Acknowledge, |rig| Some(dispatched(rig)));
}

fn dispatched<T: TestBackend>(rig: &Rig<T>) -> Step<'static, T::Backend> {
    let dispatcher = rig.group.dispatcher();
    let mut step = Step::begin(dispatcher, rig.direct(), StepOptions::new()).expect("queued");
    rig.program().dispatch(&mut step, 0).expect("queued");
    step
}

/// A host that gives up in the middle of a step: every rank is told who, long before any deadline,
/// the one that had not even begun the step too.
pub fn an_abort_ends_the_step_on_every_rank<T: TestBackend>() {
    let case = Case::new(4).on::<T>();
    let aborts = case.world() / 2;
    let faults = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.write(0);
        let absent = rig.rank() == 0;
        let launched = (!absent).then(|| rig.launch(StepOptions::new()).expect("it is queued"));
        if rig.rank() == aborts {
            // Its own step waits for rank 0, or has not begun to.
            rig.group.context().abort();
        }
        let own = launched.map(|number| fault_of(&rig, number));
        rig.meet("told");
        let late = rig.launch(StepOptions::new()).expect("it is queued");
        let fault = fault_of(&rig, late);
        assert!(own.is_none_or(|own| own == fault), "{own:?}, then {fault:?}");
        (fault.culprit.index(), fault.kind == FaultKind::Aborted)
    });
    assert_eq!(faults, vec![(aborts, true); case.world()]);
}

/// An operation of the caller's that breaks ends the stream of that rank, which says which operation
/// it was; its peers time out on it.
pub fn an_operation_that_breaks_is_reported<T: TestBackend>() {
    if !T::OPERATIONS_MAY_BREAK {
        harness::skip("it would break the device for all".to_owned());
    }
    let case = Case::new(3).on::<T>();
    let blamed = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::with(env, &with(&case, short()), &case);
        rig.write(0);
        let broken = rig.rank() == 1;
        let backend = rig.group.context().backend();
        let suspended = rig.group.context().suspend_deadlines();
        if broken {
            let kernel = backend.load::<Broken>(&Specialization::new()).expect("loaded");
            let queue = rig.direct();
            // SAFETY: the operation touches no memory.
            unsafe { queue.launch::<Broken>(&kernel, LaunchShape::ONE_WARP, &0, &[], &[]) }
                .expect("it is queued");
        }
        // On the rank whose stream breaks this may be refused already.
        let launched = rig.launch(StepOptions::new());
        rig.meet("launched");
        drop(suspended);
        if broken {
            match backend.synchronize(rig.group.stream()) {
                Err(BackendError::Failed { operation, reason, .. }) => {
                    assert!(operation.contains("broken"), "{operation}");
                    assert!(reason.contains("an operation that breaks"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
            return 1;
        }
        let fault = fault_of(&rig, launched.expect("it is queued"));
        assert_eq!((fault.phase, fault.kind), (Phase::Dispatch, FaultKind::Timeout));
        fault.culprit.0
    });
    assert_eq!(blamed, vec![1; case.world()]);
}

/// The runner of a rank whose stream breaks says what broke, rather than that no record came.
pub fn a_runner_reports_the_operation_that_breaks<T: TestBackend>() {
    if !T::OPERATIONS_MAY_BREAK {
        harness::skip("it would break the device for all".to_owned());
    }
    let case = Case::new(1);
    T::on_ranks(1, |env| {
        let deadlines = patient().with(Phase::Record, SHORT);
        let rig = Rig::<T>::with(env, &with(&case, deadlines), &case);
        let backend = rig.group.context().backend();
        let kernel = backend.load::<Broken>(&Specialization::new()).expect("loaded");
        let body = move |step: &mut Step<'static, T::Backend>| {
            let queue: &Queue<'static, T::Backend> = step.queue();
            // SAFETY: the operation touches no memory.
            let queued =
                unsafe { queue.launch::<Broken>(&kernel, LaunchShape::ONE_WARP, &0, &[], &[]) };
            Ok(queued?)
        };
        let mut runner = rig.group.runner(RecoverySettings::new(), body).expect("in range");
        let error = runner.run().expect_err("the step breaks");
        let text = graph_ep::ep_context::error::chain(&error);
        assert!(text.contains("broken"), "{text}");
    });
}

/// A rank that does not come to agree on a replay is named by all others, in time.
pub fn a_rank_missing_from_an_agreement_is_named<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(0), ..Case::new(3) }.on::<T>().capacity(4);
    let last = case.world() - 1;
    let missing = T::on_ranks(case.world(), |env| {
        let deadlines = patient().with(Phase::Agreement, SHORT);
        let rig = Rig::<T>::with(env, &with(&case, deadlines), &case);
        rig.write(0);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        if rig.rank() == last {
            // Runs the step and does not look at its record. Whether it leaves before or after the
            // deadline of the others, it is the one to name.
            let number = rig.launch(StepOptions::new()).expect("it is queued");
            assert!(rig.wait(number).expect("it ends").overflowed());
            std::thread::sleep(2 * SHORT);
            return vec![last as u32];
        }
        match runner.run() {
            Err(OverflowError::Context(ContextError::Rendezvous(RendezvousError::Deadline {
                missing,
                ..
            }))) => missing.iter().map(|rank| rank.0).collect::<Vec<_>>(),
            Err(OverflowError::Context(ContextError::Rendezvous(RendezvousError::Left {
                rank,
                ..
            }))) => vec![rank.0],
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(missing, vec![[last as u32]; case.world()]);
}

/// A rank whose host gives a recovery up leaves no other waiting for its deadline.
pub fn a_rank_that_leaves_ends_an_agreement<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(0), ..Case::new(3) }.on::<T>().capacity(4);
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.write(0);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        if rig.rank() == 1 {
            let number = rig.launch(StepOptions::new()).expect("it is queued");
            rig.wait(number).expect("it ends");
            rig.group.context().rendezvous().abort("its engine was told to stop");
            return;
        }
        let error = runner.run().expect_err("a rank is gone").to_string();
        assert!(error.contains("rank 1") && error.contains("told to stop"), "{error}");
    });
}

/// Ranks that queue different steps find out: nobody moves a token that was not meant for it.
pub fn ranks_in_different_steps_find_out<T: TestBackend>() {
    let case = Case { layers: 2, lanes: 2, ..Case::new(2) };
    let kinds = T::on_ranks(2, |env| {
        let rig = Rig::<T>::with(env, &with(&case, short()), &case);
        rig.write(0);
        let program = rig.program();
        let mut step =
            Step::begin(rig.group.dispatcher(), rig.direct(), StepOptions::new()).expect("queued");
        // The layers in opposite orders.
        for layer in if rig.rank() == 0 { [0, 1] } else { [1, 0] } {
            program.dispatch(&mut step, layer).expect("queued");
            program.experts(&mut step, layer).expect("queued");
            program.combine(&mut step, layer).expect("queued");
        }
        let number = step.finish().expect("queued").number.expect("it runs");
        let fault = fault_of(&rig, number);
        matches!(fault.kind, FaultKind::OutOfStep | FaultKind::Timeout)
    });
    assert_eq!(kinds, [true; 2]);
}

/// Ranks of which one pushes and one pulls find out, before a row is taken from where none was put. Where
/// every mode pulls, modes may differ.
pub fn ranks_in_different_modes_find_out<T: TestBackend>() {
    let case = Case::new(2);
    let kinds = T::on_ranks(2, |env| {
        let rig = Rig::<T>::with(env, &with(&case, short()), &case);
        if !rig.group.dispatcher().pushes() {
            return None;
        }
        rig.write(0);
        let eager = StepMode::Eager { max_rows: u32::MAX };
        let mode = if rig.rank() == 0 { StepMode::Static } else { eager };
        let fault = match rig.launch(StepOptions::new().with_mode(mode)) {
            Ok(number) => fault_of(&rig, number),
            Err(_) => rig.group.context().fault().expect("the group has failed"),
        };
        Some(fault.kind == FaultKind::OutOfStep)
    });
    if kinds == [None; 2] {
        harness::skip("every mode pulls here".to_owned());
    }
    assert_eq!(kinds, [Some(true); 2]);
}

/// An eager step that may not, or cannot, grow ends the group: that rank says how many rows it needs,
/// its peers are told who gave up, and nobody waits for a deadline.
pub fn an_eager_step_without_room_is_given_up<T: TestBackend>() {
    // Four rows of two-byte values fill a page, so that any growth needs another.
    let hidden = T::PAGE_BYTES / (4 * 2);
    let case = Case { skew: Skew::Hot(0), hidden, ..Case::new(3) }.on::<T>().capacity(4);
    for memory in [false, true] {
        let faults = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            rig.write(0);
            let short = rig.rank() == 0;
            if short && memory {
                let account = rig.group.context().account();
                account.set_limit(Some(account.used()));
            }
            let max_rows = if short && !memory { 4 } else { u32::MAX };
            let launched = rig.launch(StepOptions::new().with_mode(StepMode::Eager { max_rows }));
            match (short, launched) {
                (true, Err(error)) => match error.downcast_ref() {
                    Some(DispatchError::EagerLimit { rank: Rank(0), limit: 4, .. }) => {
                        assert!(!memory);
                    }
                    Some(DispatchError::Backend(BackendError::OutOfMemory { .. })) => {
                        assert!(memory);
                    }
                    _ => panic!("{error:?}"),
                },
                (false, Err(error)) => match error.downcast_ref() {
                    // It waited for the count of a later dispatch when it was told.
                    Some(DispatchError::Fault(_)) => {}
                    _ => panic!("{error:?}"),
                },
                (false, Ok(number)) => drop(fault_of(&rig, number)),
                (true, Ok(_)) => panic!("it had room"),
            }
            rig.meet("given up");
            let later = rig.launch(StepOptions::new()).expect("it is queued");
            let fault = fault_of(&rig, later);
            (fault.culprit.0, fault.kind == FaultKind::Failed, fault.phase == Phase::Growth)
        });
        assert_eq!(faults, vec![(0, true, true); case.world()]);
    }
}

/// A body that fails while a runner runs it eagerly ends the group at once: its peers are told, and do not wait
/// for what it will not queue.
pub fn an_eager_body_that_fails_is_told_to_all<T: TestBackend>() {
    for part in 0..3 {
        let case = Case::new(2);
        T::on_ranks(2, |env| {
            let rig = Rig::<T>::with(env, &with(&case, short()), &case);
            let (program, fails) = (rig.program(), rig.rank() == 1);
            let body = move |step: &mut Step<'static, T::Backend>| {
                for (at, queue) in
                    [Program::dispatch, Program::experts, Program::combine].into_iter().enumerate()
                {
                    if fails && at == part {
                        return Err("the engine is out of luck".into());
                    }
                    queue(&program, step, 0)?;
                }
                Ok(())
            };
            let mut runner = rig.group.runner(RecoverySettings::new(), body).expect("in range");
            rig.write(0);
            let ended = runner.run_eager();
            match (fails, ended) {
                (true, Err(OverflowError::Body { rank: Rank(1), source })) => {
                    assert_eq!(source.to_string(), "the engine is out of luck");
                }
                (false, Err(OverflowError::Dispatch(DispatchError::Fault(fault)))) => {
                    assert_eq!((fault.culprit, fault.kind), (Rank(1), FaultKind::Failed));
                }
                (_, other) => panic!("part {part}: {other:?}"),
            }
        });
    }
}

/// Rows beyond the limit of an eager step are an error of their own, on the rank that lacks them.
pub fn a_runner_says_what_an_eager_step_lacks<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(0), ..Case::new(2) }.capacity(4);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let settings = RecoverySettings::new();
        let limited = rig.rank() == 0;
        let settings = if limited { settings.with_eager_max_rows(4) } else { settings };
        let mut runner = rig.runner(settings).expect("in range");
        rig.write(0);
        match (limited, runner.run_eager()) {
            (true, Err(OverflowError::Dispatch(DispatchError::EagerLimit { limit: 4, .. }))) => {}
            (false, Err(OverflowError::Dispatch(DispatchError::Fault(fault)))) => {
                assert_eq!((fault.culprit, fault.phase), (Rank(0), Phase::Growth));
            }
            (_, other) => panic!("{other:?}"),
        }
    });
}

/// After a group has failed another can be built in the same process, and works.
pub fn a_new_group_works_after_a_failed_one<T: TestBackend>() {
    let case = Case::new(2);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.group.context().abort();
        let number = rig.launch(StepOptions::new()).expect("it is queued");
        fault_of(&rig, number);
    });
    let runs = T::on_ranks(2, |env| Rig::<T>::new(env, &case).run_eager(0));
    StepOracle::new(&case, 0, None).check("the new group", &runs);
}

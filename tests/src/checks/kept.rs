//! Backward passes and combines on handles that do not hold what they were queued for.

use std::ops::Range;

use graph_ep::ep_context::FaultKind;
use graph_ep::{
    Backend, BodyError, Combine, DeviceSlice, DispatchError, Phase, Step, StepMode, StepOptions,
    TokenCount,
};

use super::everywhere::least_rows;
use super::lanes::refusal;
use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::grads::{BackwardProgram, GradRig};
use crate::rig::{Rig, SPOILT};

mod overtaken;

pub use overtaken::a_combine_of_more_than_it_has_memory_for_is_a_fault;

/// The rank whose handle holds something else.
const CULPRIT: usize = 1;
/// Tokens or rows for which its backward pass has memory.
const FEW: usize = 2;

fn case() -> Case {
    Case { backward: true, top_k: 2, lanes: 2, layers: 2, tokens: vec![6; 2], ..Case::new(2) }
}

/// Queues the forward pass of the first layer for `tokens` tokens.
fn forward<T: TestBackend>(
    program: &BackwardProgram<T>,
    step: &mut Step<'static, T::Backend>,
    tokens: usize,
) -> Result<(), BodyError> {
    let mut arguments = program.forward.arguments(0)?;
    arguments.count = TokenCount::Fixed(tokens);
    program.forward.lane(0)?.dispatch(step, &arguments)?;
    program.forward.experts(step, 0)?;
    program.forward.combine(step, 0)
}

/// Queues its backward pass, with memory for the gradients of `tokens` tokens and `rows` rows.
fn backward<T: TestBackend>(
    program: &BackwardProgram<T>,
    step: &mut Step<'static, T::Backend>,
    tokens: usize,
    rows: usize,
) -> Result<(), BodyError> {
    combine_backward(program, step, tokens, rows)?;
    dispatch_backward(program, step, tokens, rows)
}

/// Queues its first half.
fn combine_backward<T: TestBackend>(
    program: &BackwardProgram<T>,
    step: &mut Step<'static, T::Backend>,
    tokens: usize,
    rows: usize,
) -> Result<(), BodyError> {
    let (lane, case) = (program.forward.lane(0)?, &program.forward.case);
    let (tokens, rows) = (0..tokens * case.sum_bytes(), 0..rows * case.sum_bytes());
    let mut arguments = program.combine_arguments(0);
    arguments.output_grads = arguments.output_grads.get(tokens).ok_or("longer")?;
    arguments.row_grads = arguments.row_grads.get(rows.clone()).ok_or("longer")?;
    arguments.expert_rows = arguments.expert_rows.and_then(|all| all.get(rows));
    Ok(lane.combine_backward(step, &arguments)?)
}

/// Queues its second half.
fn dispatch_backward<T: TestBackend>(
    program: &BackwardProgram<T>,
    step: &mut Step<'static, T::Backend>,
    tokens: usize,
    rows: usize,
) -> Result<(), BodyError> {
    let (lane, case) = (program.forward.lane(0)?, &program.forward.case);
    let mut arguments = program.dispatch_arguments(0);
    let bytes = tokens * case.sum_bytes();
    arguments.token_grads = arguments.token_grads.get(0..bytes).ok_or("longer")?;
    let bytes = rows * case.sum_bytes();
    arguments.row_grads = arguments.row_grads.get(0..bytes).ok_or("longer")?;
    if let Some(grads) = &mut arguments.row_weight_grads {
        *grads = grads.get(0..4 * rows).ok_or("longer")?;
    }
    Ok(lane.dispatch_backward(step, &arguments)?)
}

/// Waits for a step that has to end in a fault, and says whose and of which kind.
fn fault<T: TestBackend>(rig: &GradRig<T>, number: u32) -> (u32, u8) {
    match rig.rig.wait(number) {
        Err(DispatchError::Fault(fault)) => {
            assert_eq!(fault.phase, Phase::Dispatch);
            (fault.culprit.0, fault.kind as u8)
        }
        other => panic!("{other:?}"),
    }
}

/// These rows of `slice`, each of a sum, are as they were before the step.
fn assert_spoilt<T: TestBackend>(
    rig: &GradRig<T>,
    slice: &DeviceSlice<'static, T::Backend>,
    rows: Range<usize>,
    what: &str,
) {
    let row = rig.rig.case.sum_bytes();
    let mut bytes = vec![0; rows.len() * row];
    let beyond = slice.get(rows.start * row..rows.end * row).expect("it has so many rows");
    rig.rig.group.read(&beyond, &mut bytes).expect("it ran");
    assert!(bytes.iter().all(|byte| *byte == SPOILT), "{what}");
}

/// A dispatch that is refused changes nothing about the handle that it was to fill: the backward pass
/// still needs gradients of all tokens that were sent.
pub fn a_refused_dispatch_changes_no_handle<T: TestBackend>() {
    let case = case();
    T::on_ranks(2, |env| {
        let rig = GradRig::<T>::new(env, &case);
        let program = rig.program();
        let told = refusal(&rig.rig, |_, step| {
            forward(&program, step, 6)?;
            // The lane is that of the second dispatch until it is combined.
            let lane = program.forward.lane(0)?;
            lane.dispatch(step, &program.forward.arguments(1)?)?;
            let mut again = program.forward.arguments(0)?;
            again.count = TokenCount::Fixed(FEW);
            let refused = lane.dispatch(step, &again).expect_err("the lane is open");
            assert!(refused.to_string().contains("lane 0"), "{refused}");
            let layer = rig.rig.layer(1);
            lane.combine(
                step,
                &Combine {
                    handle: &layer.handle,
                    expert_rows: layer.results.slice(),
                    output: layer.output.slice(),
                },
            )?;
            let mut arguments = program.combine_arguments(0);
            let bytes = FEW * case.sum_bytes();
            arguments.output_grads = arguments.output_grads.get(0..bytes).ok_or("longer")?;
            Ok(lane.combine_backward(step, &arguments)?)
        });
        let told = told.expect("gradients of two tokens are too few for six");
        assert!(told.contains("output gradients"), "{told}");
    });
}

/// Which of two recorded dispatches has filled a handle only shows when the backward pass runs: where that
/// one sent more tokens than there are gradients, it is a fault, and nothing is touched beyond them.
pub fn gradients_of_fewer_tokens_than_were_sent_are_a_fault<T: TestBackend>() {
    let case = case();
    let faults = T::on_ranks(2, |env| {
        let rig = GradRig::<T>::new(env, &case);
        let program = rig.program();
        let few = if rig.rig.rank() == CULPRIT { FEW } else { 6 };
        let record = |tokens| rig.record(StepMode::Static, |step| forward(&program, step, tokens));
        let (long, _short) = (record(6), record(few));
        let rows = rig.rig.group.rows().capacity() as usize;
        let back = rig.record(StepMode::Static, |step| backward(&program, step, few, rows));
        rig.rig.meet("all have recorded");
        rig.write(0);
        rig.replay(&long);
        rig.rig.meet("the forward pass has ended");
        let number = back.replay(rig.rig.group.stream()).expect("it is current");
        let fault = fault(&rig, number);
        let grads = rig.layer(0).tokens.slice();
        assert_spoilt(&rig, &grads, few..6, "gradients nobody gave memory for");
        fault
    });
    assert_eq!(faults, vec![(CULPRIT as u32, FaultKind::TooManyTokens as u8); 2]);
}

/// The same for rows, where the capacity was lowered after the forward pass.
pub fn gradients_of_fewer_rows_than_were_received_are_a_fault<T: TestBackend>() {
    let case = case();
    let faults = T::on_ranks(2, |env| {
        let rig = GradRig::<T>::new(env, &case);
        let (program, group) = (rig.program(), &rig.rig.group);
        let before = group.rows().capacity() as usize;
        rig.write(0);
        rig.launch(StepMode::Static, |step| forward(&program, step, 6));
        let rows = if rig.rig.rank() == CULPRIT { FEW } else { before };
        let smaller = group.rows().plan(rows as u32).expect("smaller");
        // SAFETY: steps run on this stream only.
        unsafe { smaller.commit(&rig.rig.direct()) }.expect("nothing runs");
        rig.rig.meet("the forward pass has ended");
        let mut step = Step::begin(group.dispatcher(), rig.rig.direct(), StepOptions::new())
            .expect("it is queued");
        backward(&program, &mut step, 6, rows).expect("it is queued");
        let number = step.finish().expect("it is queued").number.expect("it runs");
        let fault = fault(&rig, number);
        let grads = rig.layer(0).rows.slice();
        assert_spoilt(&rig, &grads, rows..before, "rows nobody gave memory for");
        fault
    });
    assert_eq!(faults, vec![(CULPRIT as u32, FaultKind::TooManyTokens as u8); 2]);
}

/// Lists of a handle lie in rows. Once some were given back they are gone, even if there is memory in their
/// place again.
pub fn a_trim_ends_what_handles_hold<T: TestBackend>() {
    let case = case();
    T::on_ranks(2, |env| {
        let rig = GradRig::<T>::new(env, &case);
        let (program, rows) = (rig.program(), rig.rig.group.rows());
        let before = rows.capacity();
        rig.write(0);
        rig.launch(StepMode::Static, |step| forward(&program, step, 6));
        let direct = rig.rig.direct();
        rig.rig.group.context().backend().synchronize(direct.stream()).expect("it ran");
        for (capacity, trims) in [(1, true), (before, false)] {
            let plan = rows.plan(capacity).expect("there is memory");
            // SAFETY: steps run on this stream only.
            unsafe { plan.commit(&direct) }.expect("nothing runs");
            if trims {
                rows.trim().expect("nothing uses them");
            }
        }
        rig.rig.meet("memory was given back");
        let told = refusal(&rig.rig, |_, step| backward(&program, step, 6, before as usize));
        assert!(told.is_some_and(|text| text.contains("given back")), "its lists are gone");
        // Another dispatch fills it again.
        rig.launch(StepMode::Static, |step| forward(&program, step, 6));
        rig.launch(StepMode::Static, |step| backward(&program, step, 6, before as usize));
    });
}

/// Rounds leave the last window in a handle, along which no backward pass can go: one that is queued behind
/// them is refused, and one that was recorded for another dispatch finds out.
pub fn handles_that_rounds_filled_are_refused<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(2), ..case() };
    let case = case.clone().capacity(least_rows(&case));
    let faults = T::on_ranks(2, |env| {
        let rig = GradRig::<T>::new(env, &case);
        let program = rig.program();
        let rows = rig.rig.group.rows().capacity() as usize;
        let _whole = rig.record(StepMode::Static, |step| forward(&program, step, 6));
        let back = rig.record(StepMode::Static, |step| backward(&program, step, 6, rows));
        let rounds = rig.record(StepMode::Rounds, |step| program.forward.rounds(step, 0));
        rig.rig.meet("all have recorded");
        let told = refusal(&rig.rig, |_, step| backward(&program, step, 6, rows));
        assert!(told.is_some_and(|text| text.contains("rounds")), "the last window is not all");
        rig.write(0);
        rig.replay(&rounds);
        rig.rig.meet("the rounds have ended");
        let number = back.replay(rig.rig.group.stream()).expect("it is current");
        fault(&rig, number)
    });
    // Either rank may be the first to find out.
    assert!(faults.iter().all(|(_, kind)| *kind == FaultKind::OutOfStep as u8), "{faults:?}");
}

/// Two steps that are queued at the same time do not share a handle: the combine of the first would follow
/// what the second has left there.
pub fn a_handle_that_another_step_fills_is_refused<T: TestBackend>() {
    let case = case();
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
        let begin = || Step::begin(dispatcher, rig.direct(), StepOptions::new()).expect("queued");
        rig.write(0);
        let mut first = begin();
        program.dispatch(&mut first, 0).expect("it is queued");
        let mut second = begin();
        let mut arguments = program.arguments(1).expect("there are lanes");
        arguments.handle = &rig.layer(0).handle;
        let lane = program.lane(1).expect("there are two");
        lane.dispatch(&mut second, &arguments).expect("nothing of this step uses the handle");
        let refused = program.combine(&mut first, 0).expect_err("it holds another dispatch");
        assert!(refused.to_string().contains("another step"), "{refused}");
    });
}

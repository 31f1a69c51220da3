//! Combines whose handle a replay fills again before them: its graph knows of no step that is being queued.

use graph_ep::ep_context::FaultKind;
use graph_ep::{
    Backend, BodyError, Combine, Phase, RowShaping, Step, StepGraph, StepMode, StepOptions,
    TokenCount, Weighting,
};

use super::{CULPRIT, FEW, case, combine_backward, dispatch_backward, forward};
use crate::backend::TestBackend;
use crate::case::Case;
use crate::grads::{BackwardProgram, GradRig};
use crate::rig::SPOILT;

/// Tokens of every dispatch that is not short of memory.
const ALL: usize = 6;

/// Who, in which phase, of which kind.
type Seen = (u32, u8, u8);

/// Of what the culprit has memory for [`FEW`] only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Short {
    Tokens,
    Rows,
}

/// Whose second half is overtaken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward,
    Backward,
}

/// Where more tokens or rows are in the handle than the combine has memory for, this is a fault, and no output
/// is touched; and so it is with the combine of a backward pass.
///
/// There is memory behind that of the combine, so that whoever goes too far does no harm and is found out by
/// what it writes, and by the fault that is missing.
pub fn a_combine_of_more_than_it_has_memory_for_is_a_fault<T: TestBackend>() {
    for (short, pass, weighting) in [
        (Short::Tokens, Pass::Forward, Weighting::Combine),
        (Short::Rows, Pass::Forward, Weighting::Combine),
        (Short::Tokens, Pass::Backward, Weighting::Combine),
        (Short::Rows, Pass::Backward, Weighting::Combine),
        // Gradients of weights travel before those of rows, and both are held to their memory. Which of the
        // two faults does not show here; that of gradients of weights has a test of its own.
        (Short::Rows, Pass::Backward, Weighting::Caller),
    ] {
        let case = Case { weighting, ..case() };
        let faults = T::on_ranks(2, |env| {
            let rig = GradRig::<T>::new(env, &case);
            let is_short = |of| rig.rig.rank() == CULPRIT && short == of;
            let memory = Memory {
                tokens: if is_short(Short::Tokens) { FEW } else { ALL },
                rows: if is_short(Short::Rows) {
                    FEW
                } else {
                    rig.rig.group.rows().capacity() as usize
                },
            };
            memory.overtaken(&rig, pass)
        });
        let what = format!("{pass:?}, short of {short:?}, {weighting:?}");
        let expected: Seen = (CULPRIT as u32, Phase::Combine as u8, FaultKind::TooManyTokens as u8);
        assert_eq!(faults[CULPRIT], Some(expected), "{what}");
        // The other rank may have got all that it needs before.
        assert!(faults.iter().flatten().all(|fault| *fault == expected), "{what}: {faults:?}");
    }
}

/// For how many tokens and rows a dispatch and its combine have memory.
#[derive(Clone, Copy, Debug)]
struct Memory {
    tokens: usize,
    rows: usize,
}

impl Memory {
    /// Runs a dispatch and its combine, or the pass back along them, with a replay between the two halves that
    /// leaves [`ALL`] tokens in the handle, and their rows. Returns the fault, if there is one.
    fn overtaken<T: TestBackend>(self, rig: &GradRig<T>, pass: Pass) -> Option<Seen> {
        let (program, group) = (rig.program(), &rig.rig.group);
        let full = rig.rig.group.rows().capacity() as usize;
        // It is not stale once there are more rows.
        let options = StepOptions::new().with_shaping(RowShaping::DeviceCounted);
        let other = StepGraph::record(group.dispatcher(), group.stream(), options, |step| {
            fill_the_same(&program, step)
        });
        let other = other.expect("it is recorded");
        let resize = |rows: usize| {
            rig.rig.commit(group.rows().plan(rows as u32).expect("there is memory"));
        };
        rig.write(0);
        resize(self.rows);
        rig.rig.meet("all have recorded");
        if pass == Pass::Backward {
            rig.launch(StepMode::Static, |step| forward(&program, step, self.tokens));
        }
        let step = Step::begin(group.dispatcher(), rig.rig.direct(), StepOptions::new());
        let mut step = step.expect("it is queued");
        self.first_half(&program, &mut step, pass).expect("it is queued");
        resize(full);
        other.replay(group.stream()).expect("it is current");
        self.second_half(&program, &mut step, pass).expect("it is queued");
        step.finish().expect("it is queued");
        // The two steps end with the number of the one that is within the other, whose record is there before
        // the other goes on.
        group.context().backend().synchronize(group.stream()).expect("all of it ran");
        let fault = group.context().fault();
        if rig.rig.rank() == CULPRIT {
            let output = match pass {
                Pass::Forward => rig.rig.layer(0).output.slice(),
                Pass::Backward => rig.layer(0).tokens.slice(),
            };
            let mut bytes = vec![0; output.bytes()];
            rig.rig.group.read(&output, &mut bytes).expect("it ran");
            let touched = bytes.iter().position(|byte| *byte != SPOILT);
            assert_eq!(touched, None, "{pass:?}: an output was begun; the fault: {fault:?}");
        }
        fault.map(|fault| (fault.culprit.0, fault.phase as u8, fault.kind as u8))
    }

    fn first_half<T: TestBackend>(
        self,
        program: &BackwardProgram<T>,
        step: &mut Step<'static, T::Backend>,
        pass: Pass,
    ) -> Result<(), BodyError> {
        if pass == Pass::Backward {
            return combine_backward(program, step, self.tokens, self.rows);
        }
        let mut arguments = program.forward.arguments(0)?;
        arguments.count = TokenCount::Fixed(self.tokens);
        Ok(program.forward.lane(0)?.dispatch(step, &arguments)?)
    }

    fn second_half<T: TestBackend>(
        self,
        program: &BackwardProgram<T>,
        step: &mut Step<'static, T::Backend>,
        pass: Pass,
    ) -> Result<(), BodyError> {
        if pass == Pass::Backward {
            return dispatch_backward(program, step, self.tokens, self.rows);
        }
        let (layer, bytes) = (&program.forward.layers[0], program.forward.case.sum_bytes());
        let arguments = Combine {
            handle: &layer.handle,
            expert_rows: layer.results.slice().get(0..self.rows * bytes).ok_or("longer")?,
            output: layer.output.slice().get(0..self.tokens * bytes).ok_or("longer")?,
        };
        Ok(program.forward.lane(0)?.combine(step, &arguments)?)
    }
}

/// Queues all tokens of the second layer, on the second lane, into the handle of the first layer.
fn fill_the_same<T: TestBackend>(
    program: &BackwardProgram<T>,
    step: &mut Step<'static, T::Backend>,
) -> Result<(), BodyError> {
    let (lane, layers) = (program.forward.lane(1)?, &program.forward.layers);
    let mut arguments = program.forward.arguments(1)?;
    arguments.handle = &layers[0].handle;
    lane.dispatch(step, &arguments)?;
    let (expert_rows, output) = (layers[1].results.slice(), layers[1].output.slice());
    Ok(lane.combine(step, &Combine { handle: arguments.handle, expert_rows, output })?)
}

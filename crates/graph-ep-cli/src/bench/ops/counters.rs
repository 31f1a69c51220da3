//! What the counters and the record of a step cost: a step with both, and the same layers with neither.
//!
//! All ways run the same layers, with nothing between dispatch and combine, timed by two marks in the same
//! graph. With a record these stand around the whole step: its beginning, which counts it and clears what is
//! counted within one, and its end, which publishes the record, lie between them. Without, beginning and end
//! lie outside. On GPUs the same is measured of kernels that are compiled without updates of counters.
//! Times are those of a whole step.

use graph_ep::{Backend, BodyError, EmbeddedStep, RowShaping, Step, StepOptions};

use super::super::interval::Interval;
use super::error::OpError;
use super::layers::{Layers, Receive};
use super::part::{Check, Part};
use crate::bench::cases::Kernels;
use crate::bench::report::{Entry, Op, Work};
use crate::bench::verify::Results;

/// Where the beginning and the end of the step are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record {
    Timed,
    Outside,
}

/// Measures steps with and without a record; without one only, where kernels have no counters. Collective.
pub(super) fn measure<B: Backend>(
    part: &Part<'_, B>,
    kernels: Kernels,
) -> Result<Vec<Entry>, OpError> {
    let count = part.step_layers();
    let capacity: Vec<u32> = (0..count).map(|layer| part.enough(layer)).collect();
    let max_rows = capacity.iter().copied().max().unwrap_or(0);
    let receive =
        Receive { layers: count, capacity: &capacity, max_rows, shared: false, alike: false };
    let layers = Layers::new(part, receive)?;
    if kernels == Kernels::Bare {
        return Ok(vec![entry(part, &layers, Record::Outside, "none")?]);
    }
    let both = entry(part, &layers, Record::Timed, "with record")?;
    let counters = entry(part, &layers, Record::Outside, "without record")?;
    let record = both.time.median_us - counters.time.median_us;
    Ok(vec![both.with("record us", record), counters])
}

fn entry<B: Backend>(
    part: &Part<'_, B>,
    layers: &Layers<B>,
    record: Record,
    name: &str,
) -> Result<Entry, OpError> {
    let marks = Interval::new(part.backend())?;
    let (step, executable) = recorded(part, layers, record, &marks)?;
    part.meet("the step is recorded")?;
    let run = |routing| -> Result<(), OpError> {
        layers.give(&part.queue(), routing)?;
        let replay = || Ok(part.backend().replay(part.stream(), &executable)?);
        part.wait(step.replay(replay)?).map(drop)
    };
    let (samples, next) = part.sample(|routing| {
        run(routing)?;
        Ok(vec![marks.microseconds(part.backend())?])
    })?;
    let check = Check { routing: next, results: Results::Rows, rows_kept: true };
    let verified = part.verified(layers, check, || run(next))?;
    let count = layers.layers.len();
    let of_pair = part.halves.pair();
    let work = Work {
        wire_bytes: of_pair.wire_bytes * count as u64,
        memory_bytes: of_pair.memory_bytes * count as u64,
    };
    let case = part.case(Op::Counters, name, true, count);
    part.entry(case, &samples, 1, (work, None), verified)
}

/// The graph of a step, made as an engine makes one, so that marks can stand around the step.
fn recorded<B: Backend>(
    part: &Part<'_, B>,
    layers: &Layers<B>,
    record: Record,
    marks: &Interval<B>,
) -> Result<(EmbeddedStep<B>, B::Executable), OpError> {
    let (backend, stream, lane) = (part.backend(), part.stream(), part.lane()?);
    // Whether the capacity is still that of the recording is not looked at on the device.
    let options = StepOptions::new().with_shaping(RowShaping::DeviceCounted);
    let exchange = |step: &mut Step<'static, B>| -> Result<(), BodyError> {
        for layer in &layers.layers {
            layer.dispatch(&lane, step)?;
            layer.combine(&lane, step)?;
        }
        Ok(())
    };
    let record_all = || -> Result<EmbeddedStep<B>, OpError> {
        let queue = part.queue();
        if record == Record::Outside {
            let within = |step: &mut Step<'static, B>| {
                part.align.queue(step.queue())?;
                step.queue().reach(&marks.from)?;
                exchange(step)?;
                Ok(step.queue().reach(&marks.to)?)
            };
            return Ok(EmbeddedStep::record(
                part.group.dispatcher(),
                stream,
                options,
                &[],
                within,
            )?);
        }
        part.align.queue(&queue)?;
        queue.reach(&marks.from)?;
        let step = EmbeddedStep::record(part.group.dispatcher(), stream, options, &[], exchange)?;
        queue.reach(&marks.to)?;
        Ok(step)
    };
    let key = backend.begin_recording(stream)?;
    let step = record_all().inspect_err(|_| backend.abandon_recording(&key))?;
    let recording = backend.end_recording(&key)?;
    Ok((step, backend.instantiate(recording)?))
}

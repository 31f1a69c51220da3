//! A step that overflows and is recovered, or worked through in rounds, beside a clean step of the
//! same routing. Each from the first launch to the record of the run that is kept: what the discarded
//! run cost, growing, recording again where the graph demands it, agreement, and the replay.
//!
//! Capacity is taken back before every step, memory included, and the step recorded anew; neither is
//! part of the time.
#![allow(missing_docs, reason = "criterion's macros make public items without documentation")]

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{
    Backend, GrowthPolicy, HostBackend, Outcome, OverflowPolicy, Queue, RecoverySettings,
    RowShaping, StepRunner,
};
use graph_ep_benches::ranks::{Failure, Make, Ranks, Work};
use graph_ep_benches::step::{LEVEL_ROWS, Load, Member, RANKS};

/// A quarter of what the load needs.
const SMALL: u32 = LEVEL_ROWS;

fn settings(shaping: RowShaping) -> RecoverySettings {
    RecoverySettings::new().with_growth(GrowthPolicy::Exact).with_shaping(shaping)
}

fn clean(rendezvous: ThreadRendezvous) -> Result<Work, Failure> {
    let member = Member::join(rendezvous, 4 * SMALL, Load::OneRank)?;
    let mut runner = member.into_runner(settings(RowShaping::Capacity))?;
    Ok(Box::new(move |iterations| {
        (0..iterations).map(|_| measure(&mut runner, |outcome| outcome == Outcome::Clean)).sum()
    }))
}

fn recovered(rendezvous: ThreadRendezvous, shaping: RowShaping) -> Result<Work, Failure> {
    let member = Member::join(rendezvous, SMALL, Load::OneRank)?;
    let backend = member.group.context().backend().clone();
    let mut runner = member.into_runner(settings(shaping))?;
    let once = Outcome::Recovered { replays: 1, eager: false };
    let mut step = move || {
        take_back(&backend, &mut runner)?;
        measure(&mut runner, |outcome| outcome == once)
    };
    Ok(Box::new(move |iterations| (0..iterations).map(|_| step()).sum()))
}

fn rounds(rendezvous: ThreadRendezvous) -> Result<Work, Failure> {
    let member = Member::join(rendezvous, SMALL, Load::OneRank)?;
    let settings = RecoverySettings::new().with_overflow(OverflowPolicy::Rounds);
    let mut runner = member.into_runner(settings)?;
    Ok(Box::new(move |iterations| {
        (0..iterations).map(|_| measure(&mut runner, |outcome| outcome == Outcome::Clean)).sum()
    }))
}

/// Makes the capacity small again and gives back what was mapped behind it.
fn take_back(backend: &HostBackend, runner: &mut StepRunner<HostBackend>) -> Result<(), Failure> {
    // A graph holds views of the rows, and so does queued work until it has run.
    runner.invalidate();
    let direct = Queue::direct(backend, runner.stream());
    if runner.rows().capacity() > SMALL {
        // SAFETY: all steps are the runner's, and run on its stream.
        unsafe { runner.rows().plan(SMALL)?.commit(&direct) }?;
    }
    backend.synchronize(runner.stream())?;
    Ok(runner.rows().trim()?)
}

fn measure(
    runner: &mut StepRunner<HostBackend>,
    expected: impl Fn(Outcome) -> bool,
) -> Result<Duration, Failure> {
    let report = runner.run()?;
    if !expected(report.outcome) {
        return Err(format!("the step ended as {:?}", report.outcome).into());
    }
    Ok(report.times.total)
}

fn recovery(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("recovery");
    group.sample_size(20).measurement_time(Duration::from_secs(3));
    group.warm_up_time(Duration::from_millis(500));
    let ways: [(&str, Make); 4] = [
        ("clean step", clean),
        ("recovered, shaped by capacity", |place| recovered(place, RowShaping::Capacity)),
        ("recovered, counted on the device", |place| recovered(place, RowShaping::DeviceCounted)),
        ("in rounds", rounds),
    ];
    for (name, make) in ways {
        let ranks = Ranks::start(RANKS, make).expect("a group of ranks");
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| ranks.run(iterations));
        });
    }
    group.finish();
}

criterion_group!(benches, recovery);
criterion_main!(benches);

//! The same clean step three ways: a recorded graph replayed; its operations queued one by one
//! without waiting; eager, where the host waits in every dispatch for the number of rows. Each from
//! launch to published record.
#![allow(missing_docs, reason = "criterion's macros make public items without documentation")]

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{Outcome, Queue, RecoverySettings, Step, StepOptions};
use graph_ep_benches::ranks::{Failure, Make, Ranks, Work};
use graph_ep_benches::step::{LAYERS, LEVEL_ROWS, Load, Member, RANKS, TOKENS};

fn join(rendezvous: ThreadRendezvous) -> Result<Member, Failure> {
    Member::join(rendezvous, LEVEL_ROWS, Load::Level)
}

fn graph_replay(rendezvous: ThreadRendezvous) -> Result<Work, Failure> {
    let mut runner = join(rendezvous)?.into_runner(RecoverySettings::new())?;
    runner.run()?;
    Ok(Box::new(move |iterations| {
        let start = Instant::now();
        for _ in 0..iterations {
            let report = runner.run()?;
            debug_assert_eq!(report.outcome, Outcome::Clean);
        }
        Ok(start.elapsed())
    }))
}

fn direct_launches(rendezvous: ThreadRendezvous) -> Result<Work, Failure> {
    let member = join(rendezvous)?;
    let group = member.group.clone();
    Ok(Box::new(move |iterations| {
        let (dispatcher, backend) = (group.dispatcher(), group.context().backend());
        let start = Instant::now();
        for _ in 0..iterations {
            let queue = Queue::direct(backend, group.stream());
            let mut step = Step::begin(dispatcher, queue, StepOptions::new())?;
            member.body(&mut step)?;
            let number = step.finish()?.number.ok_or("the step was recorded, not run")?;
            dispatcher.records().wait(number)?;
        }
        Ok(start.elapsed())
    }))
}

fn eager(rendezvous: ThreadRendezvous) -> Result<Work, Failure> {
    let mut runner = join(rendezvous)?.into_runner(RecoverySettings::new())?;
    Ok(Box::new(move |iterations| {
        let start = Instant::now();
        for _ in 0..iterations {
            runner.run_eager()?;
        }
        Ok(start.elapsed())
    }))
}

fn clean_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("clean step");
    group.sample_size(20).measurement_time(Duration::from_secs(3));
    group.warm_up_time(Duration::from_millis(500));
    group.throughput(Throughput::Elements((RANKS * TOKENS * LAYERS) as u64));
    let ways: [(&str, Make); 3] =
        [("graph replay", graph_replay), ("direct launches", direct_launches), ("eager", eager)];
    for (name, make) in ways {
        let ranks = Ranks::start(RANKS, make).expect("a group of ranks");
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| ranks.run(iterations));
        });
    }
    group.finish();
}

criterion_group!(benches, clean_step);
criterion_main!(benches);

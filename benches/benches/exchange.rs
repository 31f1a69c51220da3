//! One dispatch and one combine, each by itself, from queueing to completion on the rank that takes
//! longest. Waiting for the other ranks is part of both, the experts are part of neither.
#![allow(missing_docs, reason = "criterion's macros make public items without documentation")]

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use graph_ep::{
    Backend, Combine, Dispatch, Handle, HostBackend, Queue, RowBuffer, Step, StepOptions,
};
use graph_ep_benches::ranks::{Failure, Ranks};
use graph_ep_benches::step::{HIDDEN, LEVEL_ROWS, Load, Member, RANKS, TOKENS};

/// What one exchange took on one rank.
struct Times {
    dispatch: Duration,
    combine: Duration,
}

/// A member with a receive buffer of its own, whose rows come back as they went out.
struct Exchange {
    member: Member,
    handle: Handle<HostBackend>,
    rows: RowBuffer<HostBackend>,
}

impl Exchange {
    fn new(member: Member) -> Result<Self, Failure> {
        let set = member.group.rows();
        let handle = Handle::new(member.group.dispatcher(), set)?;
        let rows = set.add("rows of the benchmark", HIDDEN * 2)?;
        Ok(Self { member, handle, rows })
    }

    fn once(&self) -> Result<Times, Failure> {
        let group = &self.member.group;
        let (dispatcher, stream) = (group.dispatcher(), group.stream());
        let backend = group.context().backend();
        let lane = dispatcher.lane(0).ok_or("no lane")?;
        let layer = &self.member.layers[0];
        let queue = Queue::direct(backend, stream);
        let mut step = Step::begin(dispatcher, queue, StepOptions::new())?;
        backend.synchronize(stream)?;

        let start = Instant::now();
        let dispatch = Dispatch::new(
            layer.tokens.clone(),
            layer.count.clone(),
            layer.topk_ids.clone(),
            &self.rows,
            &self.handle,
        );
        lane.dispatch(&mut step, &dispatch)?;
        backend.synchronize(stream)?;
        let dispatch = start.elapsed();

        let start = Instant::now();
        lane.combine(
            &mut step,
            &Combine {
                handle: &self.handle,
                expert_rows: self.rows.slice(),
                output: layer.output.clone(),
            },
        )?;
        backend.synchronize(stream)?;
        let combine = start.elapsed();

        step.finish()?;
        Ok(Times { dispatch, combine })
    }
}

fn exchange(criterion: &mut Criterion) {
    type Part = fn(&Times) -> Duration;
    let mut group = criterion.benchmark_group("exchange");
    group.sample_size(20).measurement_time(Duration::from_secs(2));
    group.warm_up_time(Duration::from_millis(500));
    group.throughput(Throughput::Elements((RANKS * TOKENS) as u64));
    let loads = [("level", Load::Level, LEVEL_ROWS), ("one rank", Load::OneRank, 4 * LEVEL_ROWS)];
    let parts: [(&str, Part); 2] =
        [("dispatch", |times| times.dispatch), ("combine", |times| times.combine)];
    for (part, pick) in parts {
        for (name, load, rows) in loads {
            let ranks = Ranks::start(RANKS, move |rendezvous| {
                let exchange = Exchange::new(Member::join(rendezvous, rows, load)?)?;
                Ok(Box::new(move |iterations| {
                    (0..iterations).map(|_| Ok(pick(&exchange.once()?))).sum()
                }))
            })
            .expect("a group of ranks");
            group.bench_function(format!("{part}/{name}"), |bencher| {
                bencher.iter_custom(|iterations| ranks.run(iterations));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, exchange);
criterion_main!(benches);

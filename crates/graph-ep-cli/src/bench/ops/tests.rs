use std::sync::Arc;
use std::thread;

use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::host::HostOptions;
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{EpContext, HostBackend, ThreadGroup};

use super::*;
use crate::bench::cases::tests::shape;
use crate::bench::cases::{Kernels, Shape};
use crate::bench::limits::{self, Limits, Places};
use crate::bench::report::Dtype;

fn limits(ranks: usize) -> Limits {
    let measure = |place: ThreadRendezvous| {
        let context = EpContext::builder(HostBackend::default(), place).build().expect("a group");
        let places = Places { devices: vec![0; ranks], multiprocessors: 0 };
        limits::measure(&context, &places, limits::Settings::QUICK).expect("limits")
    };
    thread::scope(|scope| {
        let places = ThreadGroup::new(ranks).expect("a group");
        let threads: Vec<_> = places.into_iter().map(|p| scope.spawn(move || measure(p))).collect();
        let mut found = threads.into_iter().map(|thread| thread.join().expect("a rank"));
        found.next_back().expect("a rank")
    })
}

/// As if each rank had a device of its own.
pub(super) fn setup(ranks: usize, grow_bytes: u64) -> Setup {
    Setup {
        devices: (0..ranks).collect(),
        gpus: 0,
        limits: limits(ranks),
        samples: Some(2),
        quick: true,
        grow_bytes,
        memory: 1 << 30,
        most_held: Arc::default(),
    }
}

/// Measures on all ranks, as if each had a device of its own. What each was told, and how it ended.
fn measured(
    measured: &Measured,
    given: impl Fn(usize) -> Given + Sync,
) -> Vec<(Vec<Entry>, Result<(), OpError>)> {
    measured_on(measured, given, (1 << 16, |_| HostBackend::default()))
}

/// The same, where ranks grow by so many bytes, on these devices.
fn measured_on(
    measured: &Measured,
    given: impl Fn(usize) -> Given + Sync,
    (grow_bytes, backend): (u64, impl Fn(usize) -> HostBackend + Sync),
) -> Vec<(Vec<Entry>, Result<(), OpError>)> {
    let setup = setup(measured.shape.ranks, grow_bytes);
    measured_with(&setup, measured, given, backend)
}

/// The same, with this set up.
pub(super) fn measured_with(
    setup: &Setup,
    measured: &Measured,
    given: impl Fn(usize) -> Given + Sync,
    backend: impl Fn(usize) -> HostBackend + Sync,
) -> Vec<(Vec<Entry>, Result<(), OpError>)> {
    let ranks = measured.shape.ranks;
    thread::scope(|scope| {
        let places = ThreadGroup::new(ranks).expect("a group").into_iter().enumerate();
        let threads: Vec<_> = places
            .map(|(rank, place)| {
                let (given, backend) = (&given, &backend);
                scope.spawn(move || {
                    let mut told = Vec::new();
                    let given = given(rank);
                    let end =
                        measure(backend(rank), place, measured, &given, setup, None, |entry| {
                            told.push(entry)
                        });
                    (told, end)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

const ALL: [Op; 9] = [
    Op::Dispatch,
    Op::Combine,
    Op::Pair,
    Op::Replay,
    Op::Grow,
    Op::Recover,
    Op::Round,
    Op::Host,
    Op::Counters,
];

#[test]
fn every_operation_is_measured_and_verified_and_ranks_agree() {
    let shape = Shape { tokens: 20, ranks: 3, experts: 9, ..shape() };
    let all = Measured {
        shape,
        ops: ALL.to_vec(),
        layers: 2,
        step_layers: 3,
        against: false,
        kernels: Kernels::Counting,
    };
    let ranks = measured(&all, |_| Given::new(&shape, 3, 1));
    for (entries, end) in &ranks {
        assert!(end.is_ok(), "{end:?}");
        assert_eq!(entries.len(), ranks[0].0.len());
        for (entry, same) in entries.iter().zip(&ranks[0].0) {
            // Times of the host are gathered too.
            assert_eq!(entry, same);
            assert!(entry.verified && entry.time.median_us > 0.0, "{entry:?}");
            assert!(entry.time.samples >= 2);
        }
    }
    let names: Vec<String> =
        ranks[0].0.iter().map(|e| format!("{} {}", e.case.op, e.case.variant)).collect();
    assert_eq!(
        names,
        [
            "dispatch ",
            "combine ",
            "pair ",
            "replay replay",
            "replay launches",
            "replay eager",
            "grow by 64.00 KiB, fresh",
            "grow by 64.00 KiB, given back",
            "recover capacity-shaped",
            "recover clean",
            "recover device-counted",
            "round W=1",
            "round W=2",
            "host recover",
            "host rounds",
            "counters with record",
            "counters without record",
        ]
    );
    let of = |op: Op| ranks[0].0.iter().find(|entry| entry.case.op == op).expect("measured");
    let (dispatch, combine, pair) = (of(Op::Dispatch), of(Op::Combine), of(Op::Pair));
    assert!(dispatch.work.wire_bytes > 0 && dispatch.limit_us > Some(0.0));
    assert_eq!(pair.work.wire_bytes, dispatch.work.wire_bytes + combine.work.wire_bytes);
    // Two layers, each sampled in both replays.
    assert_eq!((dispatch.time.samples, pair.time.samples), (4, 2));
    assert!(of(Op::Replay).host_us.is_some());
    let recovered = &of(Op::Recover).details;
    // Its beginning and its end, and of each layer a dispatch, experts and a combine.
    assert!(
        recovered["nodes"] >= 2.0 + 3.0 * 3.0 && recovered["recording us"] > 0.0,
        "{recovered:?}"
    );
    let windows: Vec<f64> = ranks[0]
        .0
        .iter()
        .filter(|entry| entry.case.op == Op::Round)
        .map(|entry| entry.details["windows of a layer at most"])
        .collect();
    assert_eq!(windows, [1.0, 2.0]);
    let more = ranks[0]
        .0
        .iter()
        .filter(|entry| entry.details.contains_key("one more round of one layer us"));
    assert_eq!(more.count(), 1);
    assert!(of(Op::Host).host_us > Some(0.0) && of(Op::Host).details.contains_key("settling us"));
    assert!(of(Op::Counters).details.contains_key("record us"));
}

#[test]
fn rows_that_do_not_match_their_routing_are_no_success() {
    // Rank 1 has other tokens than rank 0 is told it has.
    let shape = Shape { dtype: Dtype::Fp32, ..shape() };
    let ops = vec![Op::Dispatch, Op::Combine, Op::Pair];
    let measured = measured(
        &Measured {
            shape,
            ops,
            layers: 1,
            step_layers: 3,
            against: false,
            kernels: Kernels::Counting,
        },
        |rank| {
            let own = Given::new(&shape, 3, 1);
            match rank {
                0 => own,
                _ => Given { rows: Given::new(&shape, 3, 2).rows, inputs: own.inputs },
            }
        },
    );
    for (entries, end) in measured {
        assert!(end.is_ok(), "{end:?}");
        assert_eq!(entries.len(), 3);
        assert!(entries.iter().all(|entry| !entry.verified));
    }
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    let measured = Measured {
        shape: shape(),
        ops: vec![Op::Pair, Op::Grow],
        layers: 1,
        step_layers: 3,
        against: false,
        kernels: Kernels::Counting,
    };
    // Rank 1 has memory for everything but what it is to grow by.
    let backend = |rank| {
        let memory = MemoryAccount::new((rank == 1).then_some(1 << 26));
        HostBackend::new(HostOptions::new("test").with_memory(memory))
    };
    let ranks = measured_on(&measured, |_| Given::new(&shape(), 3, 1), (1 << 28, backend));
    let failures: Vec<OpError> =
        ranks.into_iter().map(|(_, end)| end.expect_err("both stop")).collect();
    assert!(failures[0].is_echo(), "{:?}", failures[0]);
    assert!(failures[0].to_string().contains("rank 1 gave up: out of memory"), "{}", failures[0]);
    assert!(!failures[1].is_echo(), "{:?}", failures[1]);
    assert!(failures[1].to_string().starts_with("out of memory"), "{}", failures[1]);
}

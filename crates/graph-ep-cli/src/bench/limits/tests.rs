use std::thread;
use std::time::Duration;

use graph_ep::ep_context::FaultKind;
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{Deadlines, HostBackend, Phase, Queue, ThreadGroup};
use proptest::prelude::*;

use super::*;

const LONG: Duration = Duration::from_secs(60);
const SMALL: Settings = Settings { bytes: 10_000, samples: 3, repeats: 5 };

/// Runs a group of ranks on the host, each with a context of its own.
fn on_ranks<T: Send>(
    world: usize,
    deadlines: Deadlines,
    body: impl Fn(&EpContext<HostBackend>) -> T + Sync,
) -> Vec<T> {
    let rank = |place: ThreadRendezvous| {
        let builder = EpContext::builder(HostBackend::default(), place);
        let context = builder.deadlines(deadlines).build().expect("a group");
        body(&context)
    };
    thread::scope(|scope| {
        let places = ThreadGroup::new(world).expect("a group");
        let threads: Vec<_> = places.into_iter().map(|place| scope.spawn(|| rank(place))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

fn kinds(limits: &Limits) -> Vec<(LimitKind, usize, Option<usize>)> {
    limits.all().iter().map(|limit| (limit.what, limit.from, limit.to)).collect()
}

fn measured(devices: &[usize]) -> Limits {
    let places = Places { devices: devices.to_vec(), multiprocessors: 0 };
    let ranks = on_ranks(devices.len(), Deadlines::all(LONG), |context| {
        measure(context, &places, SMALL).expect("limits of the host")
    });
    assert!(ranks.iter().all(|limits| *limits == ranks[0]), "the same on all ranks");
    for limit in ranks[0].all() {
        let time = limit.time;
        assert_eq!(time.samples, SMALL.samples, "{limit:?}");
        assert_eq!(limit.gbps.is_some(), limit.bytes > 0, "{limit:?}");
    }
    ranks[0].clone()
}

#[test]
fn every_limit_is_measured_between_ranks_of_different_devices() {
    use LimitKind as K;
    let alone = [K::Barrier, K::EmptyReplay, K::EmptyTrip, K::EmptyInterval];
    let limits = measured(&[0, 1, 0, 1]);
    let mut expected = vec![
        (K::PeerRead, 0, Some(1)),
        (K::PeerRead, 1, Some(0)),
        (K::PeerWrite, 0, Some(1)),
        (K::PeerWrite, 1, Some(0)),
        (K::MemoryCopy, 0, None),
        (K::MemoryCopy, 1, None),
        (K::Signal, 0, Some(1)),
    ];
    expected.extend(alone.map(|what| (what, 0, None)));
    assert_eq!(kinds(&limits), expected);
    let reads = limits.all().iter().filter(|limit| limit.what == K::PeerRead);
    assert!(reads.clone().all(|limit| limit.bytes == 10_000));
    assert!(limits.all()[4].bytes == 20_000, "read and written");
    assert_eq!(limits.peer_read_gbps(24), limits.peer_read_gbps(0));
    assert!(limits.copy_gbps(0).is_some_and(|gbps| gbps > 0.0));
}

#[test]
fn ranks_of_one_device_are_measured_in_a_pair_and_one_rank_alone() {
    let limits = measured(&[0, 0, 0]);
    let pairs: Vec<_> = kinds(&limits).into_iter().filter(|(_, _, to)| to.is_some()).collect();
    assert!(pairs.iter().all(|(_, from, to)| *from < 2 && *to == Some(1 - from)), "{pairs:?}");
    assert_eq!(pairs.len(), 5);
    let limits = measured(&[0]);
    assert_eq!(limits.peer_read_gbps(0), None);
    assert_eq!(limits.peer_write_gbps(8), None);
    assert!(limits.copy_gbps(0).is_some());
}

#[test]
fn places_are_those_of_the_group() {
    let places = Places { devices: vec![0; 3], multiprocessors: 0 };
    on_ranks(2, Deadlines::all(LONG), |context| {
        let refused = measure(context, &places, SMALL);
        assert!(matches!(refused, Err(LimitsError::Places { places: 3, ranks: 2 })), "{refused:?}");
    });
}

#[test]
fn peers_are_leads_of_other_devices() {
    let places = |devices: &[usize]| Places { devices: devices.to_vec(), multiprocessors: 132 };
    let of = |devices: &[usize]| -> Vec<Option<usize>> {
        (0..devices.len()).map(|rank| places(devices).peer_of(rank)).collect()
    };
    assert_eq!(of(&[0, 1, 2]), [Some(1), Some(2), Some(0)]);
    assert_eq!(of(&[0, 0, 1, 1]), [Some(2), None, Some(0), None]);
    assert_eq!(of(&[3, 3, 3]), [Some(1), Some(0), None]);
    assert_eq!(of(&[0]), [None]);
    assert_eq!(places(&[0]).budgets().collect::<Vec<_>>(), [8, 16, 24, 32, 64, 0]);
    let small = Places { devices: vec![0], multiprocessors: 24 };
    assert_eq!(small.budgets().collect::<Vec<_>>(), [8, 16, 0]);
}

/// Limits of two ranks whose rates are the numbers given.
fn known(rates: &[(u32, u64, u64)]) -> Limits {
    let time = |us: f64| Quantiles { median_us: us, p10_us: us, p90_us: us, samples: 1 };
    let all = rates.iter().flat_map(|(sms, one, other)| {
        [*one, *other].map(|gbps| {
            let bytes = gbps * 1_000_000;
            Limit::new(LimitKind::PeerRead, (0, Some(1)), *sms, bytes, time(1000.0))
        })
    });
    Limits { all: all.collect(), multiprocessors: 132 }
}

#[test]
fn a_rate_is_that_of_the_slowest_at_the_nearest_number_not_above() {
    let limits = known(&[(8, 110, 120), (16, 220, 210), (0, 340, 345)]);
    let rates = [1, 8, 15, 16, 131, 132, 200, 0].map(|sms| limits.peer_read_gbps(sms));
    assert_eq!(
        rates.map(|rate| rate.map(f64::round)),
        [110.0, 110.0, 110.0, 210.0, 210.0, 340.0, 340.0, 340.0].map(Some)
    );
    assert_eq!(limits.peer_write_gbps(0), None);
    assert_eq!(limits.copy_gbps(0), None);
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    use std::sync::atomic::{AtomicU32, Ordering};
    const ROUNDS: u32 = 50;
    const WORLD: usize = 3;
    let come = AtomicU32::new(0);
    on_ranks(WORLD, Deadlines::all(LONG), |context| {
        let align = Align::new(context).expect("a barrier");
        let stream = context.stream("s").expect("a stream");
        let backend = context.backend();
        let queue = Queue::direct(backend, &stream);
        for round in 1..=ROUNDS {
            come.fetch_add(1, Ordering::SeqCst);
            align.queue(&queue).expect("queued");
            backend.synchronize(&stream).expect("all come");
            assert!(come.load(Ordering::SeqCst) >= round * WORLD as u32, "round {round}");
        }
        // Recorded, it goes on where it was; and queued without waiting between.
        let key = backend.begin_recording(&stream).expect("idle");
        (0..3).for_each(|_| align.queue(&queue).expect("recorded"));
        let recording = backend.end_recording(&key).expect("a whole recording");
        let graph = backend.instantiate(recording).expect("instantiates");
        (0..3).for_each(|_| backend.replay(&stream, &graph).expect("queued"));
        align.queue(&queue).expect("queued");
        backend.synchronize(&stream).expect("all come");
        assert_eq!(context.fault(), None);
    });
}

#[test]
fn a_rank_that_does_not_come_to_a_barrier_is_named() {
    let deadlines = Deadlines::all(LONG).with(Phase::Agreement, Duration::from_millis(50));
    let faults = on_ranks(2, deadlines, |context| {
        let align = Align::new(context).expect("a barrier");
        let stream = context.stream("s").expect("a stream");
        if context.rank().index() == 0 {
            align.queue(&Queue::direct(context.backend(), &stream)).expect("queued");
            context.backend().synchronize(&stream).expect("it gives up");
        }
        let fault = context.fault();
        context.rendezvous().barrier("the end", LONG).expect("all come");
        fault
    });
    let fault = faults[0].expect("nobody came");
    assert_eq!((fault.culprit.index(), fault.kind), (1, FaultKind::Timeout));
}

proptest! {
    /// Whatever ranks share devices: peers form one ring over leads, each the peer of one other.
    #[test]
    fn leads_form_a_ring(devices in prop::collection::vec(0_usize..4, 1..12)) {
        let places = Places { devices: devices.clone(), multiprocessors: 1 };
        let leads = places.leads();
        let mut peers: Vec<usize> = leads.iter().filter_map(|lead| places.peer_of(*lead)).collect();
        peers.sort_unstable();
        let mut others = leads.clone();
        others.sort_unstable();
        prop_assert_eq!(peers, if leads.len() > 1 { others } else { vec![] });
        let distinct = devices.iter().collect::<std::collections::HashSet<_>>().len();
        for lead in leads {
            if let (true, Some(peer)) = (distinct > 1, places.peer_of(lead)) {
                prop_assert_ne!(devices[lead], devices[peer]);
            }
        }
    }
}

use std::sync::atomic::Ordering;

use graph_ep::HostBackend;
use graph_ep::ep_context::MemoryAccount;
use graph_ep::ep_context::host::HostOptions;

use super::super::OpError;
use super::super::part::Setup;
use super::super::tests::{measured_with, setup};
use crate::bench::cases::tests::shape;
use crate::bench::cases::{Kernels, Measured};
use crate::bench::inputs::Given;
use crate::bench::report::{Entry, Op};

const MIB: u64 = 1 << 20;

/// What a group of the bench holds besides, at most.
const BESIDES: u64 = MIB;

const RANKS: usize = 2;

fn setting(grow_bytes: u64, samples: usize) -> Setup {
    Setup { samples: Some(samples), ..setup(RANKS, grow_bytes) }
}

/// Measures growth on two ranks, whose memory these accounts count.
fn grown(setup: &Setup, accounts: &[MemoryAccount; RANKS]) -> Vec<Result<Vec<Entry>, OpError>> {
    let measured = Measured {
        shape: shape(),
        ops: vec![Op::Grow],
        layers: 1,
        step_layers: 1,
        against: false,
        kernels: Kernels::Counting,
    };
    let backend = |rank: usize| {
        HostBackend::new(HostOptions::new("test").with_memory(accounts[rank].clone()))
    };
    let found = measured_with(setup, &measured, |_| Given::new(&shape(), 1, 1), backend);
    found.into_iter().map(|(entries, end)| end.map(|()| entries)).collect()
}

fn accounts(limits: [Option<u64>; RANKS]) -> [MemoryAccount; RANKS] {
    limits.map(MemoryAccount::new)
}

/// Samples by variant, the same on all ranks.
fn samples(found: Vec<Result<Vec<Entry>, OpError>>) -> Vec<(String, usize)> {
    let of = |entry: &Entry| {
        assert!(entry.verified && entry.time.median_us > 0.0, "{entry:?}");
        assert_eq!(entry.details["samples"], entry.time.samples as f64);
        (entry.case.variant.clone(), entry.time.samples)
    };
    let mut ranks =
        found.into_iter().map(|rank| rank.expect("measured").iter().map(of).collect::<Vec<_>>());
    let first = ranks.next().expect("a rank");
    assert!(ranks.all(|rank| rank == first));
    first
}

#[test]
fn no_fresh_memory_was_in_use_before() {
    let accounts = accounts([None; RANKS]);
    let found = samples(grown(&setting(4 * MIB, 5), &accounts));
    let expected = [("by 4.00 MiB, fresh", 5), ("by 4.00 MiB, given back", 5)];
    assert_eq!(found, expected.map(|(name, count)| (name.to_owned(), count)));
    for account in accounts {
        // Five samples and the growth before them at once; and what is given back takes no more.
        let most = account.peak();
        assert!((6 * 4 * MIB..6 * 4 * MIB + BESIDES).contains(&most), "{most}");
        assert_eq!(account.used(), 0);
    }
}

#[test]
fn what_was_given_back_before_is_held_meanwhile() {
    // Another number of ranks has had 40 MiB of this device.
    let (setting, accounts) = (setting(4 * MIB, 2), accounts([None; RANKS]));
    setting.most_held.store(40 * MIB, Ordering::Relaxed);
    assert_eq!(samples(grown(&setting, &accounts))[0].1, 2);
    for account in &accounts {
        let most = account.peak();
        assert!((52 * MIB..52 * MIB + BESIDES).contains(&most), "{most}");
    }
    // Those that come later know of it, and take that in turn.
    assert!(setting.most_held.load(Ordering::Relaxed) >= 52 * MIB);
    let again = self::accounts([None; RANKS]);
    assert_eq!(samples(grown(&setting, &again))[0].1, 2);
    assert!(again.iter().all(|account| account.peak() >= 64 * MIB), "{again:?}");
}

#[test]
fn scarce_memory_makes_few_samples_on_all_ranks_and_a_quarter_stays_free() {
    // Three quarters are 72 MiB, of which the group holds a little: four growths, of which one warms up.
    let few = accounts([None, Some(96 * MIB)]);
    let found = samples(grown(&setting(16 * MIB, 9), &few));
    assert_eq!(found.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [3, 9]);
    assert!(few[1].peak() <= 72 * MIB + BESIDES, "{few:?}");

    // With memory for one, that one counts.
    let one = accounts([Some(24 * MIB), None]);
    let found = samples(grown(&setting(16 * MIB, 9), &one));
    assert_eq!(found.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1, 9]);

    // What a rank may use, limits it too.
    let setting = Setup { memory: 40 * MIB, ..setting(16 * MIB, 9) };
    assert_eq!(samples(grown(&setting, &accounts([None; RANKS])))[0].1, 1);
}

#[test]
fn without_fresh_memory_only_what_was_given_back_is_measured() {
    // Memory for one growth, but not with a quarter to spare.
    let found = samples(grown(&setting(16 * MIB, 4), &accounts([None, Some(20 * MIB)])));
    assert_eq!(found, [("by 16.00 MiB, given back".to_owned(), 4)]);
    // All that is there has been given back before.
    let setting = setting(16 * MIB, 4);
    setting.most_held.store(60 * MIB, Ordering::Relaxed);
    let found = samples(grown(&setting, &accounts([Some(64 * MIB), None])));
    assert_eq!(found, [("by 16.00 MiB, given back".to_owned(), 4)]);
}

#[test]
fn ranks_that_take_each_others_memory_end_with_an_error() {
    // Each finds room for its growth, and then there is room for one.
    let shared = MemoryAccount::new(Some(28 * MIB));
    let found = grown(&setting(16 * MIB, 2), &[shared.clone(), shared]);
    let failures: Vec<OpError> =
        found.into_iter().map(|rank| rank.expect_err("there is not enough")).collect();
    let own: Vec<&OpError> = failures.iter().filter(|failure| !failure.is_echo()).collect();
    assert!(!own.is_empty(), "{failures:?}");
    assert!(own.iter().all(|error| error.to_string().starts_with("out of memory")), "{own:?}");
}

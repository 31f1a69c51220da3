//! Workers are kept from check to check, and replaced where one of them died, hung, or went another way
//! than the others: that check has failed, and says who did what, and the next one passes.

use std::fs::File;
use std::mem;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process, test_kill_process};

use super::HostWorkers;
use super::pool::Pool;
use crate::RankEnv;
use crate::backend::{PATIENCE, TestBackend};
use crate::harness::{self, Check, Verdict};

/// The checks, for a harness that forks.
pub const CHECKS: [Check; 9] = [
    Check { name: "workers::they_are_kept", run: they_are_kept },
    Check { name: "workers::groups_may_differ_in_size", run: groups_may_differ_in_size },
    Check { name: "workers::one_that_dies", run: one_that_dies },
    Check { name: "workers::one_that_is_stopped", run: one_that_is_stopped },
    Check { name: "workers::one_that_hangs", run: one_that_hangs },
    Check { name: "workers::a_rank_that_panics", run: a_rank_that_panics },
    Check { name: "workers::a_rank_that_leaves_something", run: a_rank_that_leaves_something },
    Check { name: "workers::those_that_disagree", run: those_that_disagree },
    Check { name: "workers::checks_that_are_skipped", run: checks_that_are_skipped },
];

/// As many as the group of most checks here has ranks, and one more.
const WORKERS: usize = 3;

/// How long a check may take that is never done.
const SHORT: Duration = Duration::from_secs(1);

fn pool<const N: usize>(runs: [fn(); N]) -> ([Check; N], Pool) {
    const NAMES: [&str; 4] = ["first", "second", "third", "fourth"];
    let mut names = NAMES.into_iter();
    let checks = runs.map(|run| Check { name: names.next().expect("few checks"), run });
    (checks, Pool::new(WORKERS, PATIENCE, checks.to_vec()))
}

/// What the process of a worker remembers from check to check.
static REMEMBERED: AtomicUsize = AtomicUsize::new(0);

/// Passes on workers that are as they should be.
fn passes() {
    let ranks = HostWorkers::on_ranks(2, |env| env.rank().index());
    assert_eq!(ranks, [0, 1]);
}

/// Ends a check without a message of the panic hook: these are supposed to fail.
fn fail(text: String) -> ! {
    resume_unwind(Box::new(text))
}

/// What rank 0 of two says when it has waited for rank 1, which does `instead`.
fn in_place_of_meeting(instead: impl Fn() + Send + Sync) {
    let body = |env: RankEnv<HostWorkers>| {
        if env.rank().index() == 1 {
            instead();
        }
        match graph_ep::Rendezvous::barrier(&env.rendezvous, "all are there", PATIENCE) {
            Ok(()) => {}
            Err(error) => fail(error.to_string()),
        }
    };
    for (rank, result) in HostWorkers::try_on_ranks(2, body).into_iter().enumerate() {
        if let Err(text) = result {
            fail(format!("rank {rank}: {text}"));
        }
    }
}

/// Runs a check that comes to no verdict, and one that passes on other workers; what was said of the first.
fn fails_and_passes(run: fn(), longest: Duration) -> String {
    let ([first, second], mut pool) = pool([run, passes]);
    pool.longest = longest;
    let why = pool.run(&first).expect_err("there is no verdict");
    assert!(pool.ids().is_empty(), "{:?}", pool.ids());
    pool.longest = PATIENCE;
    assert_eq!(pool.run(&second), Ok(Verdict::Passed), "after {why}");
    why
}

/// One process for each rank runs all checks, and is gone when the pool is.
fn they_are_kept() {
    fn counts() {
        let body = |_| (getpid().as_raw_pid(), REMEMBERED.fetch_add(1, Ordering::Relaxed));
        let seen = [HostWorkers::on_ranks(2, body), HostWorkers::on_ranks(3, body)];
        let text = seen.concat().into_iter().map(|(id, before)| format!("{id} {before}"));
        fail(text.collect::<Vec<_>>().join(", "))
    }
    fn counts_before() {
        HostWorkers::on_ranks(3, |_| REMEMBERED.fetch_add(10, Ordering::Relaxed));
    }
    let ([before, counts], mut pool) = pool([counts_before, counts]);
    assert_eq!(pool.run(&before), Ok(Verdict::Passed));
    let ids = pool.ids();
    let [a, b, c] = [0, 1, 2].map(|worker| ids[worker].as_raw_pid());
    let seen = format!("{a} 10, {b} 10, {a} 11, {b} 11, {c} 10");
    assert_eq!(pool.run(&counts), Ok(Verdict::Failed(seen)));
    // A check that failed may have left anything.
    assert_eq!(pool.run(&before), Ok(Verdict::Passed));
    let others = pool.ids();
    assert!(others.iter().all(|id| !ids.contains(id)), "{ids:?}, then {others:?}");
    drop(pool);
    for id in ids.into_iter().chain(others) {
        assert_eq!(test_kill_process(id), Err(Errno::SRCH), "{id:?}");
    }
}

/// All workers learn what the ranks of every group returned, in order, however many bytes that is.
fn groups_may_differ_in_size() {
    fn differ() {
        for (world, bytes) in [(1, 0), (3, 1 << 20), (2, 1), (3, 0), (1, 300_000)] {
            let results = HostWorkers::on_ranks(world, |env| vec![env.rank().0 as u8; bytes]);
            let expected: Vec<_> = (0..world).map(|rank| vec![rank as u8; bytes]).collect();
            assert!(results == expected, "{world} ranks, {bytes} bytes");
        }
    }
    fn too_many() {
        HostWorkers::on_ranks(WORKERS + 1, |_| ());
    }
    let ([differ, too_many], mut pool) = pool([differ, too_many]);
    assert_eq!(pool.run(&differ), Ok(Verdict::Passed));
    let why = pool.run(&too_many).expect_err("there are not so many");
    assert!(why.contains("of 3 workers") && why.contains("asked for 4 ranks"), "{why}");
}

fn signal(signal: Signal) {
    kill_process(getpid(), signal).expect("a process may signal itself");
    // A stop may take effect a moment later.
    thread::sleep(PATIENCE);
}

fn one_that_dies() {
    let why = fails_and_passes(|| in_place_of_meeting(|| signal(Signal::KILL)), PATIENCE);
    assert!(why.starts_with("a worker is gone\nworker 0 had its rank say: "), "{why}");
    assert!(why.contains("rank 1"), "{why}");
    assert!(why.contains("\nworker 1 was ended by signal 9"), "{why}");
    assert!(why.ends_with("\nworker 2 had no rank"), "{why}");
}

fn one_that_is_stopped() {
    fn stops() {
        HostWorkers::on_ranks(2, |env| {
            if env.rank().index() == 1 {
                signal(Signal::STOP);
            }
        });
    }
    let why = fails_and_passes(stops, PATIENCE);
    assert!(why.contains("worker 0 had its rank return\nworker 1 was stopped"), "{why}");
}

fn one_that_hangs() {
    let why = fails_and_passes(|| in_place_of_meeting(|| thread::sleep(2 * PATIENCE)), SHORT);
    assert!(why.starts_with("not done within 1s\nworker 0 said nothing\nworker 1 said"), "{why}");
}

fn a_rank_that_panics() {
    let ([panics, passes], mut pool) =
        pool([|| in_place_of_meeting(|| fail("it failed".to_owned())), passes]);
    match pool.run(&panics) {
        Ok(Verdict::Failed(text)) => {
            assert!(text.starts_with("rank 0: ") && text.contains("rank 1"), "{text}")
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(pool.run(&passes), Ok(Verdict::Passed));
}

/// What a body used is waited for, and has to be given back between checks too.
fn a_rank_that_leaves_something() {
    fn leaves() {
        HostWorkers::on_ranks(1, |_| mem::forget(File::open("/proc/self/maps")));
    }
    let why = fails_and_passes(leaves, SHORT);
    assert!(why.starts_with("not done within 1s\nworker 0 said nothing"), "{why}");
}

/// Workers that do not come to the same groups, or the same end, since a check depends on more than what
/// its ranks return.
fn those_that_disagree() {
    fn remember() -> usize {
        HostWorkers::on_ranks(2, |env| REMEMBERED.store(env.rank().index(), Ordering::Relaxed));
        REMEMBERED.load(Ordering::Relaxed)
    }
    fn in_groups() {
        let ranks = remember() + 1;
        HostWorkers::on_ranks(ranks, |_| ());
    }
    fn in_ends() {
        if remember() == 0 {
            HostWorkers::on_ranks(1, |_| ());
        }
    }
    fn in_verdicts() {
        let remembered = remember();
        fail(format!("it remembers {remembered}"));
    }
    for (run, first, second) in [
        (
            in_groups as fn(),
            "worker 0 asked for 1 ranks, after 1 such",
            "worker 1 asked for 2 ranks",
        ),
        (in_ends, "in_ends", "worker 1 passed"),
        (in_verdicts, "worker 0 failed: it remembers 0", "worker 1 failed: it remembers 1"),
    ] {
        let why = fails_and_passes(run, PATIENCE);
        assert!(why.starts_with("workers do not agree\n"), "{why}");
        assert!(why.contains(first) && why.contains(second), "{why}");
    }
}

/// A check that is skipped half way, and one that says that it shows less, are so for the harness too.
fn checks_that_are_skipped() {
    fn skipped() {
        passes();
        harness::skip("no more ranks".to_owned());
    }
    fn on_fewer() {
        harness::on_fewer_ranks();
        passes();
    }
    let ([skipped, on_fewer, passes], mut pool) = pool([skipped, on_fewer, passes]);
    let mut run = |check: &Check| harness::counting(|| pool.run(check).expect("they agree"));
    assert_eq!(run(&skipped), (Verdict::Skipped("no more ranks".to_owned()), false));
    assert_eq!(run(&on_fewer), (Verdict::Passed, true));
    assert_eq!(run(&passes), (Verdict::Passed, false));
}

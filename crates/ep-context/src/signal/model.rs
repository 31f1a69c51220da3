//! Models of waiting and signalling that loom runs through its interleavings and weak memory.
//!
//! Time never runs out here and sleep has no end of its own, so a wake-up that gets lost is a
//! deadlock, which loom reports. Weakened variants of the atomics show that the models notice.

use std::sync::Arc;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::atomics::{Atomics, Word32, Word64};
use super::wait::{self, Clock, Value, Words, ring_bell};
use crate::Rank;
use crate::fault::{Fault, FaultKind, Phase};

const SOUND: u8 = 0;
/// Signals are stored without release.
const RELAXED_SIGNAL: u8 = 1;
/// Neither side of the doorbell has a fence.
const NO_FENCE: u8 = 2;
/// Nobody is woken.
const NO_WAKE: u8 = 3;

#[derive(Debug)]
struct Loom<const WEAKENED: u8>;

/// A word on which threads can sleep, as the kernel lets them: whether the word has moved is
/// compared, and waiters are woken, under one lock.
#[derive(Debug)]
struct Bell<const WEAKENED: u8> {
    word: AtomicU32,
    lock: Mutex<()>,
    rung: Condvar,
}

impl<const WEAKENED: u8> Bell<WEAKENED> {
    fn new(value: u32) -> Self {
        Self { word: AtomicU32::new(value), lock: Mutex::new(()), rung: Condvar::new() }
    }
}

impl<const WEAKENED: u8> Word32 for Bell<WEAKENED> {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.word.store(value, if WEAKENED == RELAXED_SIGNAL { Relaxed } else { order });
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_add(value, order)
    }

    fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_sub(value, order)
    }
}

impl Word64 for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        AtomicU64::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        AtomicU64::store(self, value, order);
    }

    fn set_once(&self, value: u64) -> u64 {
        match self.compare_exchange(0, value, AcqRel, Acquire) {
            Ok(_) => value,
            Err(first) => first,
        }
    }
}

impl<const WEAKENED: u8> Atomics for Loom<WEAKENED> {
    type U32 = Bell<WEAKENED>;
    type U64 = AtomicU64;

    const SPINS: u32 = 0;
    const YIELDS: u32 = 0;

    fn fence(order: Ordering) {
        if WEAKENED != NO_FENCE {
            fence(order);
        }
    }

    fn spin() {
        loom::hint::spin_loop();
    }

    fn yield_now() {
        thread::yield_now();
    }

    fn park(doorbell: &Bell<WEAKENED>, seen: u32, _at_most: Duration) {
        let guard = doorbell.lock.lock().expect("no thread panics with the lock");
        if doorbell.word.load(Relaxed) == seen {
            drop(doorbell.rung.wait(guard).expect("no thread panics with the lock"));
        }
    }

    fn unpark_all(doorbell: &Bell<WEAKENED>) {
        if WEAKENED != NO_WAKE {
            let _guard = doorbell.lock.lock().expect("no thread panics with the lock");
            doorbell.rung.notify_all();
        }
    }
}

/// All words of a group, and for each rank one word that peers signal.
struct Group<const WEAKENED: u8> {
    ranks: Vec<RankWords<WEAKENED>>,
}

struct RankWords<const WEAKENED: u8> {
    abort: Bell<WEAKENED>,
    suspended: Bell<WEAKENED>,
    fault: AtomicU64,
    deadline_ms: Bell<WEAKENED>,
    poison: AtomicU64,
    doorbell: Bell<WEAKENED>,
    sleepers: Bell<WEAKENED>,
    signal: Bell<WEAKENED>,
    flag: AtomicU64,
    payload: UnsafeCell<u32>,
}

impl<const WEAKENED: u8> Group<WEAKENED> {
    #[expect(clippy::arc_with_non_send_sync, reason = "loom checks every access to its cells")]
    fn new(world: usize, epoch: u32) -> Arc<Self> {
        let rank = |_| RankWords {
            abort: Bell::new(0),
            suspended: Bell::new(0),
            fault: AtomicU64::new(0),
            deadline_ms: Bell::new(u32::MAX),
            poison: AtomicU64::new(0),
            doorbell: Bell::new(0),
            sleepers: Bell::new(0),
            signal: Bell::new(epoch),
            flag: AtomicU64::new(0),
            payload: UnsafeCell::new(0),
        };
        Arc::new(Self { ranks: (0..world).map(rank).collect() })
    }

    fn view(self: &Arc<Self>, rank: u32) -> View<WEAKENED> {
        View { group: Arc::clone(self), rank: Rank(rank) }
    }
}

struct View<const WEAKENED: u8> {
    group: Arc<Group<WEAKENED>>,
    rank: Rank,
}

impl<const WEAKENED: u8> View<WEAKENED> {
    fn of(&self, rank: Rank) -> &RankWords<WEAKENED> {
        &self.group.ranks[rank.index()]
    }

    fn own(&self) -> &RankWords<WEAKENED> {
        self.of(self.rank)
    }

    fn write_payload(&self, value: u32) {
        self.own().payload.with_mut(|payload| {
            // SAFETY: loom checks that no other thread accesses the cell at the same time.
            unsafe { *payload = value }
        });
    }

    fn read_payload(&self, of: Rank) -> u32 {
        self.of(of).payload.with(|payload| {
            // SAFETY: loom checks that no other thread writes the cell at the same time.
            unsafe { *payload }
        })
    }

    /// Signals the one word of `to`.
    fn signal(&self, to: Rank, epoch: u32) {
        wait::signal(self, to, &self.of(to).signal, epoch);
    }

    /// Waits for this rank's one word.
    fn wait(&self, culprit: Rank, epoch: u32) -> Result<(), Fault> {
        let clock = &mut Clock::default();
        let value = Value::Word(&self.own().signal, epoch);
        wait::wait(self, clock, Phase::Dispatch, culprit, value)
    }

    /// Waits for this rank's one flag.
    fn wait_flag(&self, culprit: Rank, turn: u64) -> Result<(), Fault> {
        let clock = &mut Clock::default();
        wait::wait(self, clock, Phase::Dispatch, culprit, Value::Flag(&self.own().flag, turn))
    }
}

impl<const WEAKENED: u8> Words for View<WEAKENED> {
    type Atomics = Loom<WEAKENED>;

    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> usize {
        self.group.ranks.len()
    }

    fn abort(&self) -> &Bell<WEAKENED> {
        &self.own().abort
    }

    fn suspended(&self) -> &Bell<WEAKENED> {
        &self.own().suspended
    }

    fn fault(&self) -> &AtomicU64 {
        &self.own().fault
    }

    fn deadline_ms(&self, _phase: Phase) -> &Bell<WEAKENED> {
        &self.own().deadline_ms
    }

    fn poison(&self, of: Rank) -> &AtomicU64 {
        &self.of(of).poison
    }

    fn doorbell(&self, of: Rank) -> &Bell<WEAKENED> {
        &self.of(of).doorbell
    }

    fn sleepers(&self, of: Rank) -> &Bell<WEAKENED> {
        &self.of(of).sleepers
    }
}

/// Runs every interleaving with at most `preemptions` switches away from a thread that could go on.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn a_signal_carries_what_was_written_before<const WEAKENED: u8>() {
    check(3, || {
        let group = Group::<WEAKENED>::new(2, 0);
        let sender = group.view(1);
        let thread = thread::spawn(move || {
            sender.write_payload(7);
            sender.signal(Rank(0), 1);
        });
        let receiver = group.view(0);
        assert_eq!(receiver.wait(Rank(1), 1), Ok(()));
        assert_eq!(receiver.read_payload(Rank(1)), 7);
        thread.join().expect("the sender");
        assert_eq!(receiver.own().sleepers.load(Relaxed), 0);
    });
}

#[test]
fn signals_publish_and_wake() {
    a_signal_carries_what_was_written_before::<SOUND>();
}

#[test]
fn a_flag_carries_what_was_written_before_whatever_it_held() {
    check(3, || {
        let group = Group::<SOUND>::new(2, 0);
        group.ranks[0].flag.store(3, Relaxed);
        let sender = group.view(1);
        let thread = thread::spawn(move || {
            sender.write_payload(7);
            wait::raise(&sender, Rank(0), &sender.of(Rank(0)).flag, 9);
        });
        let receiver = group.view(0);
        assert_eq!(receiver.wait_flag(Rank(1), 9), Ok(()));
        assert_eq!(receiver.read_payload(Rank(1)), 7);
        thread.join().expect("the sender");
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn the_model_notices_a_signal_without_release() {
    a_signal_carries_what_was_written_before::<RELAXED_SIGNAL>();
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_model_notices_missing_fences() {
    a_signal_carries_what_was_written_before::<NO_FENCE>();
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_model_notices_a_missing_wake_up() {
    a_signal_carries_what_was_written_before::<NO_WAKE>();
}

#[test]
fn the_first_of_two_poisons_stays() {
    check(2, || {
        let group = Group::<SOUND>::new(3, 0);
        let fault = |culprit| Fault {
            phase: Phase::Combine,
            culprit: Rank(culprit),
            kind: FaultKind::TooManyTokens,
        };
        let writers = [1, 2].map(|rank| {
            let writer = group.view(rank);
            thread::spawn(move || wait::fail(&writer, fault(rank)))
        });
        let reader = group.view(0);
        let seen = reader.wait(Rank(1), 1).expect_err("nobody signals");
        assert!(seen == fault(1) || seen == fault(2));
        for (rank, writer) in [1, 2].into_iter().zip(writers) {
            assert_eq!(writer.join().expect("a writer"), fault(rank));
        }
        assert_eq!(wait::fault(&reader, Phase::Dispatch), Some(seen));
        assert_eq!(Word64::load(&reader.own().poison, Relaxed), seen.to_word());
        assert_eq!(Word64::load(&reader.own().fault, Relaxed), seen.to_word());
    });
}

#[test]
fn an_abort_wakes_a_sleeper_and_poisons_its_peer() {
    check(3, || {
        let group = Group::<SOUND>::new(2, 0);
        let host = group.view(0);
        let thread = thread::spawn(move || {
            host.own().abort.store(1, Release);
            ring_bell::<Loom<SOUND>>(&host.own().doorbell, &host.own().sleepers);
        });
        let aborted = Fault { phase: Phase::Dispatch, culprit: Rank(0), kind: FaultKind::Aborted };
        assert_eq!(group.view(0).wait(Rank(1), 1), Err(aborted));
        assert_eq!(wait::fault(&group.view(1), Phase::Combine), Some(aborted));
        thread.join().expect("the host");
    });
}

#[test]
fn two_waits_of_one_rank_are_both_woken() {
    check(3, || {
        let group = Group::<SOUND>::new(2, 0);
        let waits = [(); 2].map(|()| {
            let receiver = group.view(0);
            thread::spawn(move || receiver.wait(Rank(1), 1))
        });
        group.view(1).signal(Rank(0), 1);
        for wait in waits {
            assert_eq!(wait.join().expect("a wait"), Ok(()));
        }
    });
}

#[test]
fn a_word_is_reused_across_the_wrap_of_epochs() {
    check(2, || {
        let group = Group::<SOUND>::new(2, u32::MAX - 1);
        let sender = group.view(1);
        let epochs = [u32::MAX, 0];
        let thread = thread::spawn(move || {
            for epoch in epochs {
                sender.write_payload(epoch);
                sender.signal(Rank(0), epoch);
                // The reader's own signal gives the payload and the word back.
                assert_eq!(sender.wait(Rank(0), epoch), Ok(()));
            }
        });
        let receiver = group.view(0);
        for epoch in epochs {
            assert_eq!(receiver.wait(Rank(1), epoch), Ok(()));
            assert_eq!(receiver.read_payload(Rank(1)), epoch);
            receiver.signal(Rank(1), epoch);
        }
        thread.join().expect("the sender");
    });
}

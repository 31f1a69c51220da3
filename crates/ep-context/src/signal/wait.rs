//! How one rank waits for a word of another: the protocol, over any atomics.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::time::{Duration, Instant};

use super::atomics::{Atomics, Word32, Word64};
use crate::Rank;
use crate::fault::{Fault, FaultKind, Phase};

/// The abort word says that a rank is gone by this and its number.
pub(super) const GONE: u32 = 2;

/// The longest sleep without looking at the words. Peers always ring; this is for a host that
/// cannot, because it does not reach the doorbell, and changes the control block meanwhile.
const SLICE: Duration = Duration::from_millis(10);

type U32<W> = <<W as Words>::Atomics as Atomics>::U32;
type U64<W> = <<W as Words>::Atomics as Atomics>::U64;

/// The words of a group as one rank sees them.
pub(super) trait Words {
    type Atomics: Atomics;

    fn rank(&self) -> Rank;
    fn world(&self) -> usize;

    // The control block of this rank.
    fn abort(&self) -> &U32<Self>;
    fn suspended(&self) -> &U32<Self>;
    fn fault(&self) -> &U64<Self>;
    fn deadline_ms(&self, phase: Phase) -> &U32<Self>;

    // The attention block of any rank.
    fn poison(&self, of: Rank) -> &U64<Self>;
    fn doorbell(&self, of: Rank) -> &U32<Self>;
    fn sleepers(&self, of: Rank) -> &U32<Self>;
}

/// What a wait is about.
struct Awaited<'a, W: Words + ?Sized> {
    phase: Phase,
    culprit: Rank,
    value: Value<'a, W>,
}

/// The value that ends a wait.
pub(super) enum Value<'a, W: Words + ?Sized> {
    /// A word of a round of signals, in which every rank takes part: it holds this value or the one
    /// before.
    Word(&'a U32<W>, u32),
    /// A flag, which holds whatever its last use left.
    Flag(&'a U64<W>, u64),
}

/// The fault this rank has to respect: its own, the poison of a peer, or its host's wish to end.
pub(super) fn fault<W: Words + ?Sized>(words: &W, phase: Phase) -> Option<Fault> {
    held(words, phase).or_else(|| aborted(words, phase))
}

/// Waits until `value` is there, on the clock of the whole phase.
pub(super) fn wait<W: Words + ?Sized>(
    words: &W,
    clock: &mut Clock,
    phase: Phase,
    culprit: Rank,
    value: Value<'_, W>,
) -> Result<(), Fault> {
    let awaited = Awaited { phase, culprit, value };
    for _ in 0..W::Atomics::SPINS {
        if let Some(outcome) = poll(words, &awaited) {
            return outcome;
        }
        W::Atomics::spin();
    }
    let mut yields = 0;
    loop {
        if let Some(outcome) = poll(words, &awaited) {
            return outcome;
        }
        let Some(left) = clock.left(words, phase) else {
            return Err(fail(words, Fault { phase, culprit, kind: FaultKind::Timeout }));
        };
        if yields < W::Atomics::YIELDS {
            yields += 1;
            W::Atomics::yield_now();
        } else if let Some(outcome) = sleep(words, &awaited, left.min(SLICE)) {
            return outcome;
        }
    }
}

/// Stores `value` to a word that lies in memory of rank `to`, and wakes it. Everything written
/// before is visible to whoever finds the value by a wait.
pub(super) fn signal<W: Words + ?Sized>(words: &W, to: Rank, word: &U32<W>, value: u32) {
    word.store(value, Release);
    ring(words, to);
}

/// The same for a flag.
pub(super) fn raise<W: Words + ?Sized>(words: &W, to: Rank, flag: &U64<W>, value: u64) {
    flag.store(value, Release);
    ring(words, to);
}

/// Makes `fault` the fault of this rank and of every peer that has none yet. Returns the fault that
/// this rank holds from now on, which is an earlier one if there was one.
pub(super) fn fail<W: Words + ?Sized>(words: &W, fault: Fault) -> Fault {
    let word = fault.to_word();
    let first = words.fault().set_once(word);
    // Also when another fault came first: whoever stored it may have adopted it from a peer that
    // reached only some of the ranks before it died.
    for peer in (0..words.world()).map(Rank::from_index).filter(|peer| *peer != words.rank()) {
        words.poison(peer).set_once(first);
        ring(words, peer);
    }
    // Other waits of this rank, on other streams, sleep on its own doorbell.
    ring(words, words.rank());
    decode(words, first, fault.phase)
}

/// One look at everything that ends a wait, in the order that decides when several hold.
fn poll<W: Words + ?Sized>(words: &W, awaited: &Awaited<'_, W>) -> Option<Result<(), Fault>> {
    let &Awaited { phase, culprit, ref value } = awaited;
    if let Some(fault) = held(words, phase) {
        return Some(Err(fault));
    }
    // Acquire pairs with the release in `signal`: what the peer wrote before is now readable.
    let (there, possible) = match value {
        Value::Word(word, expected) => {
            let found = word.load(Acquire);
            // Epochs wrap, so there is no before and after: a peer is either here or one round
            // behind.
            (found == *expected, found == expected.wrapping_sub(1))
        }
        Value::Flag(flag, expected) => (flag.load(Acquire) == *expected, true),
    };
    if there {
        return Some(Ok(()));
    }
    if let Some(fault) = aborted(words, phase) {
        return Some(Err(fault));
    }
    if !possible {
        return Some(Err(fail(words, Fault { phase, culprit, kind: FaultKind::OutOfStep })));
    }
    None
}

/// The fault that this rank holds, taking over a peer's poison if it holds none.
fn held<W: Words + ?Sized>(words: &W, phase: Phase) -> Option<Fault> {
    let mut word = words.fault().load(Acquire);
    if word == 0 {
        let poison = words.poison(words.rank()).load(Acquire);
        if poison == 0 {
            return None;
        }
        word = words.fault().set_once(poison);
    }
    Some(decode(words, word, phase))
}

fn aborted<W: Words + ?Sized>(words: &W, phase: Phase) -> Option<Fault> {
    let (culprit, kind) = match words.abort().load(Acquire) {
        0 => return None,
        word => match word.checked_sub(GONE) {
            None => (words.rank(), FaultKind::Aborted),
            Some(rank) => (Rank(rank), FaultKind::Gone),
        },
    };
    Some(fail(words, Fault { phase, culprit, kind }))
}

/// A word that carries no fault is memory overwritten by something else. It still ends the wait;
/// whose memory it is, is all that is known.
fn decode<W: Words + ?Sized>(words: &W, word: u64, phase: Phase) -> Fault {
    Fault::from_word(word).unwrap_or(Fault {
        phase,
        culprit: words.rank(),
        kind: FaultKind::Failed,
    })
}

/// Looks once more and sleeps if nothing has changed. No change rung after the last look is slept
/// through.
///
/// Why: the sleeper counts itself, passes its fence, and looks; a ringer stores, passes its fence,
/// and reads the count. The two fences are in one total order. If the ringer's is first, the look
/// finds what was stored and there is no sleep. If the sleeper's is first, the ringer finds the
/// count and wakes; and `seen`, read before the sleeper's fence, is then older than that ring, so
/// that the kernel, which compares it once more before it lets a thread sleep, sees the bell moved
/// if the wake-up came too early to reach anyone.
fn sleep<W: Words + ?Sized>(
    words: &W,
    awaited: &Awaited<'_, W>,
    at_most: Duration,
) -> Option<Result<(), Fault>> {
    let (doorbell, sleepers) = (words.doorbell(words.rank()), words.sleepers(words.rank()));
    sleepers.fetch_add(1, Relaxed);
    let seen = doorbell.load(Relaxed);
    W::Atomics::fence(SeqCst);
    let outcome = poll(words, awaited);
    if outcome.is_none() {
        W::Atomics::park(doorbell, seen, at_most);
    }
    sleepers.fetch_sub(1, Relaxed);
    outcome
}

/// Wakes the waits of rank `to`; for the order of these operations see [`sleep`].
fn ring<W: Words + ?Sized>(words: &W, to: Rank) {
    ring_bell::<W::Atomics>(words.doorbell(to), words.sleepers(to));
}

/// Wakes whoever sleeps on `doorbell`, after a store that they may be waiting for.
pub(super) fn ring_bell<A: Atomics>(doorbell: &A::U32, sleepers: &A::U32) {
    A::fence(SeqCst);
    doorbell.fetch_add(1, Relaxed);
    if sleepers.load(Relaxed) > 0 {
        A::unpark_all(doorbell);
    }
}

/// The time a phase has taken, without the time in which deadlines were suspended.
///
/// It starts at the first look that finds nothing, so that a wait for a word that is there already
/// costs no reading of the time.
#[derive(Debug, Default)]
pub(super) struct Clock {
    spent: Duration,
    last: Option<Look>,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    suspended: bool,
}

impl Clock {
    /// What is left until the deadline of `phase`; `None` once it has passed.
    fn left<W: Words + ?Sized>(&mut self, words: &W, phase: Phase) -> Option<Duration> {
        let now = Look { at: Instant::now(), suspended: words.suspended().load(Relaxed) != 0 };
        if let Some(last) = self.last.replace(now)
            && !last.suspended
            && !now.suspended
        {
            self.spent += now.at.duration_since(last.at);
        }
        let deadline = Duration::from_millis(words.deadline_ms(phase).load(Relaxed).into());
        let left = deadline.saturating_sub(self.spent);
        if now.suspended { Some(left.max(SLICE)) } else { (!left.is_zero()).then_some(left) }
    }
}

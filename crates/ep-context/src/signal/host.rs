//! Waiting and signalling over real memory, for kernel bodies that run on the host.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::atomics::Std;
use super::params::{AttentionBlock, ControlBlock, WaitParams};
use super::wait::{self, Clock, Value, Words};
use crate::Rank;
use crate::fault::{Fault, Phase};
use crate::host::pointer;

/// How a kernel body on the host waits for peers, signals them, and fails.
///
/// Nothing here allocates. A wait blocks the calling thread, for at most the deadline of its phase
/// while deadlines count, and until abort, poison or the signal where they are suspended.
#[derive(Debug)]
pub struct HostWaiter {
    words: HostWords,
}

impl HostWaiter {
    /// The waiter that `params` describe.
    ///
    /// # Safety
    ///
    /// For as long as the waiter lives:
    ///
    /// 1. `params.control` is the address of a [`ControlBlock`], and `params.attention` that of
    ///    `params.world` addresses of [`AttentionBlock`]s, one a rank, all aligned for their types
    ///    and mapped for reads and writes; `params.own` is the address of that of `params.rank`.
    /// 2. These blocks are accessed by atomic operations only, and the table is not written.
    /// 3. `params.rank` is less than `params.world`.
    pub unsafe fn from_params(params: &WaitParams) -> Self {
        debug_assert!(params.rank < params.world);
        Self { words: HostWords { params: *params } }
    }

    /// The fault that this rank must respect, if there is one: the one it holds, the poison of a
    /// peer (which it holds from then on), or an abort by its host, which is told to all peers as a
    /// fault in `phase`.
    pub fn fault(&self, phase: Phase) -> Option<Fault> {
        wait::fault(&self.words, phase)
    }

    /// Waits until the word at `word` holds `expected`; what its writer wrote before it signalled
    /// is visible then. `culprit` is the rank that will signal.
    ///
    /// # Errors
    ///
    /// The fault that ended the wait, which this rank and its peers hold from then on. The word may
    /// hold `expected - 1` (wrapping) while it is waited for; any other value is
    /// [`OutOfStep`](crate::fault::FaultKind::OutOfStep).
    ///
    /// # Safety
    ///
    /// `word` is the address of an aligned `u32` that stays mapped during the call and is accessed
    /// by atomic operations only.
    pub unsafe fn wait(
        &self,
        phase: Phase,
        culprit: Rank,
        word: u64,
        expected: u32,
    ) -> Result<(), Fault> {
        // SAFETY: The caller vouches for the address; the reference ends with this call.
        let word = unsafe { AtomicU32::from_ptr(pointer(word)) };
        let value = Value::Word(word, expected);
        wait::wait(&self.words, &mut Clock::default(), phase, culprit, value)
    }

    /// Waits until the flag at `flag` holds `expected`, whatever it held before; as
    /// [`HostWaiter::wait`] otherwise.
    ///
    /// # Errors
    ///
    /// The fault that ended the wait.
    ///
    /// # Safety
    ///
    /// `flag` is the address of an aligned `u64` that stays mapped during the call and is accessed by
    /// atomic operations only.
    pub unsafe fn wait_flag(
        &self,
        phase: Phase,
        culprit: Rank,
        flag: u64,
        expected: u64,
    ) -> Result<(), Fault> {
        // SAFETY: The caller vouches for the address; the reference ends with this call.
        let flag = unsafe { AtomicU64::from_ptr(pointer(flag)) };
        let value = Value::Flag(flag, expected);
        wait::wait(&self.words, &mut Clock::default(), phase, culprit, value)
    }

    /// Waits for one word of every rank, its own included: `words` is the address of an array of
    /// `world` words, indexed by the rank that signals. Peers are looked at in the order of ranks,
    /// beginning behind this one, and the deadline counts for all of them together.
    ///
    /// # Errors
    ///
    /// As [`HostWaiter::wait`]; a timeout names the first rank in that order that is missing.
    ///
    /// # Safety
    ///
    /// As [`HostWaiter::wait`], for each of the words.
    pub unsafe fn wait_all(&self, phase: Phase, words: u64, expected: u32) -> Result<(), Fault> {
        let mut clock = Clock::default();
        let (rank, world) = (self.words.params.rank, self.words.params.world);
        for culprit in (rank + 1..world).chain(0..=rank) {
            let word = words + u64::from(culprit) * size_of::<u32>() as u64;
            // SAFETY: The caller vouches for `world` words, and `culprit` is less than that.
            let word = unsafe { AtomicU32::from_ptr(pointer(word)) };
            let value = Value::Word(word, expected);
            wait::wait(&self.words, &mut clock, phase, Rank(culprit), value)?;
        }
        Ok(())
    }

    /// Stores `value` to the word at `word`, which lies in the memory of rank `to`, and wakes its
    /// waits. Whoever finds `value` by a wait sees all that this thread wrote before.
    ///
    /// A word may be signalled again only after its reader has told, by a signal of its own, that it
    /// has found the value before: a reader that is slower finds itself out of step.
    ///
    /// # Safety
    ///
    /// `word` is the address, as mapped here, of an aligned `u32` that is accessed by atomic
    /// operations only, and `to` is a rank of the group.
    pub unsafe fn signal(&self, to: Rank, word: u64, value: u32) {
        // SAFETY: The caller vouches for the address; the reference ends with this call.
        let word = unsafe { AtomicU32::from_ptr(pointer(word)) };
        wait::signal(&self.words, to, word, value);
    }

    /// Stores `value` to the flag at `flag`, which lies in the memory of rank `to`, and wakes its
    /// waits. Whoever finds `value` by [`HostWaiter::wait_flag`] sees all that this thread wrote
    /// before.
    ///
    /// # Safety
    ///
    /// As [`HostWaiter::signal`], for an aligned `u64`.
    pub unsafe fn raise(&self, to: Rank, flag: u64, value: u64) {
        // SAFETY: The caller vouches for the address; the reference ends with this call.
        let flag = unsafe { AtomicU64::from_ptr(pointer(flag)) };
        wait::raise(&self.words, to, flag, value);
    }

    /// Makes `fault` the fault of this rank and of every peer that holds none, and wakes them all.
    /// Returns the fault that this rank holds now: an earlier one, if there was one.
    pub fn fail(&self, fault: Fault) -> Fault {
        wait::fail(&self.words, fault)
    }
}

/// The words behind a parameter block whose addresses the maker of the waiter has vouched for.
#[derive(Debug)]
struct HostWords {
    params: WaitParams,
}

impl HostWords {
    fn control(&self) -> *mut ControlBlock {
        pointer(self.params.control)
    }

    fn attention(&self, of: Rank) -> *mut AttentionBlock {
        debug_assert!(of.0 < self.params.world);
        let table = pointer::<u64>(self.params.attention);
        // SAFETY: `HostWaiter::from_params` was promised a table of `world` readable addresses that
        // nobody writes, and every rank that gets here is less than `world`: its own by that
        // contract, those of the protocol by iteration, that of `signal` by its own contract.
        pointer(unsafe { table.add(of.index()).read() })
    }
}

// Every reference below is to a word that `HostWaiter::from_params` was promised to stay mapped,
// aligned, and accessed by atomics only while the waiter, which owns `self`, lives.
impl Words for HostWords {
    type Atomics = Std;

    fn rank(&self) -> Rank {
        Rank(self.params.rank)
    }

    fn world(&self) -> usize {
        self.params.world as usize
    }

    fn abort(&self) -> &AtomicU32 {
        // SAFETY: See above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.control()).abort) }
    }

    fn suspended(&self) -> &AtomicU32 {
        // SAFETY: See above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.control()).suspended) }
    }

    fn fault(&self) -> &AtomicU64 {
        // SAFETY: See above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.control()).fault) }
    }

    fn deadline_ms(&self, phase: Phase) -> &AtomicU32 {
        // SAFETY: See above; the table has an entry for every phase.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.control()).deadline_ms[phase.index()]) }
    }

    fn poison(&self, of: Rank) -> &AtomicU64 {
        // SAFETY: See above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.attention(of)).poison) }
    }

    fn doorbell(&self, of: Rank) -> &AtomicU32 {
        // SAFETY: See above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.attention(of)).doorbell) }
    }

    fn sleepers(&self, of: Rank) -> &AtomicU32 {
        // SAFETY: See above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.attention(of)).sleepers) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::{Relaxed, Release};
    use std::time::Duration;

    use super::*;
    use crate::fault::FaultKind;
    use crate::signal::HostControl;

    const CONTROL: usize = size_of::<ControlBlock>() / 8;
    const ATTENTION: usize = size_of::<AttentionBlock>() / 8;
    const LONG: Duration = Duration::from_secs(60);

    /// The words of all ranks of a group: atomics, so that every alias of them is one too.
    struct Group {
        world: u32,
        control: Vec<AtomicU64>,
        /// What the table points to.
        _attention: Vec<AtomicU64>,
        table: Vec<u64>,
        /// `[reader][writer]`
        signals: Vec<AtomicU32>,
    }

    impl Group {
        fn new(world: u32, epoch: u32, deadline: Duration) -> Self {
            let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
            let attention = words(world as usize * ATTENTION);
            let group = Self {
                world,
                control: words(world as usize * CONTROL),
                table: attention.chunks(ATTENTION).map(|block| address(block.as_ptr())).collect(),
                _attention: attention,
                signals: (0..world * world).map(|_| AtomicU32::new(epoch)).collect(),
            };
            for rank in 0..world {
                for phase in Phase::ALL {
                    group.host(rank).set_deadline(phase, deadline);
                }
            }
            group
        }

        fn control(&self, rank: u32) -> u64 {
            address(self.control[rank as usize * CONTROL..].as_ptr())
        }

        fn host(&self, rank: u32) -> HostControl<'_> {
            // SAFETY: Both blocks are atomics of the right size and alignment that `self` owns.
            unsafe {
                HostControl::from_address(self.control(rank)).ringing(self.table[rank as usize])
            }
        }

        fn waiter(&self, rank: u32) -> HostWaiter {
            let params = WaitParams {
                control: self.control(rank),
                attention: address(self.table.as_ptr()),
                own: self.table[rank as usize],
                rank,
                world: self.world,
            };
            // SAFETY: All blocks are atomics of the right size and alignment, and every test keeps
            // the group longer than its waiters; the table is never written.
            unsafe { HostWaiter::from_params(&params) }
        }

        /// The word that `writer` signals to `reader`.
        fn signal(&self, reader: u32, writer: u32) -> u64 {
            address(&raw const self.signals[(reader * self.world + writer) as usize])
        }

        fn wait(&self, reader: u32, writer: u32, expected: u32) -> Result<(), Fault> {
            let word = self.signal(reader, writer);
            // SAFETY: The word is an atomic that `self` owns.
            unsafe { self.waiter(reader).wait(Phase::Dispatch, Rank(writer), word, expected) }
        }

        fn wait_all(&self, reader: u32, expected: u32) -> Result<(), Fault> {
            let words = self.signal(reader, 0);
            // SAFETY: `world` words begin there, atomics that `self` owns.
            unsafe { self.waiter(reader).wait_all(Phase::Combine, words, expected) }
        }

        fn send(&self, writer: u32, reader: u32, value: u32) {
            let word = self.signal(reader, writer);
            // SAFETY: The word is an atomic that `self` owns.
            unsafe { self.waiter(writer).signal(Rank(reader), word, value) }
        }

        fn faults(&self) -> Vec<Option<Fault>> {
            (0..self.world).map(|rank| self.waiter(rank).fault(Phase::Record)).collect()
        }
    }

    fn address<T>(pointer: *const T) -> u64 {
        pointer.expose_provenance() as u64
    }

    fn fault(phase: Phase, culprit: u32, kind: FaultKind) -> Fault {
        Fault { phase, culprit: Rank(culprit), kind }
    }

    #[test]
    fn ranks_go_through_rounds_together_across_the_wrap() {
        // More threads than cores, so that waits do sleep. Two sets of words take turns, as those
        // of dispatch and combine do: a rank that is through a round may begin the next while
        // others still look at the words of this one, but not the one after that.
        let world = 8;
        let before = u32::MAX - 50;
        let sets = [Group::new(world, before, LONG), Group::new(world, before, LONG)];
        let rounds: Vec<AtomicU32> = (0..world).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for rank in 0..world {
                let (sets, rounds) = (&sets, &rounds);
                scope.spawn(move || {
                    for round in 0..200 {
                        let set = &sets[round as usize % 2];
                        let epoch = before.wrapping_add(1 + round / 2);
                        rounds[rank as usize].store(round, Relaxed);
                        for peer in 0..world {
                            set.send(rank, peer, epoch);
                        }
                        assert_eq!(set.wait_all(rank, epoch), Ok(()));
                        for peer in rounds {
                            let seen = peer.load(Relaxed);
                            assert!(seen == round || seen == round + 1, "{seen} in {round}");
                        }
                    }
                });
            }
        });
        for group in &sets {
            assert_eq!(group.faults(), vec![None; 8]);
            assert!(
                (0..world)
                    .all(|rank| group.waiter(rank).words.sleepers(Rank(rank)).load(Relaxed) == 0)
            );
        }
    }

    #[test]
    fn a_missing_rank_is_named_on_every_rank() {
        let group = Group::new(4, 0, Duration::ZERO);
        for writer in [0, 1, 2] {
            group.send(writer, 1, 1);
        }
        let timeout = fault(Phase::Combine, 3, FaultKind::Timeout);
        assert_eq!(group.wait_all(1, 1), Err(timeout));
        assert_eq!(group.faults(), vec![Some(timeout); 4]);
        assert_eq!(group.host(1).fault(), Some(timeout));
        // Sticky, also for a word that is there.
        assert_eq!(group.wait(1, 2, 1), Err(timeout));
        assert_eq!(group.wait(0, 2, 1), Err(timeout));
    }

    #[test]
    fn a_signal_that_is_there_needs_no_time() {
        let group = Group::new(2, 0, Duration::ZERO);
        group.send(1, 0, 1);
        assert_eq!(group.wait(0, 1, 1), Ok(()));
    }

    #[test]
    fn suspended_deadlines_do_not_pass() {
        let group = Group::new(2, 0, Duration::ZERO);
        group.host(0).suspend();
        group.host(0).suspend();
        group.host(0).resume();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| group.wait(0, 1, 1));
            // Once it sleeps it has looked at its clock, which does not run.
            let waiter = group.waiter(0);
            while waiter.words.sleepers(Rank(0)).load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            group.host(0).resume();
            let timeout = fault(Phase::Dispatch, 1, FaultKind::Timeout);
            assert_eq!(waiting.join().expect("the wait"), Err(timeout));
        });
        // Nothing was suspended any more.
        group.host(0).resume();
        assert_eq!(group.waiter(0).words.suspended().load(Relaxed), 0);
    }

    #[test]
    fn an_abort_ends_a_wait_and_tells_the_peers() {
        let group = Group::new(3, 0, LONG);
        let aborted = fault(Phase::Dispatch, 0, FaultKind::Aborted);
        std::thread::scope(|scope| {
            let waits = [(0, 1), (1, 2), (2, 1)].map(|(reader, writer)| {
                let group = &group;
                scope.spawn(move || group.wait(reader, writer, 1))
            });
            group.host(0).abort();
            for wait in waits {
                assert_eq!(wait.join().expect("the wait"), Err(aborted));
            }
        });
        assert!(group.host(0).is_aborted());
        assert!(!group.host(1).is_aborted());
    }

    #[test]
    fn a_rank_that_is_gone_ends_the_waits_for_anyone_and_is_named() {
        let group = Group::new(3, 0, LONG);
        let gone = fault(Phase::Dispatch, 2, FaultKind::Gone);
        std::thread::scope(|scope| {
            let waits = [(0, 1), (1, 2)].map(|(reader, writer)| {
                let group = &group;
                scope.spawn(move || group.wait(reader, writer, 1))
            });
            group.host(0).gone(Rank(2));
            for wait in waits {
                assert_eq!(wait.join().expect("the wait"), Err(gone));
            }
        });
        // The first reason stays.
        let group = Group::new(2, 0, LONG);
        group.host(0).gone(Rank(1));
        group.host(0).abort();
        assert_eq!(group.wait(0, 1, 1), Err(fault(Phase::Dispatch, 1, FaultKind::Gone)));
    }

    #[test]
    fn an_abort_does_not_undo_a_signal_that_is_there() {
        let group = Group::new(2, 0, LONG);
        group.send(1, 0, 1);
        group.host(0).abort();
        assert_eq!(group.wait(0, 1, 1), Ok(()));
        let aborted = fault(Phase::Dispatch, 0, FaultKind::Aborted);
        assert_eq!(group.wait(0, 1, 2), Err(aborted));
    }

    #[test]
    fn a_peer_in_another_step_is_named() {
        for found in [2, u32::MAX - 1] {
            let group = Group::new(2, u32::MAX, LONG);
            group.send(1, 0, found);
            let out_of_step = fault(Phase::Dispatch, 1, FaultKind::OutOfStep);
            assert_eq!(group.wait(0, 1, 0), Err(out_of_step));
            assert_eq!(group.faults(), vec![Some(out_of_step); 2]);
        }
    }

    #[test]
    fn the_first_fault_stays() {
        let group = Group::new(2, 0, LONG);
        let first = fault(Phase::Dispatch, 1, FaultKind::TooManyTokens);
        let second = fault(Phase::Combine, 0, FaultKind::Failed);
        assert_eq!(group.waiter(1).fail(first), first);
        assert_eq!(group.waiter(0).fault(Phase::Dispatch), Some(first));
        assert_eq!(group.waiter(0).fail(second), first);
        assert_eq!(group.faults(), vec![Some(first); 2]);
    }

    #[test]
    fn a_word_that_is_no_fault_still_ends_a_wait() {
        let group = Group::new(2, 0, LONG);
        group.waiter(1).words.poison(Rank(0)).store(u64::MAX, Release);
        let unknown = fault(Phase::Dispatch, 0, FaultKind::Failed);
        assert_eq!(group.wait(0, 1, 1), Err(unknown));
    }

    #[test]
    fn deadlines_are_stored_in_milliseconds() {
        let group = Group::new(1, 0, Duration::from_micros(1));
        assert_eq!(group.host(0).deadline(Phase::Setup), Duration::from_millis(1));
        group.host(0).set_deadline(Phase::Shutdown, Duration::MAX);
        let longest = Duration::from_millis(u32::MAX.into());
        assert_eq!(group.host(0).deadline(Phase::Shutdown), longest);
        // SAFETY: The block is mapped, and no other thread is there to write it.
        let block = unsafe { pointer::<ControlBlock>(group.control(0)).read() };
        assert_eq!(block.deadline_ms, [1, 1, 1, 1, 1, 1, 1, u32::MAX]);
    }
}

//! The control block of a rank as the thread that owns the rank uses it.

use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use super::atomics::Std;
use super::params::{AttentionBlock, ControlBlock};
use super::wait::{GONE, ring_bell};
use crate::Rank;
use crate::deadline::Deadlines;
use crate::fault::{Fault, Phase};

/// The host's side of a rank's control block: abort, deadlines, and the fault the device reports.
///
/// Waits of the rank look at these words while they run. Nothing here blocks or allocates.
#[derive(Clone, Copy, Debug)]
pub struct HostControl<'a> {
    // Addresses rather than pointers: any thread may do atomic operations on them.
    control: u64,
    attention: Option<u64>,
    blocks: PhantomData<&'a ControlBlock>,
}

impl HostControl<'_> {
    /// A view of the [`ControlBlock`] at `control`, as the host addresses it.
    ///
    /// # Safety
    ///
    /// For the lifetime of the view the block stays mapped for reads and writes, is aligned for its
    /// type, and is accessed by atomic operations only.
    pub unsafe fn from_address(control: u64) -> Self {
        Self { control, attention: None, blocks: PhantomData }
    }

    /// Makes every change also wake the waits of this rank that sleep. `attention` is the address
    /// of the rank's own [`AttentionBlock`]. Without it, or where waits only poll, a change is seen
    /// at the next look at the control block, a few milliseconds later.
    ///
    /// # Safety
    ///
    /// As for [`HostControl::from_address`].
    #[must_use]
    pub unsafe fn ringing(self, attention: u64) -> Self {
        Self { attention: Some(attention), ..self }
    }

    /// Asks every wait of the rank to end, now and from now on.
    pub fn abort(&self) {
        self.set_abort(1);
    }

    /// Asks every wait of the rank to end, now and from now on, because `peer` is gone: waits that are
    /// not satisfied report [`Gone`](crate::fault::FaultKind::Gone) with that rank as the culprit.
    pub fn gone(&self, peer: Rank) {
        self.set_abort(peer.0.saturating_add(GONE));
    }

    /// The first reason stays.
    fn set_abort(&self, word: u32) {
        let _ = self.abort_flag().compare_exchange(0, word, AcqRel, Acquire);
        self.ring();
    }

    /// Whether waits are asked to end.
    #[cfg(test)]
    pub(super) fn is_aborted(&self) -> bool {
        self.abort_flag().load(Acquire) != 0
    }

    /// The fault that the rank holds.
    pub fn fault(&self) -> Option<Fault> {
        Fault::from_word(self.fault_word().load(Acquire))
    }

    /// Sets how long the waits of every phase may take, as [`HostControl::set_deadline`].
    pub fn set_deadlines(&self, deadlines: &Deadlines) {
        for phase in Phase::ALL {
            self.set_deadline(phase, deadlines.of(phase));
        }
    }

    /// Sets how long the waits of `phase` may take, in whole milliseconds, rounded up; at most
    /// `u32::MAX` of them, which is 49 days. Zero fails every wait whose signal is not there yet.
    /// Waits that run already take the new value.
    pub fn set_deadline(&self, phase: Phase, deadline: Duration) {
        let ms = deadline.as_nanos().div_ceil(1_000_000);
        self.deadline_word(phase).store(u32::try_from(ms).unwrap_or(u32::MAX), Relaxed);
        self.ring();
    }

    /// How long the waits of `phase` may take.
    #[cfg(test)]
    pub(super) fn deadline(&self, phase: Phase) -> Duration {
        Duration::from_millis(self.deadline_word(phase).load(Relaxed).into())
    }

    /// Stops the clocks of all waits until [`HostControl::resume`] was called as often as this.
    pub fn suspend(&self) {
        self.suspended_word().fetch_add(1, Relaxed);
        self.ring();
    }

    /// Ends one [`HostControl::suspend`]; without one it changes nothing.
    pub fn resume(&self) {
        // An error is a word that was zero: nothing was suspended.
        let _ = self.suspended_word().fetch_update(Relaxed, Relaxed, |depth| depth.checked_sub(1));
        self.ring();
    }

    fn ring(&self) {
        let Some(attention) = self.attention else { return };
        let attention = ptr::with_exposed_provenance_mut::<AttentionBlock>(attention as usize);
        // SAFETY: The block is mapped, aligned and accessed by atomics only, as promised to
        // `ringing` for the lifetime of the view.
        let (doorbell, sleepers) = unsafe {
            (
                AtomicU32::from_ptr(&raw mut (*attention).doorbell),
                AtomicU32::from_ptr(&raw mut (*attention).sleepers),
            )
        };
        ring_bell::<Std>(doorbell, sleepers);
    }

    fn block(&self) -> *mut ControlBlock {
        ptr::with_exposed_provenance_mut(self.control as usize)
    }

    // Every reference below is to a word that is mapped, aligned and accessed by atomics only, as
    // promised to `from_address` for the lifetime of the view.

    fn abort_flag(&self) -> &AtomicU32 {
        // SAFETY: See above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.block()).abort) }
    }

    fn suspended_word(&self) -> &AtomicU32 {
        // SAFETY: See above.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.block()).suspended) }
    }

    fn fault_word(&self) -> &AtomicU64 {
        // SAFETY: See above.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.block()).fault) }
    }

    fn deadline_word(&self, phase: Phase) -> &AtomicU32 {
        // SAFETY: See above; the table has an entry for every phase.
        unsafe { AtomicU32::from_ptr(&raw mut (*self.block()).deadline_ms[phase.index()]) }
    }
}

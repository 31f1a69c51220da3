//! The order in which steps were launched that are not settled yet.
//!
//! Whoever launches steps before it knows how those before them ended may have to launch them again: steps
//! behind one that overflowed move nothing. Where several do so on one dispatcher, each has to know what of the
//! others is still to come before its own. That is kept here, on the host, and changed by what every rank does
//! at the same place of its program, so that all ranks hold the same.
//!
//! It orders those who take part, and stops nobody else. A graph that is replayed by hand takes no place by that:
//! nobody says when such a step is settled, whose record may never be read, so that its place would count as in
//! flight for ever. Nor does its replay wait for what is held back, since it may itself be what comes before that:
//! the step that overflowed, launched again. So without a place a step is passed by steps that were launched behind
//! it and passes those before it, and its record is one more that the ring has to hold.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The place of a step among those that were launched on a dispatcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(u64);

/// The steps of a dispatcher that were launched and are not settled, see
/// [`TokenDispatcher::launch_order`](crate::TokenDispatcher::launch_order).
///
/// Runners take part by themselves. Whoever replays graphs by hand between their steps, and has them
/// [hold](crate::StepOptions::with_hold_on_overflow), takes part like this, on all ranks alike:
///
/// - after a replay, [`enter`](LaunchOrder::enter);
/// - when the record says that the step overflowed, [`hold_behind`](LaunchOrder::hold_behind) before
///   [`TokenDispatcher::resume`](crate::TokenDispatcher::resume), and replay it first; when it says that the step
///   was drained, [`hold`](LaunchOrder::hold), unless it is held already by who settled the step before it;
/// - replay a step that is held once nothing is held [before it](LaunchOrder::any_held_before), and
///   [`release`](LaunchOrder::release) it;
/// - [`leave`](LaunchOrder::leave) when there is an outcome, or it is given up. Until then runners count it among
///   the steps in flight, of which there are no more than records in the ring.
#[derive(Debug, Default)]
pub struct LaunchOrder {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Places by age, and whether each is held back. Steps leave about in the order in which they came.
    places: VecDeque<(Place, bool)>,
}

impl LaunchOrder {
    /// A step was launched, behind all others.
    pub fn enter(&self) -> Place {
        let mut state = self.lock();
        let place = Place(state.next);
        state.next += 1;
        state.places.push_back((place, false));
        place
    }

    /// How many steps are in flight.
    pub fn in_flight(&self) -> usize {
        self.lock().places.len()
    }

    /// A step is settled, or given up.
    pub fn leave(&self, place: Place) {
        self.lock().places.retain(|(other, _)| *other != place);
    }

    /// The step itself has moved nothing, and is to be launched again.
    pub fn hold(&self, place: Place) {
        self.mark(|other| other == place, true);
    }

    /// No step behind this one has moved anything: all of them are to be launched again.
    pub fn hold_behind(&self, place: Place) {
        self.mark(|other| other > place, true);
    }

    /// A step that was held back has been launched again.
    pub fn release(&self, place: Place) {
        self.mark(|other| other == place, false);
    }

    /// Whether a step is to be launched again.
    pub fn is_held(&self, place: Place) -> bool {
        self.lock().places.iter().any(|(other, held)| *other == place && *held)
    }

    /// Whether a step is to be launched again before this one; before any that is yet to come, for `None`.
    pub fn any_held_before(&self, place: Option<Place>) -> bool {
        let before = |other: Place| place.is_none_or(|place| other < place);
        self.lock().places.iter().any(|(other, held)| *held && before(*other))
    }

    fn mark(&self, which: impl Fn(Place) -> bool, held: bool) {
        let mut state = self.lock();
        let marked = state.places.iter_mut().filter(|(place, _)| which(*place));
        marked.for_each(|(_, mark)| *mark = held);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_behind_an_overflow_comes_first_in_its_order() {
        let order = LaunchOrder::default();
        let [before, over, second, third] = [(); 4].map(|()| order.enter());
        assert_eq!(order.in_flight(), 4);
        order.hold_behind(over);
        let held = [before, over, second, third].map(|place| order.is_held(place));
        assert_eq!(held, [false, false, true, true]);
        assert!(order.any_held_before(None) && order.any_held_before(Some(third)));
        assert!(!order.any_held_before(Some(second)), "it is its turn");
        order.leave(over);
        order.release(second);
        assert!(!order.any_held_before(Some(third)) && order.any_held_before(None));
        order.leave(third);
        assert!(!order.any_held_before(None) && !order.is_held(third));
        let last = order.enter();
        order.hold(second);
        assert!(order.any_held_before(Some(last)) && !order.is_held(last));
    }
}

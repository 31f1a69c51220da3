//! Who has come to the round that is being gathered, and with what.

use std::time::{Duration, Instant};

use super::failure::Failure;

/// One round after another, in one place: a rank comes to the next only with what it was given at
/// the end of the one before.
#[derive(Debug)]
pub(super) struct Round {
    /// Who came first, and for what.
    first: Option<(u32, String)>,
    payloads: Vec<Option<Vec<u8>>>,
    arrived: usize,
    /// The first rank to give up does so then, and its deadline.
    expiry: Option<(Instant, Duration)>,
}

/// A rank that comes to a round.
#[derive(Debug)]
pub(super) struct Arrival<'a> {
    pub(super) rank: u32,
    pub(super) purpose: &'a str,
    pub(super) payload: &'a [u8],
    pub(super) deadline: Duration,
    /// When the rank gives up; `None` is never.
    pub(super) until: Option<Instant>,
}

impl Round {
    pub(super) fn new(world: usize) -> Self {
        Self { first: None, payloads: vec![None; world], arrived: 0, expiry: None }
    }

    /// Takes in what a rank brings. With the last, gives all payloads and begins the next round.
    pub(super) fn arrive(
        &mut self,
        arrival: &Arrival<'_>,
    ) -> Result<Option<Vec<Vec<u8>>>, Failure> {
        let Arrival { rank, purpose, payload, deadline, until } = *arrival;
        let malformed = |reason: &str| Failure::Malformed { rank, reason: reason.to_owned() };
        let place = usize::try_from(rank).ok().and_then(|rank| self.payloads.get_mut(rank));
        let place = place.ok_or_else(|| malformed("it is outside the group"))?;
        if place.is_some() {
            return Err(malformed("it comes twice to one call"));
        }
        let (first, first_purpose) = self.first.get_or_insert_with(|| (rank, purpose.to_owned()));
        if first_purpose != purpose {
            return Err(Failure::Purpose {
                first: *first,
                first_purpose: first_purpose.clone(),
                second: rank,
                second_purpose: purpose.to_owned(),
            });
        }
        *place = Some(payload.to_vec());
        self.arrived += 1;
        if self.arrived == self.payloads.len() {
            let all = self.payloads.iter_mut().filter_map(Option::take).collect();
            *self = Self::new(self.payloads.len());
            return Ok(Some(all));
        }
        if let Some(until) = until
            && self.expiry.is_none_or(|(earliest, _)| until < earliest)
        {
            self.expiry = Some((until, deadline));
        }
        Ok(None)
    }

    /// When the first rank gives up, if one does.
    pub(super) fn expiry(&self) -> Option<Instant> {
        self.expiry.map(|(at, _)| at)
    }

    /// The failure of a round whose time is over at `now`.
    pub(super) fn expired(&self, now: Instant) -> Option<Failure> {
        let (_, deadline) = self.expiry.filter(|(at, _)| *at <= now)?;
        let (_, purpose) = self.first.as_ref()?;
        let missing = (0u32..).zip(&self.payloads);
        let missing = missing.filter(|(_, place)| place.is_none()).map(|(rank, _)| rank).collect();
        Some(Failure::Deadline { purpose: purpose.clone(), deadline, missing })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn arrival(rank: u32, until: Option<Instant>) -> Arrival<'static> {
        Arrival { rank, purpose: "meeting", payload: b"x", deadline: SECOND, until }
    }

    #[test]
    fn the_last_completes_a_round_and_the_next_begins_empty() {
        let mut round = Round::new(2);
        let now = Instant::now();
        for _ in 0..2 {
            assert_eq!(round.arrive(&arrival(1, Some(now))), Ok(None));
            assert_eq!(round.arrive(&arrival(0, None)), Ok(Some(vec![b"x".to_vec(); 2])));
            assert_eq!(round.expired(now), None);
        }
    }

    #[test]
    fn the_earliest_to_give_up_ends_it() {
        let mut round = Round::new(4);
        let now = Instant::now();
        assert_eq!(round.expired(now), None);
        round.arrive(&arrival(1, None)).expect("in order");
        assert_eq!(round.expiry(), None);
        round.arrive(&arrival(2, Some(now + SECOND))).expect("in order");
        round.arrive(&arrival(3, Some(now + 2 * SECOND))).expect("in order");
        assert_eq!(round.expiry(), Some(now + SECOND));
        assert_eq!(round.expired(now), None);
        let purpose = "meeting".to_owned();
        let failure = Failure::Deadline { purpose, deadline: SECOND, missing: vec![0] };
        assert_eq!(round.expired(now + SECOND), Some(failure));
    }

    #[test]
    fn a_rank_comes_once_and_for_the_same() {
        let mut round = Round::new(2);
        round.arrive(&arrival(0, None)).expect("in order");
        for rank in [0, 2, u32::MAX] {
            let failure = round.arrive(&arrival(rank, None)).expect_err("refused");
            assert!(matches!(failure, Failure::Malformed { rank: r, .. } if r == rank));
        }
        let other = Arrival { purpose: "growing", ..arrival(1, None) };
        let failure = Failure::Purpose {
            first: 0,
            first_purpose: "meeting".to_owned(),
            second: 1,
            second_purpose: "growing".to_owned(),
        };
        assert_eq!(round.arrive(&other), Err(failure));
    }
}

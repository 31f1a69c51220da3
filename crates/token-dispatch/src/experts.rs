//! Which rank holds which expert.

use ep_context::Rank;
use smallvec::SmallVec;

use crate::config::MAX_EXPERTS;
use crate::error::DispatchError;

/// Where one copy of an expert lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertHome {
    /// The rank that holds it.
    pub rank: Rank,
    /// Its place among the experts of that rank, counted from zero.
    pub slot: u32,
}

/// One or more homes for every expert.
///
/// All ranks use the same map. A token goes to one home of each of its experts: to the sender's own
/// rank if that has one, else to the one whose turn it is for that sender, so that copies share the
/// load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMap {
    homes: Vec<SmallVec<[ExpertHome; 1]>>,
    slots: Vec<u32>,
}

impl ExpertMap {
    /// Experts `[r·E/R, (r+1)·E/R)` on rank `r`, by floor division: in order, and even to within one.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] if there are no ranks, fewer experts than ranks, or more experts than
    /// 65 536.
    pub fn contiguous(experts: usize, ranks: usize) -> Result<Self, DispatchError> {
        if ranks == 0 || experts < ranks {
            return Err(DispatchError::Config {
                field: "ranks",
                value: ranks.to_string(),
                limit: format!("1 to the number of experts, {experts}"),
            });
        }
        if experts > MAX_EXPERTS {
            return Err(DispatchError::Config {
                field: "experts",
                value: experts.to_string(),
                limit: format!("at most {MAX_EXPERTS}"),
            });
        }
        let first = |rank: usize| rank * experts / ranks;
        let homes = (0..ranks).flat_map(|rank| {
            (first(rank)..first(rank + 1)).map(move |expert| ExpertHome {
                rank: Rank::from_index(rank),
                slot: (expert - first(rank)) as u32,
            })
        });
        Self::new(homes.collect(), ranks)
    }

    /// One home for each expert. Slots need not follow the order of ids, and a rank may have slots
    /// that no expert is in.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] naming the first expert whose home is on no rank of the group or
    /// taken already.
    pub fn new(homes: Vec<ExpertHome>, ranks: usize) -> Result<Self, DispatchError> {
        Self::replicated(homes.into_iter().map(|home| vec![home]).collect(), ranks)
    }

    /// One or more homes for each expert, for experts that many tokens choose.
    ///
    /// # Errors
    ///
    /// As for [`ExpertMap::new`], and for an expert that has no home.
    pub fn replicated(homes: Vec<Vec<ExpertHome>>, ranks: usize) -> Result<Self, DispatchError> {
        let mut slots = vec![0u32; ranks];
        let mut taken = std::collections::HashSet::new();
        for (expert, homes) in homes.iter().enumerate() {
            let refuse = |value: String, limit: String| DispatchError::Config {
                field: "home of an expert",
                value: format!("{value} for expert {expert}"),
                limit,
            };
            if homes.is_empty() {
                return Err(refuse("none".to_owned(), "at least one".to_owned()));
            }
            for home in homes {
                let Some(slots) = slots.get_mut(home.rank.index()) else {
                    return Err(refuse(home.rank.to_string(), format!("a rank below {ranks}")));
                };
                if home.slot >= MAX_SLOTS {
                    let limit = format!("a slot below {MAX_SLOTS}");
                    return Err(refuse(format!("slot {}", home.slot), limit));
                }
                if !taken.insert(*home) {
                    let value = format!("slot {} of {}", home.slot, home.rank);
                    return Err(refuse(value, "a slot that no other expert is in".to_owned()));
                }
                *slots = (*slots).max(home.slot + 1);
            }
        }
        Ok(Self { homes: homes.into_iter().map(SmallVec::from_vec).collect(), slots })
    }

    /// How many experts there are.
    pub fn experts(&self) -> usize {
        self.homes.len()
    }

    /// How many ranks the map spreads them over.
    pub fn ranks(&self) -> usize {
        self.slots.len()
    }

    /// The slots of a rank: one more than the highest that an expert is in.
    pub fn slots_of(&self, rank: Rank) -> u32 {
        self.slots.get(rank.index()).copied().unwrap_or(0)
    }

    /// The most slots that any rank has.
    pub fn most_slots(&self) -> u32 {
        self.slots.iter().copied().max().unwrap_or(0)
    }

    /// The homes of every expert, indexed by its id.
    pub fn homes(&self) -> &[SmallVec<[ExpertHome; 1]>] {
        &self.homes
    }

    /// The experts of a rank, by slot; none where a slot is empty.
    pub fn experts_of(&self, rank: Rank) -> Vec<Option<u32>> {
        let mut experts = vec![None; self.slots_of(rank) as usize];
        for (expert, homes) in (0u32..).zip(&self.homes) {
            for home in homes.iter().filter(|home| home.rank == rank) {
                experts[home.slot as usize] = Some(expert);
            }
        }
        experts
    }

    /// Where `sender` sends the tokens of each expert, indexed by its id.
    pub fn homes_for(&self, sender: Rank) -> Vec<ExpertHome> {
        self.homes
            .iter()
            .map(|homes| {
                let own = homes.iter().find(|home| home.rank == sender);
                *own.unwrap_or(&homes[sender.index() % homes.len()])
            })
            .collect()
    }

    /// The map in few words, to be compared between ranks.
    pub(crate) fn fingerprint(&self) -> String {
        let homes: SmallVec<[String; 64]> = self
            .homes
            .iter()
            .map(|homes| {
                let homes: SmallVec<[String; 2]> =
                    homes.iter().map(|home| format!("{}.{}", home.rank.0, home.slot)).collect();
                homes.join("+")
            })
            .collect();
        homes.join(",")
    }
}

/// Far above any model's experts on a rank.
const MAX_SLOTS: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn home(rank: u32, slot: u32) -> ExpertHome {
        ExpertHome { rank: Rank(rank), slot }
    }

    #[test]
    fn more_experts_than_there_may_be_are_refused() {
        assert!(ExpertMap::contiguous(MAX_EXPERTS, 7).is_ok());
        for experts in [MAX_EXPERTS + 1, usize::MAX] {
            let refused = ExpertMap::contiguous(experts, 7).expect_err("too many");
            assert!(refused.to_string().contains("65536"), "{refused}");
        }
    }

    #[test]
    fn contiguous_maps_are_even_and_complete() {
        let map = ExpertMap::contiguous(10, 4).expect("fits");
        assert_eq!((0..4).map(|r| map.slots_of(Rank(r))).collect::<Vec<_>>(), [2, 3, 2, 3]);
        assert_eq!(map.homes_for(Rank(3))[4], home(1, 2));
        assert_eq!((map.most_slots(), map.ranks(), map.experts()), (3, 4, 10));
        assert_eq!(map.experts_of(Rank(1)), [Some(2), Some(3), Some(4)]);
        assert!(ExpertMap::contiguous(3, 4).is_err());
        assert!(ExpertMap::contiguous(3, 0).is_err());
    }

    #[test]
    fn a_home_is_on_a_rank_and_taken_once() {
        assert!(ExpertMap::new(vec![home(0, 0), home(1, 0), home(0, 1)], 2).is_ok());
        assert!(ExpertMap::new(vec![home(2, 0)], 2).is_err());
        let twice = ExpertMap::new(vec![home(0, 0), home(0, 0)], 1).expect_err("taken");
        assert!(twice.to_string().contains("expert 1"), "{twice}");
        assert!(ExpertMap::new(vec![home(0, u32::MAX)], 1).is_err());
        assert!(ExpertMap::replicated(vec![vec![]], 1).is_err());
    }

    #[test]
    fn copies_share_the_senders_and_the_own_one_comes_first() {
        let map = ExpertMap::replicated(vec![vec![home(0, 1), home(1, 0)], vec![home(2, 0)]], 4);
        let map = map.expect("distinct homes");
        let to: Vec<u32> = (0..4).map(|s| map.homes_for(Rank(s))[0].rank.0).collect();
        assert_eq!(to, [0, 1, 0, 1]);
        assert_eq!(map.experts_of(Rank(0)), [None, Some(0)]);
        assert_eq!(map.slots_of(Rank(3)), 0);
    }
}

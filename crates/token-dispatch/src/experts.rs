//! Which rank holds which expert.

use ep_context::Rank;

use crate::error::DispatchError;

/// Where one expert lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertHome {
    /// The rank that holds it.
    pub rank: Rank,
    /// Its place among the experts of that rank, counted from zero.
    pub slot: u32,
}

/// A home for every expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertMap {
    homes: Vec<ExpertHome>,
    held: Vec<u32>,
}

impl ExpertMap {
    /// Experts `[r·E/R, (r+1)·E/R)` on rank `r`, by floor division: in order, and even to within one.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] if there are no ranks or fewer experts than ranks.
    pub fn contiguous(experts: usize, ranks: usize) -> Result<Self, DispatchError> {
        if ranks == 0 || experts < ranks {
            return Err(DispatchError::Config {
                field: "ranks",
                value: ranks.to_string(),
                limit: format!("1 to the number of experts, {experts}"),
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

    /// An explicit home for each expert. The slots of a rank count up from zero without a gap, and
    /// ascend with the expert's id: the order in which combine adds up.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] naming the first expert whose home breaks this.
    pub fn new(homes: Vec<ExpertHome>, ranks: usize) -> Result<Self, DispatchError> {
        let mut held = vec![0u32; ranks];
        for (expert, home) in homes.iter().enumerate() {
            let next = held.get_mut(home.rank.index()).ok_or_else(|| DispatchError::Config {
                field: "home of an expert",
                value: format!("{} for expert {expert}", home.rank),
                limit: format!("a rank below {ranks}"),
            })?;
            if home.slot != *next {
                return Err(DispatchError::Config {
                    field: "slot of an expert",
                    value: format!("{} for expert {expert} on {}", home.slot, home.rank),
                    limit: format!("{next}, the next free slot of that rank"),
                });
            }
            *next += 1;
        }
        Ok(Self { homes, held })
    }

    /// How many experts there are.
    pub fn experts(&self) -> usize {
        self.homes.len()
    }

    /// How many experts a rank holds.
    pub fn held_by(&self, rank: Rank) -> u32 {
        self.held.get(rank.index()).copied().unwrap_or(0)
    }

    /// The most experts that any rank holds.
    pub fn most_held(&self) -> u32 {
        self.held.iter().copied().max().unwrap_or(0)
    }

    /// The home of every expert, indexed by its id.
    pub fn homes(&self) -> &[ExpertHome] {
        &self.homes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_maps_are_even_and_complete() {
        let map = ExpertMap::contiguous(10, 4).expect("fits");
        assert_eq!((0..4).map(|r| map.held_by(Rank(r))).collect::<Vec<_>>(), [2, 3, 2, 3]);
        assert_eq!(map.homes()[4], ExpertHome { rank: Rank(1), slot: 2 });
        assert_eq!(map.most_held(), 3);
        assert!(ExpertMap::contiguous(3, 4).is_err());
        assert!(ExpertMap::contiguous(3, 0).is_err());
    }

    #[test]
    fn a_gap_in_the_slots_is_refused() {
        let home = |rank, slot| ExpertHome { rank: Rank(rank), slot };
        assert!(ExpertMap::new(vec![home(0, 0), home(1, 0), home(0, 1)], 2).is_ok());
        assert!(ExpertMap::new(vec![home(0, 1)], 1).is_err());
        assert!(ExpertMap::new(vec![home(2, 0)], 2).is_err());
    }
}

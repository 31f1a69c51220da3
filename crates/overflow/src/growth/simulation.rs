//! What a policy does on a sequence of requirements.
//!
//! It is the specification of recovery, as far as numbers go: an engine that runs the same routing
//! must overflow in the same steps and end with the same capacities. And it is the judge of a policy,
//! by the steps it replays and the rows it reserves.

use super::GrowthError;
use super::between::{Adjustments, BetweenSteps, EndedStep};
use super::policy::{GrowthInput, GrowthPolicy};

/// The settings of a simulated group; all ranks share them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Simulation {
    /// How capacities grow when a step overflowed.
    pub policy: GrowthPolicy,
    /// What changes them between steps.
    pub adjustments: Adjustments,
    /// The capacity of every rank before the first step.
    pub initial_capacity: u32,
    /// The alignment of an expert's rows, a power of two; zero counts as one.
    pub alignment: u32,
    /// The most rows that a rank may have.
    pub limit_rows: u32,
}

/// What a rank begins with, where ranks differ in that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirstRows {
    /// Its capacity before the first step.
    pub capacity: u32,
    /// The most rows that it may have.
    pub limit: u32,
}

/// What happened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimulationOutcome {
    /// Positions of the steps in which any rank required more than its capacity.
    pub overflowed_steps: Vec<usize>,
    /// Steps launched again. One for each overflowed step: requirements do not depend on what was
    /// dropped here, so the first growth covers all of them.
    pub replays: usize,
    /// How often each rank grew, ahead of need included.
    pub growths: Vec<usize>,
    /// How often each rank shrank.
    pub shrinks: Vec<usize>,
    /// The capacity of each rank when each step was first launched: `[step][rank]`.
    pub launched: Vec<Vec<u32>>,
    /// The capacity of each rank in the run of each step that was kept: `[step][rank]`.
    pub capacity: Vec<Vec<u32>>,
    /// The capacity of each rank after the last step, adjusted as after any other.
    pub final_capacity: Vec<u32>,
    /// The most that each rank required in any step.
    pub peak_required: Vec<u32>,
    /// The most rows that all ranks together had at any time.
    pub reserved_rows: u64,
}

impl Simulation {
    /// Runs the steps: `required[step][rank]`, each the requirement of that rank's worst layer.
    ///
    /// A step overflows if any rank requires more than its capacity. Then every rank takes the capacity
    /// that the policy says, and the step is launched again. After every step, the last included,
    /// capacities are adjusted as [`Adjustments`] and the policy say.
    ///
    /// # Errors
    /// [`GrowthError::Factor`] if a setting does not validate, [`GrowthError::RankCount`] if steps
    /// differ in ranks, and [`GrowthError::Refused`], for the first rank in the first step that
    /// cannot grow as far as it must.
    pub fn run(&self, required: &[Vec<u32>]) -> Result<SimulationOutcome, GrowthError> {
        let first = FirstRows { capacity: self.initial_capacity, limit: self.limit_rows };
        self.run_from(&vec![first; required.first().map_or(0, Vec::len)], required)
    }

    /// The same where each rank begins with capacity and limit of its own, in place of those of the group.
    ///
    /// # Errors
    /// As for [`run`](Self::run), [`GrowthError::RankCount`] too if steps have other ranks than `first`.
    pub fn run_from(
        &self,
        first: &[FirstRows],
        required: &[Vec<u32>],
    ) -> Result<SimulationOutcome, GrowthError> {
        let ranks = first.len();
        let mut between = (0..ranks)
            .map(|rank| BetweenSteps::new(self.policy, self.adjustments, rank))
            .collect::<Result<Vec<_>, _>>()?;
        let mut capacity: Vec<u32> = first.iter().map(|first| first.capacity).collect();
        let mut outcome = SimulationOutcome {
            growths: vec![0; ranks],
            shrinks: vec![0; ranks],
            peak_required: vec![0; ranks],
            ..SimulationOutcome::default()
        };
        outcome.note(&capacity, &capacity);

        for (step, required) in required.iter().enumerate() {
            if required.len() != ranks {
                return Err(GrowthError::RankCount {
                    step,
                    found: required.len(),
                    expected: ranks,
                });
            }
            for (peak, &required) in outcome.peak_required.iter_mut().zip(required) {
                *peak = required.max(*peak);
            }

            outcome.launched.push(capacity.clone());
            let overflowed = required.iter().zip(&capacity).any(|(need, have)| need > have);
            if overflowed {
                between.iter_mut().for_each(|between| between.note(required));
                let grown = self.grown(step, required, &capacity, first, &between)?;
                outcome.overflowed_steps.push(step);
                outcome.replays += 1;
                outcome.note(&capacity, &grown);
                capacity = grown;
            }
            outcome.capacity.push(capacity.clone());

            let adjusted: Vec<u32> = between
                .iter_mut()
                .enumerate()
                .map(|(rank, between)| {
                    between.after_step(EndedStep {
                        own_capacity: capacity[rank],
                        required,
                        overflowed,
                        alignment: self.alignment,
                        limit_rows: first[rank].limit,
                    })
                })
                .collect();
            outcome.note(&capacity, &adjusted);
            capacity = adjusted;
        }
        outcome.final_capacity = capacity;
        Ok(outcome)
    }

    fn grown(
        &self,
        step: usize,
        required: &[u32],
        capacity: &[u32],
        first: &[FirstRows],
        between: &[BetweenSteps],
    ) -> Result<Vec<u32>, GrowthError> {
        let grow = |(rank, (&own_required, &own_capacity)): (usize, (&u32, &u32))| {
            let input = GrowthInput {
                own_capacity,
                own_required,
                global_peak_required: peak(required),
                expected: between[rank].expected(),
                over: own_required > own_capacity,
                alignment: self.alignment,
                limit_rows: first[rank].limit,
            };
            let next = self.policy.next_capacity(input);
            next.map_err(|refusal| GrowthError::Refused { step, rank, refusal })
        };
        required.iter().zip(capacity).enumerate().map(grow).collect()
    }
}

impl SimulationOutcome {
    /// Growths of all ranks together.
    pub fn total_growths(&self) -> usize {
        self.growths.iter().sum()
    }

    fn note(&mut self, before: &[u32], after: &[u32]) {
        for (rank, (before, after)) in before.iter().zip(after).enumerate() {
            self.growths[rank] += usize::from(after > before);
            self.shrinks[rank] += usize::from(after < before);
        }
        let reserved = after.iter().copied().map(u64::from).sum();
        self.reserved_rows = self.reserved_rows.max(reserved);
    }
}

fn peak(required: &[u32]) -> u32 {
    required.iter().copied().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::super::GrowthRefusal;
    use super::super::recorded::{INITIAL_CAPACITY, WORST_CASE_ROWS, required};
    use super::*;

    fn simulation(policy: GrowthPolicy) -> Simulation {
        Simulation {
            policy,
            adjustments: Adjustments::default(),
            initial_capacity: 32,
            alignment: 16,
            limit_rows: 1 << 20,
        }
    }

    fn on_the_recording(policy: GrowthPolicy, adjustments: Adjustments) -> SimulationOutcome {
        let initial_capacity = INITIAL_CAPACITY;
        let simulation = Simulation { initial_capacity, adjustments, ..simulation(policy) };
        simulation.run(&required()).unwrap()
    }

    fn adjustments(look_ahead: Option<f64>, shrink_after: u32) -> Adjustments {
        let shrink_after = NonZeroU32::new(shrink_after);
        Adjustments { look_ahead, shrink_after, min_rows: 0 }
    }

    #[test]
    fn three_steps_by_hand() {
        // Capacity 32. Step 1 overflows on rank 1, step 2 on rank 0.
        let required = [vec![16, 32], vec![16, 48], vec![64, 48]];
        let exact = simulation(GrowthPolicy::Exact).run(&required).unwrap();
        assert_eq!(exact.overflowed_steps, [1, 2]);
        assert_eq!(exact.growths, [1, 1]);
        assert_eq!(exact.capacity, [[32, 32], [32, 48], [64, 48]]);
        assert_eq!((exact.peak_required, exact.reserved_rows), (vec![64, 48], 112));

        // Step 1: both to 1.2·48 = 57.6 → 64, which covers step 2.
        let headroom = simulation(GrowthPolicy::headroom()).run(&required).unwrap();
        assert_eq!(headroom.overflowed_steps, [1]);
        assert_eq!((headroom.replays, headroom.total_growths()), (1, 2));
        assert_eq!(headroom.final_capacity, [64, 64]);

        let geometric = simulation(GrowthPolicy::geometric()).run(&required).unwrap();
        assert_eq!(geometric.capacity, [[32, 32], [32, 64], [64, 64]]);
    }

    #[test]
    fn reserved_rows_remember_what_was_shrunk_away() {
        let shrinking =
            Simulation { adjustments: adjustments(None, 2), ..simulation(GrowthPolicy::Exact) };
        let outcome = shrinking.run(&[vec![160], vec![16], vec![16]]).unwrap();
        assert_eq!(outcome.capacity, [[160], [160], [160]]);
        assert_eq!(outcome.final_capacity, [32]);
        assert_eq!((outcome.shrinks, outcome.reserved_rows), (vec![1], 160));
    }

    #[test]
    fn a_refusal_names_step_and_rank() {
        let limited = Simulation { limit_rows: 64, ..simulation(GrowthPolicy::headroom()) };
        let refusal = GrowthRefusal { required: 80, budget: 64, limit: 64 };
        assert_eq!(
            limited.run(&[vec![16, 48], vec![16, 80]]),
            Err(GrowthError::Refused { step: 1, rank: 1, refusal })
        );
        assert_eq!(
            limited.run(&[vec![16, 48], vec![16]]),
            Err(GrowthError::RankCount { step: 1, found: 1, expected: 2 })
        );
        assert_eq!(limited.run(&[]).unwrap(), SimulationOutcome::default());
    }

    #[test]
    fn on_recorded_routing_exact_creeps() {
        let outcome = on_the_recording(GrowthPolicy::Exact, Adjustments::default());
        let overflowed =
            [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 22, 24, 40, 52];
        assert_eq!(outcome.overflowed_steps, overflowed);
        assert_eq!(outcome.growths, [4, 4, 11, 5, 3, 6, 3, 7]);
        assert_eq!(outcome.final_capacity, outcome.peak_required);
        assert_eq!(outcome.reserved_rows, 32_960);
    }

    #[test]
    fn on_recorded_routing_geometric_overflows_seldom_and_reserves_most() {
        let outcome = on_the_recording(GrowthPolicy::geometric(), Adjustments::default());
        assert_eq!(outcome.overflowed_steps, [0, 4, 7, 8, 12, 14, 15]);
        assert_eq!(outcome.total_growths(), 10);
        assert_eq!(outcome.reserved_rows, 51_200);
    }

    #[test]
    fn on_recorded_routing_headroom_replays_two_steps_at_a_third_of_the_worst_case() {
        let outcome = on_the_recording(GrowthPolicy::headroom(), Adjustments::default());
        assert_eq!(outcome.overflowed_steps, [0, 12]);
        assert_eq!(outcome.total_growths(), 16);
        assert_eq!(outcome.final_capacity, [5376; 8]);
        // No more than the headroom over what a perfect guess for all ranks would reserve.
        let peak = *outcome.peak_required.iter().max().unwrap();
        assert_eq!(peak, 5376);
        assert!(outcome.reserved_rows as f64 <= 1.2 * 8.0 * f64::from(peak));
        assert!(3 * outcome.reserved_rows < 8 * u64::from(WORST_CASE_ROWS));
    }

    #[test]
    fn on_recorded_routing_adaptive_is_headroom_that_grows_a_little_ahead() {
        let outcome = on_the_recording(GrowthPolicy::default(), Adjustments::default());
        assert_eq!(outcome.overflowed_steps, [0, 12]);
        let headroom =
            on_the_recording(GrowthPolicy::headroom(), adjustments(Some(GrowthPolicy::AHEAD), 0));
        assert_eq!(outcome.overflowed_steps, headroom.overflowed_steps);
        assert_eq!(outcome.final_capacity, headroom.final_capacity);
        assert!(100 * outcome.reserved_rows < 40 * 8 * u64::from(WORST_CASE_ROWS));
    }

    #[test]
    fn load_that_stays_grows_one_rank_and_load_that_moves_all_of_them() {
        let adaptive = simulation(GrowthPolicy::adaptive());
        let stays = adaptive.run(&[vec![16, 320, 16], vec![32, 304, 16], vec![16, 320, 32]]);
        let stays = stays.unwrap();
        assert_eq!(stays.overflowed_steps, [0]);
        assert_eq!((stays.final_capacity, stays.shrinks), (vec![48, 384, 48], vec![0; 3]));
        let moves = adaptive.run(&[vec![16, 320, 16], vec![16, 16, 320], vec![320, 16, 16]]);
        let moves = moves.unwrap();
        assert_eq!(moves.overflowed_steps, [0, 1]);
        assert_eq!(moves.launched, [[32, 32, 32], [32, 384, 32], [384, 384, 384]]);
    }

    #[test]
    fn on_recorded_routing_looking_ahead_spares_replays_and_shrinking_costs_some() {
        let ahead = on_the_recording(GrowthPolicy::Exact, adjustments(Some(1.25), 0));
        assert_eq!(ahead.overflowed_steps, [0]);
        assert_eq!((ahead.total_growths(), ahead.reserved_rows), (59, 41_232));

        let shrinking = on_the_recording(GrowthPolicy::headroom(), adjustments(None, 4));
        assert_eq!(shrinking.overflowed_steps, [0, 12, 30, 40]);
        assert_eq!(shrinking.shrinks, [9; 8]);
        assert_eq!((shrinking.final_capacity, shrinking.reserved_rows), (vec![3920; 8], 43_008));

        let both = on_the_recording(GrowthPolicy::headroom(), adjustments(Some(1.1), 4));
        assert_eq!(both.overflowed_steps, [0, 12, 40]);
        assert_eq!((both.growths, both.shrinks), (vec![6; 8], vec![9; 8]));
        assert_eq!(both.final_capacity, [3920; 8]);
    }

    proptest! {
        #[test]
        fn what_is_kept_fits_and_without_shrinking_nothing_is_lost(
            required in (1_usize..5).prop_flat_map(|ranks| {
                prop::collection::vec(prop::collection::vec(0_u32..2000, ranks), 0..30)
            }),
            policy in prop::sample::select(vec![
                GrowthPolicy::Exact, GrowthPolicy::geometric(), GrowthPolicy::headroom(),
                GrowthPolicy::adaptive(),
            ]),
            look_ahead in prop::option::of(1.0_f64..2.0),
            shrink_after in 0_u32..4,
            initial_capacity in 0_u32..2000,
        ) {
            let outcome = Simulation {
                adjustments: adjustments(look_ahead, shrink_after),
                initial_capacity,
                ..simulation(policy)
            }
            .run(&required)
            .unwrap();

            prop_assert_eq!(outcome.capacity.len(), required.len());
            for (capacity, required) in outcome.capacity.iter().zip(&required) {
                prop_assert!(capacity.iter().zip(required).all(|(have, need)| have >= need));
            }
            prop_assert_eq!(outcome.replays, outcome.overflowed_steps.len());
            if shrink_after == 0 {
                for pair in outcome.capacity.windows(2) {
                    prop_assert!(pair[0].iter().zip(&pair[1]).all(|(before, after)| after >= before));
                }
                let last: u64 = outcome.final_capacity.iter().copied().map(u64::from).sum();
                prop_assert_eq!(outcome.reserved_rows, last);
            }
            if policy == GrowthPolicy::Exact && look_ahead.is_none() && shrink_after == 0 {
                for (last, peak) in outcome.final_capacity.iter().zip(outcome.peak_required) {
                    let fits = peak <= initial_capacity;
                    let expected = if fits { initial_capacity } else { peak.next_multiple_of(16) };
                    prop_assert_eq!(*last, expected);
                }
            }
        }
    }
}

//! What a policy costs on a scene.

use graph_ep::overflow::{GrowthError, SimulationOutcome};

use super::candidate::Candidate;
use super::costs::Costs;
use super::report::Score;
use super::scene::Scene;

/// Judges `candidate` on all of `scenes`, adding up: they are one routing over as many ranks, by
/// several seeds.
///
/// # Errors
///
/// [`GrowthError`], which no candidate meets: limits are those of the worst case.
pub(super) fn judge(
    candidate: Candidate,
    scenes: &[Scene],
    costs: &Costs,
) -> Result<Score, GrowthError> {
    let mut score = Score { policy: candidate.to_string(), ..Score::default() };
    for scene in scenes {
        score.steps += scene.required.len();
        score.clean_us += scene.required.len() as f64 * costs.clean_us;
        let peaks = scene.peaks();
        score.peak_rows += sum(&peaks);
        score.peak_row_steps += sum(&peaks) * scene.required.len() as u64;
        match candidate {
            Candidate::Clairvoyant => hold(&mut score, scene, |_| sum(&peaks)),
            Candidate::WorstCase => {
                let all = u64::from(scene.worst_case) * scene.ranks as u64;
                hold(&mut score, scene, |_| all);
            }
            Candidate::ClairvoyantEachStep => hold(&mut score, scene, sum),
            Candidate::Growing(policy, adjustments) => {
                let outcome = scene.simulation(policy, adjustments).run(&scene.required)?;
                add(&mut score, &outcome, costs);
            }
        }
    }
    Ok(score)
}

/// Nothing is ever replayed or grown, and a step holds so many rows.
fn hold(score: &mut Score, scene: &Scene, rows: impl Fn(&[u32]) -> u64) {
    let held = scene.required.iter().map(|step| rows(step));
    score.reserved_rows += held.clone().max().unwrap_or(0);
    score.row_steps += held.sum::<u64>();
}

fn add(score: &mut Score, outcome: &SimulationOutcome, costs: &Costs) {
    score.replays += outcome.replays;
    score.lost_us += outcome.replays as f64 * costs.overflow_us;
    score.growths += outcome.total_growths();
    score.shrinks += outcome.shrinks.iter().sum::<usize>();
    score.reserved_rows += outcome.reserved_rows;
    for (step, kept) in outcome.capacity.iter().enumerate() {
        score.row_steps += sum(kept);
        // Growth for an overflow, and mapping in the same breath; all wait for who maps most.
        score.lost_us += costs.map_us(most_changed(&outcome.launched[step], kept));
        let next = outcome.launched.get(step + 1).unwrap_or(&outcome.final_capacity);
        if next != kept {
            score.adjusted_steps += 1;
            score.lost_us += costs.record_us + costs.map_us(most_changed(kept, next));
        }
    }
}

fn most_changed(before: &[u32], after: &[u32]) -> u32 {
    let changed = before.iter().zip(after).map(|(before, after)| before.abs_diff(*after));
    changed.max().unwrap_or(0)
}

fn sum(rows: &[u32]) -> u64 {
    rows.iter().copied().map(u64::from).sum()
}

#[cfg(test)]
mod tests {
    use graph_ep::{Adjustments, GrowthPolicy};

    use super::*;

    fn scene() -> Scene {
        Scene {
            routing: "by hand".into(),
            ranks: 2,
            required: vec![vec![16, 32], vec![16, 48], vec![64, 48]],
            initial: 32,
            worst_case: 160,
            alignment: 16,
        }
    }

    /// A row is a GiB, so that mapping shows.
    fn costs() -> Costs {
        Costs {
            source: String::new(),
            clean_us: 100.0,
            overflow_us: 150.0,
            record_us: 10.0,
            map_gib_us: 0.25,
            row_bytes: 1 << 30,
        }
    }

    fn of(candidate: Candidate) -> Score {
        judge(candidate, &[scene(), scene()], &costs()).unwrap()
    }

    #[test]
    fn the_clairvoyant_loses_nothing_and_reserves_what_is_needed() {
        let score = of(Candidate::Clairvoyant);
        assert_eq!((score.steps, score.replays, score.lost_us), (6, 0, 0.0));
        assert_eq!((score.reserved_rows, score.peak_rows), (2 * 112, 2 * 112));
        assert_eq!(
            (score.rows_beyond(), score.reserved_ratio(), score.held_ratio()),
            (0, 1.0, 1.0)
        );
        let each = of(Candidate::ClairvoyantEachStep);
        assert_eq!((each.row_steps, each.reserved_rows), (2 * (48 + 64 + 112), 2 * 112));
        assert_eq!(of(Candidate::WorstCase).reserved_rows, 2 * 320);
    }

    #[test]
    fn replays_and_growth_are_paid_for() {
        let exact = of(Candidate::Growing(GrowthPolicy::Exact, Adjustments::default()));
        assert_eq!((exact.replays, exact.growths, exact.adjusted_steps), (4, 4, 0));
        // Two overflows of 150, and 16 and 32 rows at 0.25, twice.
        assert_eq!(exact.lost_us, 2.0 * (300.0 + 12.0));
        assert_eq!(exact.lost_share(), 1.04);
        assert_eq!((exact.row_steps, exact.reserved_rows), (2 * (64 + 80 + 112), 2 * 112));
    }

    #[test]
    fn what_changes_between_steps_is_recorded_for() {
        let ahead = Adjustments { look_ahead: Some(1.5), ..Adjustments::default() };
        let score = of(Candidate::Growing(GrowthPolicy::Exact, ahead));
        // After step 0 rank 1 takes 48, after step 1 it takes 80; step 2 overflows on rank 0, and after it
        // rank 0 takes 96.
        assert_eq!((score.replays, score.adjusted_steps), (2, 2 * 3));
        let once = 150.0 + 3.0 * 10.0 + 0.25 * f64::from(16 + 32 + 32 + 32);
        assert_eq!(score.lost_us, 2.0 * once);
        assert_eq!(score.reserved_rows, 2 * (96 + 80));
    }
}

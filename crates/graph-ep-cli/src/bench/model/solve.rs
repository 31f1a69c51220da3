//! Least squares of relative errors, with coefficients that are physical: none is negative.

/// Part of a column's length that must be new for its coefficient to be told apart from those before.
const NEW: f64 = 0.02;

/// Coefficients of `rows · x ≈ times`, by the least sum of squares of relative errors.
///
/// Columns stand in the order in which they are believed: one that is nearly a combination of those
/// before it, or that would come out negative, gets none. A column of zeros gets none either.
pub(super) fn fit(rows: &[Vec<f64>], times: &[f64]) -> Vec<Option<f64>> {
    let columns = rows.first().map_or(0, Vec::len);
    // Relative errors: each equation is divided by its time.
    let weight = |time: &f64| if *time > 0.0 { 1.0 / time } else { 0.0 };
    let weights: Vec<f64> = times.iter().map(weight).collect();
    let column = |at: usize| -> Vec<f64> {
        rows.iter().zip(&weights).map(|(row, weight)| row[at] * weight).collect()
    };
    let right: Vec<f64> = times.iter().zip(&weights).map(|(time, weight)| time * weight).collect();
    let mut used: Vec<usize> = (0..columns).collect();
    loop {
        let (kept, found) = solve(&used, column, &right);
        let least = kept.iter().zip(&found).min_by(|a, b| a.1.total_cmp(b.1));
        match least {
            Some((worst, value)) if *value < 0.0 => {
                let worst = *worst;
                used = kept.into_iter().filter(|at| *at != worst).collect();
            }
            _ => {
                let mut all = vec![None; columns];
                for (at, value) in kept.into_iter().zip(found) {
                    all[at] = Some(value);
                }
                return all;
            }
        }
    }
}

/// Those of the columns `used` that are independent, and their coefficients, by Gram and Schmidt.
fn solve(
    used: &[usize],
    column: impl Fn(usize) -> Vec<f64>,
    right: &[f64],
) -> (Vec<usize>, Vec<f64>) {
    let mut kept = Vec::new();
    // Orthonormal columns; and what each kept column is made of.
    let mut basis: Vec<Vec<f64>> = Vec::new();
    let mut parts: Vec<Vec<f64>> = Vec::new();
    for at in used {
        let mut rest = column(*at);
        let whole = length(&rest);
        let mut part = Vec::new();
        for unit in &basis {
            let along = dot(unit, &rest);
            rest.iter_mut().zip(unit).for_each(|(rest, unit)| *rest -= along * unit);
            part.push(along);
        }
        let new = length(&rest);
        // What is no number is not new either.
        let is_new = new > NEW * whole;
        if !is_new || basis.len() == right.len() {
            continue;
        }
        rest.iter_mut().for_each(|rest| *rest /= new);
        part.push(new);
        basis.push(rest);
        parts.push(part);
        kept.push(*at);
    }
    let mut found = vec![0.0; kept.len()];
    for at in (0..kept.len()).rev() {
        let later: f64 = (at + 1..kept.len()).map(|other| parts[other][at] * found[other]).sum();
        found[at] = (dot(&basis[at], right) - later) / parts[at][at];
    }
    (kept, found)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn length(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn exact_data_give_exact_coefficients() {
        let rows = [vec![1.0, 0.0], vec![1.0, 2.0], vec![1.0, 5.0]];
        let found = fit(&rows, &[3.0, 7.0, 13.0]);
        assert!((found[0].unwrap() - 3.0).abs() < 1e-9 && (found[1].unwrap() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn what_cannot_be_told_apart_has_no_coefficient() {
        // The second column is twice the first, the third is nothing.
        let rows = [vec![1.0, 2.0, 0.0], vec![1.0, 2.0, 0.0]];
        let found = fit(&rows, &[4.0, 4.0]);
        assert!((found[0].unwrap() - 4.0).abs() < 1e-9 && found[1..] == [None, None], "{found:?}");
        // More columns than equations.
        assert_eq!(fit(&[vec![1.0, 3.0]], &[2.0]), [Some(2.0), None]);
        assert_eq!(fit(&[], &[]), []);
    }

    #[test]
    fn a_negative_coefficient_is_left_out() {
        let rows = [vec![1.0, 1.0], vec![1.0, 2.0], vec![1.0, 3.0]];
        let found = fit(&rows, &[10.0, 8.0, 6.0]);
        assert!(found[0].unwrap() > 6.0 && found[1].is_none(), "{found:?}");
    }

    proptest! {
        #[test]
        fn coefficients_come_back(
            truth in prop::collection::vec(0.5_f64..5.0, 3),
            inputs in prop::collection::vec((0.0_f64..100.0, 0.0_f64..100.0), 8..20),
        ) {
            let rows: Vec<Vec<f64>> = inputs.iter().map(|(a, b)| vec![1.0, *a, *b]).collect();
            let times: Vec<f64> = rows.iter().map(|row| dot(row, &truth)).collect();
            let found = fit(&rows, &times);
            for (row, time) in rows.iter().zip(&times) {
                let found: f64 = row.iter().zip(&found).map(|(x, c)| x * c.unwrap_or(0.0)).sum();
                prop_assert!((found - time).abs() < 0.05 * time, "{found} for {time}");
            }
            prop_assert!(found.iter().flatten().all(|c| *c >= 0.0));
        }
    }
}

//! `graph-ep bench model`: laws fitted to measured times, and what they say of other sizes.
//!
//! Reports become equations (`cells`), of which each kind of exchange has a `law` of a handful of
//! coefficients with a meaning, found by least squares of relative errors (`solve`). Every exchange is
//! held out once and foretold from the others (`laws`). What is `expected` of bytes from sizes alone
//! makes a `predict`ion of what nobody has measured. Growth, recovery and rounds have small laws of
//! their own (`steps`).

mod args;
mod cells;
mod expected;
mod law;
mod laws;
mod predict;
mod solve;
mod steps;
mod table;

pub use args::{ModelArgs, Size};

use super::BenchError;
use super::report::Report;
use crate::output;
use crate::verdict::Verdict;
use cells::Rates;
use law::{Form, LEAST_POINTS};
use laws::Laws;
use predict::Network;

/// Fits laws to reports, and shows them, their errors and their predictions.
pub(super) fn run(args: &ModelArgs) -> Result<Verdict, BenchError> {
    let reports =
        args.reports.iter().map(|path| Report::read(path)).collect::<Result<Vec<_>, _>>()?;
    output::show(&render(args, &reports)?);
    Ok(Verdict::Verified)
}

fn render(args: &ModelArgs, reports: &[Report]) -> Result<String, BenchError> {
    let cells = cells::cells(reports);
    let steps = steps::laws(reports);
    let laws = Laws::of(&cells, Form::Overlapped, None);
    if laws.all().next().is_none() && steps.is_empty() {
        return Err(BenchError::NothingToFit);
    }
    let [checked, added] = [Form::Overlapped, Form::Added].map(|form| laws::checked(&cells, form));
    let rates = fastest(reports);
    let network = Network { domain: args.domain, gbps: args.network };
    let predictions = predict::predict(&laws, &rates, &network, &args.wanted());
    // Without sizes that somebody asked for, the laws are worth showing by themselves.
    if predictions.is_empty() && !args.predict.is_empty() {
        return Err(BenchError::NothingToPredict { least: LEAST_POINTS });
    }
    let mut text = table::laws(&laws, &checked, &added);
    text.push_str(&table::steps(&steps));
    if args.points {
        text.push_str(&table::points(&checked));
    }
    text.push_str(&table::predictions(&predictions, &rates, &network));
    Ok(text)
}

/// What the hardware does at best: the highest rates of all reports in which each rank has a GPU. Limits that
/// were measured with few bytes are lower.
fn fastest(reports: &[Report]) -> Rates {
    let apart = reports
        .iter()
        .filter(|report| report.results.iter().all(|entry| entry.case.gpus >= entry.case.ranks));
    // An infinite rate is one that was not measured.
    let faster = |a: f64, b: f64| match (a.is_finite(), b.is_finite()) {
        (true, true) => a.max(b),
        _ => a.min(b),
    };
    let start = Rates { write: f64::INFINITY, read: f64::INFINITY, copy: f64::INFINITY };
    apart.map(Rates::of).fold(start, |a, b| Rates {
        write: faster(a.write, b.write),
        read: faster(a.read, b.read),
        copy: faster(a.copy, b.copy),
    })
}

#[cfg(test)]
mod tests {
    use super::cells::tests::lawful;
    use super::*;
    use crate::bench::report::LayoutChoice;

    fn args() -> ModelArgs {
        ModelArgs {
            reports: Vec::new(),
            predict: Vec::new(),
            domain: 72,
            network: 50.0,
            points: true,
        }
    }

    #[test]
    fn laws_errors_points_and_predictions_are_shown() {
        let text = render(&args(), &[lawful()]).unwrap();
        for expected in ["dispatch", "by expert", "push", "held out", "4096 tokens", "1024", "288"]
        {
            assert!(text.contains(expected), "{expected} in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 150), "{text}");
    }

    #[test]
    fn what_was_measured_with_few_bytes_does_not_bound_predictions() {
        let mut few = lawful();
        few.limits.iter_mut().for_each(|limit| limit.gbps = limit.gbps.map(|gbps| gbps / 10.0));
        let (both, one) = (fastest(&[few, lawful()]), fastest(&[lawful()]));
        assert_eq!(both, one);
        assert!(both.copy.is_finite());
        let mut alone = lawful();
        alone.limits.clear();
        assert_eq!(fastest(&[alone, lawful()]), one);
    }

    /// The same as a machine whose ranks share one GPU has measured it.
    fn shared(flat: bool) -> Report {
        let mut report = lawful();
        for entry in &mut report.results {
            entry.case.gpus = 1;
            entry.case.ranks += 1;
            if flat {
                entry.case.layout = LayoutChoice::Flat;
            }
        }
        report
    }

    #[test]
    fn what_cannot_be_predicted_is_said() {
        // Laws there are, but none of rows that are pushed from GPU to GPU.
        let text = render(&args(), &[shared(false)]).unwrap();
        assert!(text.contains("shared GPU"), "{text}");
        for layout in ["by expert", "flat"] {
            let said = format!("no prediction of rows {layout}: no 3 verified dispatches");
            assert!(text.contains(&said), "{text}");
        }
        assert!(!text.contains("predicted:"), "{text}");

        // Nor are there those that somebody has asked for.
        let asked = ModelArgs { predict: vec![(Size::Ranks, vec![8])], ..args() };
        let error = render(&asked, &[shared(false)]).unwrap_err();
        assert!(matches!(error, BenchError::NothingToPredict { least: 3 }), "{error}");
        assert_eq!(error.verdict(), Verdict::BadInput);

        // One layout is not silent about the other.
        let text = render(&asked, &[lawful(), shared(true)]).unwrap();
        assert!(
            text.contains("predicted:") && text.contains("no prediction of rows flat: "),
            "{text}"
        );
        assert!(!text.contains("no prediction of rows by expert"), "{text}");
    }

    #[test]
    fn nothing_makes_no_law() {
        let mut report = lawful();
        report.results.clear();
        assert!(matches!(render(&args(), &[report]), Err(BenchError::NothingToFit)));
    }
}

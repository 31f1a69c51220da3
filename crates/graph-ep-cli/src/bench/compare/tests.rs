//! What counts as moved, what belongs together, and what is said of it.

use super::super::report::tests::{around, case, entry, sample};
use super::super::report::{Case, Op};
use super::*;

fn quantiles(p10_us: f64, median_us: f64, p90_us: f64) -> Quantiles {
    Quantiles { median_us, p10_us, p90_us, samples: 9 }
}

#[test]
fn it_moved_only_if_medians_and_spreads_say_so() {
    let before = quantiles(95.0, 100.0, 105.0);
    let change = |p10, median, p90| Change::of(&before, &quantiles(p10, median, p90), 0.03);
    assert_eq!(change(107.0, 110.0, 112.0), Change::Slower);
    assert_eq!(change(80.0, 85.0, 90.0), Change::Faster);
    // A median that is far off among samples that are not.
    assert_eq!(change(104.0, 110.0, 120.0), Change::Same);
    assert_eq!(change(70.0, 85.0, 96.0), Change::Same);
    // A spread that touches is one that overlaps.
    assert_eq!(change(105.0, 110.0, 120.0), Change::Same);
    // Spreads so narrow that nothing overlaps, and a difference of no account.
    let narrow = quantiles(99.9, 100.0, 100.1);
    let change =
        |median: f64| Change::of(&narrow, &quantiles(median - 0.1, median, median + 0.1), 0.03);
    assert_eq!([change(102.9), change(97.1)], [Change::Same; 2]);
    assert_eq!([change(103.2), change(96.8)], [Change::Slower, Change::Faster]);
}

#[test]
fn a_report_is_like_itself() {
    let report = sample();
    let comparison = Comparison::of(&report, &report, 0.0);
    assert_eq!(comparison.results.len(), report.results.len());
    assert!(comparison.results.iter().all(|pair| pair.change == Change::Same));
    assert!(comparison.only_before.is_empty() && comparison.only_after.is_empty());
    assert_eq!(comparison.verdict(), Verdict::Verified);
}

#[test]
fn results_belong_together_if_every_parameter_is_the_same() {
    let (before, mut after) = (sample(), sample());
    after.results[0].case.sms = 24;
    after.results.swap(1, 2);
    let comparison = Comparison::of(&before, &after, NOISE);
    assert_eq!(comparison.only_before, [&before.results[0]]);
    assert_eq!(comparison.only_after, [&after.results[0]]);
    assert!(comparison.results.iter().all(|pair| pair.before.case == pair.after.case));
    assert_eq!(comparison.verdict(), Verdict::Verified, "what is missing is not slower");
    let text = render(&before, &after, &comparison);
    assert!(text.contains("only in A: dispatch, 1 token, all SMs"), "{text}");
    assert!(text.contains("only in B: dispatch, 1 token, 24 SMs"), "{text}");
}

#[test]
fn repeated_cases_are_matched_in_order() {
    let of = |times: &[f64]| Report {
        results: times.iter().map(|&us| entry(case(Op::Pair, 8), us)).collect(),
        ..sample()
    };
    let (before, after) = (of(&[10.0, 20.0, 30.0]), of(&[10.0, 20.0]));
    let comparison = Comparison::of(&before, &after, NOISE);
    assert!(comparison.results.iter().all(|pair| pair.change == Change::Same));
    assert_eq!(comparison.only_before, [&before.results[2]]);
}

#[test]
fn what_is_slower_or_wrong_fails() {
    let (before, mut after) = (sample(), sample());
    after.results[0].time = around(before.results[0].time.median_us * 2.0);
    after.results[1].time = around(before.results[1].time.median_us / 2.0);
    let comparison = Comparison::of(&before, &after, NOISE);
    assert_eq!(comparison.verdict(), Verdict::Failed);
    let text = render(&before, &after, &comparison);
    assert!(text.contains("+100.0 %") && text.contains("SLOWER"), "{text}");
    assert!(text.contains("-50.0 %") && text.contains("faster"), "{text}");
    assert!(text.contains("1 slower, 1 faster, 11 within noise (3 %"), "{text}");

    let mut wrong = sample();
    wrong.results[3].verified = false;
    let comparison = Comparison::of(&before, &wrong, NOISE);
    assert_eq!(comparison.verdict(), Verdict::Failed);
    assert!(render(&before, &wrong, &comparison).contains("WRONG"));
    assert_eq!(Comparison::of(&wrong, &wrong, NOISE).verdict(), Verdict::Verified);
}

#[test]
fn a_machine_that_moved_is_named() {
    let (before, mut after) = (sample(), sample());
    after.limits[0].time = around(1000.0);
    let comparison = Comparison::of(&before, &after, NOISE);
    assert_eq!(comparison.verdict(), Verdict::Verified);
    let text = render(&before, &after, &comparison);
    assert!(text.contains("peer-read 0 -> 1 took 775.0 us in A and 1000.0 us in B"), "{text}");
}

#[test]
fn nothing_in_common_is_no_failure() {
    let (before, mut after) = (sample(), sample());
    after.results = vec![entry(Case { ranks: 4, ..case(Op::Pair, 1) }, 0.0)];
    let comparison = Comparison::of(&before, &after, NOISE);
    assert!(comparison.results.is_empty());
    assert_eq!(comparison.only_before.len(), before.results.len());
    assert!(render(&before, &after, &comparison).ends_with('\n'));
}

#[test]
fn files_are_read_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.json"), folder.path().join("b.json"));
    sample().write(&a).unwrap();
    let mut slower = sample();
    slower.results[0].time = around(1e6);
    slower.write(&b).unwrap();
    let verdict = |a, b| compared(a, b, NOISE).unwrap().1;
    assert_eq!(verdict(&a, &a), Verdict::Verified);
    assert_eq!(verdict(&a, &b), Verdict::Failed);
    assert_eq!(verdict(&b, &a), Verdict::Verified);
    std::fs::write(&b, "{}").unwrap();
    assert!(matches!(run(&a, &b, NOISE), Err(ReadError::Kind { .. })));
}

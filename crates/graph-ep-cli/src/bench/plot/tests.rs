//! The plot is well-formed, complete, and asks for no font.

use super::super::report::tests::{case, entry, sample};
use super::super::report::{Case, Op};
use super::*;
use crate::plot::tests::{assert_plain, assert_well_formed, count};

#[test]
fn each_operation_has_its_panels_and_each_result_its_marks() {
    let svg = render(&sample(), None).unwrap();
    assert_well_formed(&svg);
    for expected in ["\ndispatch\n", "\ncombine\n", "\ngrow\n", "dispatch (nccl), captured"] {
        assert!(svg.contains(expected), "{expected}");
    }
    assert_eq!(svg.matches("\nshare of the limit; dashed: the limit\n").count(), 2);
    // Discs and rings: three results of either in two operations, in two panels and in the legend; a
    // ring is two circles. Growth has one result, which has no share.
    assert_eq!(count(&svg, "circle"), (2 * 2 * 3 + 2) * (1 + 2) + 2);
}

#[test]
fn any_report_is_drawn() {
    let mut report = sample();
    report.results = (0..20).map(|sms| entry(Case { sms, ..case(Op::Pair, 8) }, 3.0)).collect();
    assert_well_formed(&render(&report, None).unwrap());
    report.results.truncate(1);
    assert_well_formed(&render(&report, None).unwrap());
    report.results[0].time.median_us = 0.0;
    assert_well_formed(&render(&report, None).unwrap());
    report.results[0].limit_share = Some(7.5);
    report.results[0].time.median_us = 1e-3;
    assert_well_formed(&render(&report, None).unwrap());
    report.results.clear();
    assert_well_formed(&render(&report, None).unwrap());
}

#[test]
fn a_sweep_is_drawn_over_what_was_swept_or_what_is_asked_for() {
    let mut report = sample();
    let of = |experts| entry(Case { experts, ..case(Op::Pair, 8) }, 3.0);
    report.results = [8, 64, 512].map(of).to_vec();
    let svg = render(&report, None).unwrap();
    assert!(svg.contains("\nexperts over all ranks\n") && !svg.contains("\ntokens of each rank\n"));
    let svg = render(&report, Some(Axis::Hidden)).unwrap();
    assert!(svg.contains("\nelements of a token\n") && svg.contains("512 experts"));
}

#[test]
fn names_cannot_break_the_file() {
    let mut report = sample();
    report.command = "<&\u{1}\n\">".into();
    report.results[0].case.variant = "<\u{1}".into();
    report.results[0].case.skew = "&\u{2}".into();
    let svg = render(&report, None).unwrap();
    assert_well_formed(&svg);
    assert!(!svg.contains(['\u{1}', '\u{2}']));
}

#[test]
fn the_file_is_grey_and_names_no_font_of_its_own() {
    let svg = render(&sample(), None).unwrap();
    assert_plain(&svg);
}

#[test]
fn a_plot_is_written_to_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    write(&sample(), None, &path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), render(&sample(), None).unwrap());
    let error = write(&sample(), None, folder.path()).unwrap_err();
    assert!(matches!(error, PlotError::Output(_)));
}

//! The plot is well-formed, complete, and asks for no font.

use super::*;
use crate::report::tests::{built_in_sample, sample};
use crate::workload::{Workload, WorkloadConfig};

/// Occurrences of an element in the SVG.
pub(crate) fn count(svg: &str, tag: &str) -> usize {
    svg.matches(&format!("<{tag} ")).count()
}

/// Every tag that is opened is closed, in order.
pub(crate) fn assert_well_formed(svg: &str) {
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let tag = tag.split_once('>').expect("a tag ends").0;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split_whitespace().next().unwrap());
        }
    }
    assert!(open.is_empty());
}

/// There is no colour in it but grey, and no font but the reader's own.
pub(crate) fn assert_plain(svg: &str) {
    for part in svg.split("font-family=\"").skip(1) {
        assert!(part.starts_with("sans-serif\""));
    }
    for colour in svg.split("=\"#").skip(1) {
        let colour = &colour[..6];
        assert!(colour[..2] == colour[2..4] && colour[2..4] == colour[4..], "{colour}");
    }
}

#[test]
fn ranks_have_a_panel_each_on_one_scale() {
    let svg = render(&built_in_sample()).unwrap();
    assert_well_formed(&svg);
    for rank in 0..8 {
        assert_eq!(svg.matches(&format!("\nrank {rank}\n")).count(), 1);
    }
    // The same labels stand at every vertical axis.
    assert_eq!(svg.matches("\n1000\n").count(), 8);
    // An area for each rank, a triangle for each growth and one in the legend; the rest are lines.
    let report = built_in_sample();
    assert_eq!(count(&svg, "polygon"), 8 + report.growths as usize + 1);
}

#[test]
fn too_many_ranks_share_a_panel() {
    let routing = |ranks| {
        let config = WorkloadConfig::new(Workload::Burst, 0, ranks).experts(128).layers(1);
        config.generate().unwrap()
    };
    let svg = render(&sample(&routing(MAX_PANELS), MAX_PANELS, true)).unwrap();
    assert!(svg.contains("\nrank 63\n"));
    let more = MAX_PANELS + 1;
    let svg = render(&sample(&routing(more), more, true)).unwrap();
    assert!(svg.contains("all 65 ranks") && !svg.contains("\nrank 0\n"));
}

#[test]
fn any_number_of_ranks_and_steps_is_drawn() {
    for ranks in [1, 2, 3, 8, 9, 64] {
        for steps in [1, 2, 40] {
            let config = WorkloadConfig::new(Workload::Burst, 1, ranks).steps(steps).layers(1);
            assert_well_formed(&render(&sample(&config.generate().unwrap(), ranks, true)).unwrap());
        }
    }
}

#[test]
fn a_run_that_ended_before_its_first_step_is_drawn() {
    let mut report = built_in_sample();
    report.required_rows.clear();
    report.capacity_rows.clear();
    report.overflows.clear();
    report.final_capacity_rows.clear();
    assert_well_formed(&render(&report).unwrap());
}

#[test]
fn names_cannot_break_the_file() {
    let mut report = built_in_sample();
    report.routing = "<&\u{1}\n\">".into();
    let svg = render(&report).unwrap();
    assert_well_formed(&svg);
    assert!(!svg.contains('\u{1}'));
}

#[test]
fn the_file_is_grey_and_names_no_font_of_its_own() {
    let svg = render(&built_in_sample()).unwrap();
    assert_plain(&svg);
}

#[test]
fn a_plot_is_written_to_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plot.svg");
    write(&built_in_sample(), &path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), render(&built_in_sample()).unwrap());
    let error = write(&built_in_sample(), folder.path()).unwrap_err();
    assert!(matches!(error, PlotError::Output(_)));
}

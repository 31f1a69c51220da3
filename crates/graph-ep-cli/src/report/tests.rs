//! The JSON form, and sample reports that the table and the plot are tested with.

use std::time::Duration;

use super::*;
use crate::demand::{initial_capacity_rows, required_rows, worst_case_rows};
use crate::routing::Routing;
use crate::trace;

/// The report that a run of `routing` in recover mode would give, computed without running it:
/// growth to 1.2 times the peak of all ranks, or if `exact` to the requirement of each.
pub(crate) fn sample(routing: &Routing, ranks: usize, exact: bool) -> Report {
    let alignment = 16;
    let max_tokens = routing.shards(ranks).unwrap().max_tokens();
    let initial = initial_capacity_rows(1.25, max_tokens, routing.top_k(), alignment).unwrap();
    let required = required_rows(routing, ranks, alignment);
    let worst =
        worst_case_rows(routing.tokens(), ranks, routing.experts(), routing.top_k(), alignment)
            .unwrap();

    let mut capacity = vec![initial; ranks];
    let (mut overflows, mut capacity_rows, mut peak) = (vec![], vec![], vec![0; ranks]);
    let (mut growths, mut recordings) = (0, vec![1; ranks]);
    for (step, rows) in required.iter().enumerate() {
        capacity_rows.push(capacity.clone());
        for (peak, &rows) in peak.iter_mut().zip(rows) {
            *peak = rows.max(*peak);
        }
        if rows.iter().zip(&capacity).all(|(rows, had)| rows <= had) {
            continue;
        }
        let before = capacity.clone();
        let headroom = (rows.iter().max().unwrap() * 6).div_ceil(5).next_multiple_of(alignment);
        for ((had, &rows), recorded) in capacity.iter_mut().zip(rows).zip(&mut recordings) {
            let grown = if exact { rows } else { headroom }.max(*had);
            growths += u64::from(grown > *had);
            *recorded += u64::from(grown > *had);
            *had = grown;
        }
        overflows.push(Overflow {
            step,
            required_rows: rows.clone(),
            capacity_before: before,
            capacity_after: capacity.clone(),
            attempts: 1,
        });
    }
    let us = |us: &[u64]| Timing::of(us.iter().map(|&us| Duration::from_micros(us)));
    Report {
        schema_version: SCHEMA_VERSION,
        outcome: Outcome::Verified,
        failure: None,
        routing: routing.name().into(),
        origin: routing.origin().map(str::to_owned),
        backend: "host".into(),
        ranks,
        experts: routing.experts(),
        top_k: routing.top_k(),
        layers: routing.layers(),
        steps: routing.steps(),
        tokens: routing.tokens(),
        max_tokens_per_rank: max_tokens,
        hidden: 256,
        dtype: Dtype::Bf16,
        seed: 0,
        mode: Mode::Recover,
        graph: GraphChoice::CapacityShaped,
        growth: if exact { GrowthChoice::Exact } else { GrowthChoice::Headroom },
        look_ahead: None,
        shrink_after: None,
        capacity_factor: 1.25,
        alignment,
        initial_capacity_rows: initial,
        final_capacity_rows: capacity,
        peak_required_rows: peak,
        worst_case_rows: worst,
        required_rows: required,
        capacity_rows,
        overflowed_steps: overflows.iter().map(|overflow| overflow.step).collect(),
        replays: overflows.len() as u64,
        overflows,
        growths,
        graph_recordings: recordings,
        rounds_per_step: 1,
        dropped_rows: 0,
        recovered_rows: 4321,
        verified_values: 33_554_432,
        mismatched_values: 0,
        host_syncs_in_clean_steps: 0,
        memory: Memory {
            initial_bytes: 1_703_936,
            final_bytes: 2_555_904,
            worst_case_bytes: 6_815_744,
            limit_bytes: Some(64 << 20),
        },
        timings_us: Timings {
            clean_step: us(&[812, 840, 1011]),
            recovered_step: us(&[2417, 2590]),
            recording: us(&[95, 130]),
            growing: None,
        },
    }
}

/// The sample for the built-in trace over eight ranks.
pub(crate) fn built_in_sample() -> Report {
    sample(&trace::built_in().unwrap(), 8, false)
}

#[test]
fn json_has_the_documented_fields_and_comes_back_equal() {
    let report = built_in_sample();
    let json = serde_json::to_value(&report).unwrap();
    for field in [
        "ranks",
        "experts",
        "top_k",
        "layers",
        "steps",
        "mode",
        "alignment",
        "initial_capacity_rows",
        "overflowed_steps",
        "replays",
        "growths",
        "final_capacity_rows",
        "peak_required_rows",
        "worst_case_rows",
        "dropped_rows",
        "recovered_rows",
        "mismatched_values",
        "verified_values",
        "host_syncs_in_clean_steps",
        "graph_recordings",
        "rounds_per_step",
        "schema_version",
    ] {
        assert!(json.get(field).is_some(), "{field}");
    }
    assert_eq!(json["mode"], "recover");
    assert_eq!(json["graph"], "capacity-shaped");
    assert_eq!(json["overflowed_steps"], serde_json::json!([0, 13]));
    assert_eq!(serde_json::from_str::<Report>(&report.to_json()).unwrap(), report);
}

#[test]
fn a_report_is_written_to_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let report = built_in_sample();
    report.write(&path).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), report.to_json());
    assert!(report.write(folder.path()).is_err());
}

#[test]
fn an_overflow_knows_its_ranks() {
    let overflow = Overflow {
        step: 0,
        required_rows: vec![3, 16, 17],
        capacity_before: vec![16; 3],
        capacity_after: vec![32; 3],
        attempts: 1,
    };
    assert_eq!(overflow.ranks().collect::<Vec<_>>(), [2]);
}

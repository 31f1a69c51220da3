//! The JSON form, and sample reports that the table, the plots and the comparison are tested with.

use serde_json::Value;

use super::*;

/// Quantiles around `median_us`, a twentieth to either side at most.
pub(crate) fn around(median_us: f64) -> Quantiles {
    Quantiles::of((0..=10).map(|tenth| median_us * (0.9375 + f64::from(tenth) / 80.0))).unwrap()
}

/// A pair on two GPUs, BF16 in the layout by expert.
pub(crate) fn case(op: Op, tokens: usize) -> Case {
    Case {
        op,
        variant: String::new(),
        by: By::GraphEp,
        layout: LayoutChoice::Expert,
        dtype: Dtype::Bf16,
        tokens,
        hidden: 7168,
        top_k: 8,
        experts: 256,
        ranks: 2,
        gpus: 2,
        skew: "uniform".into(),
        sms: 0,
        padding: Padding::Cleared,
        captured: true,
        layers: 8,
    }
}

/// A result at half of what the wire allows.
pub(crate) fn entry(case: Case, median_us: f64) -> Entry {
    let work = Work { wire_bytes: case.tokens as u64 * 14_336, memory_bytes: 1 << 29 };
    let bound = Bound { by: LimitKind::PeerRead, us: median_us / 2.0 };
    Entry::new(case, around(median_us), work, Some(bound), true)
}

/// Dispatch and combine over three numbers of tokens, NCCL beside, and growth, which has no limit.
pub(crate) fn sample() -> Report {
    let mut results = Vec::new();
    for (op, us) in [(Op::Dispatch, 10.0), (Op::Combine, 12.0)] {
        for tokens in [1, 128, 4096] {
            let us = us + tokens as f64 / 20.0;
            results.push(entry(case(op, tokens), us));
            let nccl = Case { by: By::Nccl, ..case(op, tokens) };
            results.push(entry(nccl, us * 1.5));
        }
    }
    let grow = Case { variant: "grow".into(), captured: false, ..case(Op::Grow, 128) };
    results.push(Entry::new(grow, around(2500.0), Work::default(), None, true));
    Report {
        schema: SCHEMA.into(),
        date: "2026-11-30T14:05:09Z".into(),
        commit: "0123abc".into(),
        command: "graph-ep bench --ops dispatch,combine".into(),
        hardware: vec!["GPU 0: NVIDIA H200".into(), "GPU 1: NVIDIA H200".into()],
        method: vec!["the slowest rank of each replay".into()],
        limits: vec![
            Limit::new(LimitKind::PeerRead, (0, Some(1)), 24, 1 << 28, around(775.0)),
            Limit::new(LimitKind::Signal, (0, Some(1)), 1, 0, around(1.2)),
        ],
        results,
    }
}

#[test]
fn a_report_has_the_fields_that_are_documented() {
    let json: Value = serde_json::from_str(&sample().to_json()).unwrap();
    let report = json.as_object().unwrap();
    for name in ["schema", "date", "commit", "command", "hardware", "method", "limits", "results"] {
        assert!(report.contains_key(name), "{name}");
    }
    let entry = json["results"][0].as_object().unwrap();
    for name in [
        "op",
        "layout",
        "dtype",
        "tokens",
        "hidden",
        "top_k",
        "experts",
        "ranks",
        "gpus",
        "sms",
        "captured",
        "median_us",
        "p10_us",
        "p90_us",
        "wire_gbps",
        "limit_share",
        "verified",
        "skew",
        "variant",
        "by",
        "samples",
        "layers",
        "wire_bytes",
        "memory_bytes",
        "limit",
        "limit_us",
        "host_us",
    ] {
        assert!(entry.contains_key(name), "{name}");
    }
    assert_eq!(entry["op"], "dispatch");
    assert_eq!(entry["limit"], "peer-read");
    let limit = json["limits"][0].as_object().unwrap();
    for name in ["what", "from", "to", "sms", "bytes", "gbps", "median_us", "samples"] {
        assert!(limit.contains_key(name), "{name}");
    }
}

#[test]
fn rates_and_shares_follow_from_times() {
    let entry = entry(case(Op::Dispatch, 4096), 200.0);
    assert!((entry.wire_gbps - 4096.0 * 14_336.0 / 200e-6 / 1e9).abs() < 1e-3);
    assert_eq!((entry.limit_us, entry.limit_share), (Some(100.0), Some(0.5)));
    let limit = Limit::new(LimitKind::MemoryCopy, (0, None), 0, 4_000_000, around(1000.0));
    assert_eq!(limit.gbps, Some(4.0));
    assert_eq!(Limit::new(LimitKind::Signal, (0, Some(1)), 1, 0, around(1.0)).gbps, None);
}

/// What took no time at all has no rate, rather than one that JSON cannot hold.
#[test]
fn no_time_leaves_no_number_that_json_lacks() {
    let entry = entry(case(Op::Dispatch, 4), 0.0);
    assert_eq!((entry.wire_gbps, entry.limit_share), (0.0, None));
    let limit = Limit::new(LimitKind::MemoryCopy, (0, None), 0, 1, around(0.0));
    assert_eq!(limit.gbps, None);
}

#[test]
fn a_report_is_read_back_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    sample().write(&path).unwrap();
    assert_eq!(Report::read(&path).unwrap(), sample());
    assert!(sample().verified());
}

/// Reports that know nothing of padding are those in which it was cleared.
#[test]
fn padding_is_a_field_only_where_it_was_left() {
    let mut report = sample();
    report.results[1].case.padding = Padding::Left;
    let json: Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(json["results"][0].get("padding"), None);
    assert_eq!(json["results"][1]["padding"], "left");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), json.to_string()).unwrap();
    assert_eq!(Report::read(file.path()).unwrap(), report);
}

#[test]
fn growth_of_older_programs_was_by_what_was_given_back() {
    let grow = |variant: &str| {
        let mut report = sample();
        let case = Case { variant: variant.into(), captured: false, ..case(Op::Grow, 1) };
        report.results = vec![entry(case.clone(), 10.0), entry(Case { ranks: 1, ..case }, 10.0)];
        report
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    grow("by 1024.00 MiB").write(file.path()).unwrap();
    let older = Report::read(file.path()).unwrap();
    assert_eq!(older, grow("by 1024.00 MiB, given back"));
    grow("by 1024.00 MiB, fresh").write(file.path()).unwrap();
    assert_eq!(Report::read(file.path()).unwrap(), grow("by 1024.00 MiB, fresh"));
}

#[test]
fn fields_of_later_programs_are_ignored() {
    let mut json: Value = serde_json::from_str(&sample().to_json()).unwrap();
    json["later"] = 1.into();
    json["results"][0]["later"] = "x".into();
    json["limits"][0]["later"] = "x".into();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), json.to_string()).unwrap();
    assert_eq!(Report::read(file.path()).unwrap(), sample());
}

#[test]
fn what_is_no_report_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Report::read(&path).unwrap_err()
    };
    assert!(matches!(read("{\"schema\": "), ReadError::Json { .. }));
    for text in ["[]", "7", "{}", "{\"schema\": 1}", "{\"schema_version\": 1}"] {
        assert!(matches!(read(text), ReadError::Kind { .. }), "{text}");
    }
    let error = read("{\"schema\": \"graph-ep bench, 2\"}");
    assert!(matches!(&error, ReadError::Schema { found, .. } if found == "graph-ep bench, 2"));
    assert!(error.to_string().contains("report.json") && error.to_string().contains(SCHEMA));
    let error = read(&sample().to_json().replace("\"p10_us\"", "\"p11_us\""));
    let ReadError::Fields { source, .. } = error else { panic!("{error}") };
    assert!(source.to_string().contains("p10_us"), "{source}");
    let missing = Report::read(&folder.path().join("none.json")).unwrap_err();
    assert!(matches!(missing, ReadError::File { .. }));
}

//! `graph-ep bench` as a user runs it, on the host: every operation, and what it writes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(folder: &Path, line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_graph-ep"))
        .arg("bench")
        .args(line.split_whitespace())
        .env_remove("GRAPH_EP_COMMIT")
        .current_dir(folder)
        .output()
        .expect("the program starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn read(path: &Path) -> Value {
    let text = std::fs::read(path).expect("the file was written");
    serde_json::from_slice(&text).expect("it is JSON")
}

#[test]
fn every_operation_is_in_the_report_and_verified() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line = "--backend host --quick --seed 5 --commit abc --report r.json --plot p.svg";
    let output = bench(folder.path(), line);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(table.contains("VERIFIED") && table.contains("memory-copy"), "{table}");
    let plot = std::fs::read_to_string(folder.path().join("p.svg")).expect("a plot");
    assert!(plot.starts_with("<svg"), "{}", &plot[..plot.len().min(80)]);

    let report = read(&folder.path().join("r.json"));
    assert_eq!(report["schema"], "graph-ep bench, 1");
    assert_eq!(report["commit"], "abc");
    assert!(report["command"].as_str().expect("text").ends_with(&format!("bench {line}")));
    assert!(!report["hardware"].as_array().expect("a list").is_empty());
    let results = report["results"].as_array().expect("a list");
    let mut seen = BTreeSet::new();
    for entry in results {
        for (field, is) in [
            ("op", Value::is_string as fn(&Value) -> bool),
            ("layout", Value::is_string),
            ("dtype", Value::is_string),
            ("tokens", Value::is_u64),
            ("hidden", Value::is_u64),
            ("top_k", Value::is_u64),
            ("experts", Value::is_u64),
            ("ranks", Value::is_u64),
            ("gpus", Value::is_u64),
            ("sms", Value::is_u64),
            ("captured", Value::is_boolean),
            ("median_us", Value::is_number),
            ("p10_us", Value::is_number),
            ("p90_us", Value::is_number),
            ("wire_gbps", Value::is_number),
            ("verified", Value::is_boolean),
        ] {
            assert!(is(&entry[field]), "{field} in {entry}");
        }
        assert!(entry.get("limit_share").is_some(), "{entry}");
        assert_eq!(entry["verified"], true, "{entry}");
        assert!(entry["median_us"].as_f64() > Some(0.0), "{entry}");
        seen.insert(entry["op"].as_str().unwrap_or_default().to_owned());
        if entry["op"] == "pair" {
            assert!(entry["limit_share"].as_f64().is_some(), "{entry}");
        }
    }
    let all =
        ["combine", "counters", "dispatch", "grow", "host", "pair", "recover", "replay", "round"];
    assert_eq!(seen, all.map(str::to_owned).into());
    // Layouts and types of dispatch, at both numbers of tokens.
    let dispatches = results.iter().filter(|entry| entry["op"] == "dispatch").count();
    assert_eq!(dispatches, 8);

    // A report does not differ from itself.
    let output = bench(folder.path(), "show r.json --plot again.svg");
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("recover"), "the table");
    let again = std::fs::read_to_string(folder.path().join("again.svg")).unwrap();
    assert!(again.starts_with("<svg"), "{again}");

    let output = bench(folder.path(), "compare r.json r.json");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn what_is_asked_for_is_measured_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line = "--backend host --quick --ops combine,grow --tokens 6 --dtype fp16 --layout expert \
                --ranks 1,3 --skew hot-rank,zipf --samples 2 --grow-bytes 64KiB --report r.json";
    let output = bench(folder.path(), line);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report = read(&folder.path().join("r.json"));
    assert_eq!(report["commit"], "unknown");
    let results = report["results"].as_array().expect("a list");
    let found: Vec<String> = results
        .iter()
        .map(|entry| {
            let word = |field: &str| entry[field].to_string().replace('"', "");
            format!("{} {} {}", word("op"), word("ranks"), word("skew"))
        })
        .collect();
    let expected = [
        "combine 1 hot-rank",
        "grow 1 hot-rank",
        "grow 1 hot-rank",
        "combine 1 zipf",
        "combine 3 hot-rank",
        "grow 3 hot-rank",
        "grow 3 hot-rank",
        "combine 3 zipf",
    ];
    assert_eq!(found, expected);
    let grown: Vec<_> = [1, 2].map(|at| results[at]["variant"].clone()).into();
    assert_eq!(grown, ["by 64.00 KiB, fresh", "by 64.00 KiB, given back"]);
    assert_eq!(results[1]["details"]["samples"], 2.0);
    // Two names in the table, and in the figure two lines.
    let shown = bench(folder.path(), "show r.json --plot r.svg");
    let figure = std::fs::read_to_string(folder.path().join("r.svg")).expect("a figure");
    for name in ["grow by 64.00 KiB, fresh", "grow by 64.00 KiB, given back"] {
        let table = String::from_utf8_lossy(&shown.stdout);
        assert!(table.contains(name) && figure.contains(name), "{name}: {table}");
    }
}

#[test]
fn padding_that_is_left_is_fewer_bytes_under_a_name_of_its_own() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line = "--backend host --quick --ops dispatch --tokens 3 --dtype bf16 --layout expert \
                --padding cleared,left --report r.json";
    let output = bench(folder.path(), line);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let table = String::from_utf8(output.stdout).expect("text");
    assert_eq!(table.matches("padding left").count(), 1, "{table}");
    let report = read(&folder.path().join("r.json"));
    let [cleared, left] = &report["results"].as_array().expect("a list")[..] else {
        panic!("two results: {report}");
    };
    assert_eq!((cleared.get("padding"), &left["padding"]), (None, &"left".into()));
    assert!(left["memory_bytes"].as_u64() < cleared["memory_bytes"].as_u64(), "{report}");
}

#[test]
fn bad_arguments_are_refused_in_a_line() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (line, expected) in [
        ("--ops replay --layout flat", "there is nothing to measure"),
        ("--top-k 9 --experts 8", "top_k is 9"),
        ("--ranks 9 --experts 8", "ranks is 9"),
        ("--tokens 1152921504606846976", "from 1 to 1048576"),
        ("--top-k 18446744073709551615", "from 1 to 64"),
        ("--experts 18446744073709551615", "from 1 to 65536"),
        ("--ranks 18446744073709551615", "from 1 to 1024"),
        ("--step-layers 18446744073709551615", "from 1 to 1024"),
        ("--report no/such/folder/r.json", "there is no folder"),
        ("--against nccl", "needs GPUs"),
        ("compare missing.json other.json", "missing.json: cannot be read"),
        ("show missing.json", "missing.json: cannot be read"),
    ] {
        let line = match ["compare", "show"].iter().any(|verb| line.starts_with(verb)) {
            true => line.to_owned(),
            false => format!("--backend host --quick {line}"),
        };
        let output = bench(folder.path(), &line);
        let stderr = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {stderr}");
        assert!(stderr.contains(expected), "{line}: {stderr}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

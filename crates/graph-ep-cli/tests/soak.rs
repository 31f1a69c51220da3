//! `graph-ep soak` as a user runs it, on the host, in a process of its own.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn soak(folder: &Path, line: &str) -> (Output, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_graph-ep"))
        .arg("soak")
        .args(line.split_whitespace())
        .args(["--backend", "host", "--commit", "abc", "--report", "r.json"])
        .current_dir(folder)
        .output()
        .expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{line}: {stderr}");
    let text = std::fs::read(folder.join("r.json")).expect("the report was written");
    (output, serde_json::from_slice(&text).expect("it is JSON"))
}

#[test]
fn groups_that_come_and_go_leave_nothing_behind() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (_, report) = soak(folder.path(), "cycles --cycles 60 --tokens 4 --hidden 8 --alignment 1");
    assert_eq!(report["verified"], true);
    let held = &report["held"];
    assert_eq!(held["cycles"], 60);
    for what in ["descriptors", "threads"] {
        assert_eq!(held["before"][what], held["after"][what], "{what}");
    }
    let overflowed = report["results"][0]["overflowed"].as_u64();
    assert!(overflowed > Some(20), "{report}");
}

#[test]
fn replays_are_told_in_a_table_and_a_report() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line = "replays --mode rounds --ranks 3 --experts 12 --replays 300 --burst 8 --hidden 16";
    let (output, report) = soak(folder.path(), line);
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(table.contains("VERIFIED") && table.contains("300 replays"), "{table}");
    assert_eq!(report["schema"], "graph-ep soak report, 1");
    assert_eq!((&report["commit"], &report["ranks"]), (&"abc".into(), &3.into()));
    let command = report["command"].as_str().expect("a command");
    assert!(command.starts_with("graph-ep soak replays --mode rounds"), "{command}");
    let result = &report["results"][0];
    assert_eq!((&result["steps"], &result["mismatches"]), (&300.into(), &0.into()));
    assert_eq!(result["compared"], result["expected"]);
    assert!(result["most_windows"].as_u64() > Some(1), "{result}");
}

#[cfg(unix)]
#[test]
fn a_name_that_is_no_unicode_is_a_name() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(std::ffi::OsStr::from_bytes(b"r\xff.json"));
    let status = Command::new(env!("CARGO_BIN_EXE_graph-ep"))
        .args("soak phased --backend host --hidden 8 --steps 1 --report".split(' '))
        .arg(&path)
        .stdout(std::process::Stdio::null())
        .status()
        .expect("the program starts");
    assert_eq!(status.code(), Some(0));
    let text = std::fs::read(path).expect("the report was written");
    let report: Value = serde_json::from_slice(&text).expect("it is JSON");
    assert!(report["command"].as_str().expect("a command").contains("r\u{fffd}.json"), "{report}");
}

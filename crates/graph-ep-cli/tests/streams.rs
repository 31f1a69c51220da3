//! A stdout or stderr that nobody reads: files are written all the same, and the exit code is what it
//! would be.

#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Every write to it fails, as every write to a pipe does whose reader is gone.
const FULL: &str = "/dev/full";

fn graph_ep(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_graph-ep"));
    command.args(line.split_whitespace()).current_dir(folder);
    command
}

fn full() -> Stdio {
    File::options().write(true).open(FULL).expect("the device that is full").into()
}

/// The exit code where neither stdout nor stderr can be written to.
fn unheard(folder: &Path, line: &str) -> Option<i32> {
    let status = graph_ep(folder, line).stdout(full()).stderr(full()).status();
    status.expect("the program starts").code()
}

fn heard(folder: &Path, line: &str) -> Output {
    graph_ep(folder, line).output().expect("the program starts")
}

/// The length of a file; none if it is not there.
fn length(folder: &Path, name: &str) -> u64 {
    fs::metadata(folder.join(name)).map_or(0, |file| file.len())
}

#[test]
fn files_are_written_though_nobody_reads_the_table() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    for (line, files) in [
        // Overflows, events and a table.
        (
            "run --backend host --ranks 2 --steps 2 --hidden 8 -vvv --report r.json --plot r.svg",
            "r",
        ),
        (
            "run --backend host --ranks 2 --steps 2 --hidden 8 --processes --report p.json --plot p.svg",
            "p",
        ),
        ("policies --ranks 4 --report o.json --plot o.svg", "o"),
        (
            "bench --backend host --quick --ops pair --tokens 2 --ranks 2 --report b.json --plot b.svg",
            "b",
        ),
    ] {
        assert_eq!(unheard(folder, line), Some(0), "{line}");
        for name in [format!("{files}.json"), format!("{files}.svg")] {
            assert!(length(folder, &name) > 100, "{name} of {line}");
        }
    }
    let line = "soak replays --backend host --replays 8 --hidden 8 --report s.json";
    assert_eq!(unheard(folder, line), Some(0));
    assert!(length(folder, "s.json") > 100);

    assert_eq!(unheard(folder, "bench show b.json --plot again.svg"), Some(0));
    assert!(length(folder, "again.svg") > 100);
}

#[test]
fn exit_codes_do_not_depend_on_readers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    for (line, code) in [
        ("doctor", 0),
        ("--help", 0),
        ("run --backend host --ranks 2 --steps 1 --hidden 8 --mode static", 1),
        ("run --ranks 65", 2),
        ("run --ranks none", 2),
        ("bench compare none.json none.json", 2),
        ("soak replays --mode static", 2),
    ] {
        assert_eq!(unheard(folder, line), Some(code), "{line}");
        assert_eq!(heard(folder, line).status.code(), Some(code), "{line}");
    }
}

#[test]
fn a_report_that_cannot_be_written_loses_neither_table_nor_plot() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line =
        format!("run --backend host --ranks 2 --steps 1 --hidden 8 --report {FULL} --plot p.svg");
    let output = heard(folder.path(), &line);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("error: /dev/full: cannot be written"), "{stderr}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("VERIFIED"));
    assert!(length(folder.path(), "p.svg") > 100);
}

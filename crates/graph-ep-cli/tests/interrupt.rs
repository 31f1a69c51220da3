//! Ctrl-C: the first ends a run between two steps, with its report; the second ends it at once.

#![cfg(target_os = "linux")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;

/// How long anything may take before the test fails.
const BOUND: Duration = Duration::from_secs(120);

/// Steps that nobody would wait for.
const STEPS: usize = 1_000_000;

/// Writes a trace of [`STEPS`] steps, all alike: two tokens of two ranks that both go to rank 0.
fn long_trace(path: &Path) {
    let bytes = STEPS * 4;
    let header = format!(
        "{{\"__metadata__\":{{\"experts\":\"8\"}},\"topk_idx\":{{\"dtype\":\"U8\",\
         \"shape\":[{STEPS},1,2,2],\"data_offsets\":[0,{bytes}]}}}}"
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0, 1, 0, 1].repeat(STEPS));
    fs::write(path, file).expect("the trace is written");
}

/// A run in a process group of its own, as a shell would start it.
struct Run {
    program: Child,
    group: Pid,
}

impl Run {
    /// Starts it and waits for its first step.
    fn start(folder: &Path, arguments: &[&str]) -> Self {
        long_trace(&folder.join("long.safetensors"));
        let program = Command::new(env!("CARGO_BIN_EXE_graph-ep"))
            .args("run --backend host --ranks 2 --hidden 8 --trace long.safetensors".split(' '))
            .args(["--report", "r.json", "--plot", "p.svg"])
            .args(arguments)
            .current_dir(folder)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let group = Pid::from_child(&program);
        let mut run = Self { program, group };
        let mut lines = BufReader::new(run.program.stderr.take().expect("a pipe"));
        let mut line = String::new();
        while !line.starts_with("step 0: overflow") {
            line.clear();
            let read = lines.read_line(&mut line).expect("stderr is text");
            assert_ne!(read, 0, "it ended before its first step");
        }
        run.program.stderr = Some(lines.into_inner());
        run
    }

    /// Waits for the program to end, calling `meanwhile` now and then.
    fn end(&mut self, mut meanwhile: impl FnMut(&Self)) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.program.try_wait().expect("its status") {
                return status;
            }
            assert!(start.elapsed() < BOUND, "it goes on");
            meanwhile(self);
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Processes that the program started and that run.
    fn others(&self) -> Vec<Pid> {
        let of_group = |pid: &Pid| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
            let stat = stat.unwrap_or_default();
            // pid (name) state parent group ...
            let fields: Vec<&str> =
                stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            let group = self.group.as_raw_pid().to_string();
            matches!(fields[..], [state, _, of, ..] if of == group && !matches!(state, "Z" | "X"))
        };
        let entries = fs::read_dir("/proc").expect("processes").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter_map(Pid::from_raw).filter(|pid| *pid != self.group).filter(of_group).collect()
    }

    fn assert_alone(&self) {
        let start = Instant::now();
        while !self.others().is_empty() {
            assert!(start.elapsed() < BOUND, "{:?} go on", self.others());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Checks that it ended in good order.
    fn assert_told(mut self, folder: &Path) {
        let status = self.end(|_| {});
        let (mut shown, mut said) = (String::new(), String::new());
        self.program.stdout.take().expect("a pipe").read_to_string(&mut shown).expect("text");
        self.program.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(shown.contains("FAILED: interrupted; every rank has ended"), "{shown}\n{said}");
        assert_eq!(said, "failed: interrupted; every rank has ended\n");
        let report = fs::read(folder.join("r.json")).expect("the report was written");
        let report: Value = serde_json::from_slice(&report).expect("it is JSON");
        assert_eq!(report["outcome"], "failed");
        assert_eq!(report["mismatched_values"], 0);
        let steps = report["required_rows"].as_array().expect("steps").len();
        assert!((1..STEPS).contains(&steps), "{steps} steps");
        assert!(folder.join("p.svg").exists());
        self.assert_alone();
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Nothing is left of it where a test fails. Afterwards there is no such group.
        let _ = kill_process_group(self.group, Signal::KILL);
        let _ = self.program.wait();
    }
}

#[test]
fn threads_end_between_two_steps() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run::start(folder.path(), &[]);
    kill_process(run.group, Signal::INT).expect("it is there");
    run.assert_told(folder.path());
}

#[test]
fn processes_end_between_two_steps_if_the_terminal_interrupts_all() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run::start(folder.path(), &["--processes"]);
    assert_eq!(run.others().len(), 2);
    kill_process_group(run.group, Signal::INT).expect("they are there");
    run.assert_told(folder.path());
}

#[test]
fn processes_end_between_two_steps_if_only_the_first_is_interrupted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run::start(folder.path(), &["--processes"]);
    kill_process(run.group, Signal::INT).expect("it is there");
    run.assert_told(folder.path());
}

#[test]
fn a_second_interrupt_ends_processes_that_do_not() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut run = Run::start(folder.path(), &["--processes"]);
    // A rank that is stopped ends no step.
    kill_process(run.others()[0], Signal::STOP).expect("it is there");
    let status = run.end(|run| {
        kill_process_group(run.group, Signal::INT).expect("they are there");
    });
    assert_eq!((status.code(), status.signal()), (Some(130), None));
    // What is stopped does not hear of the death of its parent before it runs again.
    let _ = kill_process_group(run.group, Signal::CONT);
    run.assert_alone();
    assert!(!folder.path().join("r.json").exists());
}

#[test]
fn a_rank_without_the_process_that_started_it_ends() {
    let output = Command::new(env!("CARGO_BIN_EXE_graph-ep"))
        .args(["run", "--processes", "--backend", "host"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("GRAPH_EP_PARENT", "2147483647")])
        .output()
        .expect("the program starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr, "error: the process that started this rank is gone\n");
}

//! What the program does with input that it cannot run: one line that names the culprit on stderr,
//! nothing on stdout, and exit code 2.

use std::io::Write;
use std::path::Path;
use std::process::Command;

/// Runs `graph-ep run` in `folder`; its stderr, after checking that it refused.
fn refused(folder: &Path, arguments: &[&str]) -> String {
    refused_by("run", folder, arguments)
}

/// The same for another command.
fn refused_by(command: &str, folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_graph-ep"))
        .arg(command)
        .args(arguments)
        .current_dir(folder)
        .output()
        .expect("the program starts");
    let stderr = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    stderr
}

/// A safetensors file of one step, one layer and two tokens with two choices each.
fn trace(tensor: &str, experts: &str, ids: [u8; 4]) -> Vec<u8> {
    let header = format!(
        "{{\"__metadata__\":{{\"experts\":\"{experts}\"}},\"{tensor}\":{{\"dtype\":\"U8\",\
         \"shape\":[1,1,2,2],\"data_offsets\":[0,4]}}}}"
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(ids);
    bytes
}

#[test]
fn bad_traces() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let good = trace("topk_idx", "8", [0, 1, 2, 7]);
    let cases = [
        (b"no such thing".to_vec(), "not a safetensors file"),
        (Vec::new(), "not a safetensors file"),
        (good[..good.len() - 1].to_vec(), "truncated"),
        (good[..40].to_vec(), "truncated"),
        (trace("ids", "8", [0, 1, 2, 7]), "no tensor `topk_idx`"),
        (trace("topk_idx", "7", [0, 1, 2, 7]), "expert 7 does not exist"),
        (trace("topk_idx", "8", [0, 1, 2, 2]), "expert 2 was already chosen"),
        (trace("topk_idx", "eight", [0, 1, 2, 7]), "\"eight\""),
    ];
    for (bytes, expected) in cases {
        std::fs::write(folder.path().join("bad.safetensors"), bytes).expect("the file is written");
        let stderr = refused(folder.path(), &["--trace", "bad.safetensors"]);
        assert!(stderr.starts_with("error: bad.safetensors: "), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    let stderr = refused(folder.path(), &["--trace", "missing.safetensors"]);
    assert!(stderr.starts_with("error: missing.safetensors: cannot be read: "), "{stderr}");
}

#[test]
fn arguments_that_do_not_go_with_the_routing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cases: [(&[&str], &str); 6] = [
        (&["--ranks", "65"], "65 ranks are more than the 64 experts"),
        (&["--workload", "burst", "--ranks", "65"], "65 ranks are more than the 64 experts"),
        (&["--steps", "65"], "65 steps were asked for, but there are 64"),
        (&["--steps", "0"], "at least 1"),
        (&["--plot", "none/plot.svg"], "there is no folder none"),
        (&["--report", "same", "--plot", "same"], "both name same"),
    ];
    for (arguments, expected) in cases {
        let stderr = refused(folder.path(), arguments);
        assert!(stderr.contains(expected), "{stderr}");
    }
    let left = std::fs::read_dir(folder.path()).expect("the folder is there").count();
    assert_eq!(left, 0, "nothing is written by a run that does not begin");
}

#[test]
fn a_soak_of_which_no_group_can_be_made() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for kind in ["replays", "cycles", "phased"] {
        let arguments =
            [kind, "--backend", "host", "--capacity-factor", "1e9", "--report", "r.json"];
        let stderr = refused_by("soak", folder.path(), &arguments);
        let said = "error: the group cannot be made: the capacity factor is 1000000000, ";
        assert!(stderr.starts_with(said), "{kind}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    for kind in ["replays", "random", "cycles", "phased"] {
        let arguments = [kind, "--backend", "host", "--memory-limit", "1KiB", "--report", "r.json"];
        let stderr = refused_by("soak", folder.path(), &arguments);
        assert!(stderr.starts_with("error: the group cannot be made: "), "{kind}: {stderr}");
        assert!(stderr.contains("but its memory limit is 1024"), "{kind}: {stderr}");
    }
    let left = std::fs::read_dir(folder.path()).expect("the folder is there").count();
    assert_eq!(left, 0, "nothing is written by a soak that does not begin");
}

#[test]
fn architectures_that_there_are_not() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let compile = |arch| {
        let sizes =
            ["--hidden", "64", "--top-k", "2", "--ranks", "2", "--arch", "sm_80", "--arch", arch];
        refused_by("compile", folder.path(), &sizes)
    };
    for arch in ["sm_1", "sm_75", "90a", "sm_"] {
        let stderr = compile(arch);
        let said = format!(
            "invalid value '{arch}' for '--arch <ARCH>': it must be an architecture from sm_80"
        );
        assert!(stderr.contains(&said), "{stderr}");
    }
    // The rest only the compiler knows.
    if let Err(error) = graph_ep::ep_context::cuda::nvrtc_version() {
        let line = format!("architectures_that_there_are_not: half skipped: no NVRTC: {error}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
        return;
    }
    for arch in ["sm_99", "sm_80a", "sm_90aa", "sm_090"] {
        let stderr = compile(arch);
        assert!(
            stderr.starts_with(&format!("error: --arch {arch} is none that NVRTC ")),
            "{stderr}"
        );
        assert!(stderr.contains("those are sm_80, "), "{stderr}");
        assert!(stderr.contains(", sm_90a, "), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

/// Settings are not to blame for a machine that is out of something, and the exit code does not say so.
#[test]
fn what_a_machine_lacks_is_no_bad_input() {
    let line = "ulimit -n 12 && exec \"$0\" run --backend host --ranks 4 --steps 1 --hidden 8";
    let output = Command::new("sh")
        .args(["-c", line, env!("CARGO_BIN_EXE_graph-ep")])
        .output()
        .expect("the shell starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: the group cannot be set up: "), "{stderr}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let stderr = refused(folder.path(), &["--backend", "host", "--memory-limit", "1KiB"]);
    assert!(stderr.starts_with("error: the group cannot be made: "), "{stderr}");
}

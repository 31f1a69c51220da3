//! The device code compiles for every architecture that is meant, without a GPU and without spilling
//! registers. Where NVRTC is not found the test says that it was skipped.
#![cfg(feature = "cuda")]

use std::io::{self, Write};

use ep_context::cuda::{architectures, compile, compiles_for, nvrtc_version};
use ep_context::signal::{AttentionBlock, ControlBlock, WaitParams};
use ep_context::{BackendError, FaultKind, KernelSource, Phase, Specialization};
use graph_ep_kernels::{HEADERS, layouts, probes};

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

/// Whether NVRTC is there. Says so past the harness, which hides what passing tests print.
fn nvrtc_is_there(test: &str) -> bool {
    let (there, line) = match nvrtc_version() {
        Ok((place, (major, minor))) => {
            (true, format!("{test}: NVRTC {major}.{minor} at {place}\n"))
        }
        Err(error) => (false, format!("{test}: skipped: no NVRTC: {error}\n")),
    };
    let _ = io::stderr().write_all(line.as_bytes());
    there
}

#[test]
fn kernels_compile_for_every_architecture_without_spills() {
    if !nvrtc_is_there("kernels_compile_for_every_architecture_without_spills") {
        return;
    }
    let none = Specialization::new();
    for (file, text) in [probes::ADD, probes::COUNT_DOWN, probes::MEET] {
        let source = KernelSource { file, text, headers: HEADERS };
        for architecture in ARCHITECTURES {
            let compiled = compile(&source, &none, architecture)
                .unwrap_or_else(|error| panic!("{file} for {architecture}: {error}"));
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{file} for {architecture}");
            assert!(compiled.log.contains("registers"), "no report: {}", compiled.log);
            assert_eq!(compiled.spilled_bytes(), 0, "{file} for {architecture}: {}", compiled.log);
            assert!(!compiled.log.contains("warning"), "{file}: {}", compiled.log);
        }
    }
}

#[test]
fn constants_reach_the_compiler_and_its_messages_the_caller() {
    if !nvrtc_is_there("constants_reach_the_compiler_and_its_messages_the_caller") {
        return;
    }
    let text = "#ifndef WIDTH\n#error no width\n#endif\n\
                static_assert(WIDTH == 7, \"another width\");\n\
                extern \"C\" __global__ void probe(const __grid_constant__ int p) {}";
    let source = KernelSource { file: "probe.cu", text, headers: &[] };
    let compiled = |constants: Specialization| compile(&source, &constants, "sm_80");
    compiled(Specialization::new().with("WIDTH", 7)).expect("the width that it asks for");
    for (constants, said) in [
        (Specialization::new(), "no width"),
        (Specialization::new().with("WIDTH", 8), "another width"),
    ] {
        match compiled(constants) {
            Err(BackendError::Unavailable { what, reason }) => {
                assert!(what.contains("probe.cu"), "{what}");
                assert!(reason.contains(said), "{reason}");
            }
            other => panic!("expected a failure, not {other:?}"),
        }
    }
}

#[test]
fn architectures_are_told_from_what_is_none() {
    if !nvrtc_is_there("architectures_are_told_from_what_is_none") {
        return;
    }
    let all = architectures().expect("a list");
    for architecture in ARCHITECTURES {
        assert!(all.iter().any(|one| one == architecture), "{architecture} in {all:?}");
        assert!(compiles_for(architecture).expect("an answer"), "{architecture}");
    }
    // No such chip, a suffix that the chip has not, and what is no name.
    for architecture in
        ["sm_1", "sm_99", "sm_80a", "sm_90f", "sm_090", "sm_90aa", "90", "", "sm_80\0"]
    {
        assert!(!compiles_for(architecture).expect("an answer"), "{architecture}");
        assert!(!all.iter().any(|one| one == architecture), "{architecture} in {all:?}");
        let source = KernelSource { file: "probe.cu", text: "", headers: &[] };
        let refused = compile(&source, &Specialization::new(), architecture);
        assert!(matches!(refused, Err(BackendError::Unavailable { .. })), "{refused:?}");
    }
}

#[test]
fn a_struct_that_differs_from_its_twin_does_not_compile() {
    if !nvrtc_is_there("a_struct_that_differs_from_its_twin_does_not_compile") {
        return;
    }
    for (size, offset, right) in [(16, 8, true), (24, 8, false), (16, 4, false)] {
        let text = format!(
            "#include \"types.cuh\"\nstruct P {{ u32 a; u64 b; }};\nSAME_LAYOUT(P, {size}, b, {offset});\n\
             extern \"C\" __global__ void probe(const __grid_constant__ P p) {{}}"
        );
        // A source's text is a constant of the program everywhere but here.
        let source = KernelSource { file: "probe.cu", text: text.leak(), headers: HEADERS };
        let compiled = compile(&source, &Specialization::new(), "sm_80");
        assert_eq!(compiled.is_ok(), right, "{size} bytes, last at {offset}: {compiled:?}");
    }
}

#[test]
fn what_host_and_device_share_is_the_same_on_both_sides() {
    if !nvrtc_is_there("what_host_and_device_share_is_the_same_on_both_sides") {
        return;
    }
    let mut text = "#include \"wait.cuh\"\n".to_owned();
    text += &layouts! {
        WaitParams as "wait::WaitParams" { control, attention, own, rank, world }
        ControlBlock as "wait::ControlBlock" { abort, suspended, fault, deadline_ms }
        AttentionBlock as "wait::AttentionBlock" { poison, doorbell, sleepers }
    };
    let mut equal = |device: String, value: usize| {
        text += &format!("static_assert(u32({device}) == {value}, \"{device}\");\n");
    };
    equal("wait::PHASES".to_owned(), Phase::COUNT);
    for phase in Phase::ALL {
        equal(format!("wait::Phase::{phase:?}"), phase.index());
    }
    for kind in [
        FaultKind::Timeout,
        FaultKind::Aborted,
        FaultKind::OutOfStep,
        FaultKind::TooManyTokens,
        FaultKind::Failed,
    ] {
        equal(format!("wait::FaultKind::{kind:?}"), kind as usize);
    }
    text += "extern \"C\" __global__ void probe(const __grid_constant__ int p) {}";
    let source = KernelSource { file: "probe.cu", text: text.leak(), headers: HEADERS };
    compile(&source, &Specialization::new(), "sm_90a").expect("every assertion holds");
}

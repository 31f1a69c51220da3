//! The device bodies of the kernels of a soak, without a device: they compile for every architecture,
//! spill no registers, and see the structs that Rust sees.

use graph_ep::ep_context::KernelSource;
use graph_ep::ep_context::cuda::{compile, nvrtc_version};
use graph_ep::{DType, Kernel};
use graph_ep_kernels::layouts;

use super::kernels::{
    Check, CheckParams, Experts, ExpertsParams, Input, InputParams, Shape, State, constants,
};
use crate::output::tell;

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

#[test]
fn nvrtc_compiles_the_kernels_of_a_soak() {
    if let Err(error) = nvrtc_version() {
        // Past the capture of a test that passes.
        tell(&format!("nvrtc_compiles_the_kernels_of_a_soak: skipped: no NVRTC: {error}"));
        return;
    }
    let shared = layouts! {
        State as "SoakState" {
            step, compared, mismatches, missing, bad_step, bad_layer, bad_token, bad_column, bad_found,
            bad_expected, claimed, arrived, reserved
        }
        Shape as "SoakShape" {
            seed, state, rank, world, experts, top_k, hidden, max_tokens, layers, burst, ragged, format
        }
    };
    let input = layouts! {
        InputParams as "SoakInputParams" { shape, before, count, tokens, ids, weights }
    };
    let experts = layouts! {
        ExpertsParams as "SoakExpertsParams" {
            shape, rows, outputs, expert_offsets, tokens_per_expert, row_weights, row_experts, slots,
            width
        }
    };
    let check = layouts! {
        CheckParams as "SoakCheckParams" { shape, outputs, dropping, reserved }
    };
    for (name, source, own) in [
        (Input::NAME, Input::SOURCE, input),
        (Experts::NAME, Experts::SOURCE, experts),
        (Check::NAME, Check::SOURCE, check),
    ] {
        let source = source.expect("it has a device body");
        // A source's text is a constant of the program everywhere but in tests.
        let text = format!("{}\n{shared}{own}", source.text).leak();
        let source = KernelSource { text, ..source };
        for (architecture, dtype) in ARCHITECTURES
            .into_iter()
            .flat_map(|arch| [DType::Bf16, DType::Fp16, DType::Fp32].map(|dtype| (arch, dtype)))
        {
            let compiled = compile(&source, &constants(dtype), architecture)
                .unwrap_or_else(|error| panic!("{name} for {architecture}: {error}"));
            let named = compiled
                .cubin
                .windows(name.len() + 1)
                .any(|part| part.split_last() == Some((&0, name.as_bytes())));
            assert!(named, "{name} is not an entry of what {} compiles to", source.file);
            assert_eq!(compiled.spilled_bytes(), 0, "{name} for {architecture}: {}", compiled.log);
            assert!(!compiled.log.contains("warning"), "{name}: {}", compiled.log);
        }
    }
}

//! The device bodies of the tests' own kernels, without a device: they compile, spill no registers,
//! and see the structs that Rust sees.

use graph_ep::Kernel;
use graph_ep::ep_context::cuda::{compile, nvrtc_version};
use graph_ep::ep_context::{KernelSource, Specialization};
use graph_ep_kernels::layouts;
use graph_ep_tests::backend::say_skipped;
use graph_ep_tests::experts::{Backward, BackwardParams, Forward, ForwardParams, RowParams};
use graph_ep_tests::kernels::{Broken, RouteByOutput, Stall};
use graph_ep_tests::payload::RowFormat;

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

fn source_of<K: Kernel>() -> KernelSource {
    K::SOURCE.unwrap_or_else(|| panic!("{} has no device body", K::NAME))
}

#[test]
fn nvrtc_compiles_the_kernels_of_the_tests() {
    if let Err(error) = nvrtc_version() {
        return say_skipped(
            "nvrtc_compiles_the_kernels_of_the_tests",
            &format!("no NVRTC: {error}"),
        );
    }
    let same = layouts! {
        RowFormat { hidden, dtype, payload, row_bytes, scale_bytes, sum_bytes }
        RowParams {
            rows, scales, expert_offsets, tokens_per_expert, row_weights, row_experts, expert_ids,
            format, slots, width
        }
        ForwardParams { rows, outputs }
        BackwardParams { rows, grads, weight_grads }
    };
    let with_layouts = |source: KernelSource| KernelSource {
        // A source's text is a constant of the program everywhere but in tests.
        text: format!("{}\n{same}", source.text).leak(),
        ..source
    };
    for (name, source) in [
        (Forward::NAME, with_layouts(source_of::<Forward>())),
        (Backward::NAME, with_layouts(source_of::<Backward>())),
        (RouteByOutput::NAME, source_of::<RouteByOutput>()),
        (Stall::NAME, source_of::<Stall>()),
        (Broken::NAME, source_of::<Broken>()),
    ] {
        for architecture in ARCHITECTURES {
            let compiled = compile(&source, &Specialization::new(), architecture)
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

//! The device bodies without a device: they compile for every architecture that is meant, spill no
//! registers, and see the structs that Rust sees. Where NVRTC is not found a test says that it was
//! skipped.

use std::fmt::Write as _;
use std::mem::offset_of;

use graph_ep::Kernel;
use graph_ep::ep_context::cuda::{compile, nvrtc_version};
use graph_ep::ep_context::{KernelSource, Specialization};
use graph_ep_kernels::HEADERS;

use super::align::{AlignKernel, AlignParams};
use super::replay::{EmptyKernel, EmptyParams, TripKernel, TripParams};
use super::signal::{PingPongKernel, PingPongParams};
use super::transfer::{CopyKernel, CopyParams};
use crate::output;

const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100a"];

/// Whether NVRTC is there. Says so past the harness, which hides what passing tests print.
fn nvrtc_is_there(test: &str) -> bool {
    let (there, line) = match nvrtc_version() {
        Ok((place, (major, minor))) => (true, format!("{test}: NVRTC {major}.{minor} at {place}")),
        Err(error) => (false, format!("{test}: skipped: no NVRTC: {error}")),
    };
    output::tell(&line);
    there
}

/// The device code of a kernel, and that code with assertions of its parameters, field by field.
/// Forgetting a field here does not compile.
macro_rules! kernel {
    ($kernel:ty: $params:ident { $($field:ident),* $(,)? }) => {{
        let source = <$kernel>::SOURCE.expect("a device body");
        let name = stringify!($params);
        let mut text = source.text.to_owned();
        let size = size_of::<$params>();
        writeln!(text, "static_assert(sizeof({name}) == {size}, \"{name}\");").unwrap();
        $(
            let (field, offset) = (stringify!($field), offset_of!($params, $field));
            writeln!(
                text,
                "static_assert(OFFSET_OF({name}, {field}) == {offset}, \"{name}.{field}\");"
            )
            .unwrap();
        )*
        let _ = |value: &$params| {
            let $params { $($field: _),* } = value;
        };
        (<$kernel>::NAME, source.file, text)
    }};
}

#[test]
fn kernels_compile_without_spills_and_agree_with_rust() {
    let kernels = [
        kernel!(CopyKernel: CopyParams { to, from, quads }),
        kernel!(AlignKernel: AlignParams { wait, blocks, begun }),
        kernel!(PingPongKernel: PingPongParams {
            wait, theirs, ours, peer, first, trips, serves,
        }),
        kernel!(EmptyKernel: EmptyParams { nothing }),
        kernel!(TripKernel: TripParams { left, condition, begin }),
    ];
    if !nvrtc_is_there("kernels_compile_without_spills_and_agree_with_rust") {
        return;
    }
    for (name, file, text) in kernels {
        // A source's text is a constant of the program everywhere but in tests.
        let source = KernelSource { file, text: text.leak(), headers: HEADERS };
        assert!(source.text.contains(&format!("{name}(const __grid_constant__")), "{name}");
        for architecture in ARCHITECTURES {
            let case = format!("{name}, {architecture}");
            let compiled = compile(&source, &Specialization::new(), architecture)
                .unwrap_or_else(|error| panic!("{case}: {error}"));
            assert!(compiled.log.contains("registers"), "{case}: no report: {}", compiled.log);
            assert_eq!(compiled.spilled_bytes(), 0, "{case}: {}", compiled.log);
            assert!(!compiled.log.contains("warning"), "{case}: {}", compiled.log);
        }
    }
}

//! The device bodies without a device: they compile for every architecture that is meant, spill no
//! registers, and see the structs that Rust sees. Where NVRTC is not found a test says that it was
//! skipped.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use ep_context::cuda::{compile, nvrtc_version};
use ep_context::signal::params::{AttentionBlock, ControlBlock, WaitParams};
use ep_context::{FaultKind, Kernel, KernelSource, Phase, Specialization};
use graph_ep_kernels::{HEADERS, layouts};

use super::*;
use crate::geometry::{Geometry, LaneLayout};
use crate::params::*;

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

/// A kernel for one configuration.
struct Instance {
    name: &'static str,
    source: KernelSource,
    top_k: u64,
    dtype: u64,
    stamped: bool,
}

impl Instance {
    /// The same for few tokens.
    fn stamped(self) -> Self {
        Self { stamped: true, ..self }
    }
}

fn instance<K: Kernel>(top_k: u64, dtype: u64) -> Instance {
    let source = K::SOURCE.unwrap_or_else(|| panic!("{} has no device body", K::NAME));
    Instance { name: K::NAME, source, top_k, dtype, stamped: false }
}

/// Every kernel for what is usual, and those that depend on top-k or the number format for its other
/// values.
fn instances() -> Vec<Instance> {
    let mut all = vec![
        instance::<StepBegin>(8, 0),
        instance::<Count>(8, 0),
        instance::<Window>(8, 0),
        instance::<Gather>(8, 0),
        instance::<Fold>(8, 0),
        instance::<Acknowledge>(8, 0),
        instance::<StepEnd>(8, 0),
        instance::<Resume>(8, 0),
        instance::<Abandon>(8, 0),
        instance::<Restage>(8, 0),
        instance::<Acquire>(8, 0),
        instance::<PushWeightGrads>(8, 0),
    ];
    all.extend([1, 4, 6, 8, 10, 32, 33, 64].map(|top_k| instance::<Route>(top_k, 0)));
    all.extend([1, 8, 32].map(|top_k| instance::<PushDispatch>(top_k, 0)));
    all.extend([8, 32].map(|top_k| instance::<PushDispatch>(top_k, 0).stamped()));
    for dtype in 0..3 {
        all.push(instance::<PushCombine>(8, dtype));
        all.push(instance::<PushCombine>(8, dtype).stamped());
        all.push(instance::<ReducePush>(8, dtype));
        all.push(instance::<Reduce>(8, dtype));
        all.push(instance::<Regather>(8, dtype));
    }
    all
}

#[test]
fn kernels_compile_for_every_architecture_without_spills() {
    let instances = instances();
    assert!(instances.len() <= 40, "{} instances take too long", instances.len());
    if !nvrtc_is_there("kernels_compile_for_every_architecture_without_spills") {
        return;
    }
    for Instance { name, source, top_k, dtype, stamped } in instances {
        let constants = Specialization::new()
            .with("HIDDEN", 7168)
            .with("TOP_K", top_k)
            .with("DTYPE", dtype)
            .with("WORLD", 8)
            .with("STAMPED", stamped.into());
        for architecture in ARCHITECTURES {
            let rows = if stamped { ", stamped" } else { "" };
            let case = format!("{name} for top-{top_k}, format {dtype}, {architecture}{rows}");
            let compiled = compile(&source, &constants, architecture)
                .unwrap_or_else(|error| panic!("{case}: {error}"));
            assert!(compiled.log.contains("registers"), "{case}: no report: {}", compiled.log);
            assert_eq!(compiled.spilled_bytes(), 0, "{case}: {}", compiled.log);
            assert!(!compiled.log.contains("warning"), "{case}: {}", compiled.log);
        }
    }
}

/// Assertions in C++ of everything that Rust and the device agree on.
fn agreements() -> String {
    let mut text = "#include \"params.cuh\"\n#include \"stale.cuh\"\n#include \"items.cuh\"\n\
                    #include \"turns.cuh\"\n"
        .to_owned();
    text += &layouts! {
        WaitParams as "wait::WaitParams" { control, attention, own, rank, world }
        ControlBlock as "wait::ControlBlock" { abort, suspended, fault, deadline_ms }
        AttentionBlock as "wait::AttentionBlock" { poison, doorbell, sleepers }
        LaneLayout {
            dispatch_words, combine_words, dispatch_headers, combine_headers, counts, tallies, prefixes,
            items, pairs, staging, scales, landing, weight_grads, pushed_items, pushed_pairs, arrived, returned,
            pushed_rows, pushed_scales, bytes,
        }
        Geometry {
            world, rank, experts, slots, local_experts, top_k, fanout, max_tokens, alignment, hidden,
            row_bytes, scale_bytes, token_bytes, sum_bytes, dtype, quantize, flat, flat_width,
            weighted, push, row_pieces, sum_pieces, clear_padding, stamped, lane,
        }
        DispatchHeader {
            step, ordinal, items, item_base, pairs, pair_base, transfer, reserved,
        }
        CombineHeader { step, ordinal, prefix, required, first_over, reserved }
        Item { token, slot, pair_begin, pairs }
        Pair { slot, index, weight, choice }
        Destination { rank, position }
        WindowItem { source, slot, begin, rows }
        RowRef { row, weight, choice, slot }
        ExpertHomeEntry { rank, slot }
        TurnCounters { counted, listed, sent, taken, pushed, reduced }
        LaneState { epoch, arrivals, turn, counters, placed, silent, begun }
        StepState {
            step, held, drained, first_over, required, dispatches, windows, capacity, dropped,
            delivered, invalid_ids, repeated_ids,
        }
        WindowState {
            tokens, items, pairs, required, begin, end, pair_begin, window_pairs, capacity, windows,
            silent, reserved,
        }
        RecordHeader {
            sequence, step, drained, first_over, required, dispatches, windows, capacity, reserved, fault,
            dropped, delivered, invalid_ids, repeated_ids,
        }
        LaneParams { blocks, state }
        HandleParams {
            fanouts, destinations, window, expert_offsets, tokens_per_expert, total, source_items,
            source_pairs, bases, taken, items, pairs, row_weights, row_experts,
        }
        StepBeginParams {
            wait, state, peer_required, required_by_dispatch, max_dispatches, shape_count, shapes,
        }
        ShapeCheck { generation, recorded }
        RouteParams {
            geometry, wait, lane, handle, state, homes, topk_ids, topk_weights, tokens, scales,
            num_tokens_word, expert_counts, rank_counts, num_tokens, id_bytes, ordinal, dependent,
        }
        PushDispatchParams {
            geometry, wait, lane, blocks, handle, state, homes, topk_ids, topk_weights, tokens, scales,
            num_tokens_word, expert_counts, rank_counts, block_counts, required_by_dispatch, capacity,
            rows, received_scales, condition, num_tokens, id_bytes, ordinal, dependent, row_limit,
            max_dispatches, budgeted, last, listers, senders, halves, reserved,
        }
        PushCombineParams {
            geometry, wait, lane, blocks, handle, state, peer_required, expert_rows, output, ordinal, weighted,
            senders, halves, push_span, sum_span, num_tokens, row_limit,
        }
        CountParams {
            geometry, wait, lane, handle, state, required_by_dispatch, capacity, row_limit,
            max_dispatches, ordinal, budgeted, dependent, reserved, condition,
        }
        WindowParams {
            geometry, wait, lane, handle, state, capacity, row_limit, last, condition,
        }
        GatherParams { geometry, wait, lane, handle, rows, scales }
        ReducePushParams {
            geometry, wait, lane, handle, state, expert_rows, ordinal, push, release, weighted,
            row_limit, reserved,
        }
        FoldParams { geometry, wait, lane, state, peer_required, ordinal, reserved }
        ReduceParams {
            geometry, wait, lane, handle, output, weight_grads, num_tokens, reserved,
        }
        RestageParams { geometry, wait, lane, handle, state, rows, ordinal, num_tokens }
        AcquireParams { geometry, wait, lane, state, ordinal, reserved }
        RegatherParams {
            geometry, wait, lane, handle, rows, expert_rows, row_limit, whole,
        }
        PushWeightGradsParams { geometry, wait, lane, handle, row_grads, row_limit, reserved }
        AcknowledgeParams { geometry, wait, lane, state, peer_required, ordinal, reserved }
        StepEndParams {
            wait, state, peer_required, required_by_dispatch, ring, stride, records, max_dispatches,
            hold,
        }
        ResumeParams { state }
        AbandonParams { wait, fault }
    };
    let mut equal = |device: &str, here: u32| {
        writeln!(text, "static_assert(u32({device}) == {here}u, \"{device}\");").unwrap();
    };
    equal("NONE", NONE);
    equal("TRANSFER_PULL", TRANSFER_PULL);
    equal("TRANSFER_PUSH", TRANSFER_PUSH);
    equal("stale::MARK", STALE);
    equal("stamped::MOST_TOKENS", MOST_TOKENS as u32);
    equal("turns::MOST_RANKS", MOST_RANKS as u32);
    equal("wait::PHASES", Phase::COUNT as u32);
    equal("wait::Phase::Dispatch", Phase::Dispatch as u32);
    equal("wait::Phase::Combine", Phase::Combine as u32);
    equal("wait::Phase::Acknowledge", Phase::Acknowledge as u32);
    equal("wait::Phase::Record", Phase::Record as u32);
    equal("wait::FaultKind::OutOfStep", FaultKind::OutOfStep as u32);
    equal("wait::FaultKind::TooManyTokens", FaultKind::TooManyTokens as u32);
    equal("wait::FaultKind::NoProgress", FaultKind::NoProgress as u32);
    equal("wait::FaultKind::Gone", FaultKind::Gone as u32);
    text + "extern \"C\" __global__ void agreements(const __grid_constant__ Geometry g) {}\n"
}

#[test]
fn structs_have_one_layout_in_rust_and_on_the_device() {
    if !nvrtc_is_there("structs_have_one_layout_in_rust_and_on_the_device") {
        return;
    }
    let compiles = |text: String| {
        // A source's text is a constant of the program everywhere but in tests.
        let source = KernelSource { file: "agreements.cu", text: text.leak(), headers: HEADERS };
        compile(&source, &Specialization::new(), "sm_80")
    };
    compiles(agreements()).expect("the same layouts");
    let other = agreements()
        .replace("OFFSET_OF(Geometry, hidden) == 36", "OFFSET_OF(Geometry, hidden) == 40");
    assert_ne!(other, agreements());
    assert!(compiles(other).is_err(), "a wrong offset passes");
}

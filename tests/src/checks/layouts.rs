//! How received rows lie, and who multiplies by the weights.

use graph_ep::{DType, Layout, Payload, StepMode, StepOptions, Weighting};

use super::everywhere::conforms;
use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{RankRun, by_step};
use crate::rig::{Rig, SPOILT};

fn flat() -> Case {
    let tokens = vec![6, 0, 7];
    Case { layout: Layout::Flat, skew: Skew::Rotating, top_k: 3, tokens, ..Case::new(3) }
}

fn caller() -> Case {
    Case { layout: Layout::ExpertGrouped, weighting: Weighting::Caller, ..flat() }
}

/// Flat rows arrive in the order of source and token, one for each token, with its local experts and
/// their weights beside it; sums of what the caller made of them come back; all with truncation, in
/// rounds, and recovered.
pub fn flat_rows_equal_the_oracle<T: TestBackend>() {
    let several = Case { layers: 3, lanes: 2, ..flat() };
    let uneven = Case { experts: 7, top_k: 5, bad_ids: true, ..flat() };
    let placed = Case { placement: Some(vec![2, 2, 0, 2, 0, 0]), ..flat() };
    let counted = Case { device_count: true, wide_ids: true, ..flat() };
    for (what, case) in [
        ("one layer", flat()),
        ("three layers", several),
        ("seven experts", uneven),
        ("a rank without experts", placed),
        ("a device count", counted),
    ] {
        let case = case.on::<T>();
        let oracle = StepOracle::new(&case, 0, None);
        let pairs = &oracle.layers()[0].delivered;
        let rows = oracle.layers()[0].ranks.iter().map(|rank| rank.total as u64);
        assert!(rows.zip(pairs).any(|(rows, pairs)| rows < *pairs), "{what}: some rows are shared");
        conforms::<T>(&format!("flat, {what}"), &case);
    }
}

/// Flat rows are truncated to whole groups of the alignment, at capacities that are no multiple of it.
pub fn flat_rows_are_truncated_to_whole_groups<T: TestBackend>() {
    for rows in [[5, 0, 7], [3, 9, 13]] {
        let case = Case { capacity: Some(rows.to_vec()), ..flat() }.on::<T>();
        let runs =
            T::on_ranks(case.world(), |env| Rig::<T>::new(env, &case).run(0, StepMode::Static));
        let oracle = StepOracle::new(&case, 0, case.capacity.as_deref());
        oracle.check(&format!("{rows:?} rows"), &runs);
        assert!(runs.iter().any(|run| run.record.dropped > 0));
    }
}

/// Where the caller multiplies, the weights lie beside the grouped rows, zero for padding.
pub fn weights_beside_grouped_rows_equal_the_oracle<T: TestBackend>() {
    conforms::<T>("the caller multiplies", &caller());
    conforms::<T>("three layers", &Case { layers: 3, lanes: 2, ..caller() });
    conforms::<T>("no weights", &Case { weights: false, ..caller() });
    conforms::<T>("FP32", &Case { dtype: DType::Fp32, bad_ids: true, ..caller() });
}

/// Every payload in every layout.
pub fn every_payload_in_every_layout<T: TestBackend>() {
    for payload in [Payload::Fp8, Payload::Bytes { row_bytes: 48, scale_bytes: 16 }] {
        for case in [flat(), caller()] {
            let case = Case { payload, hidden: 144, ..case };
            conforms::<T>(&format!("{payload:?}, {:?}", case.layout), &case);
        }
    }
}

/// Every alignment from 1 to 256 in every layout.
pub fn every_alignment_in_every_layout<T: TestBackend>() {
    for alignment in (0..=8).map(|power| 1 << power) {
        for case in [flat(), caller()] {
            let tokens = vec![5; 2];
            let case = Case { alignment, tokens, experts: 4, ..case };
            conforms::<T>(&format!("alignment {alignment}, {:?}", case.layout), &case);
        }
    }
}

/// Rows, scales and weights of padding of a rank's first layer, as bytes. In the flat layout there is none.
fn padding(case: &Case, run: &RankRun) -> Vec<u8> {
    if case.flat() {
        return Vec::new();
    }
    let layer = &run.layers[0];
    let weights: &[u8] = bytemuck::cast_slice(&layer.row_weights);
    let groups = layer.expert_offsets.windows(2).zip(&layer.tokens_per_expert);
    let rows = groups.flat_map(|(group, rows)| (group[0] + rows) as usize..group[1] as usize);
    let of_row = |row: usize| {
        let parts = [(&layer.rows[..], case.row_bytes()), (&layer.scales, case.scale_bytes())];
        let weight = (weights, if weights.is_empty() { 0 } else { size_of::<f32>() });
        parts.into_iter().chain([weight]).flat_map(move |(all, bytes)| &all[row * bytes..][..bytes])
    };
    rows.flat_map(of_row).copied().collect()
}

/// Padding that a dispatch is told to leave holds what was there before, and is zero unless it is told so;
/// everything else is the same. With room, eager, direct and replayed; where not all fits; with every payload,
/// and where the caller multiplies; and in the flat layout, which has no padding, so that nothing changes.
pub fn padding_that_is_left<T: TestBackend>() {
    // Few tokens for many rows of padding.
    let few = Case { alignment: 16, tokens: vec![3, 0, 2], ..Case::new(3) };
    let scaled = Payload::Bytes { row_bytes: 48, scale_bytes: 16 };
    let caller = Case { weighting: Weighting::Caller, ..few.clone() };
    // The hot expert alone fills the rows of its rank.
    let hot = Case { alignment: 4, skew: Skew::Hot(0), tokens: vec![6, 0, 7], ..few.clone() };
    let crowded = hot.capacity(8);
    let flat_rows = Case { alignment: 16, ..flat() };
    for (what, case) in [
        ("values", few.clone()),
        ("two layers", Case { layers: 2, lanes: 2, ..few.clone() }),
        ("quantised", Case { payload: Payload::Fp8, hidden: 144, ..few }),
        ("bytes, the caller multiplies", Case { payload: scaled, ..caller }),
        ("not all fits", crowded),
        ("flat", flat_rows),
    ] {
        for clear_padding in [true, false] {
            let what = format!("{what}, {}", if clear_padding { "cleared" } else { "left" });
            let case = Case { clear_padding, ..case.clone() }.on::<T>();
            let runs = T::on_ranks(case.world(), |env| {
                let rig = Rig::<T>::new(env, &case);
                let graph = rig.record(StepOptions::new()).expect("it can be recorded");
                let held = [rig.run(0, StepMode::Static), rig.replay(&graph, 1)];
                // The first maps rows that are missing, over which the second finds the pattern as well.
                let [_, eager] = [2, 2].map(|step| rig.run_eager(step));
                held.into_iter().chain([eager]).collect::<Vec<_>>()
            });
            let steps = by_step(&runs);
            let dropped = steps[..2].iter().flatten().any(|run| run.record.dropped > 0);
            assert_eq!(dropped, case.capacity.is_some(), "{what}: rows are dropped");
            for (step, runs) in steps.iter().enumerate() {
                let capacity: Vec<u32> = (0..case.world()).map(|rank| case.rows_of(rank)).collect();
                let capacity = (step < 2).then_some(capacity.as_slice());
                StepOracle::new(&case, step, capacity).check(&format!("{what}: step {step}"), runs);
                let found: Vec<u8> = runs.iter().flat_map(|run| padding(&case, run)).collect();
                let byte = if clear_padding { 0 } else { SPOILT };
                assert_eq!(found.is_empty(), case.flat(), "{what}: step {step}, bytes of padding");
                assert!(found.iter().all(|found| *found == byte), "{what}: step {step}, padding");
            }
        }
    }
}

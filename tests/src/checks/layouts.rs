//! How received rows lie, and who multiplies by the weights.

use graph_ep::{DType, Layout, Payload, StepMode, Weighting};

use super::everywhere::conforms;
use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::rig::Rig;

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

//! What rows are made of: values, bytes with scales, FP8 quantised on the way; copied and staged.

use graph_ep::{DType, Dispatch, DispatchError, Payload};

use super::everywhere::conforms;
use super::lanes::looked_at;
use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::rig::Rig;

fn skewed() -> Case {
    Case { skew: Skew::Rotating, layers: 2, tokens: vec![6, 0, 7], ..Case::new(3) }
}

/// Bytes and their scales arrive as they were, in rows of any multiple of 16 bytes; what lies behind
/// the last row of an expert is zero.
pub fn bytes_and_scales_arrive_as_they_were<T: TestBackend>() {
    for (row_bytes, scale_bytes) in [(16, 0), (16, 16), (48, 32), (112, 16), (400, 80)] {
        let payload = Payload::Bytes { row_bytes, scale_bytes };
        let case = Case { payload, hidden: 16, ..skewed() };
        conforms::<T>(&format!("rows of {row_bytes} + {scale_bytes} bytes"), &case);
    }
}

/// Rows, and scales beside them, that the caller wrote into the staging areas.
pub fn staged_rows_and_scales<T: TestBackend>() {
    for payload in [Payload::Values, Payload::Bytes { row_bytes: 80, scale_bytes: 16 }] {
        let case = Case { payload, staging: true, ..skewed() };
        conforms::<T>(&format!("staged {payload:?}"), &case);
    }
}

/// FP8 rows arrive as the reference quantises them, with a scale for each 128 values and zeros behind
/// the last, from every number format.
pub fn fp8_rows_are_quantised_on_the_way<T: TestBackend>() {
    for (dtype, hidden) in
        [(DType::Bf16, 16), (DType::Fp16, 128), (DType::Fp32, 144), (DType::Bf16, 400)]
    {
        let case = Case { payload: Payload::Fp8, dtype, hidden, ..skewed() };
        conforms::<T>(&format!("FP8 from {dtype}, {hidden} values"), &case);
    }
}

/// FP16 and FP32 values in every mode.
pub fn other_number_formats_in_every_mode<T: TestBackend>() {
    for dtype in [DType::Fp16, DType::Fp32] {
        conforms::<T>(&dtype.to_string(), &Case { dtype, hidden: 24, top_k: 3, ..skewed() });
    }
}

/// Partial sums that round to a zero of either sign are added to zero like any others, also where a token
/// has only one of them: on its own rank, or from another.
pub fn sums_that_round_to_zero<T: TestBackend>() {
    for (ranks, top_k, hidden) in [(1, 1, 16), (2, 1, 24), (2, 2, 2048)] {
        let case = Case { dtype: DType::Fp16, tiny: true, top_k, hidden, ..Case::new(ranks) };
        conforms::<T>(&format!("tiny values, {ranks} ranks, top-{top_k}, hidden {hidden}"), &case);
    }
}

/// What a dispatch of rows with scales refuses: no scales, nowhere to receive them, too few, and
/// buffers of other sizes.
pub fn missing_and_short_scales_are_refused<T: TestBackend>() {
    let payload = Payload::Bytes { row_bytes: 32, scale_bytes: 16 };
    let case = Case { payload, ..Case::new(1) };
    T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let layer = rig.layer(0);
        let (rows, scales) = (&layer.rows, layer.received_scales.as_ref());
        refused(&rig, "scales of the tokens", &|a| a.scales = None);
        refused(&rig, "buffer of scales", &|a| a.received_scales = None);
        refused(&rig, "length of the scales", &|a| a.scales = layer.scales.slice().get(0..64));
        refused(&rig, "address of the scales", &|a| {
            a.count = graph_ep::TokenCount::Fixed(4);
            a.scales = layer.scales.slice().get(8..80);
        });
        refused(&rig, "receive buffer", &|a| a.rows = Box::leak(Box::new(scales.unwrap().clone())));
        refused(&rig, "buffer of scales", &|a| {
            a.received_scales = Some(Box::leak(Box::new(rows.clone())));
        });
    });
}

/// Tokens that lie across the staging area, or in it where each row has to be made from another, are
/// refused: the dispatch would read what it has written.
pub fn tokens_across_the_staging_area_are_refused<T: TestBackend>() {
    for payload in [Payload::Values, Payload::Fp8] {
        let case = Case { payload, hidden: 16, ..Case::new(1) };
        T::on_ranks(1, |env| {
            let rig = Rig::<T>::new(env, &case);
            let staging = rig.program().lane(0).expect("it has one").staging();
            let first = if payload == Payload::Fp8 { 0 } else { 16 };
            refused(&rig, "tokens", &|a| {
                a.count = graph_ep::TokenCount::Fixed(2);
                a.tokens = staging.get(first..staging.bytes()).expect("shorter");
            });
        });
    }
}

type Change<'c, B> = &'c dyn Fn(&mut Dispatch<'_, 'static, B>);

/// A dispatch whose arguments were changed is refused by an error that names `argument`.
fn refused<T: TestBackend>(rig: &Rig<T>, argument: &str, change: Change<'_, T::Backend>) {
    let named = looked_at(rig, |program, step| {
        let mut arguments = program.arguments(0)?;
        change(&mut arguments);
        match program.lane(0)?.dispatch(step, &arguments) {
            Err(DispatchError::Argument { argument, .. }) => Ok(argument),
            other => panic!("{argument}: {other:?}"),
        }
    });
    assert!(named.is_some_and(|named| named.contains(argument)), "{argument}: {named:?}");
}

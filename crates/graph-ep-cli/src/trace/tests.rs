//! Files that are read, and files that are refused.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::demand::{initial_capacity_rows, required_rows};
use crate::routing::{Position, RoutingError};

/// A file of the header and the data; `pad` spaces move the data to another alignment.
fn file(header: &str, data: &[u8], pad: usize) -> Vec<u8> {
    let header = header.to_owned() + &" ".repeat(pad);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn parse(bytes: &[u8]) -> Result<Routing, TraceError> {
    read(bytes, "t".into(), "t.safetensors".into())
}

/// The file of the given tensors (name, type, shape, bytes) and metadata.
fn trace(tensors: &[(&str, &str, &[usize], &[u8])], metadata: Value) -> Vec<u8> {
    let (mut header, mut data) = (json!({"__metadata__": metadata}), Vec::new());
    for &(name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        header[name] = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
    }
    file(&header.to_string(), &data, 0)
}

/// One layer of two tokens in two steps, two of four experts each.
const IDS: [u8; 8] = [0, 1, 2, 3, 3, 0, 1, 2];
const SHAPE: &[usize] = &[2, 1, 2, 2];

/// The file of `IDS` and nothing else wrong with it.
fn with_ids(ids: &[u8]) -> Vec<u8> {
    trace(&[("topk_idx", "U8", SHAPE, ids)], json!({"experts": "4"}))
}

/// A file with every tensor that a trace can have, at odd addresses.
fn full() -> Vec<u8> {
    let weights: Vec<u8> = (0..8).flat_map(|i| (i as f32 / 8.0).to_le_bytes()).collect();
    let domains: Vec<u8> = [-1_i64, 1 << 40].into_iter().flat_map(i64::to_le_bytes).collect();
    let steps: Vec<u8> = [7_i32, -9].into_iter().flat_map(i32::to_le_bytes).collect();
    trace(
        &[
            ("odd", "U8", &[1], &[0]),
            ("topk_idx", "U8", SHAPE, &IDS),
            ("topk_weights", "F32", SHAPE, &weights),
            ("step", "I32", &[2], &steps),
            ("domain", "I64", &[2], &domains),
        ],
        json!({"experts": "4", "origin": "a test"}),
    )
}

#[test]
fn everything_a_trace_can_have_is_read() {
    let routing = parse(&full()).unwrap();
    assert_eq!(routing.layer(1, 0).ids, [3, 0, 1, 2]);
    assert_eq!(routing.layer(1, 0).weights, Some(&[0.5, 0.625, 0.75, 0.875][..]));
    assert_eq!([routing.step_label(0), routing.step_label(1)], [Some(7), Some(-9)]);
    assert_eq!([routing.domain(0), routing.domain(1)], [Some(-1), Some(1 << 40)]);
    assert_eq!((routing.name(), routing.origin()), ("t", Some("a test")));
}

#[test]
fn every_id_type_reads_the_same_at_any_alignment() {
    let ids: Vec<i32> = IDS.iter().map(|&id| id.into()).collect();
    let encodings: [(&str, Vec<u8>); 3] = [
        ("U8", IDS.to_vec()),
        ("U16", IDS.iter().flat_map(|&id| u16::from(id).to_le_bytes()).collect()),
        ("I32", ids.iter().flat_map(|id| id.to_le_bytes()).collect()),
    ];
    for (dtype, bytes) in encodings {
        for pad in 0..4 {
            let header = json!({
                "__metadata__": {"experts": "4"},
                "topk_idx": {"dtype": dtype, "shape": SHAPE, "data_offsets": [0, bytes.len()]},
            });
            let routing = parse(&file(&header.to_string(), &bytes, pad)).unwrap();
            assert_eq!([routing.layer(0, 0).ids, routing.layer(1, 0).ids].concat(), ids);
        }
    }
}

#[test]
fn minus_one_is_none_in_i32_and_an_id_beyond_in_u16() {
    let i32s = [0_i32, -1, -1, -1, 3, 0, 1, 2].map(i32::to_le_bytes).concat();
    let routing =
        parse(&trace(&[("topk_idx", "I32", SHAPE, &i32s)], json!({"experts": "4"}))).unwrap();
    assert_eq!(routing.layer(0, 0).ids, [0, -1, -1, -1]);

    let u16s = [0_u16, u16::MAX, 2, 3, 3, 0, 1, 2].map(u16::to_le_bytes).concat();
    let error = parse(&trace(&[("topk_idx", "U16", SHAPE, &u16s)], json!({"experts": "4"})));
    let at = Position { step: 0, layer: 0, token: 0, choice: 1 };
    assert!(matches!(
        error,
        Err(TraceError::Routing { source: RoutingError::ExpertOutOfRange { at: found, id: 65535, .. }, .. })
            if found == at
    ));
}

#[test]
fn wrong_decisions_are_refused_with_file_and_place() {
    let error = parse(&with_ids(&[0, 1, 2, 3, 3, 0, 1, 4])).unwrap_err();
    assert_eq!(error.to_string(), "t.safetensors: its router decisions are invalid");
    assert_eq!(
        std::error::Error::source(&error).unwrap().to_string(),
        "step 1, layer 0, token 1, choice 1: expert 4 does not exist, ids are 0 to 3 of 4 experts"
    );
    let twice = parse(&with_ids(&[0, 1, 2, 2, 3, 0, 1, 3])).unwrap_err();
    assert!(matches!(
        twice,
        TraceError::Routing { source: RoutingError::ExpertTwice { id: 2, .. }, .. }
    ));
    let bytes = [0_i32, -7, 2, 3, 3, 0, 1, 2].map(i32::to_le_bytes).concat();
    let negative = parse(&trace(&[("topk_idx", "I32", SHAPE, &bytes)], json!({"experts": "4"})));
    assert!(matches!(
        negative,
        Err(TraceError::Routing { source: RoutingError::NegativeId { id: -7, .. }, .. })
    ));
}

#[test]
fn zero_dimensions_and_too_many_choices_are_refused() {
    for shape in [[0, 1, 2, 2], [2, 0, 2, 2], [2, 1, 0, 2], [2, 1, 2, 0]] {
        let bytes = trace(&[("topk_idx", "U8", &shape, &[])], json!({"experts": "4"}));
        assert!(matches!(
            parse(&bytes),
            Err(TraceError::Routing { source: RoutingError::Empty { .. }, .. })
        ));
    }
    let one = trace(&[("topk_idx", "U8", SHAPE, &[0; 8])], json!({"experts": "1"}));
    assert!(matches!(
        parse(&one),
        Err(TraceError::Routing { source: RoutingError::TopKExceedsExperts { .. }, .. })
    ));
}

#[test]
fn what_is_no_safetensors_file_is_refused() {
    let mut longer = with_ids(&IDS);
    longer.push(0);
    let cases: [&[u8]; 9] = [
        b"",
        b"short",
        b"\0\0\0\0\0\0\0\0",
        b"PK\x03\x04 this is some other kind of file",
        &u64::MAX.to_le_bytes(),
        &file("[1, 2]", &[], 0),
        &file("{\"topk_idx\": 3}", &[], 0),
        &file("{\"\u{0}\": {}", &[], 0),
        &longer,
    ];
    for bytes in cases {
        let error = parse(bytes).expect_err("not a trace");
        assert!(matches!(error, TraceError::NotSafetensors { .. }), "{bytes:?}: {error}");
    }
    let mut not_text = file("{\"a\": 1}", &[], 0);
    not_text[10] = 0xff;
    assert!(matches!(parse(&not_text), Err(TraceError::NotSafetensors { .. })));
}

#[test]
fn every_truncation_is_an_error() {
    let whole = full();
    let header = usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    for length in 0..whole.len() {
        let error = parse(&whole[..length]).expect_err("cut off");
        if length > 8 {
            let part_expected = if length < 8 + header { "header" } else { "data" };
            assert!(
                matches!(error, TraceError::Truncated { part, .. } if part == part_expected),
                "{length}: {error}"
            );
        }
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let header = |shape: &str, offsets: &str| {
        let text = format!(
            r#"{{"__metadata__":{{"experts":"4"}},"topk_idx":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#
        );
        file(&text, &IDS, 0)
    };
    parse(&header("[2,1,2,2]", "[0,8]")).unwrap();
    for (shape, offsets) in [
        ("[2,1,2,2]", "[0,9]"),
        ("[2,1,2,2]", "[1,9]"),
        ("[2,1,2,2]", "[8,0]"),
        ("[2,1,2,3]", "[0,8]"),
        ("[4294967296,4294967296,1,1]", "[0,8]"),
        ("[4294967296,4294967296,1,1]", "[0,0]"),
        ("[18446744073709551615,1,1,2]", "[0,18446744073709551614]"),
        ("[18446744073709551616,1,1,1]", "[0,8]"),
        ("[-2,1,2,2]", "[0,8]"),
    ] {
        let error = parse(&header(shape, offsets)).expect_err("a lie");
        assert!(matches!(error, TraceError::NotSafetensors { .. }), "{shape} {offsets}: {error}");
    }
    // A size that is possible, but not there: refused after the bytes that are, without memory for
    // the rest.
    let huge = header("[1152921504606846976,1,1,1]", "[0,1152921504606846976]");
    assert!(matches!(
        parse(&huge),
        Err(TraceError::Truncated {
            part: "data",
            expected: 1_152_921_504_606_846_976,
            found: 8,
            ..
        })
    ));
}

#[test]
fn a_key_that_occurs_twice_is_refused() {
    let entry = r#""topk_idx":{"dtype":"U8","shape":[2,1,2,2],"data_offsets":[0,8]}"#;
    let cases = [
        format!(r#"{{"__metadata__":{{"experts":"4"}},{entry},{entry}}}"#),
        format!(r#"{{"__metadata__":{{"experts":"4","experts":"5"}},{entry}}}"#),
        format!(r#"{{"__metadata__":{{"experts":"4"}},"__metadata__":{{}},{entry}}}"#),
    ];
    for header in cases {
        let message = parse(&file(&header, &IDS, 0)).expect_err("twice").to_string();
        assert!(message.contains("occurs twice"), "{message}");
    }
}

#[test]
fn tensors_of_wrong_type_or_shape_are_refused() {
    let experts = json!({"experts": "4"});
    let ids = ("topk_idx", "U8", SHAPE, &IDS[..]);
    let zeros = [0; 64];
    let type_cases = [
        vec![("topk_idx", "F32", SHAPE, &zeros[..32])],
        vec![("topk_idx", "I64", SHAPE, &zeros[..64])],
        vec![ids, ("topk_weights", "F16", SHAPE, &zeros[..16])],
        vec![ids, ("step", "F32", &[2], &zeros[..8])],
        vec![ids, ("domain", "U8", &[2], &zeros[..2])],
    ];
    for tensors in type_cases {
        assert!(matches!(
            parse(&trace(&tensors, experts.clone())),
            Err(TraceError::ElementType { .. })
        ));
    }
    let shape_cases = [
        vec![("topk_idx", "U8", &[2, 2, 2][..], &IDS[..])],
        vec![("topk_idx", "U8", &[1, 2, 1, 2, 2], &IDS)],
        vec![ids, ("topk_weights", "F32", &[2, 1, 2, 1], &zeros[..16])],
        vec![ids, ("topk_weights", "F32", &[8], &zeros[..32])],
        vec![ids, ("step", "I32", &[3], &zeros[..12])],
        vec![ids, ("domain", "I32", &[2, 1], &zeros[..8])],
    ];
    for tensors in shape_cases {
        assert!(matches!(parse(&trace(&tensors, experts.clone())), Err(TraceError::Shape { .. })));
    }
}

#[test]
fn ids_and_experts_must_be_there() {
    let other = parse(&trace(&[("ids", "U8", SHAPE, &IDS)], json!({"experts": "4"}))).unwrap_err();
    assert_eq!(other.to_string(), "t.safetensors: there is no tensor `topk_idx`, only ids");

    let ids = ("topk_idx", "U8", SHAPE, &IDS[..]);
    assert!(matches!(parse(&trace(&[ids], json!({}))), Err(TraceError::NoExperts { .. })));
    for garbage in ["", "four", "+4", "-4", "4.0", " 4", "0x4", "99999999999999999999999"] {
        let error = parse(&trace(&[ids], json!({"experts": garbage}))).unwrap_err();
        assert!(matches!(&error, TraceError::Experts { value, .. } if value == garbage), "{error}");
    }
    // Decimal, but no number of experts that anybody has.
    assert!(matches!(
        parse(&trace(&[ids], json!({"experts": "4000000000"}))),
        Err(TraceError::Routing { source: RoutingError::TooManyExperts { .. }, .. })
    ));
}

#[test]
fn weights_must_be_finite() {
    let mut weights = [0.5_f32; 8];
    weights[5] = f32::NAN;
    let bytes = weights.map(f32::to_le_bytes).concat();
    let error = parse(&trace(
        &[("topk_idx", "U8", SHAPE, &IDS), ("topk_weights", "F32", SHAPE, &bytes)],
        json!({"experts": "4"}),
    ));
    let at = Position { step: 1, layer: 0, token: 0, choice: 1 };
    assert!(matches!(
        error,
        Err(TraceError::Routing { source: RoutingError::WeightNotFinite { at: found, .. }, .. })
            if found == at
    ));
}

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path().join("none.safetensors"), directory.path().to_owned()] {
        let error = load(&path).unwrap_err();
        assert!(matches!(error, TraceError::Read { .. }));
        assert!(error.to_string().starts_with(&path.display().to_string()));
    }
}

#[test]
fn a_file_on_disk_is_named_after_itself() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mine.safetensors");
    std::fs::write(&path, full()).unwrap();
    let routing = load(&path).unwrap();
    assert_eq!(routing.name(), "mine");
    assert_eq!(routing.steps(), 2);
}

/// The built-in trace is the input of the documented main job: its size and its skew are promises.
#[test]
fn the_built_in_trace_keeps_its_promises() {
    assert!(BUILT_IN.len() <= 1_100_000);
    let routing = built_in().unwrap();
    assert_eq!((routing.steps(), routing.layers(), routing.tokens()), (64, 4, 512));
    assert_eq!((routing.experts(), routing.top_k()), (64, 8));
    assert_eq!((routing.step_label(63), routing.domain(63)), (Some(1199), Some(2)));
    assert!(routing.origin().unwrap().contains("language model"));

    let (ranks, alignment) = (8, 16);
    let required = required_rows(&routing, ranks, alignment);
    let max_tokens = routing.shards(ranks).unwrap().max_tokens();
    let mut capacity = vec![initial_capacity_rows(1.25, max_tokens, 8, alignment).unwrap(); ranks];
    let mut overflowed = 0;
    for step in &required {
        overflowed += usize::from(step.iter().zip(&capacity).any(|(rows, have)| rows > have));
        for (have, &rows) in capacity.iter_mut().zip(step) {
            *have = rows.max(*have);
        }
    }
    assert_eq!(overflowed, 22, "steps that overflow when growth is exact");
}

proptest! {
    /// Whatever is done to a good file, it is read or refused: no panic, no memory beyond its size.
    #[test]
    fn damaged_files_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = full();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Err(error) = parse(&bytes) {
            prop_assert!(error.to_string().starts_with("t.safetensors: "));
        }
    }

    /// Digits are where a header can lie without ceasing to be JSON.
    #[test]
    fn headers_of_other_numbers_do_no_harm(
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..12),
    ) {
        let mut bytes = full();
        let places: Vec<usize> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
        for (place, digit) in digits {
            bytes[places[place.index(places.len())]] = digit;
        }
        if let Err(error) = parse(&bytes) {
            prop_assert!(error.to_string().starts_with("t.safetensors: "));
        }
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        prop_assert!(parse(&bytes).is_err());
    }
}

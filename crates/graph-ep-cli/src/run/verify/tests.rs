use clap::Parser;
use graph_ep::token_dispatch::reference::window::{dropped_rows, items, longest_prefix};

use super::*;
use crate::args::{Cli, Command};

fn plan() -> Plan {
    let line = "graph-ep run --workload balanced --ranks 2 --steps 1 --hidden 16 --dtype fp32";
    let cli = Cli::try_parse_from(line.split_whitespace()).expect("arguments");
    let Command::Run(args) = cli.command else { panic!("another command") };
    Plan::new(&args).expect("a plan")
}

/// The first tokens of rank 0, and what should come out of them.
fn tokens(verifier: &Verifier<'_>, tokens: usize) -> (LayerInput, Vec<u8>) {
    let input = LayerInput::new(verifier.plan, 0, 0, 0..tokens);
    let topk: Vec<i64> = input.ids.iter().map(|id| i64::from(*id)).collect();
    let source = Source { values: &input.values, topk: &topk, weights: &input.weights };
    let exchange = verifier.exchange(source).expect("an exchange");
    let rows = exact(&exchange, expert, &Processed::all()).expect("outputs");
    let mut output = vec![0; size_of_val(&input.values[..])];
    dtype(Dtype::Fp32).encode(&rows[0], &mut output);
    (input, output)
}

#[test]
fn parts_find_what_the_whole_finds() {
    let plan = plan();
    let verifier = Verifier::new(&plan, 0).expect("a verifier");
    let (input, output) = tokens(&verifier, 7);
    let topk: Vec<i64> = input.ids.iter().map(|id| i64::from(*id)).collect();
    let source = Source { values: &input.values, topk: &topk, weights: &input.weights };
    // One in the first token, one in the last, which may be in a part that is shorter.
    let mut wrong = output.clone();
    for at in [3, 6 * 16] {
        wrong[at * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    for parts in [0, 1, 2, 3, 4, 7, 64] {
        let found = |output: &[u8], eager: Option<&[u8]>| {
            verifier.check_parts(source, output, eager, parts).expect("it can be compared")
        };
        let all = |mismatched| Tally { verified: 7 * 16, mismatched };
        assert_eq!(found(&output, Some(&output)), all(0), "{parts} parts");
        assert_eq!(found(&output, None), all(0), "{parts} parts, without eager mode");
        assert_eq!(found(&wrong, Some(&wrong)), all(2), "{parts} parts: the oracle");
        assert_eq!(found(&output, Some(&wrong)), all(2), "{parts} parts: eager mode");
        assert_eq!(found(&wrong, None), all(2), "{parts} parts: the reference");
    }
}

#[test]
fn where_a_value_lacks_or_is_one_too_many_none_is_right() {
    let plan = plan();
    let verifier = Verifier::new(&plan, 0).expect("a verifier");
    let (input, output) = tokens(&verifier, 7);
    let checked = |input, output, bitwise| {
        verifier.check(0, 0, input, output, bitwise).expect("it can be compared")
    };
    let all = |values| Tally { verified: values, mismatched: values };
    let eager = Bitwise::Eager(&output);
    assert_eq!(checked(&input, &output, eager), Tally { verified: 112, mismatched: 0 });
    let longer = [&output[..], &[0; 4]].concat();
    let row = &output[..16 * 4];
    for (output, bitwise) in [
        (&output[..111 * 4], eager),
        (row, eager),
        (row, Bitwise::Eager(row)),
        (&output, Bitwise::Eager(row)),
        (&output, Bitwise::Eager(&[])),
        (row, Bitwise::Truncated { capacity: 1 << 20 }),
    ] {
        assert_eq!(checked(&input, output, bitwise), all(112), "{} bytes", output.len());
    }
    assert_eq!(checked(&input, &longer, eager), all(113));
    let none = LayerInput::default();
    assert_eq!(checked(&none, &[], Bitwise::Eager(&[])), Tally::default());
    assert_eq!(checked(&none, row, Bitwise::Eager(&[])), all(16));
}

/// What comes out for each rank in layer 0 of step 0 where every receiver has `capacity` rows, by the
/// reference for all ranks together; beside it, how many rows that drops.
fn truncated(plan: &Plan, inputs: &[LayerInput], capacity: usize) -> (Vec<Vec<u8>>, usize) {
    let map = ExpertMap::contiguous(plan.routing.experts(), inputs.len()).expect("a map");
    let top_k = plan.routing.top_k();
    let wide = |ids: &[i32]| ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>();
    let topk: Vec<Vec<i64>> = inputs.iter().map(|input| wide(&input.ids)).collect();
    let ids: Vec<&[i64]> = topk.iter().map(Vec::as_slice).collect();
    let items: Vec<_> =
        (0..inputs.len()).map(|receiver| items(&ids, top_k, &map, receiver)).collect();
    let taken: Vec<_> =
        items.iter().map(|items| longest_prefix(items, capacity, plan.args.alignment)).collect();
    let dropped = items.iter().zip(&taken).map(|(items, taken)| dropped_rows(items, *taken)).sum();
    let sources = inputs
        .iter()
        .zip(&ids)
        .map(|(input, topk)| Source { values: &input.values, topk, weights: &input.weights })
        .collect();
    let exchange = Exchange::new(&map, Format::Fp32, top_k, plan.args.hidden, sources);
    let processed = Processed::prefixes(&items, &taken).expect("prefixes");
    let rows = exact(&exchange.expect("an exchange"), expert, &processed).expect("outputs");
    let bytes = |rows: &Vec<f32>| rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    (rows.iter().map(bytes).collect(), dropped)
}

#[test]
fn what_is_dropped_has_to_lack_and_nothing_else() {
    let plan = plan();
    let inputs = [0, 1].map(|rank| LayerInput::new(&plan, 0, 0, plan.shards.range(0, rank)));
    // 512 tokens with four experts on each rank, 2048 rows: the cut of the smaller lies in rank 0, that
    // of the larger in rank 1.
    let capacities = [800, 1500];
    let [(few, lost), (more, fewer)] = capacities.map(|rows| truncated(&plan, &inputs, rows));
    let (all, none) = truncated(&plan, &inputs, 1 << 20);
    assert!(lost > fewer && fewer > 0 && none == 0, "{lost}, {fewer}, {none} rows dropped");
    let differ = |left: &[u8], right: &[u8]| {
        left.chunks(4).zip(right.chunks(4)).filter(|(left, right)| left != right).count() as u64
    };
    for (rank, input) in inputs.iter().enumerate() {
        let verifier = Verifier::new(&plan, rank).expect("a verifier");
        let mismatched = |output: &[u8], capacity| {
            let bitwise = Bitwise::Truncated { capacity };
            let tally = verifier.check(0, 0, input, output, bitwise).expect("it can be compared");
            assert_eq!(tally.verified, input.values.len() as u64);
            tally.mismatched
        };
        for (output, capacity) in [(&few, 800), (&more, 1500), (&all, 1 << 20)] {
            let right = &output[rank];
            assert_eq!(mismatched(right, capacity), 0, "rank {rank}, {capacity} rows");
            // In the first value its last bit, which the oracle admits; in the last value its sign.
            for (at, bits) in [(0, 1), (right.len() - 1, 0x80)] {
                let mut wrong = right.clone();
                wrong[at] ^= bits;
                assert_eq!(mismatched(&wrong, capacity), 1, "rank {rank}, {capacity} rows");
            }
            // Rows that are there too many, or too few.
            for other in [&few, &more, &all] {
                let found = mismatched(&other[rank], capacity);
                assert_eq!(found, differ(&other[rank], right), "rank {rank}, {capacity} rows");
            }
        }
    }
    assert!(differ(&few[0], &all[0]) > 0, "rank 0 loses nothing");
    assert_eq!(differ(&more[0], &all[0]), 0, "the cut of 1500 rows does not lie in rank 1");
    assert!(differ(&more[1], &all[1]) > 0, "rank 1 loses nothing");
}

//! Sizes at both ends, and everything that inputs may be.

use graph_ep::ep_context::FaultKind;
use graph_ep::synthetic::SyntheticExperts;
use graph_ep::{
    DType, DispatchError, Error, Layout, Payload, Phase, Received, RowSet, StepOptions, TokenCount,
    TopKIds,
};

use super::lanes::looked_at;
use crate::backend::{TestBackend, enough_ranks};
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::by_step;
use crate::rig::Rig;

/// Three steps of `case`, eager and replayed, are what the oracle says.
fn conforms<T: TestBackend>(what: &str, case: &Case) {
    let case = &case.clone().on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        let replayed = (0..2).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>();
        replayed.into_iter().chain([rig.run_eager(2)]).collect::<Vec<_>>()
    });
    let rows: Vec<u32> = (0..case.world()).map(|rank| case.rows_of(rank)).collect();
    for (step, runs) in by_step(&runs).iter().enumerate() {
        let capacity = (step < 2).then_some(rows.as_slice());
        StepOracle::new(case, step, capacity).check(&format!("{what}: step {step}"), runs);
    }
}

/// Groups of 1 to 16 ranks, as far as the backend has them.
pub fn one_to_sixteen_ranks<T: TestBackend>() {
    for world in [1, 2, 3, 5, 8, 16] {
        if !enough_ranks::<T>(world) {
            continue;
        }
        conforms::<T>(&format!("{world} ranks"), &Case::new(world));
    }
}

/// Experts that do not divide by the ranks, so that ranks hold different numbers of them.
pub fn experts_that_do_not_divide<T: TestBackend>() {
    for (world, experts) in [(3, 4), (3, 5), (4, 7)] {
        conforms::<T>(&format!("{experts} on {world}"), &Case { experts, ..Case::new(world) });
    }
}

/// Experts of a rank that are not neighbours, and a rank that holds none.
pub fn experts_placed_by_a_list<T: TestBackend>() {
    let base = Case { top_k: 3, ..Case::new(3) };
    for placement in [[2, 0, 1, 0, 2, 1], [2, 2, 0, 2, 0, 0]] {
        let placement = Some(placement.to_vec());
        conforms::<T>(&format!("{placement:?}"), &Case { placement, ..base.clone() });
    }
}

/// One choice for each token, and every expert for each token.
pub fn top_one_and_top_all<T: TestBackend>() {
    for top_k in [1, 6] {
        conforms::<T>(&format!("top {top_k}"), &Case { top_k, ..Case::new(3) });
    }
}

/// Ranks without tokens take part; so does a group in which nobody has any.
pub fn ranks_without_tokens<T: TestBackend>() {
    for tokens in [[0, 6, 1], [3, 0, 0], [0, 0, 0]] {
        conforms::<T>(&format!("{tokens:?}"), &Case { tokens: tokens.to_vec(), ..Case::new(3) });
    }
}

/// Ids that are −1, out of range or repeated count as none, and are counted.
pub fn bad_ids_are_counted_and_ignored<T: TestBackend>() {
    for wide_ids in [false, true] {
        let case =
            Case { bad_ids: true, wide_ids, top_k: 4, tokens: vec![20, 9, 13], ..Case::new(3) };
        let bad = StepOracle::new(&case, 0, None).layers()[0].bad_ids.clone();
        assert!(bad.iter().all(|(invalid, repeated)| *invalid > 0 && *repeated > 0), "{bad:?}");
        conforms::<T>(&format!("wide: {wide_ids}"), &case);
    }
}

/// Ids of eight bytes.
pub fn wide_ids<T: TestBackend>() {
    conforms::<T>("i64", &Case { wide_ids: true, ..Case::new(3) });
}

/// Without weights every choice counts once.
pub fn no_weights<T: TestBackend>() {
    conforms::<T>("no weights", &Case { weights: false, ..Case::new(3) });
}

/// Tokens that the caller wrote into the staging area, in every layer of a step.
pub fn staged_tokens<T: TestBackend>() {
    conforms::<T>("staged", &Case { staging: true, layers: 2, ..Case::new(3) });
}

/// Every alignment from 1 to 256.
pub fn alignments<T: TestBackend>() {
    for alignment in (0..=8).map(|power| 1 << power) {
        conforms::<T>(&format!("alignment {alignment}"), &Case { alignment, ..Case::new(2) });
    }
}

/// BF16, FP16 and FP32, in rows of one 16-byte piece and of many.
pub fn number_formats<T: TestBackend>() {
    for dtype in [DType::Bf16, DType::Fp16, DType::Fp32] {
        for hidden in [8, 200] {
            let case = Case { dtype, hidden, top_k: 4, ..Case::new(3) };
            conforms::<T>(&format!("{dtype}, {hidden} values"), &case);
        }
    }
}

/// One graph serves batches of any length up to the one it was recorded for.
pub fn device_counts_below_the_most<T: TestBackend>() {
    let case = Case {
        device_count: true,
        tokens: vec![9, 4, 6],
        layers: 2,
        skew: Skew::Rotating,
        ..Case::new(3)
    }
    .on::<T>();
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        (0..6).map(|step| rig.replay(&graph, step)).collect::<Vec<_>>()
    });
    let rows = vec![case.worst_case(); case.world()];
    for (step, runs) in by_step(&runs).iter().enumerate() {
        StepOracle::new(&case, step, Some(&rows)).check(&format!("step {step}"), runs);
    }
}

/// A device word above the most is a fault of that rank, which every rank is told.
pub fn more_tokens_than_the_most_are_a_fault<T: TestBackend>() {
    let case = Case { device_count: true, ..Case::new(3) }.on::<T>();
    let faults = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.write(0);
        if rig.rank() == 1 {
            rig.group.write(&rig.layer(0).count, &6_u32.to_le_bytes()).expect("fits");
        }
        let number = rig.launch(StepOptions::new()).expect("it is queued");
        match rig.wait(number) {
            Err(DispatchError::Fault(fault)) => {
                assert_eq!(rig.group.context().fault(), Some(fault));
                (
                    fault.culprit.0,
                    fault.phase == Phase::Dispatch,
                    fault.kind == FaultKind::TooManyTokens,
                )
            }
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(faults, vec![(1, true, true); case.world()]);
}

/// Arguments that are too large, too short or misplaced are refused when they are given, by an error
/// that names the rank and the argument; nothing is queued.
pub fn wrong_arguments_are_refused<T: TestBackend>() {
    let case = Case::new(2);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let rank = rig.group.context().rank();
        let program = rig.program();
        let layer = rig.layer(0);
        let row = case.hidden * case.dtype.bytes();
        let refused =
            |what: &str, change: &dyn Fn(&mut graph_ep::Dispatch<'_, 'static, T::Backend>)| {
                // Recorded, so that what is wrongly accepted never runs.
                let recorded = graph_ep::StepGraph::record(
                    rig.group.dispatcher(),
                    rig.group.stream(),
                    StepOptions::new(),
                    |step| {
                        let mut arguments = program.arguments(0)?;
                        change(&mut arguments);
                        match program.lane(0)?.dispatch(step, &arguments) {
                            Err(DispatchError::Argument { rank: named, .. }) if named == rank => {
                                Err("refused".into())
                            }
                            other => panic!("{what}: {other:?}"),
                        }
                    },
                );
                assert!(matches!(recorded, Err(graph_ep::CaptureError::Body { .. })), "{what}");
            };
        refused("six tokens", &|a| a.count = TokenCount::Fixed(6));
        refused("a word of two bytes", &|a| {
            a.count = TokenCount::Device(layer.count.slice().get(0..2).expect("shorter"), 5);
        });
        refused("four rows", &|a| {
            a.tokens = layer.tokens.slice().get(0..4 * row).expect("shorter")
        });
        refused("rows at an odd place", &|a| {
            a.count = TokenCount::Fixed(4);
            a.tokens = layer.tokens.slice().get(8..5 * row).expect("shorter");
        });
        refused("too few ids", &|a| {
            a.topk_ids = TopKIds::I32(layer.ids.slice().get(0..39).expect("shorter"));
        });
        refused("narrow ids as wide ones", &|a| a.topk_ids = TopKIds::I64(layer.ids.slice()));
        refused("too few weights", &|a| {
            a.topk_weights = Some(layer.weights.slice().get(0..36).expect("shorter"));
        });
        let other = graph_ep::RowSet::new(rig.group.context(), rig.group.stream(), "other", 8, 8)
            .expect("memory");
        let foreign = other.add("foreign", row).expect("memory");
        refused("rows of another set", &|a| {
            // The handle stays that of the case.
            a.rows = Box::leak(Box::new(foreign.clone()));
        });
    });
}

/// Ids, weights and counts that do not lie at multiples of their size are refused: a kernel loads
/// them as whole words.
pub fn misaligned_words_are_refused<T: TestBackend>() {
    let case = Case { tokens: vec![4], ..Case::new(1) };
    T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let layer = rig.layer(0);
        type Change<'c, B> = &'c dyn Fn(&mut graph_ep::Dispatch<'_, 'static, B>);
        let changes: [(&str, Change<'_, T::Backend>); 3] = [
            ("ids", &|a| {
                a.count = TokenCount::Fixed(3);
                a.topk_ids = TopKIds::I32(layer.ids.slice().get(2..32).expect("shorter"));
            }),
            ("weights", &|a| {
                a.count = TokenCount::Fixed(3);
                a.topk_weights = Some(layer.weights.slice().get(1..32).expect("shorter"));
            }),
            ("count", &|a| {
                let word = layer.ids.slice().get(1..5).expect("shorter");
                a.count = TokenCount::Device(word, 4);
            }),
        ];
        for (what, change) in changes {
            let accepted = looked_at(&rig, |program, step| {
                let mut arguments = program.arguments(0)?;
                change(&mut arguments);
                Ok(program.lane(0)?.dispatch(step, &arguments).is_ok())
            });
            assert_eq!(accepted, Some(false), "misaligned {what} were accepted");
        }
    });
}

/// A combine into an output that has fewer rows than the dispatch had tokens is refused: the reduce
/// would write behind its end.
pub fn a_short_output_is_refused<T: TestBackend>() {
    let case = Case::new(1);
    T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let layer = rig.layer(0);
        let row = case.hidden * case.dtype.bytes();
        let accepted = looked_at(&rig, |program, step| {
            program.dispatch(step, 0)?;
            let arguments = graph_ep::Combine {
                handle: &layer.handle,
                expert_rows: layer.results.slice(),
                output: layer.output.slice().get(0..4 * row).expect("shorter"),
            };
            Ok(program.lane(0)?.combine(step, &arguments).is_ok())
        });
        assert_eq!(accepted, Some(false), "an output of four rows for five tokens was accepted");
    });
}

/// A combine of rows that grow with another capacity than the handle's is refused: the handle may bring
/// more rows than there is memory for. So are rows of its own set that are too short for sums.
pub fn rows_that_may_lack_memory_are_refused<T: TestBackend>() {
    let case = Case { backward: true, ..Case::new(1).capacity(4) };
    T::on_ranks(1, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (layer, group) = (rig.layer(0), &rig.group);
        let (row, most) = (case.sum_bytes(), group.rows().max_rows());
        let other = graph_ep::RowSet::new(group.context(), group.stream(), "other", 1, 2 * most);
        let foreign = other.and_then(|set| set.add("foreign", row)).expect("memory").slice();
        let short = group.rows().add("short", row / 2).expect("memory").slice();
        for (what, rows) in [("foreign", &foreign), ("short", &short)] {
            assert!(rows.bytes() >= 4 * row, "{what}: as far as addresses go");
            let accepted = looked_at(&rig, |program, step| {
                program.dispatch(step, 0)?;
                let lane = program.lane(0)?;
                let combine = graph_ep::Combine {
                    handle: &layer.handle,
                    expert_rows: rows.clone(),
                    output: layer.output.slice(),
                };
                let backward = graph_ep::token_dispatch::CombineBackward {
                    handle: &layer.handle,
                    output_grads: layer.output.slice(),
                    row_grads: rows.clone(),
                    expert_rows: None,
                };
                let combined = lane.combine(step, &combine).is_ok();
                Ok((combined, lane.combine_backward(step, &backward).is_ok()))
            });
            assert_eq!(accepted, Some((false, false)), "{what} rows were accepted");
        }
    });
}

/// Settings out of range are refused on each rank by itself, before anything is allocated.
pub fn settings_out_of_range_are_refused<T: TestBackend>() {
    let good = Case::new(2);
    let bad = [
        ("hidden", Case { hidden: 7, ..good.clone() }),
        ("top_k", Case { top_k: 0, ..good.clone() }),
        ("top_k", Case { top_k: 5, ..good.clone() }),
        ("alignment", Case { alignment: 3, capacity: Some(vec![8; 2]), ..good.clone() }),
        ("alignment", Case { alignment: 0, capacity: Some(vec![8; 2]), ..good.clone() }),
        ("lanes", Case { lanes: 0, ..good.clone() }),
        ("clear_padding", Case { clear_padding: false, backward: true, ..good.clone() }),
    ];
    for (field, case) in bad {
        let told = T::on_ranks(2, |env| {
            let builder = case.builder(env.rank());
            env.build(&builder).expect_err("a setting is out of range").to_string()
        });
        assert!(told.iter().all(|text| text.contains(field)), "{field}: {told:?}");
    }
}

/// The synthetic experts read values that are grouped by expert, as long as those of their group: whatever
/// else a group or a dispatch receives is refused.
pub fn synthetic_experts_refuse_what_they_cannot_read<T: TestBackend>() {
    let values = Case::new(2);
    let bytes = Payload::Bytes { row_bytes: 16, scale_bytes: 0 };
    let others = [
        ("payload", Case { payload: bytes, ..values.clone() }),
        ("payload", Case { payload: Payload::Fp8, hidden: 16, ..values.clone() }),
        ("layout", Case { layout: Layout::Flat, ..values.clone() }),
    ];
    for (field, case) in others {
        T::on_ranks(2, |env| {
            let builder = case.builder(env.rank());
            let group = env.build(&builder).expect("the group is built");
            match SyntheticExperts::new(&group) {
                Err(Error::Dispatch(DispatchError::Config { field: named, .. })) => {
                    assert_eq!(named, field);
                }
                other => panic!("{other:?}"),
            }
        });
    }
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &values);
        let experts = SyntheticExperts::new(&rig.group).expect("it has what they read");
        let layer = rig.layer(0);
        let short = rig.group.rows().add("short rows", 8).expect("memory");
        let apart = RowSet::new(rig.group.context(), rig.group.stream(), "apart", 1, 1);
        let apart = apart.and_then(|set| set.add("rows of another set", 16)).expect("memory");
        for (rows, outputs, field) in [
            (&short, &layer.results, "row"),
            (&layer.rows, &short, "row"),
            (&apart, &layer.results, "row set"),
            (&layer.rows, &apart, "row set"),
        ] {
            let row_limit = rig.group.rows().capacity();
            let handle = &layer.handle;
            let received = Received { rows, scales: None, outputs, handle, row_limit };
            let refused = experts.queue(&rig.direct(), &received).expect_err("wrong rows");
            assert!(refused.to_string().contains(field), "{refused}");
        }
    });
}

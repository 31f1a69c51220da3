//! Building a group: what differs, who is missing, where memory ends; and what it holds when built.

use std::time::Duration;

use graph_ep::{
    DType, Deadlines, Error, ExpertParallelBuilder, Phase, Rank, RecoverySettings,
    RoutingDependence, StepMode, StepOptions,
};

use crate::backend::{PATIENCE, TestBackend};
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::rig::Rig;

/// A setting that differs between ranks fails on all of them, naming the field, both values and who
/// has them.
pub fn settings_that_differ_are_named<T: TestBackend>() {
    let case = Case::new(3).on::<T>();
    let last = case.world() - 1;
    let placed = |placement: &[usize]| Case { placement: Some(placement.to_vec()), ..case.clone() };
    let tokens = |tokens: usize| Case { tokens: vec![tokens; case.world()], ..case.clone() };
    let differ: [(&str, Case, &str, &str); 10] = [
        ("hidden", Case { hidden: 16, ..case.clone() }, "8", "16"),
        ("top_k", Case { top_k: 3, ..case.clone() }, "2", "3"),
        ("max_tokens", tokens(7), "5", "7"),
        ("alignment", Case { alignment: 8, ..case.clone() }, "4", "8"),
        ("clear_padding", Case { clear_padding: false, ..case.clone() }, "true", "false"),
        ("dtype", Case { dtype: DType::Fp16, ..case.clone() }, "bf16", "fp16"),
        (
            "experts",
            placed(&[0, 1, 0, 1, 2, 2][..case.experts]),
            "0.0,0.1,1.0,1.1",
            "0.0,1.0,0.1,1.1",
        ),
        ("lanes", Case { lanes: 2, ..case.clone() }, "1", "2"),
        (
            "routing",
            Case { routing: RoutingDependence::Dependent, ..case.clone() },
            "Independent",
            "Dependent",
        ),
        ("first_epoch", Case { first_epoch: 9, ..case.clone() }, "0", "9"),
    ];
    for (field, other, first, second) in differ {
        let told = T::on_ranks(case.world(), |env| {
            let of_rank = if env.rank().index() == last { &other } else { &case };
            let builder = of_rank.builder(env.rank());
            env.build(&builder).expect_err("a setting differs").to_string()
        });
        assert!(told.iter().all(|text| *text == told[0]), "{field}: {told:?}");
        for part in [field, first, second, "rank 0", &format!("rank {last}")] {
            assert!(told[0].contains(part), "{field}: {part:?} is not in {:?}", told[0]);
        }
    }
}

/// A rank that does not come to set up is named by all others, in time. It stays, so that it has not
/// left, until they have given up.
pub fn a_rank_missing_from_set_up_is_named<T: TestBackend>() {
    let case = Case::new(4).on::<T>();
    let missing = Rank::from_index(case.world() - 1);
    let told = T::on_ranks(case.world(), |env| {
        if env.rank() == missing {
            // Whether it leaves before or after their deadline, it is the one to name.
            std::thread::sleep(Duration::from_millis(600));
            return missing.to_string();
        }
        let deadlines = Deadlines::all(PATIENCE).with(Phase::Setup, Duration::from_millis(300));
        let builder = case.builder(env.rank()).deadlines(deadlines);
        env.build(&builder).expect_err("a rank is missing").to_string()
    });
    assert!(told.iter().all(|text| text.contains(&missing.to_string())), "{told:?}");
}

/// A device that is too small on one rank fails the set-up on all ranks, in the same words, wherever
/// memory ends; with enough of it the set-up succeeds.
pub fn memory_that_runs_out_in_set_up_fails_on_all_ranks<T: TestBackend>() {
    let case = Case { lanes: 2, hidden: 64, ..Case::new(3) }.on::<T>();
    let mut refused = 0;
    for quarter in 0.. {
        let bytes = quarter * 16 * 1024;
        assert!(bytes < 64 << 20, "no amount of memory suffices");
        let told = T::on_ranks(case.world(), |env| {
            let builder = case.builder(env.rank());
            if env.rank() == Rank(1) {
                env.memory.set_limit(Some(bytes));
            }
            env.build(&builder).map(drop).map_err(|error| error.to_string())
        });
        if told.iter().all(Result::is_ok) {
            break;
        }
        refused += 1;
        let texts: Vec<&String> = told.iter().filter_map(|told| told.as_ref().err()).collect();
        assert_eq!(texts.len(), case.world(), "{bytes} bytes: {told:?}");
        assert!(texts.iter().all(|text| *text == texts[0]), "{bytes} bytes: {texts:?}");
        let text = texts[0];
        assert!(text.contains("rank 1") && text.contains("out of memory"), "{bytes} bytes: {text}");
    }
    assert!(refused > 2, "memory ended in several places");
}

/// The same for the limit that the library keeps: below what the report says it is refused with both
/// numbers, at that it is enough.
pub fn the_memory_report_is_what_is_charged<T: TestBackend>() {
    for case in [
        Case::new(3),
        Case { lanes: 3, layers: 1, experts: 7, hidden: 200, ..Case::new(3) },
        Case { dtype: DType::Fp32, ..Case::new(3) }.capacity(52),
    ] {
        let case = case.on::<T>();
        T::on_ranks(case.world(), |env| {
            let (rank, builder) = (env.rank(), T::settings(&case.builder(env.rank())));
            let report = builder.memory_report(rank, case.world()).expect("settings in range");
            let group = env.build(&builder).expect("there is no limit");
            let account = group.context().account();
            assert_eq!(account.used(), report.budget_bytes(), "{rank}: {report}");
            assert_eq!(report.budget_rows, group.rows().capacity());
            assert_eq!(report.worst_case_rows, group.dispatcher().worst_case_rows());
            // At the worst case the set grows to, it is the other column.
            if report.worst_case_rows > report.budget_rows {
                let growth = group.rows().plan(report.worst_case_rows).expect("it is reserved");
                let queue = graph_ep::Queue::direct(group.context().backend(), group.stream());
                // SAFETY: no step was queued yet.
                unsafe { growth.commit(&queue) }.expect("the stream is alive");
                assert_eq!(account.used(), report.worst_case_bytes(), "{rank}: {report}");
            }
        });
    }
}

/// A limit below the report is refused before anything is allocated, with both numbers; a limit of
/// exactly the report is enough.
pub fn a_memory_limit_is_held_to_the_report<T: TestBackend>() {
    let case = Case::new(2);
    let needed = |builder: &ExpertParallelBuilder, rank| {
        builder.memory_report(rank, 2).expect("settings in range").budget_bytes()
    };
    T::on_ranks(2, |env| {
        let builder = T::settings(&case.builder(env.rank()));
        let limit = needed(&builder, env.rank()) - 1;
        match env.build(&builder.memory_limit(Some(limit))) {
            Err(Error::MemoryLimit { needed: told, limit: kept, capacity_rows }) => {
                assert_eq!((told, kept), (limit + 1, limit));
                assert_eq!(capacity_rows, case.rows_of(0));
            }
            other => panic!("{other:?}"),
        }
    });
    T::on_ranks(2, |env| {
        let builder = T::settings(&case.builder(env.rank()));
        let limit = needed(&builder, env.rank());
        let group = env.build(&builder.memory_limit(Some(limit))).expect("it is enough");
        assert_eq!(group.context().account().used(), limit);
    });
}

/// A limit that one rank alone has refuses there, and lets nobody wait for that rank.
pub fn a_memory_limit_of_one_rank_stops_all<T: TestBackend>() {
    let case = Case::new(3).on::<T>();
    let told = T::on_ranks(case.world(), |env| {
        let mut builder = case.builder(env.rank());
        if env.rank() == Rank(1) {
            builder = builder.memory_limit(Some(1));
        }
        env.build(&builder).expect_err("a rank cannot take part").to_string()
    });
    assert!(told[1].contains("limit"), "{told:?}");
    assert!(told.iter().all(|text| text.contains("rank 1") || text == &told[1]), "{told:?}");
}

/// A clean step makes no blocking call to the device and allocates no memory of it, also when it is
/// replayed many times.
pub fn clean_steps_neither_block_nor_allocate<T: TestBackend>() {
    let case = Case { layers: 2, ..Case::new(3) }.on::<T>();
    T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        rig.step(&mut runner, 0).expect("it fits");
        let account = rig.group.context().account().clone();
        let before = (account.used(), account.peak(), rig.memory.used(), rig.memory.peak());
        for step in 1..6 {
            let ran = rig.step(&mut runner, step).expect("it fits");
            assert_eq!((ran.blocking_calls, ran.recordings, ran.growths), (0, 0, 0));
        }
        let after = (account.used(), account.peak(), rig.memory.used(), rig.memory.peak());
        assert_eq!(before, after);
    });
}

/// When everything of a rank is dropped, all of its device memory is free again: after steps of every
/// kind, with a graph alive to the last.
pub fn a_group_that_is_dropped_leaves_nothing<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(0), ..Case::new(2) }.capacity(4);
    T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (device, account) = (rig.memory.clone(), rig.group.context().account().clone());
        let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
        rig.step(&mut runner, 0).expect("it recovers");
        rig.run_eager(1);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        rig.replay(&graph, 2);
        assert!(device.used() > 0 && account.used() > 0);
        drop((runner, rig));
        assert!(device.used() > 0, "the graph keeps what it uses");
        drop(graph);
        assert_eq!((account.used(), device.used()), (0, 0));
    });
}

/// Memory behind a capacity that shrank is given back once nothing uses it, and not before.
pub fn trimming_waits_for_every_user<T: TestBackend>() {
    // Four rows of two-byte values fill a page.
    let case = Case { hidden: T::PAGE_BYTES / (4 * 2), tokens: vec![2; 2], ..Case::new(2) };
    let runs = T::on_ranks(2, |env| {
        let rig = Rig::<T>::new(env, &case);
        let (rows, account) = (rig.group.rows().clone(), rig.group.context().account().clone());
        let full = account.used();
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        rig.commit(rows.plan(4).expect("fewer rows"));
        rows.trim().expect_err("a graph holds them");
        assert_eq!(account.used(), full);
        drop(graph);
        graph_ep::Backend::synchronize(rig.group.context().backend(), rig.group.stream())
            .expect("idle");
        rows.trim().expect("nothing holds them");
        assert!(account.used() < full);
        let most = rows.max_rows();
        rig.commit(rows.plan(most).expect("reserved"));
        assert_eq!(account.used(), full);
        rig.meet("the memory is there again");
        rig.run(0, StepMode::Static)
    });
    StepOracle::new(&case, 0, None).check_outputs("grown again", &runs);
}

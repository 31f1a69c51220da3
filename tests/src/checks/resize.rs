//! Groups that are made again for more tokens than were thought of at the start.

use graph_ep::token_dispatch::ExpertHome;
use graph_ep::{
    Backend, ExpertMap, ExpertParallel, ExpertParallelBuilder, Rank, StepMode, StepOptions,
};

use crate::backend::{RankEnv, TestBackend};
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{RankRun, by_step};
use crate::rig::Rig;

fn small() -> Case {
    Case { skew: Skew::Rotating, tokens: vec![4, 3, 2], ..Case::new(3) }.capacity(24)
}

fn with_tokens(case: &Case, tokens: usize) -> Case {
    let tokens = [tokens, 1, tokens - 1][..case.world()].to_vec();
    Case { tokens, ..case.clone() }
}

/// A group that was resized takes more tokens, and fewer, as often as one likes; the one before is
/// dropped, and steps of both are what the oracle says.
pub fn a_resized_group_takes_more_tokens<T: TestBackend>() {
    let case = small().on::<T>();
    let sizes = [11, 3, 20];
    let runs = T::on_ranks(case.world(), |env| {
        let mut rig = Rig::<T>::new(env, &case);
        let device = rig.memory.clone();
        let mut runs = vec![rig.run(0, StepMode::Static)];
        for (step, tokens) in (1..).zip(sizes) {
            let group = rig.group.resize_tokens(tokens).expect("there is memory");
            assert_eq!(group.dispatcher().config().max_tokens(), tokens);
            let (before, account) = (device.used(), group.context().account().clone());
            let charged = account.used();
            drop(rig);
            assert!(device.used() < before && account.used() < charged, "the old group stayed");
            rig = Rig::on(group, &with_tokens(&case, tokens)).expect("memory");
            let graph = rig.record(StepOptions::new()).expect("it can be recorded");
            rig.meet("the memory of the new size is there");
            runs.push(rig.replay(&graph, 2 * step));
            runs.push(rig.run_eager(2 * step + 1));
        }
        runs
    });
    for (at, runs) in by_step(&runs).iter().enumerate() {
        let capacity: Vec<u32> = runs.iter().map(|run| run.record.capacity).collect();
        let (case, step) = match at {
            0 => (case.clone(), 0),
            _ => (with_tokens(&case, sizes[(at - 1) / 2]), at + 1),
        };
        StepOracle::new(&case, step, Some(&capacity)).check(&format!("run {at}"), runs);
        assert!(
            at > 2 || capacity.iter().all(|rows| *rows == 24) || at == 2,
            "the capacity is kept: {capacity:?}"
        );
    }
}

/// What the group holds after it was resized is what the report says, and while both groups live,
/// both reports, but for what they share.
pub fn a_resized_group_holds_what_is_reported<T: TestBackend>() {
    let case = small().on::<T>();
    T::on_ranks(case.world(), |env| {
        let (group, builder) = built(env, &case);
        let (rank, account) = (group.context().rank(), group.context().account().clone());
        let of = |tokens| {
            let builder = Case { tokens: vec![tokens; case.world()], ..case.clone() }.builder(rank);
            let builder = T::settings(&builder);
            builder.memory_report(rank, case.world()).expect("in range").budget_bytes()
        };
        let before = builder.memory_report(rank, case.world()).expect("in range").budget_bytes();
        assert_eq!(account.used(), before);
        let larger = group.resize_tokens(9).expect("there is memory");
        assert!(account.used() > before && account.used() <= before + of(9));
        // Set-up has queued work, which holds what it uses until it has run.
        for group in [&group, &larger] {
            let queued = group.context().backend().synchronize(group.stream());
            queued.expect("nothing has failed");
        }
        drop(group);
        assert_eq!(account.used(), of(9));
        drop(larger);
        assert_eq!(account.used(), 0);
    });
}

fn built<T: TestBackend>(
    env: RankEnv<T>,
    case: &Case,
) -> (ExpertParallel<T::Backend>, ExpertParallelBuilder) {
    let builder = T::settings(&case.builder(env.rank()));
    (env.build(&builder).expect("the group is built"), builder)
}

/// A rank that lacks the memory for a larger group, by its limit or on its device, refuses it on all;
/// the group that there is goes on, and can be resized once there is memory.
pub fn a_resize_without_memory_refuses_on_all_ranks<T: TestBackend>() {
    let case = small().on::<T>();
    let larger = with_tokens(&case, 40);
    for device in [false, true] {
        let results = T::on_ranks(case.world(), |env| {
            let rig = Rig::<T>::new(env, &case);
            let own = rig.group.context().account().clone();
            let account = if device { &rig.memory } else { &own };
            let before = (own.used(), rig.memory.used());
            if rig.rank() == 1 {
                account.set_limit(Some(account.used() + 4096));
            }
            let told = rig.group.resize_tokens(40).expect_err("no memory").to_string();
            T::collect(rig.group.context().backend());
            assert_eq!((own.used(), rig.memory.used()), before, "bytes in use");
            account.set_limit(None);
            rig.meet("what the refused size had is gone");
            let old = rig.run(0, StepMode::Static);
            let group = rig.group.resize_tokens(40).expect("there is memory");
            drop(rig);
            let rig = Rig::<T>::on(group, &larger).expect("memory");
            rig.meet("the memory of the new size is there");
            (told, vec![old, rig.run_eager(1)])
        });
        let (told, runs): (Vec<String>, Vec<_>) = results.into_iter().unzip();
        assert!(told.iter().all(|text| *text == told[0]), "{told:?}");
        assert!(told[0].contains("rank 1") && told[0].contains("out of memory"), "{told:?}");
        let runs = by_step(&runs);
        StepOracle::new(&case, 0, case.capacity.as_deref()).check("the old group", &runs[0]);
        StepOracle::new(&larger, 1, None).check("the new group", &runs[1]);
    }
}

/// Ranks that ask for different sizes are all told, and go on.
pub fn resizes_that_differ_are_named<T: TestBackend>() {
    let case = small().on::<T>();
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let last = rig.rank() == case.world() - 1;
        let tokens = if last { 9 } else { 8 };
        let told = rig.group.resize_tokens(tokens).expect_err("they differ").to_string();
        (told, rig.run(0, StepMode::Static))
    });
    let (told, runs): (Vec<String>, Vec<_>) = results.into_iter().unzip();
    let last = format!("rank {}", case.world() - 1);
    for part in ["max_tokens", "8", "9", "rank 0", &last] {
        assert!(told.iter().all(|text| text.contains(part)), "{part}: {told:?}");
    }
    StepOracle::new(&case, 0, case.capacity.as_deref()).check("after that", &runs);
}

/// Experts stay where they were moved to, and so do the slots that maps may use.
pub fn a_resized_group_keeps_its_expert_map<T: TestBackend>() {
    let case = small().on::<T>();
    let first = case.expert_map();
    let turned = first.homes().iter().map(|homes| {
        let rank = Rank((homes[0].rank.0 + 1) % case.world() as u32);
        ExpertHome { rank, ..homes[0] }
    });
    let turned = ExpertMap::new(turned.collect(), case.world()).expect("distinct slots");
    let moved = |case: &Case| Case { map: Some(turned.clone()), ..case.clone() };
    let larger = with_tokens(&case, 9);
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        rig.set_map(&moved(&case)).expect("it has slots enough");
        let group = rig.group.resize_tokens(9).expect("there is memory");
        drop(rig);
        let rig = Rig::<T>::on(group, &larger).expect("memory");
        rig.meet("the memory of the new size is there");
        let after = rig.run_eager(0);
        rig.set_map(&larger).expect("the first one still fits");
        [after, rig.run_eager(1)].to_vec()
    });
    let runs = by_step(&runs);
    StepOracle::new(&moved(&larger), 0, None).check_outputs("moved before", &runs[0]);
    StepOracle::new(&larger, 1, None).check_outputs("moved back", &runs[1]);
    let rows = |runs: &[RankRun]| runs.iter().map(|run| run.layers[0].total).collect::<Vec<_>>();
    let expected = StepOracle::new(&moved(&larger), 0, None).required();
    assert_eq!(rows(&runs[0]), expected.iter().map(|rows| *rows as i32).collect::<Vec<_>>());
}

/// A size that no group can have, asked for by one rank, is told to all of them at once; the group goes on.
pub fn a_size_out_of_range_refuses_on_all_ranks<T: TestBackend>() {
    let case = small().on::<T>();
    let last = case.world() - 1;
    let results = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &case);
        let tokens = if rig.rank() == last { 1 << 21 } else { 8 };
        let told = rig.group.resize_tokens(tokens).expect_err("too many").to_string();
        let group = rig.group.resize_tokens(8).expect("there is memory");
        drop(group);
        rig.meet("the second group is gone");
        (told, rig.run(0, StepMode::Static))
    });
    let (told, runs): (Vec<String>, Vec<_>) = results.into_iter().unzip();
    assert!(told.iter().all(|text| *text == told[0]), "{told:?}");
    for part in ["max_tokens", "2097152", &format!("rank {last}")] {
        assert!(told[0].contains(part), "{part}: {told:?}");
    }
    StepOracle::new(&case, 0, case.capacity.as_deref()).check("after that", &runs);
}

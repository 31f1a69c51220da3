//! Expert maps that change between steps, under the graphs that there are.

use graph_ep::token_dispatch::ExpertHome;
use graph_ep::{
    DispatchError, Error, ExpertMap, GrowthPolicy, Layout, Rank, RecoverySettings, StepOptions,
};

use crate::backend::TestBackend;
use crate::case::{Case, Skew};
use crate::oracle::StepOracle;
use crate::outcome::{RankRun, by_step};
use crate::rig::Rig;

const EXPERTS: usize = 7;

/// Slots of a rank: room for a fair share of the experts and more.
const SLOTS: u32 = 6;

fn home(rank: usize, slot: u32) -> ExpertHome {
    ExpertHome { rank: Rank::from_index(rank), slot }
}

fn base<T: TestBackend>() -> Case {
    let case = Case { tokens: vec![6, 4, 7], ..Case::new(3) }.on::<T>();
    Case { experts: EXPERTS, top_k: 3, slots: Some(SLOTS), ..case }
}

/// Maps of seven experts on `world` ranks, at least two.
fn maps(world: usize) -> Vec<(&'static str, ExpertMap)> {
    let last = world - 1;
    let map = |homes: Vec<ExpertHome>| ExpertMap::new(homes, world).expect("distinct slots");
    let copies =
        |homes: Vec<Vec<ExpertHome>>| ExpertMap::replicated(homes, world).expect("distinct slots");
    let contiguous = ExpertMap::contiguous(EXPERTS, world).expect("an expert for each");
    let rotated = contiguous.homes().iter().map(|homes| {
        let home = homes[0];
        ExpertHome { rank: Rank((home.rank.0 + 1) % world as u32), ..home }
    });
    // Slots against the order of ids, and not the first.
    let scattered = contiguous.homes().iter().map(|homes| {
        let home = homes[0];
        ExpertHome { slot: SLOTS - 1 - home.slot, ..home }
    });
    let everywhere = (0..EXPERTS).map(|expert| match expert {
        // On all ranks, on two, and on one.
        0 => (0..world).map(|rank| home(rank, 0)).collect(),
        1 => vec![home(last, 1), home(0, 1)],
        _ => vec![home(expert % world, 2 + expert as u32 / world as u32)],
    });
    vec![
        ("contiguous", contiguous.clone()),
        ("rotated", map(rotated.collect())),
        ("scattered", map(scattered.collect())),
        ("with copies", copies(everywhere.collect())),
        (
            "on one rank but two",
            map((0..EXPERTS).map(|e| home(e / 5 * last, e as u32 % 5)).collect()),
        ),
    ]
}

fn with(case: &Case, map: &ExpertMap) -> Case {
    Case { map: Some(map.clone()), ..case.clone() }
}

/// Steps under one graph while the map changes before each of them.
fn follow<T: TestBackend>(case: &Case, order: &[usize], steps: &[usize]) -> Vec<Vec<RankRun>> {
    let maps = maps(case.world());
    let first = with(case, &maps[0].1);
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &first);
        let graph = rig.record(StepOptions::new()).expect("it can be recorded");
        let turn = order.iter().zip(steps);
        turn.map(|(map, step)| {
            rig.set_map(&with(case, &maps[*map].1)).expect("it has slots enough");
            rig.replay(&graph, *step)
        })
        .collect::<Vec<_>>()
    });
    by_step(&runs)
}

const ORDER: [usize; 8] = [0, 1, 2, 3, 4, 3, 2, 0];

/// One graph serves every map that there are slots for: rotated, scattered over slots, with copies.
pub fn maps_change_under_one_graph<T: TestBackend>() {
    for layout in [Layout::ExpertGrouped, Layout::Flat] {
        let case = Case { layout, ..base::<T>() };
        let maps = maps(case.world());
        let steps: Vec<usize> = (0..ORDER.len()).collect();
        for (step, runs) in follow::<T>(&case, &ORDER, &steps).iter().enumerate() {
            let (what, map) = &maps[ORDER[step]];
            let case = with(&case, map);
            let rows: Vec<u32> = (0..case.world()).map(|rank| case.rows_of(rank)).collect();
            let oracle = StepOracle::new(&case, step, Some(&rows));
            oracle.check(&format!("{layout:?}, {what}, step {step}"), runs);
        }
    }
}

/// A sum is in the order of the experts' ids, so moving experts between the slots of a rank changes no
/// bit; neither does moving them anywhere, or copying them, where a token has one expert.
pub fn moving_experts_changes_no_bit_of_their_sums<T: TestBackend>() {
    let outputs = |run: &Vec<RankRun>| -> Vec<Vec<u32>> {
        run.iter().flat_map(|rank| &rank.layers).map(|layer| layer.output.clone()).collect()
    };
    // Contiguous and scattered: the same ranks.
    let runs = follow::<T>(&base::<T>(), &[0, 2, 0], &[0; 3]);
    assert!(runs.iter().all(|run| outputs(run) == outputs(&runs[0])), "slots of a rank");
    let runs = follow::<T>(&Case { top_k: 1, ..base::<T>() }, &[0, 1, 2, 3, 4], &[0; 5]);
    assert!(runs.iter().all(|run| outputs(run) == outputs(&runs[0])), "one expert a token");
}

/// Copies of an expert share the senders: with a copy on every rank, a rank keeps its own tokens.
pub fn copies_share_the_load<T: TestBackend>() {
    let case = Case { skew: Skew::Hot(0), top_k: 1, ..base::<T>() };
    let runs = follow::<T>(&case, &[0, 3], &[0, 0]);
    let hot = |run: &RankRun| run.layers[0].tokens_per_expert[0];
    let (without, copied): (Vec<i32>, Vec<i32>) =
        runs[0].iter().zip(&runs[1]).map(|(before, after)| (hot(before), hot(after))).unzip();
    assert!(copied.iter().all(|tokens| *tokens > 0), "{copied:?}");
    assert_eq!(copied.iter().sum::<i32>(), without[0], "no token is lost or doubled");
    assert!(copied.iter().max() < without.iter().max());
}

/// Maps change between recovered steps, and between steps in rounds.
pub fn maps_change_between_recovered_steps_and_rounds<T: TestBackend>() {
    let case = Case { skew: Skew::Rotating, ..base::<T>() };
    let maps = maps(case.world());
    let least = super::everywhere::least_rows(&case);
    let first = with(&case, &maps[0].1).capacity(least);
    let runs = T::on_ranks(case.world(), |env| {
        let rig = Rig::<T>::new(env, &first);
        let rounds = rig.record_rounds();
        let settings = RecoverySettings::new().with_growth(GrowthPolicy::Exact);
        let mut runner = rig.runner(settings).expect("in range");
        let mut runs = Vec::new();
        for (step, map) in ORDER.into_iter().enumerate() {
            rig.set_map(&with(&case, &maps[map].1)).expect("it has slots enough");
            runs.push(match step < ORDER.len() / 2 {
                true => rig.replay(&rounds, step),
                false => rig.step(&mut runner, step).expect("it recovers").run,
            });
        }
        runs
    });
    for (step, runs) in by_step(&runs).iter().enumerate() {
        let (what, map) = &maps[ORDER[step]];
        let oracle = StepOracle::new(&with(&case, map), step, None);
        oracle.check_outputs(&format!("{what}, step {step}"), runs);
        assert!(runs.iter().all(|run| run.record.dropped == 0));
    }
}

/// Maps of other experts, of other ranks, or with more slots than there are, are refused; the one
/// before still holds.
pub fn maps_that_do_not_fit_are_refused<T: TestBackend>() {
    let base = base::<T>();
    let world = base.world();
    let maps = maps(world);
    let first = with(&base, &maps[1].1);
    let wrong = [
        ("experts", ExpertMap::contiguous(EXPERTS + 1, world)),
        ("ranks", ExpertMap::contiguous(EXPERTS, world - 1)),
        ("slots", ExpertMap::new((0..EXPERTS).map(|e| home(1, e as u32)).collect(), world)),
    ];
    let runs = T::on_ranks(world, |env| {
        let rig = Rig::<T>::new(env, &first);
        for (field, map) in &wrong {
            let map = map.as_ref().expect("a map");
            let refused = rig.group.dispatcher().set_expert_map(&rig.direct(), map);
            match refused {
                Err(DispatchError::Config { field: named, .. }) => {
                    assert!(named.contains(field), "{field}: {named}");
                }
                other => panic!("{field}: {other:?}"),
            }
        }
        rig.run_eager(0)
    });
    StepOracle::new(&first, 0, None).check("the map before", &runs);
    // Without more slots than the first map uses, none that uses more can come.
    let few = Case { slots: None, ..first };
    T::on_ranks(world, |env| {
        let rig = Rig::<T>::new(env, &few);
        let other = Case { map: Some(maps[3].1.clone()), ..few.clone() };
        assert!(matches!(rig.set_map(&other), Err(Error::Dispatch(DispatchError::Config { .. }))));
    });
    // And no group is made with fewer slots than its map uses.
    let none = Case { slots: Some(1), ..few };
    let told = T::on_ranks(world, |env| {
        env.build(&none.builder(Rank(0))).expect_err("too few").to_string()
    });
    assert!(told.iter().all(|text| text.contains("expert_slots")), "{told:?}");
}

//! Each workload is deterministic, valid, and as skewed as its name says.

use clap::ValueEnum;
use proptest::prelude::*;

use super::*;
use crate::demand::{even_range, initial_capacity_rows, required_rows, worst_case_rows};

const RANKS: usize = 8;
const ALIGNMENT: usize = 16;

fn default_of(workload: Workload) -> Routing {
    WorkloadConfig::new(workload, 7, RANKS).generate().unwrap()
}

/// `[steps][ranks]`, and the initial capacity that the program would give every rank.
fn demand(routing: &Routing) -> (Vec<Vec<usize>>, usize) {
    let max_tokens = routing.shards(RANKS).unwrap().max_tokens();
    let capacity =
        initial_capacity_rows(1.25, max_tokens, routing.top_k(), ALIGNMENT).expect("it is small");
    (required_rows(routing, RANKS, ALIGNMENT), capacity)
}

/// Steps in which some rank requires more than its capacity, if each rank that did grows to exactly
/// that, or if all ranks grow to 1.2 times the most of any.
fn overflowed(routing: &Routing, headroom: bool) -> usize {
    let (required, initial) = demand(routing);
    let mut capacity = [initial; RANKS];
    let mut overflowed = 0;
    for step in &required {
        if step.iter().zip(&capacity).all(|(rows, have)| rows <= have) {
            continue;
        }
        overflowed += 1;
        let peak = step.iter().copied().max().unwrap_or(0);
        for (have, &rows) in capacity.iter_mut().zip(step) {
            *have = if headroom { peak * 6 / 5 } else { rows }.max(*have);
        }
    }
    overflowed
}

/// How many tokens chose each expert in one layer of one step.
fn expert_counts(routing: &Routing, step: usize, layer: usize) -> Vec<usize> {
    let mut counts = vec![0; routing.experts()];
    for &id in routing.layer(step, layer).ids {
        counts[usize::try_from(id).unwrap()] += 1;
    }
    counts
}

/// The rank that requires most.
fn hottest(step: &[usize]) -> usize {
    (0..step.len()).max_by_key(|&rank| step[rank]).unwrap()
}

#[test]
fn names_are_those_of_the_command_line() {
    let names: Vec<String> = Workload::value_variants().iter().map(|w| w.name()).collect();
    let expected = [
        "balanced",
        "hot-expert",
        "hot-rank",
        "spread-hot",
        "ragged",
        "zero-load",
        "rotating",
        "burst",
    ];
    assert_eq!(names, expected);
}

#[test]
fn balanced_does_not_overflow() {
    assert_eq!(overflowed(&default_of(Workload::Balanced), false), 0);
}

#[test]
fn a_hot_expert_is_chosen_by_three_tokens_of_four() {
    let routing = default_of(Workload::HotExpert);
    for (step, layer) in [(0, 0), (30, 1), (63, 3)] {
        let mut counts = expert_counts(&routing, step, layer);
        counts.sort_unstable();
        let [.., second, first] = counts[..] else { unreachable!("64 experts") };
        // Three quarters, and an eighth of the quarter that chooses among all; six deviations.
        assert!(first.abs_diff(400) < 60, "{first}");
        assert!(second < 120, "{second}");
    }
    // It stays hot, so that later steps overflow only by what chance adds to the peak so far.
    let (required, capacity) = demand(&routing);
    assert!(required.iter().all(|step| step.iter().any(|&rows| rows > capacity)));
    let (first, last) = (hottest(&required[0]), hottest(&required[63]));
    assert!(required[63][first] > capacity && required[0][last] > capacity);
}

#[test]
fn a_hot_rank_requires_a_multiple_of_the_others() {
    let (required, capacity) = demand(&default_of(Workload::HotRank));
    let hot = hottest(&required[0]);
    for step in &required {
        for (rank, &rows) in step.iter().enumerate() {
            if rank == hot {
                assert!(rows > 3 * capacity, "{rows}");
            } else {
                assert!(rows < capacity * 2 / 3, "{rows}");
            }
        }
    }
}

#[test]
fn spread_heat_skews_experts_but_not_ranks() {
    let routing = default_of(Workload::SpreadHot);
    for layer in 0..4 {
        let counts = expert_counts(&routing, 5, layer);
        for rank in 0..RANKS {
            let local = &counts[even_range(64, RANKS, rank)];
            let hot = local.iter().max().unwrap();
            let others = local.iter().sum::<usize>() - hot;
            assert!(*hot > 2 * others, "rank {rank}: {local:?}");
        }
    }
    assert_eq!(overflowed(&routing, false), 0);
}

#[test]
fn ragged_ranks_own_unequal_and_changing_numbers_of_tokens() {
    let routing = default_of(Workload::Ragged);
    let shards = routing.shards(RANKS).unwrap();
    let owned: Vec<Vec<usize>> = (0..64)
        .map(|step| (0..RANKS).map(|rank| shards.range(step, rank).len()).collect())
        .collect();
    assert!(owned.iter().all(|step| step.iter().sum::<usize>() == 512));
    assert!(owned.iter().flatten().any(|&tokens| tokens == 0));
    assert!(shards.max_tokens() > 512 / RANKS * 3 / 2);
    assert_ne!(owned[0], owned[1]);
    assert_eq!(overflowed(&routing, false), 0);
}

#[test]
fn zero_load_ranks_send_or_receive_nothing() {
    let routing = default_of(Workload::ZeroLoad);
    let shards = routing.shards(RANKS).unwrap();
    let required = required_rows(&routing, RANKS, ALIGNMENT);
    let mut kinds = [[0; 2]; 2];
    for (step, rows) in required.iter().enumerate() {
        let sends: Vec<_> = (0..RANKS).map(|r| !shards.range(step, r).is_empty()).collect();
        let receives: Vec<_> = rows.iter().map(|&rows| rows > 0).collect();
        assert_eq!(sends.iter().filter(|&&s| s).count(), RANKS / 2);
        assert_eq!(receives.iter().filter(|&&r| r).count(), RANKS / 2);
        for (&s, &r) in sends.iter().zip(&receives) {
            kinds[usize::from(s)][usize::from(r)] += 1;
        }
    }
    // Silent altogether, only sending, only receiving, both: all four occur.
    assert!(kinds.iter().flatten().all(|&count| count > 0), "{kinds:?}");
    assert_eq!(shards.max_tokens(), 128);
    assert_eq!(overflowed(&routing, false), 0);
}

#[test]
fn steady_heat_is_paid_for_once_with_headroom() {
    for workload in [Workload::HotExpert, Workload::HotRank, Workload::Burst] {
        let routing = default_of(workload);
        assert_eq!(overflowed(&routing, true), 1, "{workload:?}");
        assert!(overflowed(&routing, false) > 1, "{workload:?}");
    }
}

#[test]
fn rotating_heat_visits_every_rank() {
    let routing = default_of(Workload::Rotating);
    let (required, capacity) = demand(&routing);
    let hot: Vec<usize> = required.iter().map(|step| hottest(step)).collect();
    for (step, &rank) in hot.iter().enumerate() {
        assert_eq!(rank, (hot[0] + step / 8) % RANKS);
        assert!(required[step][rank] > 3 * capacity);
    }
    // Serving only the rank that overflowed pays at every turn.
    assert!(overflowed(&routing, false) >= RANKS);
    assert_eq!(overflowed(&routing, true), 1);
}

#[test]
fn bursts_are_rare_and_near_the_worst_case() {
    let (required, capacity) = demand(&default_of(Workload::Burst));
    let worst = worst_case_rows(512, RANKS, 64, 8, ALIGNMENT).unwrap();
    let burst: Vec<usize> =
        (0..64).filter(|&s| required[s].iter().any(|&rows| rows > capacity)).collect();
    assert_eq!(burst.len(), 12, "three steps in sixteen: {burst:?}");
    for step in burst {
        assert!(required[step][hottest(&required[step])] > worst * 3 / 4);
    }
}

#[test]
fn every_part_is_the_same_whatever_is_generated_beside_it() {
    for &workload in Workload::value_variants() {
        let whole = default_of(workload);
        assert_eq!(whole, default_of(workload));
        let part = WorkloadConfig::new(workload, 7, RANKS).steps(3).layers(2).tokens(50);
        let part = part.generate().unwrap();
        for (step, layer) in [(0, 0), (2, 1)] {
            assert_eq!(part.layer(step, layer).ids, &whole.layer(step, layer).ids[..50 * 8]);
        }
        let other = WorkloadConfig::new(workload, 8, RANKS).steps(1).generate().unwrap();
        assert_ne!(other.layer(0, 0), whole.layer(0, 0));
    }
}

/// The generator is part of what a seed means. These were computed apart from it, by hand.
#[test]
fn a_seed_means_these_choices() {
    assert_eq!(
        default_of(Workload::Balanced).layer(0, 0).ids[..8],
        [2, 11, 18, 24, 38, 46, 53, 61]
    );
}

#[test]
fn impossible_sizes_are_refused() {
    let config = WorkloadConfig::new(Workload::ZeroLoad, 0, 4);
    for (config, expected) in [
        (config.steps(0), "zero steps"),
        (config.tokens(0), "zero tokens"),
        (config.top_k(0), "zero choices"),
        (config.experts(7), "top-k 8 exceeds the 7 experts"),
        (config.experts(2).top_k(1), "4 ranks are more than the 2 experts"),
        (WorkloadConfig::new(Workload::HotRank, 0, 0), "at least one rank"),
        (config.tokens(usize::MAX / 8192), "too many choices"),
    ] {
        let message = config.generate().expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
}

proptest! {
    /// Routing::new checks that choices are valid and distinct; nothing may ever fail it.
    #[test]
    fn any_possible_size_generates(
        workload in prop::sample::select(Workload::value_variants()),
        seed: u64,
        experts in 1_usize..20,
        ranks in 1_usize..20,
        top_k in 1_usize..20,
        tokens in 1_usize..20,
    ) {
        prop_assume!(ranks <= experts && top_k <= experts);
        let config = WorkloadConfig::new(workload, seed, ranks)
            .experts(experts).top_k(top_k).tokens(tokens).steps(20).layers(1);
        let routing = config.generate().unwrap();
        prop_assert!((0..20).all(|step| routing.layer(step, 0).ids.iter().all(|&id| id >= 0)));
        prop_assert!(routing.shards(ranks).unwrap().max_tokens() <= tokens);
    }
}

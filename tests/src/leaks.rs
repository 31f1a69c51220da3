//! What is left behind by groups that are made, used and dropped over and over.

use std::fs;
use std::thread;

use graph_ep::ep_context::MemoryAccount;
use graph_ep::{Rank, RecoverySettings, StepOptions, ThreadGroup};

use crate::backend::{HostThreads, RankEnv};
use crate::case::{Case, Skew};
use crate::harness::Check;
use crate::held::Held;
use crate::processes::{Ending, run};
use crate::rig::Rig;

/// The checks, for the harness of processes.
pub const CHECKS: [Check; 2] = [
    Check { name: "leaks::a_thousand_groups_leave_nothing", run: a_thousand_groups_leave_nothing },
    Check { name: "leaks::failed_groups_leave_nothing", run: failed_groups_leave_nothing },
];

/// Mappings of this process, of whatever kind.
fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").expect("proc is mounted").lines().count()
}

/// Runs `once` often in a process of its own, which must not hold more after the last time than after
/// the first few.
fn repeat(times: usize, once: impl Fn(usize) + Sync) {
    let endings = run(1, |_| {
        // Until the allocator has as many arenas as there are threads at once, and stacks to reuse.
        (0..times / 10).for_each(&once);
        let (held, mapped) = (Held::now(), mappings());
        (0..times).for_each(&once);
        held.again().expect("no descriptor, thread or shared mapping more");
        (mapped, mappings())
    });
    match endings.as_slice() {
        // Arenas and stacks come and go by a few; what leaks does so every time.
        [Ending::Returned((before, after))] => {
            assert!(*after <= before + times / 20, "{before} mappings became {after}");
        }
        other => panic!("{other:?}"),
    }
}

fn on_threads(world: usize, body: impl Fn(RankEnv<HostThreads>) + Sync) {
    let group = ThreadGroup::new(world).expect("a group");
    thread::scope(|scope| {
        for rendezvous in group {
            let body = &body;
            scope.spawn(move || body(RankEnv { rendezvous, memory: MemoryAccount::new(None) }));
        }
    });
}

/// A thousand groups that record, replay, overflow and grow.
fn a_thousand_groups_leave_nothing() {
    let case = Case { tokens: vec![3, 2], skew: Skew::Hot(0), ..Case::new(2) }.capacity(4);
    repeat(1000, |round| {
        on_threads(2, |env| {
            let rig = Rig::<HostThreads>::new(env, &case);
            if round % 4 == 0 {
                let mut runner = rig.runner(RecoverySettings::new()).expect("in range");
                rig.step(&mut runner, round).expect("it recovers");
            } else {
                let graph = rig.record(StepOptions::new()).expect("it can be recorded");
                rig.replay(&graph, round);
            }
        });
    });
}

/// Groups that fail in set-up and in a step.
fn failed_groups_leave_nothing() {
    let case = Case { tokens: vec![2, 2], ..Case::new(2) };
    repeat(200, |round| {
        on_threads(2, |env| {
            let second = env.rank() == Rank(1);
            if round % 2 == 0 {
                let alignment = if second { 8 } else { 4 };
                let differs = Case { alignment, ..case.clone() };
                env.build(&differs.builder(Rank(0))).expect_err("a setting differs");
                return;
            }
            let rig = Rig::<HostThreads>::new(env, &case);
            if second {
                rig.group.context().abort();
            }
            let number = rig.launch(StepOptions::new()).expect("queued");
            rig.wait(number).expect_err("it was aborted");
        });
    });
}

//! What the thread that runs a clean step takes from the heap of its host: nothing, once a few have run.
//!
//! What other threads take, those of the host backend's streams or of the driver, is not counted. It is its own
//! harness, which counts what is skipped.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::ExitCode;

use graph_ep::{Outcome, OverflowPolicy, RecoverySettings};
use graph_ep_tests::harness::{self, Check};
use graph_ep_tests::{CudaThreads, HostThreads, TestBackend, steady};

thread_local! {
    /// How often the thread has allocated.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts for each thread.
struct Counting;

// SAFETY: every call is the system allocator's, with the arguments of the caller, who keeps its contract;
// counting neither allocates nor panics. `realloc` is the default one, made of these two and a copy.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Failing only while the thread is torn down, when nobody asks any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; all memory comes from the same allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps of a runner until everything that is kept for the next is there: records that the caller holds
/// while the next is read, the room of queues.
const FIRST: usize = 40;

/// Allocations of the thread that runs each step, on every rank.
fn allocations<T: TestBackend>(overflow: OverflowPolicy) -> Vec<Vec<u64>> {
    T::on_ranks(2, |env| {
        let mut runner = steady::runner(env, RecoverySettings::new().with_overflow(overflow));
        let mut last = Some(runner.run().expect("the first step, which records"));
        let mut seen = Vec::new();
        for step in 0..FIRST + 8 {
            let before = ALLOCATIONS.get();
            let report = runner.run().expect("a step");
            let taken = ALLOCATIONS.get() - before;
            assert_eq!(report.outcome, Outcome::Clean);
            assert_eq!(report.record.required_by_dispatch.len(), steady::LAYERS);
            last.replace(report);
            if step >= FIRST {
                seen.push(taken);
            }
        }
        seen
    })
}

fn none<T: TestBackend>() {
    if let Some(why) = T::missing() {
        harness::skip(why);
    }
    for overflow in [OverflowPolicy::Recover, OverflowPolicy::Rounds] {
        for (rank, steps) in allocations::<T>(overflow).iter().enumerate() {
            assert!(steps.iter().all(|taken| *taken == 0), "rank {rank}, {overflow:?}: {steps:?}");
        }
    }
}

fn main() -> ExitCode {
    let checks = vec![
        Check { name: "a_clean_step_allocates_nothing", run: none::<HostThreads> },
        Check { name: "a_clean_step_allocates_nothing_on_gpus", run: none::<CudaThreads> },
    ];
    harness::main(&[("allocations", checks)])
}

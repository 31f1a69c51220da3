//! How long calls of the driver take: for measuring, and off unless asked for.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// What one call of the driver has taken on a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallTime {
    /// The name of the call.
    pub call: &'static str,
    /// How often it was made.
    pub calls: u64,
    /// The time of the host in all of them.
    pub time: Duration,
}

thread_local! {
    static RUNS: Cell<bool> = const { Cell::new(false) };
    static TIMES: RefCell<Vec<CallTime>> = const { RefCell::new(Vec::new()) };
}

/// Does `work` and says how long the calls of the driver took that the backend made meanwhile on the
/// calling thread, in the order in which each was first made. Timing adds some 50 ns to a call. What is
/// clocked within `work` is found there and not again out here. Nothing is found for what makes no such
/// calls, as the host backend.
pub fn clock_calls<T>(work: impl FnOnce() -> T) -> (T, Vec<CallTime>) {
    let clock = Clock::start();
    let result = work();
    (result, clock.stop())
}

/// The clock of a thread while it runs, and what it is set back to where it ends, also by a panic.
struct Clock {
    ran: bool,
    times: Vec<CallTime>,
}

impl Clock {
    fn start() -> Self {
        Self { ran: RUNS.replace(true), times: TIMES.take() }
    }

    /// What was found.
    fn stop(self) -> Vec<CallTime> {
        TIMES.take()
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        let _ = RUNS.try_with(|runs| runs.set(self.ran));
        let _ = TIMES.try_with(|times| times.replace(std::mem::take(&mut self.times)));
    }
}

/// Makes a call, and times it where the clock runs.
pub(super) fn clocked(name: &'static str, call: impl FnOnce() -> u32) -> u32 {
    if !RUNS.try_with(Cell::get).unwrap_or(false) {
        return call();
    }
    let begin = Instant::now();
    let code = call();
    let time = begin.elapsed();
    let _ = TIMES.try_with(|times| {
        let mut times = times.borrow_mut();
        match times.iter_mut().find(|known| known.call == name) {
            Some(known) => {
                known.calls += 1;
                known.time += time;
            }
            None => times.push(CallTime { call: name, calls: 1, time }),
        }
    });
    code
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn calls_are_timed_while_the_clock_runs_and_on_its_thread() {
        assert_eq!(clocked("a", || 7), 7, "the result is the call's");
        let (result, times) = clock_calls(|| {
            clocked("b", || 0);
            std::thread::spawn(|| clocked("elsewhere", || 0)).join().expect("no panic");
            clocked("a", || 0);
            clocked("b", || {
                std::thread::sleep(Duration::from_millis(2));
                0
            });
            5
        });
        let found: Vec<_> = times.iter().map(|time| (time.call, time.calls)).collect();
        assert_eq!((result, found), (5, vec![("b", 2), ("a", 1)]));
        assert!(times[0].time >= Duration::from_millis(2), "{times:?}");
        clocked("a", || 0);
        assert_eq!(clock_calls(|| ()).1, []);
    }

    #[test]
    fn a_panic_stops_the_clock() {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            clock_calls(|| {
                clocked("a", || 0);
                panic!("work fails")
            })
        }));
        assert!(panicked.is_err());
        clocked("a", || 0);
        assert!(TIMES.with_borrow(Vec::is_empty));
    }

    #[test]
    fn a_clock_within_another_leaves_it_running_with_what_it_has() {
        let found = |times: &[CallTime]| -> Vec<_> {
            times.iter().map(|time| (time.call, time.calls)).collect()
        };
        let (_, outer) = clock_calls(|| {
            clocked("a", || 0);
            let (_, inner) = clock_calls(|| clocked("a", || clocked("b", || 0)));
            assert_eq!(found(&inner), [("b", 1), ("a", 1)]);
            let panicked = catch_unwind(|| {
                clock_calls(|| {
                    clocked("c", || 0);
                    panic!("inner work fails")
                })
            });
            assert!(panicked.is_err());
            clocked("d", || 0);
            clocked("a", || 0);
        });
        assert_eq!(found(&outer), [("a", 2), ("d", 1)]);
    }
}

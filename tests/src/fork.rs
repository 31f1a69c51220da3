//! Processes that are forked from this one: how they start, and how they end.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_parent_process_death_signal,
    waitpid,
};

use crate::held::Held;

// The standard library links the C library in any case, and has no wrapper of these two.
unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// By itself.
    Ended,
    /// By the signal of this number.
    Killed(i32),
    /// It has not: it was stopped.
    Stopped,
    /// It has not, and took too long.
    Hung,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => write!(f, "ended"),
            Self::Killed(signal) => write!(f, "was ended by signal {signal}"),
            Self::Stopped => write!(f, "was stopped"),
            Self::Hung => write!(f, "did not end"),
        }
    }
}

/// Starts a process that runs `body`, ends when that returns or panics, and is killed when this process ends.
///
/// # Panics
///
/// If this process has other threads, or the system refuses another process.
pub(crate) fn start(body: impl FnOnce()) -> Pid {
    assert_eq!(Held::now().threads, 1, "a process with other threads cannot be forked");
    let parent = getpid();
    // SAFETY: this process has one thread, as was just seen, so the child has all that its memory
    // speaks of. It returns from nothing that was called before: it ends below.
    let id = unsafe { fork() };
    if id != 0 {
        assert!(id > 0, "the system has no more processes");
        return Pid::from_raw(id).expect("it is not zero");
    }
    let orphaned =
        set_parent_process_death_signal(Some(Signal::KILL)).is_err() || getppid() != Some(parent);
    if !orphaned {
        // What it says is for the body to tell.
        let _ = catch_unwind(AssertUnwindSafe(body));
    }
    // SAFETY: ends the process, whose memory is nobody else's.
    unsafe { _exit(0) }
}

/// How the child has ended, unless it still runs.
pub(crate) fn status(id: Pid) -> Option<Status> {
    let (_, status) = waitpid(Some(id), WaitOptions::NOHANG | WaitOptions::UNTRACED).ok()??;
    Some(match status.terminating_signal() {
        Some(signal) => Status::Killed(signal),
        None if status.stopped() => Status::Stopped,
        None => Status::Ended,
    })
}

/// Waits for so long until a child has ended that was told to, which it has if this says so.
pub(crate) fn ends_within(id: Pid, longest: Duration) -> bool {
    let start = Instant::now();
    loop {
        // One that has been waited for is no child any more.
        if !matches!(waitpid(Some(id), WaitOptions::NOHANG), Ok(None)) {
            return true;
        }
        if start.elapsed() > longest {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Kills a child that has not been waited for, so that its number is still its own.
pub(crate) fn kill(id: Pid) {
    // A driver may keep a process for a while; one that it keeps for ever is left to the system.
    const DYING: Duration = Duration::from_secs(20);
    let _ = kill_process(id, Signal::KILL);
    ends_within(id, DYING);
}

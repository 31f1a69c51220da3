//! The thread behind a stream and the queue that feeds it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use smallvec::SmallVec;

use super::operation::{Failure, Operation, panic_message};
use crate::backend::{BackendError, Retained};
use crate::sync::{lock, wait};

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller is the thread of some stream, as a destructor of retained objects may be. It
/// must wait for no stream: that may be its own, or one that waits for it.
pub(super) fn on_worker_thread() -> bool {
    // Unknown only while the thread is being torn down, when not to wait is right as well.
    IS_WORKER.try_with(Cell::get).unwrap_or(true)
}

/// An ordered queue of work with a thread that runs it.
///
/// Dropping it lets the thread finish what is queued and waits for that; kernels bound their own
/// waits, so this ends. On the thread of a stream it does not wait: two streams may hold each
/// other's last handle in queued work, and would wait for each other for ever.
#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Told when work is queued and when the last handle is gone.
    queued: Condvar,
    /// Told when work has run.
    ran: Condvar,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<Work>,
    /// How much was ever queued and how much of it has run or was discarded.
    accepted: u64,
    settled: u64,
    failure: Option<Failure>,
    closing: bool,
}

/// One operation and what it keeps alive.
#[derive(Debug)]
struct Work {
    operation: Operation,
    _retained: SmallVec<[Retained; 4]>,
}

impl Worker {
    /// Starts the thread.
    pub(super) fn spawn(thread_name: &str) -> Result<Self, BackendError> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            queued: Condvar::new(),
            ran: Condvar::new(),
        });
        let of_thread = shared.clone();
        let thread = thread::Builder::new()
            // The standard library panics on a zero byte in a name.
            .name(thread_name.replace('\0', "?"))
            .spawn(move || of_thread.work())
            .map_err(|source| BackendError::Os {
                call: "clone",
                what: format!("the thread of stream {thread_name}"),
                source,
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues an operation.
    ///
    /// # Safety
    ///
    /// As for [`crate::Backend::launch`].
    pub(super) unsafe fn push(
        &self,
        operation: Operation,
        retained: &[Retained],
    ) -> Result<(), Failure> {
        let work = Work { operation, _retained: retained.iter().cloned().collect() };
        let mut state = lock(&self.shared.state);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.pending.push_back(work);
        state.accepted += 1;
        drop(state);
        self.shared.queued.notify_one();
        Ok(())
    }

    /// Waits until everything that is queued now has run.
    pub(super) fn wait(&self) -> Result<(), Failure> {
        let mut state = lock(&self.shared.state);
        let target = state.accepted;
        while state.settled < target {
            state = wait(&self.shared.ran, state);
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// The failure that ended this queue, if there was one so far.
    pub(super) fn check(&self) -> Result<(), Failure> {
        lock(&self.shared.state).failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.queued.notify_one();
        if let Some(thread) = self.thread.take()
            && !on_worker_thread()
        {
            // The thread catches every panic; an error here could tell nobody anything new.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        IS_WORKER.set(true);
        while let Some((work, failure)) = self.next() {
            // Settled only when what the work retained is released, so that whoever waited for
            // the stream finds it gone.
            let outcome = match failure {
                Some(failure) => work.skip(&failure),
                None => work.run(),
            };
            let mut state = lock(&self.state);
            state.settled += 1;
            if let (Err(failure), None) = (outcome, &state.failure) {
                state.failure = Some(failure);
            }
            drop(state);
            self.ran.notify_all();
        }
    }

    /// The next operation, and the failure that keeps it from running.
    fn next(&self) -> Option<(Work, Option<Failure>)> {
        let mut state = lock(&self.state);
        loop {
            if let Some(work) = state.pending.pop_front() {
                return Some((work, state.failure.clone()));
            }
            if state.closing {
                return None;
            }
            state = wait(&self.queued, state);
        }
    }
}

impl Work {
    fn run(self) -> Result<(), Failure> {
        // SAFETY: `push` was given the promise that the addresses hold until this has run, and what
        // it relies on is in `_retained`, which lives to the end of this function.
        let ran = unsafe { self.operation.run() };
        let released = self.release();
        ran.and(released)
    }

    fn skip(self, failure: &Failure) -> Result<(), Failure> {
        self.operation.skip(failure);
        self.release()
    }

    fn release(self) -> Result<(), Failure> {
        let name = self.operation.name();
        catch_unwind(AssertUnwindSafe(|| drop(self))).map_err(|payload| Failure {
            operation: format!("releasing what {name} used"),
            reason: panic_message(payload),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::thread;
    use std::time::{Duration, Instant};

    use crate::backend::{Backend, BackendError, Retained};
    use crate::host::HostStream;
    use crate::host::testing::{
        Device, Gate, Log, Meet, MeetParams, Panic, PanicParams, address_of,
    };

    #[test]
    fn work_runs_in_the_order_in_which_it_was_queued() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        for value in 0..1000 {
            device.append(&stream, &log, value);
        }
        device.wait(&stream);
        assert_eq!(log.values(), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn queued_work_holds_what_it_retains_until_it_has_run() {
        let (device, gate, log) = (Device::new(), Gate::default(), Log::default());
        let stream = device.stream("s");
        device.close(&stream, &gate);
        device.append(&stream, &log, 1);
        let weak = Arc::downgrade(&log.values);
        drop(log);
        assert!(weak.upgrade().is_some(), "the queued append needs it");
        gate.open();
        device.wait(&stream);
        assert!(weak.upgrade().is_none(), "nobody needs it any more");
    }

    #[test]
    fn two_streams_run_at_the_same_time() {
        let device = Device::new();
        let words: [_; 2] = std::array::from_fn(|_| Arc::new(AtomicU32::new(0)));
        let streams = [device.stream("a"), device.stream("b")];
        for (at, stream) in streams.iter().enumerate() {
            let (own, other) = (address_of(&words[at]), address_of(&words[1 - at]));
            let retained: [Retained; 2] = [words[0].clone(), words[1].clone()];
            device.launch::<Meet>(stream, MeetParams { own, other }, &retained);
        }
        streams.iter().for_each(|stream| device.wait(stream));
    }

    #[test]
    fn a_panic_ends_its_stream_and_no_other() {
        for (kind, said) in [
            (0, "panicked: fixed text"),
            (1, "panicked: text with 1"),
            (2, "panicked with a value that is no text"),
            (3, "panicked with a value that is no text"),
        ] {
            let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
            let (stream, other) = (device.stream("bad"), device.stream("good"));
            device.append(&stream, &log, 1);
            device.close(&stream, &gate);
            device.launch::<Panic>(&stream, PanicParams { kind }, &[]);
            device.append(&stream, &log, 2);
            gate.open();
            let expect_failure = |result: Result<(), BackendError>| match result {
                Err(BackendError::Failed { stream, operation, reason }) => {
                    assert_eq!((&*stream, &*operation, &*reason), ("test/bad", "panicking", said));
                }
                other => panic!("expected a failure, not {other:?}"),
            };
            expect_failure(device.backend.synchronize(&stream));
            expect_failure(device.backend.synchronize(&stream));
            // SAFETY: the stream has failed, so no byte is read.
            expect_failure(unsafe { device.backend.download(&stream, 0, &mut [0]) });
            expect_failure(device.try_launch::<Panic>(&stream, PanicParams { kind }, &[]));
            expect_failure(device.backend.begin_recording(&stream).map(drop));
            assert_eq!(log.values(), [1], "what was queued behind a failure does not run");
            device.append(&other, &log, 3);
            device.wait(&other);
            assert_eq!(log.values(), [1, 3]);
            drop(stream);
            assert_eq!(Arc::strong_count(&log.values), 1, "discarded work holds nothing");
        }
    }

    struct PanicsWhenDropped;

    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn a_panic_in_a_destructor_is_a_failure_of_the_stream() {
        let (device, gate) = (Device::new(), Gate::default());
        let stream = device.stream("s");
        device.close(&stream, &gate);
        let retained: Retained = Arc::new(PanicsWhenDropped);
        // SAFETY: nothing is written.
        unsafe { device.backend.fill(&stream, 0, 0, 0, &[retained]) }.expect("the stream runs");
        gate.open();
        let error = device.backend.synchronize(&stream).expect_err("the destructor panicked");
        assert_eq!(
            error.to_string(),
            "stream test/s: releasing what fill used failed: panicked: dropped"
        );
    }

    fn hold(device: &Device, on: &HostStream, held: &HostStream) {
        let held: Retained = Arc::new(held.clone());
        // SAFETY: nothing is written.
        unsafe { device.backend.fill(on, 0, 0, 0, &[held]) }.expect("the stream runs");
    }

    fn await_values(log: &Log, expected: &[u64]) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let mut values = log.values();
            values.sort_unstable();
            if values == expected {
                return;
            }
            assert!(Instant::now() < deadline, "the queues were not finished: {values:?}");
            thread::yield_now();
        }
    }

    #[test]
    fn a_stream_whose_work_holds_its_last_handle_ends() {
        let (device, gate, log) = (Device::new(), Gate::default(), Log::default());
        let stream = device.stream("s");
        device.close(&stream, &gate);
        hold(&device, &stream, &stream);
        device.append(&stream, &log, 1);
        drop(stream);
        gate.open();
        await_values(&log, &[1]);
    }

    #[test]
    fn streams_whose_work_holds_the_last_handles_of_each_other_end() {
        let (device, gate, log) = (Device::new(), Gate::default(), Log::default());
        let (first, second) = (device.stream("first"), device.stream("second"));
        device.close(&first, &gate);
        device.close(&second, &gate);
        hold(&device, &first, &second);
        hold(&device, &second, &first);
        device.append(&first, &log, 1);
        device.append(&second, &log, 2);
        drop((first, second));
        gate.open();
        await_values(&log, &[1, 2]);
    }

    struct Waits(Device, HostStream, Log);

    impl Drop for Waits {
        fn drop(&mut self) {
            let refused = self.0.backend.synchronize(&self.1);
            let expected = matches!(refused, Err(BackendError::Unavailable { .. }));
            super::lock(&self.2.values).push(u64::from(expected));
        }
    }

    #[test]
    fn a_destructor_on_the_thread_of_a_stream_does_not_wait_for_it() {
        let (device, gate, log) = (Device::new(), Gate::default(), Log::default());
        let stream = device.stream("s");
        device.close(&stream, &gate);
        let held: Retained = Arc::new(Waits(Device::new(), stream.clone(), log.clone()));
        // SAFETY: nothing is written.
        unsafe { device.backend.fill(&stream, 0, 0, 0, &[held]) }.expect("the stream runs");
        gate.open();
        device.wait(&stream);
        assert_eq!(log.values(), [1]);
    }
}

//! Recordings as values: the operations of a graph, what they keep alive, and how they are replayed.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::operation::{Failure, Operation};
use crate::backend::Retained;
use crate::sync::lock;

/// A finished recording. It owns what was retained while it was made.
pub struct HostRecording {
    graph: Graph,
}

impl HostRecording {
    pub(super) fn new(
        operations: Vec<Operation>,
        conditions: Vec<Arc<AtomicU32>>,
        retained: Vec<Retained>,
    ) -> Self {
        Self { graph: Graph { operations, conditions, retained, running: Mutex::new(()) } }
    }
}

impl fmt::Debug for HostRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.graph.describe("HostRecording", f)
    }
}

/// A graph ready to be replayed.
///
/// Replays of one graph never overlap, on whatever streams they are queued, since they share the
/// words of its loops.
pub struct HostExecutable {
    graph: Arc<Graph>,
}

impl HostExecutable {
    pub(super) fn new(recording: HostRecording) -> Self {
        Self { graph: Arc::new(recording.graph) }
    }

    /// Later replays run `recording`; those that are queued keep what they were queued with.
    pub(super) fn update(&mut self, recording: HostRecording) {
        *self = Self::new(recording);
    }

    /// One replay of the graph as it is now.
    pub(super) fn replay(&self) -> Replay {
        Replay { graph: self.graph.clone() }
    }
}

impl fmt::Debug for HostExecutable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.graph.describe("HostExecutable", f)
    }
}

/// One replay, queued or recorded; it keeps the graph alive.
pub(super) struct Replay {
    graph: Arc<Graph>,
}

impl Replay {
    pub(super) fn count(&self) -> usize {
        self.graph.count()
    }

    /// # Safety
    ///
    /// The promises under which the operations of the graph were recorded hold.
    pub(super) unsafe fn run(&self) -> Result<(), Failure> {
        // A graph holds only graphs that were finished before it, so these locks nest without a
        // cycle.
        let _running = lock(&self.graph.running);
        for condition in &self.graph.conditions {
            condition.store(0, Ordering::Relaxed);
        }
        for operation in &self.graph.operations {
            // SAFETY: the caller's promise; what the operation relies on is retained by the graph.
            unsafe { operation.run()? };
        }
        Ok(())
    }
}

struct Graph {
    operations: Vec<Operation>,
    /// The words of all loops, those in bodies included.
    conditions: Vec<Arc<AtomicU32>>,
    retained: Vec<Retained>,
    running: Mutex<()>,
}

impl Graph {
    fn count(&self) -> usize {
        self.operations.iter().map(Operation::count).sum()
    }

    fn describe(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("operations", &self.count())
            .field("retained", &self.retained.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;

    use super::*;
    use crate::backend::{Backend, BackendError, Condition, Memory, Update};
    use crate::host::HostStream;
    use crate::host::testing::{
        CountDown, CountDownParams, Device, Gate, Log, Panic, PanicParams, RaiseIfNonzero, Store,
        StoreParams, address_of, keep,
    };

    fn recorded(device: &Device, stream: &HostStream, log: &Log, values: &[u64]) -> HostExecutable {
        let key = device.begin(stream);
        values.iter().for_each(|value| device.append(stream, log, *value));
        device.end(&key)
    }

    #[test]
    fn a_graph_runs_as_often_as_it_is_replayed_and_in_order() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let graph = recorded(&device, &stream, &log, &[1, 2, 3]);
        device.wait(&stream);
        assert_eq!(log.values(), [], "recording runs nothing");
        device.replay(&stream, &graph);
        device.append(&stream, &log, 9);
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert_eq!(log.values(), [1, 2, 3, 9, 1, 2, 3]);
        // A graph belongs to no stream.
        let other = device.stream("other");
        device.replay(&other, &graph);
        device.wait(&other);
        assert_eq!(log.values().len(), 10);
        assert_eq!(device.backend.node_count(&graph), 3);
    }

    #[test]
    fn an_empty_graph_replays() {
        let device = Device::new();
        let stream = device.stream("s");
        let key = device.begin(&stream);
        let graph = device.end(&key);
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert_eq!(device.backend.node_count(&graph), 0);
    }

    #[test]
    fn what_was_recorded_is_alive_until_the_last_replay_has_run() {
        let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
        let stream = device.stream("s");
        let weak = Arc::downgrade(&log.values);
        let key = device.begin(&stream);
        device.append(&stream, &log, 1);
        drop(log);
        let recording = device.backend.end_recording(&key).expect("a whole recording");
        assert!(weak.upgrade().is_some(), "the recording holds it");
        let graph = device.backend.instantiate(recording).expect("instantiates");
        device.close(&stream, &gate);
        device.replay(&stream, &graph);
        drop(graph);
        assert!(weak.upgrade().is_some(), "the queued replay holds it");
        gate.open();
        device.wait(&stream);
        assert!(weak.upgrade().is_none(), "nothing holds it any more");
    }

    #[test]
    fn an_update_concerns_later_replays_only() {
        let (device, log, gate) = (Device::new(), Log::default(), Gate::default());
        let stream = device.stream("s");
        let old = Log::default();
        let mut graph = recorded(&device, &stream, &old, &[1]);
        device.close(&stream, &gate);
        device.replay(&stream, &graph);
        let key = device.begin(&stream);
        device.append(&stream, &log, 2);
        device.append(&stream, &log, 3);
        let recording = device.backend.end_recording(&key).expect("a whole recording");
        assert_eq!(device.backend.update(&mut graph, recording).ok(), Some(Update::InPlace));
        device.replay(&stream, &graph);
        gate.open();
        device.wait(&stream);
        assert_eq!((old.values(), log.values()), (vec![1], vec![2, 3]));
        assert_eq!(Arc::strong_count(&old.values), 1, "the old operations are gone");
        assert_eq!(device.backend.node_count(&graph), 2);
    }

    #[test]
    fn a_graph_may_stand_in_another_even_in_its_own_successor() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let mut graph = recorded(&device, &stream, &log, &[1, 2]);
        let key = device.begin(&stream);
        device.append(&stream, &log, 0);
        device.replay(&stream, &graph);
        device.replay(&stream, &graph);
        let recording = device.backend.end_recording(&key).expect("a whole recording");
        device.backend.update(&mut graph, recording).expect("updates");
        device.replay(&stream, &graph);
        device.wait(&stream);
        assert_eq!(log.values(), [0, 1, 2, 1, 2]);
        assert_eq!(device.backend.node_count(&graph), 7);
    }

    #[test]
    fn a_failure_inside_a_graph_names_the_kernel_and_skips_the_rest() {
        let (device, log) = (Device::new(), Log::default());
        let stream = device.stream("s");
        let key = device.begin(&stream);
        device.append(&stream, &log, 1);
        device.launch::<Panic>(&stream, PanicParams { kind: 0 }, &[]);
        device.append(&stream, &log, 2);
        let graph = device.end(&key);
        device.replay(&stream, &graph);
        let error = device.backend.synchronize(&stream).expect_err("a kernel panicked");
        assert!(
            matches!(&error, BackendError::Failed { operation, .. } if operation == "panicking"),
            "{error}"
        );
        let refused = device.backend.replay(&stream, &graph);
        assert!(matches!(refused, Err(BackendError::Failed { .. })));
        // The graph itself is whole, and runs elsewhere up to the same kernel.
        let other = device.stream("other");
        device.replay(&other, &graph);
        device.backend.synchronize(&other).expect_err("a kernel panicked");
        assert_eq!(log.values(), [1, 1]);
    }

    struct Loops {
        device: Device,
        stream: HostStream,
        log: Log,
    }

    impl Loops {
        fn new() -> Self {
            let device = Device::new();
            let stream = device.stream("s");
            Self { device, stream, log: Log::default() }
        }

        fn count_down(&self, on: &HostStream, word: &Arc<AtomicU64>, condition: Condition) {
            let params = CountDownParams { word: address_of(word), condition: condition.0 };
            self.device.launch::<CountDown>(on, params, &keep(word));
        }

        fn store(&self, on: &HostStream, word: &Arc<AtomicU64>, value: u64) {
            let params = StoreParams { word: address_of(word), value };
            self.device.launch::<Store>(on, params, &keep(word));
        }

        /// Records a loop whose body is what `body` records, as often as `word` says.
        fn repeat(&self, on: &HostStream, word: &Arc<AtomicU64>, body: impl FnOnce(&HostStream)) {
            let backend = &self.device.backend;
            let condition = backend.condition(on).expect("recording");
            self.count_down(on, word, condition);
            let inside = backend.begin_while(on, condition).expect("recording");
            body(&inside);
            self.count_down(&inside, word, condition);
            backend.end_while(on, inside).expect("the innermost loop");
        }
    }

    #[test]
    fn a_loop_makes_as_many_trips_as_its_condition_says_in_each_replay() {
        let loops = Loops::new();
        let word = Arc::new(AtomicU64::new(0));
        let key = loops.device.begin(&loops.stream);
        loops.repeat(&loops.stream, &word, |body| loops.device.append(body, &loops.log, 7));
        loops.device.append(&loops.stream, &loops.log, 8);
        let graph = loops.device.end(&key);
        assert_eq!(loops.device.backend.node_count(&graph), 5);
        for trips in [0, 1, 5, 0, 3] {
            word.store(trips, Ordering::Relaxed);
            loops.device.replay(&loops.stream, &graph);
            loops.device.wait(&loops.stream);
            let mut expected = vec![7; trips as usize];
            expected.push(8);
            assert_eq!(std::mem::take(&mut *lock(&loops.log.values)), expected);
        }
    }

    #[test]
    fn inner_loops_start_anew_on_every_trip() {
        let loops = Loops::new();
        let [outer, inner] = [2, 0].map(|trips| Arc::new(AtomicU64::new(trips)));
        let key = loops.device.begin(&loops.stream);
        loops.repeat(&loops.stream, &outer, |body| {
            loops.device.append(body, &loops.log, 1);
            loops.store(body, &inner, 3);
            loops.repeat(body, &inner, |body| loops.device.append(body, &loops.log, 2));
        });
        let graph = loops.device.end(&key);
        loops.device.replay(&loops.stream, &graph);
        loops.device.wait(&loops.stream);
        assert_eq!(loops.log.values(), [1, 2, 2, 2, 1, 2, 2, 2]);
    }

    #[test]
    fn a_condition_that_a_failed_replay_left_set_is_zero_in_the_next() {
        let loops = Loops::new();
        let (device, stream) = (&loops.device, &loops.stream);
        let word = Arc::new(AtomicU64::new(1));
        let key = device.begin(stream);
        let condition = device.backend.condition(stream).expect("recording");
        let params = CountDownParams { word: address_of(&word), condition: condition.0 };
        device.launch::<RaiseIfNonzero>(stream, params, &keep(&word));
        let body = device.backend.begin_while(stream, condition).expect("recording");
        device.append(&body, &loops.log, 1);
        device.launch::<Panic>(&body, PanicParams { kind: 0 }, &[]);
        device.backend.end_while(stream, body).expect("the innermost loop");
        let graph = device.end(&key);
        device.replay(stream, &graph);
        device.backend.synchronize(stream).expect_err("the body panicked");
        word.store(0, Ordering::Relaxed);
        let other = device.stream("other");
        device.replay(&other, &graph);
        device.wait(&other);
        assert_eq!(loops.log.values(), [1]);
    }

    #[test]
    fn replays_of_one_graph_do_not_overlap() {
        let loops = Loops::new();
        let streams = ["a", "b", "c"].map(|name| loops.device.stream(name));
        let word = Arc::new(AtomicU64::new(0));
        let key = loops.device.begin(&loops.stream);
        loops.store(&loops.stream, &word, 20);
        loops.repeat(&loops.stream, &word, |body| loops.device.append(body, &loops.log, 1));
        loops.device.append(&loops.stream, &loops.log, 2);
        let graph = loops.device.end(&key);
        for _ in 0..20 {
            streams.iter().for_each(|stream| loops.device.replay(stream, &graph));
        }
        streams.iter().for_each(|stream| loops.device.wait(stream));
        let mut expected = vec![1; 20];
        expected.push(2);
        assert_eq!(loops.log.values(), expected.repeat(60));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Copy(u64, u64, usize),
        Fill(u64, u8, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..48_u64, 64..112_u64, 0..16_usize, any::<bool>()).prop_map(|(low, high, n, up)| {
                if up { Step::Copy(high, low, n) } else { Step::Copy(low, high, n) }
            }),
            (0..112_u64, any::<u8>(), 0..16_usize)
                .prop_map(|(to, value, n)| { Step::Fill(to, value, n) }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// A recorded program does to memory, however often it is replayed, what it does when it
        /// is queued that often.
        #[test]
        fn recorded_and_queued_programs_agree(
            steps in prop::collection::vec(step(), 0..20),
            times in 1..4_usize,
        ) {
            let device = Device::new();
            let stream = device.stream("s");
            let seed: Vec<u8> = (0..128).collect();
            let queue = |start: u64| {
                for step in &steps {
                    // SAFETY: all offsets and lengths stay below 128 and copies go between the
                    // lower and the upper half; the memory lives until the stream is idle.
                    unsafe {
                        match *step {
                            Step::Copy(to, from, n) => {
                                device.backend.copy(&stream, start + to, start + from, n, &[])
                            }
                            Step::Fill(to, value, n) => {
                                device.backend.fill(&stream, start + to, value, n, &[])
                            }
                        }
                    }
                    .expect("the stream takes it");
                }
            };
            let mut seen = Vec::new();
            for replayed in [false, true] {
                let memory = device.backend.allocate(128).expect("memory");
                // SAFETY: `memory` is 128 bytes and lives until the download below has waited.
                unsafe { device.backend.upload(&stream, memory.address(), &seed, &[]) }
                    .expect("runs");
                if replayed {
                    let key = device.begin(&stream);
                    queue(memory.address());
                    let graph = device.end(&key);
                    prop_assert_eq!(device.backend.node_count(&graph), steps.len());
                    (0..times).for_each(|_| device.replay(&stream, &graph));
                } else {
                    (0..times).for_each(|_| queue(memory.address()));
                }
                let mut bytes = vec![0; 128];
                // SAFETY: as for the upload.
                unsafe { device.backend.download(&stream, memory.address(), &mut bytes) }
                    .expect("runs");
                seen.push(bytes);
            }
            prop_assert_eq!(&seen[0], &seen[1]);
        }
    }
}

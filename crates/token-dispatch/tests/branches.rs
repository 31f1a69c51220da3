//! Lanes in flight side by side: the second lane on a branch of the step.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use ep_context::host::{HostOptions, HostStream};
use ep_context::rendezvous::ThreadGroup;
use ep_context::{
    Backend, Buffer, Deadlines, EpContext, HostBackend, Kernel, LaunchShape, Queue, QueueScope,
    Retained, RowBuffer, RowSet, Specialization,
};
use token_dispatch::{
    Combine, DType, Dispatch, DispatchConfig, DispatchError, ExpertMap, Handle, Lane, Step,
    StepMode, StepOptions, TokenCount, TokenDispatcher, TopKIds,
};

type Host = HostBackend;

const HIDDEN: usize = 8;
const TOP_K: usize = 2;
const TOKENS: usize = 12;
const LOCAL_EXPERTS: usize = 2;
const ROW_BYTES: usize = HIDDEN * 4;
/// Far beyond what any wait takes; reached only when something is wrong.
const BOUND: Duration = Duration::from_secs(60);

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Expert `e` makes `(e + 1) · x + e` of `x`: exact for small whole numbers.
struct Experts;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct ExpertsParams {
    rows: u64,
    results: u64,
    expert_offsets: u64,
    tokens_per_expert: u64,
    first_expert: u64,
}

impl Kernel for Experts {
    type Params = ExpertsParams;
    const NAME: &'static str = "experts";

    unsafe fn run_on_host(p: &ExpertsParams) {
        for slot in 0..LOCAL_EXPERTS {
            let scale = (p.first_expert as usize + slot) as f32;
            // SAFETY: the launch retains the handle and both buffers, which are distinct and hold the
            // rows that the handle names.
            unsafe {
                let first = *pointer::<i32>(p.expert_offsets).add(slot) as usize;
                let count = *pointer::<i32>(p.tokens_per_expert).add(slot) as usize;
                for at in first * HIDDEN..(first + count) * HIDDEN {
                    let value = *pointer::<f32>(p.rows).add(at);
                    *pointer::<f32>(p.results).add(at) = (scale + 1.0) * value + scale;
                }
            }
        }
    }
}

/// Sets a word and waits until another is set.
struct Meet;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct MeetParams {
    own: u64,
    other: u64,
}

impl Kernel for Meet {
    type Params = MeetParams;
    const NAME: &'static str = "meet";

    unsafe fn run_on_host(p: &MeetParams) {
        // SAFETY: the launch retains both words, which are only accessed atomically.
        let (own, other) = unsafe { (&*pointer::<AtomicU32>(p.own), &*pointer(p.other)) };
        own.store(1, Ordering::Release);
        await_word(other);
    }
}

fn await_word(word: &AtomicU32) {
    let deadline = Instant::now() + BOUND;
    while word.load(Ordering::Acquire) == 0 {
        assert!(Instant::now() < deadline, "the other side did not run beside this one");
        thread::yield_now();
    }
}

/// Sets a word to one more than another is.
struct Witness;

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct WitnessParams {
    from: u64,
    to: u64,
}

impl Kernel for Witness {
    type Params = WitnessParams;
    const NAME: &'static str = "witness";

    unsafe fn run_on_host(p: &WitnessParams) {
        // SAFETY: the launch retains both words, which are only accessed atomically.
        let (from, to) = unsafe { (&*pointer::<AtomicU32>(p.from), &*pointer::<AtomicU32>(p.to)) };
        to.store(from.load(Ordering::Acquire) + 1, Ordering::Release);
    }
}

struct Broken;

impl Kernel for Broken {
    type Params = u32;
    const NAME: &'static str = "broken";

    unsafe fn run_on_host(_: &u32) {
        // Without the hook, which would print a panic that is wanted.
        resume_unwind(Box::new("an operation that breaks"));
    }
}

/// A lane and what one exchange on it uses.
struct Half {
    lane: Lane<Host>,
    handle: Handle<Host>,
    rows: RowBuffer<Host>,
    results: RowBuffer<Host>,
    tokens: Buffer<Host>,
    ids: Buffer<Host>,
    output: Buffer<Host>,
}

struct Rank {
    dispatcher: TokenDispatcher<Host>,
    own: HostStream,
    second: HostStream,
    halves: [Half; 2],
}

/// The values of a token, and its two experts, on a rank in one of the halves.
fn input(rank: usize, half: usize, token: usize, experts: usize) -> ([f32; HIDDEN], [i32; TOP_K]) {
    let seed = 7 * rank + 13 * half + 3 * token;
    let values = std::array::from_fn(|column| (seed + column) as f32 % 32.0);
    let first = (seed / 2) % experts;
    (values, [first as i32, ((first + 1 + seed % (experts - 1)) % experts) as i32])
}

impl Rank {
    fn new(context: &EpContext<Host>, capacity: u32, shared_rows: bool) -> Self {
        let world = context.world();
        let map = ExpertMap::contiguous(LOCAL_EXPERTS * world, world).expect("as many for each");
        let config = DispatchConfig::builder(HIDDEN, TOP_K, TOKENS, map)
            .dtype(DType::Fp32)
            .alignment(4)
            .lanes(2)
            .build()
            .expect("in range");
        let dispatcher = TokenDispatcher::new(context, config).expect("all ranks agree");
        let own = context.stream("own").expect("threads are left");
        let second = context.stream("second").expect("threads are left");
        let worst = dispatcher.worst_case_rows();
        let set = || {
            RowSet::new(context, &own, "rows", capacity.min(worst), worst).expect("memory is left")
        };
        let sets = match shared_rows {
            true => [set()].map(|set| [set.clone(), set]).concat(),
            false => vec![set(), set()],
        };
        let queue = Queue::direct(context.backend(), &own);
        let halves = std::array::from_fn(|index| {
            let mut values = Vec::new();
            let mut ids = Vec::new();
            for token in 0..TOKENS {
                let (row, experts) =
                    input(context.rank().index(), index, token, LOCAL_EXPERTS * world);
                values.extend(row);
                ids.extend(experts);
            }
            let buffer = |bytes| context.allocate("input or output", bytes).expect("memory");
            let half = Half {
                lane: dispatcher.lane(index).expect("there are two"),
                handle: Handle::new(&dispatcher, &sets[index]).expect("memory is left"),
                rows: sets[index].add("rows", ROW_BYTES).expect("memory is left"),
                results: sets[index].add("results", ROW_BYTES).expect("memory is left"),
                tokens: buffer(TOKENS * ROW_BYTES),
                ids: buffer(TOKENS * TOP_K * 4),
                output: buffer(TOKENS * ROW_BYTES),
            };
            // SAFETY: nothing else uses the buffers yet.
            unsafe {
                queue.upload(&half.tokens.slice(), bytemuck::cast_slice(&values)).expect("fits");
                queue.upload(&half.ids.slice(), bytemuck::cast_slice(&ids)).expect("fits");
            }
            half
        });
        context.backend().synchronize(&own).expect("nothing failed");
        Self { dispatcher, own, second, halves }
    }

    fn backend(&self) -> &Host {
        self.dispatcher.context().backend()
    }

    fn direct(&self) -> Queue<'static, Host> {
        Queue::direct(self.backend(), &self.own)
    }

    fn dispatch(&self, step: &mut Step<'static, Host>, half: &Half) -> Result<(), DispatchError> {
        let args = Dispatch::new(
            half.tokens.slice(),
            TokenCount::Fixed(TOKENS),
            TopKIds::I32(half.ids.slice()),
            &half.rows,
            &half.handle,
        );
        half.lane.dispatch(step, &args)
    }

    fn experts(&self, step: &Step<'static, Host>, half: &Half) -> Result<(), DispatchError> {
        let (offsets, counts) = (half.handle.expert_offsets(), half.handle.tokens_per_expert());
        let params = ExpertsParams {
            rows: half.rows.address(),
            results: half.results.address(),
            expert_offsets: offsets.address(),
            tokens_per_expert: counts.address(),
            first_expert: (self.dispatcher.context().rank().index() * LOCAL_EXPERTS) as u64,
        };
        let uses = [&half.rows.slice(), &half.results.slice(), &offsets, &counts];
        // SAFETY: every address lies in `uses`, and other work on them is ordered by the stream.
        unsafe { self.launch::<Experts>(step, &params, &uses.map(Clone::clone), &[]) }
    }

    /// Launches a kernel of this test.
    ///
    /// # Safety
    ///
    /// As for [`Queue::launch`].
    unsafe fn launch<K: Kernel>(
        &self,
        step: &Step<'static, Host>,
        params: &K::Params,
        uses: &[ep_context::DeviceSlice<'static, Host>],
        retained: &[Retained],
    ) -> Result<(), DispatchError> {
        let kernel = self.backend().load::<K>(&Specialization::new())?;
        let uses: Vec<_> = uses.iter().collect();
        // SAFETY: the caller's promise.
        Ok(unsafe {
            step.queue().launch::<K>(&kernel, LaunchShape::ONE_WARP, params, &uses, retained)
        }?)
    }

    fn combine(&self, step: &mut Step<'static, Host>, half: &Half) -> Result<(), DispatchError> {
        let args = Combine {
            handle: &half.handle,
            expert_rows: half.results.slice(),
            output: half.output.slice(),
        };
        half.lane.combine(step, &args)
    }

    /// One lane after the other, on one stream.
    fn in_sequence(&self, step: &mut Step<'static, Host>) -> Result<(), DispatchError> {
        for half in &self.halves {
            self.dispatch(step, half)?;
            self.experts(step, half)?;
            self.combine(step, half)?;
        }
        Ok(())
    }

    /// The second lane beside the first, in two pieces, the second of which waits for more of the
    /// step's own stream.
    fn side_by_side(&self, step: &mut Step<'static, Host>) -> Result<(), DispatchError> {
        let [first, beside] = &self.halves;
        self.dispatch(step, first)?;
        step.branch(&self.second, |step| {
            self.dispatch(step, beside)?;
            self.experts(step, beside)
        })?;
        self.experts(step, first)?;
        step.branch(&self.second, |step| self.combine(step, beside))?;
        self.combine(step, first)
    }

    /// Spoils the outputs, runs one step, and returns what is in them then.
    fn run(
        &self,
        mode: StepMode,
        body: impl FnOnce(&mut Step<'static, Host>) -> Result<(), DispatchError>,
    ) -> Result<Vec<u8>, DispatchError> {
        self.spoil();
        let options = StepOptions::new().with_mode(mode);
        let mut step = Step::begin(&self.dispatcher, self.direct(), options)?;
        body(&mut step)?;
        let number = step.finish()?.number.expect("a step that runs has a number");
        self.outputs(number)
    }

    fn spoil(&self) {
        for half in &self.halves {
            let output = half.output.slice();
            // SAFETY: the last step has ended.
            unsafe { self.direct().upload(&output, &[0xa5; TOKENS * ROW_BYTES]) }.expect("fits");
        }
    }

    fn outputs(&self, number: u32) -> Result<Vec<u8>, DispatchError> {
        let record = self.dispatcher.records().wait_on(number, &self.own)?;
        assert_eq!((record.first_over, record.dropped), (None, 0));
        assert!(record.required_by_dispatch.len() >= 2);
        let mut outputs = vec![0; 2 * TOKENS * ROW_BYTES];
        for (half, into) in self.halves.iter().zip(outputs.chunks_mut(TOKENS * ROW_BYTES)) {
            // SAFETY: the record says that the step has ended.
            unsafe { self.direct().download(&half.output.slice(), into) }?;
        }
        Ok(outputs)
    }

    fn expected(&self) -> Vec<u8> {
        let context = self.dispatcher.context();
        let (rank, experts) = (context.rank().index(), LOCAL_EXPERTS * context.world());
        let mut values = Vec::new();
        for half in 0..2 {
            for token in 0..TOKENS {
                let (row, chosen) = input(rank, half, token, experts);
                let expert = |value: f32, id: i32| (id as f32 + 1.0) * value + id as f32;
                values.extend(
                    row.map(|value| chosen.iter().map(|&id| expert(value, id)).sum::<f32>()),
                );
            }
        }
        bytemuck::cast_slice(&values).to_vec()
    }
}

fn on_ranks(world: usize, capacity: u32, shared_rows: bool, run: impl Fn(&Rank) + Sync) {
    ranks_on(None, world, capacity, shared_rows, run);
}

/// The same, all on one device.
fn on_one_device(world: usize, run: impl Fn(&Rank) + Sync) {
    ranks_on(Some("shared"), world, u32::MAX, true, run);
}

fn ranks_on(
    device: Option<&str>,
    world: usize,
    capacity: u32,
    shared_rows: bool,
    run: impl Fn(&Rank) + Sync,
) {
    let group = ThreadGroup::new(world).expect("a group");
    thread::scope(|scope| {
        for (rank, rendezvous) in group.into_iter().enumerate() {
            let run = &run;
            scope.spawn(move || {
                let options = HostOptions::new(format!("rank {rank}"));
                let options = match device {
                    Some(name) => options.with_device(name),
                    None => options,
                };
                let backend = HostBackend::new(options);
                let context = EpContext::builder(backend, rendezvous)
                    .deadlines(Deadlines::all(BOUND))
                    .build()
                    .expect("all ranks come");
                run(&Rank::new(&context, capacity, shared_rows));
            });
        }
    });
}

#[test]
fn lanes_side_by_side_give_the_bits_of_lanes_in_sequence() {
    on_ranks(3, u32::MAX, true, |rank| {
        let expected = rank.expected();
        for _ in 0..3 {
            let sequence = rank.run(StepMode::Static, |step| rank.in_sequence(step));
            assert!(sequence.expect("it runs") == expected, "in sequence");
            let beside = rank.run(StepMode::Static, |step| rank.side_by_side(step));
            assert!(beside.expect("it runs") == expected, "side by side");
            let joined = rank.run(StepMode::Static, |step| {
                rank.side_by_side(step)?;
                step.join(&rank.second)?;
                assert!(step.join(&rank.second).is_err(), "it is joined");
                // The step's own stream goes behind the branch, so that the lane may be used here.
                let beside = &rank.halves[1];
                rank.dispatch(step, beside)?;
                rank.experts(step, beside)?;
                rank.combine(step, beside)
            });
            assert!(joined.expect("it runs") == expected, "joined by hand");
        }
    });
}

#[test]
fn a_recorded_step_with_branches_is_replayed_like_any_other() {
    on_ranks(3, u32::MAX, true, |rank| {
        let backend = rank.backend();
        let key = backend.begin_recording(&rank.own).expect("idle");
        let scope = QueueScope::new();
        // SAFETY: the queue is used while the stream records, and for 'static slices only.
        let queue = unsafe { Queue::recording(backend, &rank.own, &scope) };
        let mut step =
            Step::begin(&rank.dispatcher, queue, StepOptions::new()).expect("it records");
        rank.side_by_side(&mut step).expect("recorded");
        let summary = step.finish().expect("recorded");
        assert_eq!((summary.number, summary.dispatches), (None, 2));
        drop(scope);
        let recording = backend.end_recording(&key).expect("every branch was joined");
        let graph = backend.instantiate(recording).expect("instantiates");
        for _ in 0..4 {
            rank.spoil();
            backend.replay(&rank.own, &graph).expect("queued");
            let outputs = rank.outputs(rank.dispatcher.count_step()).expect("it runs");
            assert!(outputs == rank.expected(), "replayed");
            // Direct steps between replays, branches included.
            let direct = rank.run(StepMode::Static, |step| rank.side_by_side(step));
            assert!(direct.expect("it runs") == rank.expected(), "direct");
        }
    });
}

#[test]
fn eager_lanes_grow_their_row_sets_side_by_side() {
    on_ranks(3, 0, false, |rank| {
        let eager = StepMode::Eager { max_rows: u32::MAX };
        for _ in 0..2 {
            let outputs = rank.run(eager, |step| rank.side_by_side(step)).expect("it runs");
            assert!(outputs == rank.expected(), "eager");
        }
    });
}

#[test]
fn branches_run_at_the_same_time() {
    on_ranks(3, u32::MAX, true, |rank| {
        let words: [_; 2] = std::array::from_fn(|_| Arc::new(AtomicU32::new(0)));
        let meet = |step: &Step<'static, Host>, at: usize| {
            let address = |at: usize| Arc::as_ptr(&words[at]).expose_provenance() as u64;
            let params = MeetParams { own: address(at), other: address(1 - at) };
            let retained: [Retained; 2] = [words[0].clone(), words[1].clone()];
            // SAFETY: both words are retained, and only accessed atomically.
            unsafe { rank.launch::<Meet>(step, &params, &[], &retained) }
        };
        let [first, beside] = &rank.halves;
        let outputs = rank.run(StepMode::Static, |step| {
            // The experts of the branch wait for what the step queues on its own stream later.
            step.branch(&rank.second, |step| {
                rank.dispatch(step, beside)?;
                meet(step, 1)?;
                rank.experts(step, beside)?;
                rank.combine(step, beside)
            })?;
            rank.dispatch(step, first)?;
            meet(step, 0)?;
            rank.experts(step, first)?;
            rank.combine(step, first)
        });
        assert!(outputs.expect("both sides ran") == rank.expected());
    });
}

/// Nothing promises that streams of several ranks run side by side on one device.
#[test]
fn on_a_shared_device_a_step_goes_on_behind_its_branches() {
    on_one_device(3, |rank| {
        assert!(rank.dispatcher.shares_devices());
        let begun = Arc::new(AtomicU32::new(0));
        let [go, done, seen] = std::array::from_fn(|_| Arc::new(AtomicU32::new(0)));
        let address = |word: &Arc<AtomicU32>| Arc::as_ptr(word).expose_provenance() as u64;
        let retained: [Retained; 4] = [begun.clone(), go.clone(), done.clone(), seen.clone()];
        let [first, beside] = &rank.halves;
        let outputs = thread::scope(|scope| {
            scope.spawn(|| {
                await_word(&begun);
                // Whatever is not ordered behind the branch has time to run now.
                let deadline = Instant::now() + Duration::from_millis(100);
                while seen.load(Ordering::Acquire) == 0 && Instant::now() < deadline {
                    thread::yield_now();
                }
                go.store(1, Ordering::Release);
            });
            rank.run(StepMode::Static, |step| {
                rank.dispatch(step, first)?;
                step.branch(&rank.second, |step| {
                    for own in [&begun, &done] {
                        let params = MeetParams { own: address(own), other: address(&go) };
                        // SAFETY: the words are retained, and only accessed atomically.
                        unsafe { rank.launch::<Meet>(step, &params, &[], &retained) }?;
                    }
                    rank.dispatch(step, beside)?;
                    rank.experts(step, beside)
                })?;
                let params = WitnessParams { from: address(&done), to: address(&seen) };
                // SAFETY: the words are retained, and only accessed atomically.
                unsafe { rank.launch::<Witness>(step, &params, &[], &retained) }?;
                rank.experts(step, first)?;
                rank.combine(step, first)?;
                step.branch(&rank.second, |step| rank.combine(step, beside))?;
                step.join(&rank.second)?;
                assert!(step.join(&rank.second).is_err(), "it is joined");
                Ok(())
            })
        });
        assert!(outputs.expect("it runs") == rank.expected());
        assert_eq!(seen.load(Ordering::Acquire), 2, "1 if it ran before the branch had");
    });
}

#[test]
fn on_a_shared_device_a_recorded_step_has_branches_too() {
    on_one_device(2, |rank| {
        let backend = rank.backend();
        let key = backend.begin_recording(&rank.own).expect("idle");
        let scope = QueueScope::new();
        // SAFETY: the queue is used while the stream records, and for 'static slices only.
        let queue = unsafe { Queue::recording(backend, &rank.own, &scope) };
        let mut step =
            Step::begin(&rank.dispatcher, queue, StepOptions::new()).expect("it records");
        rank.side_by_side(&mut step).expect("recorded");
        step.finish().expect("recorded");
        drop(scope);
        let recording = backend.end_recording(&key).expect("every branch was joined");
        let graph = backend.instantiate(recording).expect("instantiates");
        for _ in 0..2 {
            rank.spoil();
            backend.replay(&rank.own, &graph).expect("queued");
            let outputs = rank.outputs(rank.dispatcher.count_step()).expect("it runs");
            assert!(outputs == rank.expected(), "replayed");
        }
    });
}

fn reason<T>(result: Result<T, DispatchError>) -> String {
    match result {
        Err(DispatchError::Order { reason, .. }) => reason,
        Err(other) => panic!("expected a refusal, not {other:?}"),
        Ok(_) => panic!("expected a refusal"),
    }
}

#[test]
fn what_would_not_be_ordered_is_refused() {
    on_ranks(1, u32::MAX, true, |rank| {
        let [first, beside] = &rank.halves;
        let outputs = rank.run(StepMode::Static, |step| {
            assert!(reason(step.join(&rank.second)).contains("no branch is out"));
            let own = rank.own.clone();
            let refused = step.branch(&own, |_| Ok::<_, DispatchError>(()));
            assert!(reason(refused).contains("step's own"));
            step.branch(&rank.second, |step| {
                let nested = step.branch(&own, |_| Ok::<_, DispatchError>(()));
                assert!(reason(nested).contains("no branches of its own"));
                assert!(reason(step.join(&rank.second)).contains("no branches of its own"));
                rank.dispatch(step, beside)
            })?;
            // The combine of a dispatch on a branch that is out.
            assert!(reason(rank.combine(step, beside)).contains("not joined"));
            rank.dispatch(step, first)?;
            let foreign = step.branch(&rank.second, |step| rank.combine(step, beside));
            foreign.expect("its own dispatch");
            rank.experts(step, first)?;
            rank.combine(step, first)?;
            // What was refused has changed nothing.
            Ok(())
        });
        let half = TOKENS * ROW_BYTES;
        assert!(outputs.expect("it runs")[..half] == rank.expected()[..half]);

        let eager = StepMode::Eager { max_rows: u32::MAX };
        let shared = rank.run(eager, |step| {
            rank.dispatch(step, first)?;
            let first_used_before = step.branch(&rank.second, |step| rank.dispatch(step, beside));
            first_used_before.expect("the fork orders the two");
            rank.combine(step, first)?;
            let refused = rank.dispatch(step, first);
            assert!(reason(refused).contains("row set"));
            step.branch(&rank.second, |step| rank.combine(step, beside))
        });
        shared.expect("it runs");
    });
}

#[test]
fn a_branch_that_fails_fails_the_step() {
    on_ranks(1, u32::MAX, true, |rank| {
        let failed = rank.run(StepMode::Static, |step| {
            step.branch(&rank.second, |step| {
                // SAFETY: the kernel touches no memory.
                unsafe { rank.launch::<Broken>(step, &0, &[], &[]) }
            })
        });
        let error = failed.expect_err("the branch has failed").to_string();
        assert!(error.contains("broken failed"), "{error}");
    });
}

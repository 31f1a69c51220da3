//! A few C functions by which the tests drive GraphEP from engines in other languages, with streams and
//! tensors of theirs. Not an interface for anybody else: it has what `torch_capture.py` asks for.
//!
//! Every function takes a rank from [`gep_join`]. Those that return an `i32` return 0, or what went wrong:
//! −1, and [`gep_error`] says what; 1 for a stale graph. No function may be called for a rank by two
//! threads at once, except that callbacks call back.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use graph_ep::ep_context::cuda::{CudaBackend, CudaOptions, CudaStream};
use graph_ep::ep_context::rendezvous::ThreadRendezvous;
use graph_ep::{
    BodyError, DType, DeviceSlice, DispatchError, EmbeddedStep, EngineGraph, ExpertParallel,
    MoeLayer, Outcome, OverflowError, OverflowPolicy, Queue, RecoverySettings, Step, StepMode,
    StepOptions, StepRunner, StepSpec, ThreadGroup, TokenCount, TopKIds,
};

mod callbacks;

use callbacks::Callbacks;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// The sizes of a group. All ranks give the same.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// Values of a row, fp32.
    pub hidden: u32,
    /// Experts of the model.
    pub experts: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// The most tokens of a rank.
    pub max_tokens: u32,
    /// Receive rows of a rank at the start.
    pub capacity: u32,
}

/// The tensors of one layer, by their addresses. They live as long as the graphs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Layer {
    /// `[count, hidden]` fp32.
    pub tokens: u64,
    /// `[count, top_k]` i32.
    pub ids: u64,
    /// `[count, top_k]` fp32.
    pub weights: u64,
    /// `[count, hidden]` fp32.
    pub output: u64,
    /// Tokens.
    pub count: u32,
    /// Nonzero: in rounds.
    pub rounds: u32,
}

/// What a step reports.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Report {
    /// The step.
    pub step: u32,
    /// Whether rows were missing on any rank.
    pub overflowed: u32,
    /// Pairs of token and expert that found no room on this rank.
    pub dropped: u64,
    /// The most windows that a dispatch took.
    pub windows: u32,
    /// How often the step was replayed to recover it.
    pub replays: u32,
    /// Receive rows of this rank now.
    pub capacity: u32,
    /// The rank whose graph was stale.
    pub stale_rank: u32,
    /// The generation for which that was recorded.
    pub recorded: u64,
    /// The generation of now.
    pub now: u64,
}

/// One rank.
#[derive(Debug)]
pub struct Rank {
    group: ExpertParallel<CudaBackend>,
    stream: CudaStream,
    sizes: Sizes,
    runner: Mutex<Option<StepRunner<CudaBackend>>>,
    /// The step that was recorded last.
    embedded: Mutex<Option<EmbeddedStep<CudaBackend>>>,
    /// While a runner has the engine capture: how.
    spec: AtomicPtr<c_void>,
}

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// How many objects that stood for an engine's tensors graphs have let go.
static RELEASED: AtomicU64 = AtomicU64::new(0);

/// Stands for the tensors of a layer in the graph that uses them.
struct Tensors;

impl Drop for Tensors {
    fn drop(&mut self) {
        RELEASED.fetch_add(1, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn told(error: &(dyn std::error::Error + 'static)) {
    let text = graph_ep::ep_context::error::chain(error).replace('\0', "");
    ERROR.with(|place| *place.borrow_mut() = CString::new(text).unwrap_or_default());
}

fn code(result: Result<(), Error>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            told(error.as_ref());
            -1
        }
    }
}

/// What went wrong in the last call of this thread that failed.
#[unsafe(no_mangle)]
pub extern "C" fn gep_error() -> *const c_char {
    ERROR.with(|place| place.borrow().as_ptr())
}

/// Joins a group of `world` threads of this process, on a GPU, with a stream of the engine's. Returns
/// null if that fails. Collective.
///
/// # Safety
///
/// `stream` is one of the GPU's primary context, and outlives the rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_join(
    world: u32,
    rank: u32,
    gpu: u32,
    stream: *mut c_void,
    sizes: Sizes,
) -> *const Rank {
    // SAFETY: the caller's promise.
    let joined = unsafe { join(world, rank, gpu, stream, sizes) };
    joined.map_or_else(
        |error| {
            told(error.as_ref());
            ptr::null()
        },
        |rank| Box::into_raw(Box::new(rank)).cast_const(),
    )
}

/// # Safety
///
/// As for [`gep_join`].
unsafe fn join(
    world: u32,
    rank: u32,
    gpu: u32,
    stream: *mut c_void,
    sizes: Sizes,
) -> Result<Rank, Error> {
    let backend = CudaBackend::new(CudaOptions::new(gpu))?;
    // SAFETY: the caller's promise.
    let stream = unsafe { backend.borrow_stream(stream.cast(), "engine") };
    let [hidden, experts, top_k, most] =
        [sizes.hidden, sizes.experts, sizes.top_k, sizes.max_tokens].map(|size| size as usize);
    let group = ExpertParallel::<CudaBackend>::builder(hidden, experts, top_k, most)
        .dtype(DType::Fp32)
        .alignment(4)
        .capacity_rows(sizes.capacity)
        .build(backend, meet(world, rank)?)?;
    let (runner, embedded) = (Mutex::default(), Mutex::default());
    Ok(Rank { group, stream, sizes, runner, embedded, spec: AtomicPtr::new(ptr::null_mut()) })
}

/// Ranks of the group that is meeting.
static MEETING: Mutex<Vec<Option<ThreadRendezvous>>> = Mutex::new(Vec::new());

fn meet(world: u32, rank: u32) -> Result<ThreadRendezvous, Error> {
    let mut meeting = lock(&MEETING);
    if meeting.iter().all(Option::is_none) {
        *meeting = ThreadGroup::new(world as usize)?.into_iter().map(Some).collect();
    }
    let place = meeting.get_mut(rank as usize).and_then(Option::take);
    place.ok_or_else(|| format!("rank {rank} of {world} has no place in the meeting").into())
}

/// Leaves the group.
///
/// # Safety
///
/// `rank` is from [`gep_join`] and used by nobody any more; its graphs are not launched any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_leave(rank: *const Rank) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(rank.cast_mut()) });
}

/// Records a step of one layer into what the engine is capturing on its stream.
///
/// # Safety
///
/// `rank` is from [`gep_join`], and the tensors are as [`Layer`] says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_record(rank: *const Rank, layer: Layer, callbacks: Callbacks) -> i32 {
    // SAFETY: the caller's promise.
    let rank = unsafe { &*rank };
    code(rank.record(layer, callbacks))
}

impl Rank {
    fn record(&self, layer: Layer, callbacks: Callbacks) -> Result<(), Error> {
        let Sizes { hidden, top_k, .. } = self.sizes;
        let owner = Arc::new(Tensors);
        let slice = |address, width: u32| {
            let bytes = layer.count as usize * width as usize * 4;
            // SAFETY: by the promise of whoever gave the addresses.
            unsafe { DeviceSlice::owned_by(owner.clone(), address, bytes) }
        };
        let mut moe = MoeLayer::new(
            slice(layer.tokens, hidden),
            TokenCount::Fixed(layer.count as usize),
            TopKIds::I32(slice(layer.ids, top_k)),
            slice(layer.output, hidden),
        );
        moe.topk_weights = Some(slice(layer.weights, top_k));
        let body = |step: &mut Step<'static, CudaBackend>| {
            self.group.layer(step, &moe, |queue: &Queue<'static, _>, received| {
                callbacks.experts(queue, received)
            })
        };
        let spec = self.spec.load(Ordering::Acquire).cast::<StepSpec<'_, CudaBackend>>();
        let embedded = if spec.is_null() {
            let mode = if layer.rounds == 0 { StepMode::Static } else { StepMode::Rounds };
            self.group.embed(&self.stream, StepOptions::new().with_mode(mode), body)?
        } else {
            // SAFETY: it is set while the runner has the engine capture, which is now.
            unsafe { &*spec }.record(&self.stream, body)?
        };
        *lock(&self.embedded) = Some(embedded);
        Ok(())
    }

    fn wait(&self, step: u32) -> Result<Report, Error> {
        let record = self.group.dispatcher().records().wait_on(step, &self.stream)?;
        Ok(Report {
            step: record.step,
            overflowed: u32::from(record.overflowed()),
            dropped: record.dropped,
            windows: record.windows,
            capacity: self.group.rows().capacity(),
            ..Report::default()
        })
    }

    fn run(&self) -> Result<Report, Error> {
        let mut runner = lock(&self.runner);
        let report = runner.as_mut().ok_or("the rank has no runner")?.run()?;
        Ok(Report {
            step: report.record.step,
            overflowed: u32::from(report.record.overflowed()),
            dropped: report.record.dropped,
            windows: report.record.windows,
            replays: match report.outcome {
                Outcome::Recovered { replays, .. } => replays,
                _ => 0,
            },
            capacity: report.capacity_after,
            ..Report::default()
        })
    }
}

/// Counts a launch of the step that was recorded last, and returns its number; 0 if there is none.
///
/// # Safety
///
/// `rank` is from [`gep_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_replayed(rank: *const Rank) -> u32 {
    // SAFETY: the caller's promise.
    let rank = unsafe { &*rank };
    lock(&rank.embedded).as_ref().map_or(0, EmbeddedStep::replayed)
}

/// Waits for the record of a step.
///
/// # Safety
///
/// `rank` is from [`gep_join`], and `report` a place for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_wait(rank: *const Rank, step: u32, report: *mut Report) -> i32 {
    // SAFETY: the caller's promise.
    let (rank, report) = unsafe { (&*rank, &mut *report) };
    settle(rank.wait(step), report)
}

/// Runs a step of the runner to its end. Collective.
///
/// # Safety
///
/// As for [`gep_wait`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_run(rank: *const Rank, report: *mut Report) -> i32 {
    // SAFETY: the caller's promise.
    let (rank, report) = unsafe { (&*rank, &mut *report) };
    settle(rank.run(), report)
}

fn settle(result: Result<Report, Error>, report: &mut Report) -> i32 {
    let error = match result {
        Ok(made) => {
            *report = made;
            return 0;
        }
        Err(error) => error,
    };
    told(error.as_ref());
    let dispatch = match error.downcast_ref::<OverflowError>() {
        Some(OverflowError::Dispatch(error)) => Some(error),
        _ => error.downcast_ref::<DispatchError>(),
    };
    match dispatch {
        Some(DispatchError::StaleGraph { rank, step, recorded, now }) => {
            let (stale_rank, step) = (rank.0, *step);
            *report =
                Report { step, stale_rank, recorded: *recorded, now: *now, ..Report::default() };
            1
        }
        _ => -1,
    }
}

/// Makes a runner whose graph the engine captures and launches by `callbacks`. Collective.
///
/// # Safety
///
/// `rank` is from [`gep_join`]; the callbacks can be called until it is left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_runner(rank: *const Rank, callbacks: Callbacks, rounds: u32) -> i32 {
    // SAFETY: the caller's promise.
    let here = unsafe { &*rank };
    let policy = if rounds == 0 { OverflowPolicy::Recover } else { OverflowPolicy::Rounds };
    let settings = RecoverySettings::new().with_overflow(policy);
    let engine = Engine { rank: Address(rank), callbacks };
    code(
        here.group
            .engine_runner(settings, here.stream.clone(), engine)
            .map(|runner| *lock(&here.runner) = Some(runner))
            .map_err(Error::from),
    )
}

/// Changes the receive capacity of this rank alone, in the order of its stream.
///
/// # Safety
///
/// `rank` is from [`gep_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_set_capacity(rank: *const Rank, rows: u32) -> i32 {
    // SAFETY: the caller's promise.
    let rank = unsafe { &*rank };
    let direct = Queue::direct(rank.group.context().backend(), &rank.stream);
    let planned = rank.group.rows().plan(rows);
    // SAFETY: the engine launches its graphs on this stream alone.
    code(planned.and_then(|change| unsafe { change.commit(&direct) }).map_err(Error::from))
}

/// Whether the rows are pushed.
///
/// # Safety
///
/// `rank` is from [`gep_join`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gep_pushes(rank: *const Rank) -> i32 {
    // SAFETY: the caller's promise.
    i32::from(unsafe { &*rank }.group.dispatcher().pushes())
}

/// Drops what graphs kept that are gone, and returns how many layers' tensors graphs have let go so far.
#[unsafe(no_mangle)]
pub extern "C" fn gep_released() -> u64 {
    graph_ep::ep_context::reclaim();
    RELEASED.load(Ordering::Relaxed)
}

/// The engine of a rank.
#[derive(Debug)]
struct Engine {
    rank: Address,
    callbacks: Callbacks,
}

#[derive(Clone, Copy, Debug)]
struct Address(*const Rank);

// SAFETY: a rank may be used from any thread, one at a time.
unsafe impl Send for Address {}

impl EngineGraph<CudaBackend> for Engine {
    fn capture(
        &mut self,
        spec: &StepSpec<'_, CudaBackend>,
    ) -> Result<EmbeddedStep<CudaBackend>, BodyError> {
        // SAFETY: the rank owns the runner that owns this.
        let rank = unsafe { &*self.rank.0 };
        rank.spec.store(ptr::from_ref(spec).cast_mut().cast(), Ordering::Release);
        let captured = self.callbacks.capture();
        rank.spec.store(ptr::null_mut(), Ordering::Release);
        captured?;
        lock(&rank.embedded).take().ok_or_else(|| "the engine has recorded no step".into())
    }

    fn launch(&mut self) -> Result<(), BodyError> {
        self.callbacks.launch()
    }
}

//! What only a GPU can be put through: a kernel that faults, and memory that really runs out. Each rank
//! is a process with a GPU of its own, since a fault takes the context of its process with it.

use graph_ep::ep_context::cuda::CudaBackend;
use graph_ep::ep_context::error::chain;
use graph_ep::ep_context::{FaultKind, Specialization};
use graph_ep::{
    Backend, BackendError, BodyError, Deadlines, DispatchError, GrowthPolicy, LaunchShape, Outcome,
    OverflowError, Phase, Queue, Rank, RecoverySettings, Step, StepOptions,
};

use crate::backend::{PATIENCE, TestBackend};
use crate::case::{Case, Skew};
use crate::cuda_processes::CudaProcesses;
use crate::harness::Check;
use crate::kernels::Broken;
use crate::outcome::Ended;
use crate::processes::Processes;
use crate::rig::Rig;

type Gpu = Rig<CudaProcesses>;

/// The checks, for a harness that forks.
pub const CHECKS: [Check; 3] = [
    Check { name: "faults::a_kernel_that_faults", run: a_kernel_that_faults },
    Check { name: "faults::a_runner_whose_kernel_faults", run: a_runner_whose_kernel_faults },
    Check { name: "faults::memory_that_is_really_full", run: memory_that_is_really_full },
];

/// The driver's name for what [`Broken`] does.
const ILLEGAL: &str = "CUDA_ERROR_ILLEGAL_ADDRESS";

fn deadlines() -> Deadlines {
    let step = std::time::Duration::from_secs(2);
    Deadlines::all(step)
        .with(Phase::Setup, PATIENCE)
        .with(Phase::Agreement, PATIENCE)
        .with(Phase::Record, PATIENCE)
}

fn rig(env: crate::RankEnv<CudaProcesses>, case: &Case) -> Gpu {
    Rig::with(env, &case.builder(Rank(0)).deadlines(deadlines()), case)
}

/// Queues a kernel that writes where nothing is mapped.
fn break_on(
    kernel: &<CudaBackend as Backend>::Loaded<Broken>,
    queue: &Queue<'static, CudaBackend>,
) -> Result<(), BackendError> {
    // SAFETY: it touches no memory that anybody has, which is what is wrong with it.
    unsafe { queue.launch::<Broken>(kernel, LaunchShape::ONE_WARP, &7, &[], &[]) }
}

/// Whether this says that the context is dead, and why.
fn is_dead<R>(result: Result<R, BackendError>) -> bool {
    let Err(error) = result else { return false };
    matches!(error, BackendError::Failed { .. } | BackendError::Driver { .. })
        && chain(&error).contains(ILLEGAL)
}

/// A kernel of one rank faults between its dispatch and its combine. That rank is told so by whatever it
/// asks next, and by everything after that; the other blames it for not combining, and goes on to end in
/// order.
fn a_kernel_that_faults() {
    CudaProcesses::require(2);
    let case = Case::new(2);
    let blamed = CudaProcesses::on_ranks(2, |env| {
        let rig = rig(env, &case);
        rig.write(0);
        let backend = rig.group.context().backend();
        let kernel = backend.load::<Broken>(&Specialization::new()).expect("loaded");
        let suspended = rig.group.context().suspend_deadlines();
        let breaks = rig.rank() == 1;
        let (program, dispatcher) = (rig.program(), rig.group.dispatcher());
        let mut step = Step::begin(dispatcher, rig.direct(), StepOptions::new()).expect("queued");
        let queued = (|| -> Result<Option<u32>, BodyError> {
            program.dispatch(&mut step, 0)?;
            if breaks {
                break_on(&kernel, step.queue())?;
            }
            program.experts(&mut step, 0)?;
            program.combine(&mut step, 0)?;
            Ok(step.finish()?.number)
        })();
        rig.meet("launched");
        drop(suspended);
        if !breaks {
            let number = queued.expect("it is queued").expect("it runs");
            match rig.wait(number) {
                Err(DispatchError::Fault(fault)) => {
                    assert_eq!((fault.phase, fault.kind), (Phase::Combine, FaultKind::Timeout));
                    return fault.culprit.0;
                }
                other => panic!("{other:?}"),
            }
        }
        // What is queued behind the fault may be refused already.
        match queued {
            Ok(number) => {
                let (records, stream) = (dispatcher.records(), rig.group.stream());
                let error =
                    records.wait_on(number.expect("it runs"), stream).expect_err("it broke");
                assert!(chain(&error).contains(ILLEGAL), "{error:?}");
            }
            Err(error) => assert!(error.to_string().contains("fail"), "{error:?}"),
        }
        // The context is dead, and everything says so without waiting for anything.
        for _ in 0..2 {
            assert!(is_dead(backend.synchronize(rig.group.stream())));
            assert!(is_dead(backend.check(rig.group.stream())));
            assert!(is_dead(backend.allocate(256).map(drop)));
        }
        rig.launch(StepOptions::new()).expect_err("no step can be queued any more");
        1
    });
    assert_eq!(blamed, [1, 1]);
}

/// The runner of a rank whose kernel faults says what happened, rather than that no record came.
fn a_runner_whose_kernel_faults() {
    let case = Case::new(1);
    CudaProcesses::on_ranks(1, |env| {
        let rig = rig(env, &case);
        let kernel = rig.group.context().backend().load::<Broken>(&Specialization::new());
        let kernel = kernel.expect("loaded");
        let body =
            move |step: &mut Step<'static, CudaBackend>| Ok(break_on(&kernel, step.queue())?);
        let mut runner = rig.group.runner(RecoverySettings::new(), body).expect("in range");
        for _ in 0..2 {
            let error = runner.run().expect_err("the step breaks");
            assert!(chain(&error).contains(ILLEGAL), "{error:?}");
        }
    });
}

/// Growth for which a GPU has no memory is refused on every rank, with the group as it was; once there is
/// memory the same step is recovered.
fn memory_that_is_really_full() {
    CudaProcesses::require(2);
    // Rows of 512 KiB: the growth takes far more than what is left when the GPU is full.
    let hidden = CudaProcesses::PAGE_BYTES / (4 * 2);
    let tokens = vec![64, 64];
    let case = Case { skew: Skew::Hot(0), hidden, tokens, ..Case::new(2) }.capacity(4);
    CudaProcesses::on_ranks(2, |env| {
        let rig = rig(env, &case);
        let settings = RecoverySettings::new().with_growth(GrowthPolicy::Exact);
        let mut runner = rig.runner(settings).expect("in range");
        let backend = rig.group.context().backend();
        // Recorded while there is memory: a step that sends nothing fits.
        rig.write(0);
        let nowhere = vec![-1_i32; 64 * case.top_k];
        rig.group.write(&rig.layer(0).ids, bytemuck::cast_slice(&nowhere)).expect("it fits");
        rig.meet("written");
        let report = runner.run().expect("nothing is sent");
        assert_eq!(report.outcome, Outcome::Clean);
        rig.meet("recorded");
        let mut full = Vec::new();
        if rig.rank() == 0 {
            let mut bytes: usize = 32 << 30;
            while bytes >= 64 << 20 {
                match backend.allocate(bytes) {
                    Ok(memory) => full.push(memory),
                    Err(BackendError::OutOfMemory { .. }) => bytes /= 2,
                    Err(other) => panic!("{other:?}"),
                }
            }
            let (free, _) = backend.free_memory().expect("the GPU says");
            assert!(free < 128 << 20, "{free} bytes are left");
        }
        rig.meet("full");
        match rig.step(&mut runner, 0) {
            Err(OverflowError::Refused { rank: Rank(0), refusal, .. }) => {
                assert!(refusal.reason.contains("memory"), "{}", refusal.reason);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(rig.group.rows().capacity(), 4);
        drop(full);
        backend.collect().expect("it is given back");
        rig.meet("there is room");
        let ran = rig.step(&mut runner, 0).expect("there is memory now");
        assert!(matches!(ran.ended, Ended::Recovered { .. }), "{:?}", ran.ended);
        assert_eq!(ran.run.record.dropped, 0);
    });
}

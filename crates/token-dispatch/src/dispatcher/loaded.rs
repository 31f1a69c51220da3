//! The kernels of a dispatcher, and what they are compiled with.

use ep_context::{Backend, Kernel, KernelSource, Specialization};

use crate::config::DispatchConfig;
use crate::dtype::DType;
use crate::error::DispatchError;
use crate::geometry;
use crate::kernels;

/// Every kernel, loaded before anything can wait on the device.
pub(crate) struct Kernels<B: Backend> {
    pub(crate) step_begin: B::Loaded<kernels::StepBegin>,
    pub(crate) route: B::Loaded<kernels::Route>,
    pub(crate) count: B::Loaded<kernels::Count>,
    pub(crate) window: B::Loaded<kernels::Window>,
    pub(crate) gather: B::Loaded<kernels::Gather>,
    pub(crate) push_dispatch: B::Loaded<kernels::PushDispatch>,
    pub(crate) push_combine: B::Loaded<kernels::PushCombine>,
    pub(crate) reduce_push: B::Loaded<kernels::ReducePush>,
    pub(crate) reduce: B::Loaded<kernels::Reduce>,
    pub(crate) acknowledge: B::Loaded<kernels::Acknowledge>,
    pub(crate) step_end: B::Loaded<kernels::StepEnd>,
    pub(crate) resume: B::Loaded<kernels::Resume>,
    pub(crate) abandon: B::Loaded<kernels::Abandon>,
    pub(crate) fold: B::Loaded<kernels::Fold>,
    pub(crate) restage: B::Loaded<kernels::Restage>,
    pub(crate) acquire: B::Loaded<kernels::Acquire>,
    pub(crate) regather: B::Loaded<kernels::Regather>,
    pub(crate) push_weight_grads: B::Loaded<kernels::PushWeightGrads>,
}

/// The constants that kernels are compiled with.
fn constants(hidden: usize, top_k: usize, dtype: DType, world: usize) -> Specialization {
    Specialization::new()
        .with("HIDDEN", hidden as u64)
        .with("TOP_K", top_k as u64)
        .with("DTYPE", u64::from(dtype as u32))
        .with("WORLD", world as u64)
}

/// The same of kernels that push, of which there is one for few tokens and one for many.
fn pushing(constants: &Specialization, stamped: bool) -> Specialization {
    constants.clone().with("STAMPED", u64::from(stamped))
}

/// The device code of every kernel that a dispatcher loads and what it is compiled with, whatever its most tokens
/// are: for compiling ahead of time.
pub fn device_kernels(
    hidden: usize,
    top_k: usize,
    dtype: DType,
    world: usize,
) -> Vec<(KernelSource, Specialization)> {
    let constants = constants(hidden, top_k, dtype, world);
    let push = [kernels::PushDispatch::SOURCE, kernels::PushCombine::SOURCE];
    let others = [
        kernels::StepBegin::SOURCE,
        kernels::Route::SOURCE,
        kernels::Count::SOURCE,
        kernels::Window::SOURCE,
        kernels::Gather::SOURCE,
        kernels::ReducePush::SOURCE,
        kernels::Reduce::SOURCE,
        kernels::Acknowledge::SOURCE,
        kernels::StepEnd::SOURCE,
        kernels::Resume::SOURCE,
        kernels::Abandon::SOURCE,
        kernels::Fold::SOURCE,
        kernels::Restage::SOURCE,
        kernels::Acquire::SOURCE,
        kernels::Regather::SOURCE,
        kernels::PushWeightGrads::SOURCE,
    ];
    let push = [false, true].into_iter().flat_map(|stamped| {
        let constants = pushing(&constants, stamped);
        push.into_iter().flatten().map(move |source| (source, constants.clone()))
    });
    let others = others.into_iter().flatten().map(|source| (source, constants.clone()));
    push.chain(others).collect()
}

impl<B: Backend> Kernels<B> {
    pub(super) fn load(
        backend: &B,
        config: &DispatchConfig,
        world: usize,
    ) -> Result<Self, DispatchError> {
        let constants = constants(config.hidden, config.top_k, config.dtype, world);
        let pushing = pushing(&constants, geometry::stamps_rows(config));
        fn load<B: Backend, K: Kernel>(
            backend: &B,
            constants: &Specialization,
        ) -> Result<B::Loaded<K>, DispatchError> {
            Ok(backend.load::<K>(constants)?)
        }
        Ok(Self {
            step_begin: load::<B, _>(backend, &constants)?,
            route: load::<B, _>(backend, &constants)?,
            count: load::<B, _>(backend, &constants)?,
            window: load::<B, _>(backend, &constants)?,
            gather: load::<B, _>(backend, &constants)?,
            push_dispatch: load::<B, _>(backend, &pushing)?,
            push_combine: load::<B, _>(backend, &pushing)?,
            reduce_push: load::<B, _>(backend, &constants)?,
            reduce: load::<B, _>(backend, &constants)?,
            acknowledge: load::<B, _>(backend, &constants)?,
            step_end: load::<B, _>(backend, &constants)?,
            resume: load::<B, _>(backend, &constants)?,
            abandon: load::<B, _>(backend, &constants)?,
            fold: load::<B, _>(backend, &constants)?,
            restage: load::<B, _>(backend, &constants)?,
            acquire: load::<B, _>(backend, &constants)?,
            regather: load::<B, _>(backend, &constants)?,
            push_weight_grads: load::<B, _>(backend, &constants)?,
        })
    }
}

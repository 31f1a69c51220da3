//! Which types may be given to another thread, and which may be used by several at once.

use graph_ep::{
    Backend, Buffer, DeviceSlice, EmbeddedStep, EpContext, ExpertParallel, Follower, Handle,
    HostBackend, Lane, Launched, MoeLayer, PlannedGrowth, Queue, Records, Rendezvous, RowBuffer,
    RowSet, Step, StepGraph, StepPieces, StepReport, StepRunner, ThreadGroup, TokenDispatcher,
};

fn send<T: Send>() {}
fn send_and_sync<T: Send + Sync>() {}

/// On any backend: what is shared by all threads of a rank, and a graph, which may be recorded on one
/// thread and replayed on another.
fn of_any_backend<B: Backend>() {
    send_and_sync::<EpContext<B>>();
    send_and_sync::<TokenDispatcher<B>>();
    send_and_sync::<ExpertParallel<B>>();
    send_and_sync::<Lane<B>>();
    send_and_sync::<Handle<B>>();
    send_and_sync::<RowSet<B>>();
    send_and_sync::<RowBuffer<B>>();
    send_and_sync::<PlannedGrowth<B>>();
    send_and_sync::<Buffer<B>>();
    send_and_sync::<DeviceSlice<'static, B>>();
    send_and_sync::<MoeLayer<'static, B>>();
    send_and_sync::<Records<'static, B>>();
    send_and_sync::<Follower<B>>();
    send_and_sync::<StepGraph<'static, B>>();
    send_and_sync::<EmbeddedStep<B>>();
    send_and_sync::<StepPieces<B>>();
    send_and_sync::<Queue<'static, B>>();
    send_and_sync::<Step<'static, B>>();
    // Its body and hooks are the caller's, who need not make them `Sync`.
    send::<StepRunner<B>>();
}

#[test]
fn types_are_send_and_sync_as_documented() {
    of_any_backend::<HostBackend>();
    send_and_sync::<Box<dyn Rendezvous>>();
    send_and_sync::<StepReport>();
    send_and_sync::<Launched>();
    send_and_sync::<ThreadGroup>();
}

/// Ambiguous for a type that is `Sync`, so that a call that infers the parameter does not compile.
trait SyncOrNot<Marker> {
    fn holds() {}
}

impl<T: ?Sized> SyncOrNot<()> for T {}
impl<T: ?Sized + Sync> SyncOrNot<u8> for T {}

#[test]
fn a_runner_is_not_sync() {
    <StepRunner<HostBackend> as SyncOrNot<_>>::holds();
}

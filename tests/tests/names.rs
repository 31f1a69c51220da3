//! What the facade's signatures mention can be named through it alone. These functions are compiled, not
//! called: each names what its body gets from items at the root.

use std::sync::Arc;

use graph_ep::synthetic::SyntheticExpertKernel;
use graph_ep::{
    Adjustments, Backend, BackendError, BodyError, CaptureError, Charge, CombineBackward,
    ContextError, DeviceSlice, DispatchBackward, DispatchConfig, DispatchConfigBuilder,
    DispatchError, EpContext, EpContextBuilder, ExpertHome, ExpertMap, Fault, FaultKind, Follower,
    Gone, GrowthError, GrowthPolicy, GrowthRefusal, HostBackend, HostOptions, Kernel, KernelSource,
    Lane, LaunchOrder, LoadedKernel, MemoryAccount, OverflowError, Place, PlannedGrowth, Records,
    Refusal, Rendezvous, RendezvousError, Retained, RoundsBackward, RowSet, RowShape,
    Specialization, Step, StepBody, StepGraph, StepReport, StepSummary, StepTimes, Suspended,
    SymmetricBlock, SymmetricError, ThreadGroup, ThreadRendezvous, TokenDispatcher, Update,
    WaitParams,
};

fn of_a_rendezvous(one: &dyn Rendezvous, gone: Gone) -> Result<ThreadRendezvous, RendezvousError> {
    one.watch(gone);
    Ok(ThreadGroup::new(1)?.into_iter().next().expect("one rank"))
}

fn of_a_context<B: Backend>(
    backend: B,
    rendezvous: ThreadRendezvous,
) -> Result<(Suspended<B>, WaitParams, Retained, SymmetricBlock<B>), ContextError> {
    let builder: EpContextBuilder<B> = EpContext::builder(backend, rendezvous);
    let context = builder.build()?;
    let block = context.share("block", 16)?;
    Ok((context.suspend_deadlines(), context.wait_params(), context.retain_signals(), block))
}

fn of_an_account<B: Backend>(context: &EpContext<B>) -> Result<Charge, BackendError> {
    let account: &MemoryAccount = context.account();
    account.charge("nothing", 0)
}

fn of_the_host<K: Kernel>(options: HostOptions) -> Option<(KernelSource, Specialization)> {
    let loaded: LoadedKernel = HostBackend::new(options).loaded().pop()?;
    Some((K::SOURCE.or(loaded.source)?, loaded.constants))
}

fn of_rows<B: Backend>(rows: &RowSet<B>) -> Result<(RowShape, PlannedGrowth<B>), BackendError> {
    Ok((rows.shape(), rows.plan(16)?))
}

fn of_a_slice<'s, B: Backend>(slice: &'s DeviceSlice<'_, B>) -> Option<&'s Retained> {
    slice.retained()
}

fn of_a_dispatcher<B: Backend>(
    dispatcher: &TokenDispatcher<B>,
) -> (Records<'_, B>, Follower<B>, &Arc<LaunchOrder>, Place) {
    let order: &Arc<LaunchOrder> = dispatcher.launch_order();
    let records: Records<'_, B> = dispatcher.records();
    let follower: Follower<B> = records.follow();
    (records, follower, order, order.enter())
}

fn of_a_configuration(home: ExpertHome) -> Result<DispatchConfigBuilder, DispatchError> {
    Ok(DispatchConfig::builder(8, 1, 1, ExpertMap::new(vec![home], 1)?))
}

fn of_a_lane<'a, B: Backend>(
    lane: &Lane<B>,
    mut step: Step<'a, B>,
    combine: &CombineBackward<'_, 'a, B>,
    dispatch: &DispatchBackward<'_, 'a, B>,
    rounds: &RoundsBackward<'_, 'a, B>,
) -> Result<StepSummary<B>, DispatchError> {
    lane.combine_backward(&mut step, combine)?;
    lane.dispatch_backward(&mut step, dispatch)?;
    lane.rounds_backward(&mut step, rounds, |_| Ok::<_, DispatchError>(()), |_| Ok(()))?;
    step.finish()
}

fn of_a_graph<'a, B: Backend>(
    graph: StepGraph<'a, B>,
    stream: &B::Stream,
    body: fn(&mut Step<'a, B>) -> Result<(), BodyError>,
) -> Result<Update, CaptureError> {
    Ok(graph.record_again(stream, body)?.1)
}

fn of_a_report(report: &StepReport) -> StepTimes {
    report.times
}

fn of_settings(policy: GrowthPolicy, asked: Adjustments) -> Result<(), GrowthError> {
    policy.validate()?;
    asked.validate().map(drop)
}

/// The types inside errors, by which an engine tells them apart.
fn of_errors(error: &OverflowError, fault: &Fault) -> FaultKind {
    let _: Option<&Refusal> = match error {
        OverflowError::Refused { refusal, .. } => Some(refusal),
        _ => None,
    };
    fault.kind
}

fn named<T: ?Sized>() {}

#[test]
fn types_of_signatures_are_at_the_root() {
    type Host = HostBackend;
    let _ = (of_a_rendezvous, of_a_context::<Host>, of_an_account::<Host>);
    let _ = (of_the_host::<SyntheticExpertKernel>, of_rows::<Host>, of_a_slice::<Host>);
    let _ = (of_a_dispatcher::<Host>, of_a_configuration, of_a_lane::<Host>);
    let _ = (of_a_graph::<Host>, of_a_report, of_settings, of_errors);
    named::<(GrowthRefusal, SymmetricError)>();
    named::<StepBody<Host>>();
}

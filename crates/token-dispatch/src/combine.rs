//! Combine: the weighted sums of what the experts made of each token, back to its owner.

use ep_context::{Backend, DeviceSlice};
use smallvec::SmallVec;

use crate::error::DispatchError;
use crate::handle::Handle;
use crate::kernels;
use crate::lane::Lane;
use crate::launch;
use crate::params::{
    FoldParams, HALF_RECEIVE, HALF_SEND, PushCombineParams, ReduceParams, ReducePushParams,
};
use crate::step::{Bounds, Step, StepMode};

/// The arguments of a combine.
#[derive(Debug)]
pub struct Combine<'s, 'a, B: Backend> {
    /// The handle that the dispatch filled.
    pub handle: &'s Handle<B>,
    /// What the experts made of each row, in the place of the row: `[capacity, hidden]` values.
    pub expert_rows: DeviceSlice<'a, B>,
    /// `[tokens, hidden]` values for the sums.
    pub output: DeviceSlice<'a, B>,
}

/// Which parts of the expert rank's half of a combine an operation does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PushParts {
    pub(crate) push: bool,
    pub(crate) release: bool,
    pub(crate) weighted: bool,
}

impl<B: Backend> Lane<B> {
    /// Queues a combine: the rows of each token are summed on their expert ranks, with the routing
    /// weights unless the caller applied them, sent to the token's owner and added in the order of
    /// the ranks. A token none of whose experts took part gets zeros.
    ///
    /// Nothing is waited for by the host, nothing allocated; the operation can be recorded.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Argument`] for a slice that is too short, [`DispatchError::Order`] if no
    /// dispatch into this handle is open on this lane.
    ///
    /// Where a replay that runs between the two leaves another dispatch in the handle, of more tokens or rows than
    /// there is memory for, this is a fault of the rank:
    /// [`FaultKind::TooManyTokens`](ep_context::FaultKind::TooManyTokens).
    pub fn combine<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Combine<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let bounds = self.check_combine("combine", step, args)?;
        let pushed = step.was_pushed(self, args.handle);
        let ordinal = step.close(self, args.handle.id())?;
        if pushed {
            return self.push_back(step, args, ordinal, HALF_SEND | HALF_RECEIVE, bounds);
        }
        self.return_sums(step, args, ordinal, bounds)?;
        self.reduce(step, args.handle, Some(&args.output), None, ordinal, bounds)
    }

    /// Queues a combine but for the half of the tokens' owner, which [`Lane::combine_receive`] queues:
    /// what the caller queues between the two runs while sums may still be on their way.
    ///
    /// # Errors
    ///
    /// As for [`Lane::combine`].
    pub fn combine_send<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Combine<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let bounds = self.check_combine("combine_send", step, args)?;
        let ordinal = step.send_back(self, args.handle.id())?;
        if step.was_pushed(self, args.handle) {
            return self.push_back(step, args, ordinal, HALF_SEND, bounds);
        }
        self.return_sums(step, args, ordinal, bounds)
    }

    /// Queues the half of a combine of the tokens' owner: waits on the device for every rank, and adds
    /// up. `args` are those of the [`Lane::combine_send`] before.
    ///
    /// # Errors
    ///
    /// As for [`Lane::combine`]; [`DispatchError::Order`] if its sums were not sent.
    pub fn combine_receive<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &Combine<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        let bounds = self.check_combine("combine_receive", step, args)?;
        let pushed = step.was_pushed(self, args.handle);
        let ordinal = step.close_returned(self, args.handle.id())?;
        if pushed {
            return self.push_back(step, args, ordinal, HALF_RECEIVE, bounds);
        }
        self.reduce(step, args.handle, Some(&args.output), None, ordinal, bounds)
    }

    /// Checks the arguments of a combine, and returns what they are enough for.
    fn check_combine(
        &self,
        operation: &'static str,
        step: &Step<'_, B>,
        args: &Combine<'_, '_, B>,
    ) -> Result<Bounds, DispatchError> {
        if step.options().mode == StepMode::Rounds {
            return Err(DispatchError::Order {
                operation,
                rank: self.dispatcher().rank(),
                reason: "the step runs in rounds; use Lane::rounds".to_owned(),
            });
        }
        let bounds = step.bounds_of(self, args.handle);
        let rows = "length of the expert rows in bytes";
        self.check_received(operation, rows, &args.expert_rows, args.handle, bounds.rows)?;
        let output = "length of the output in bytes";
        self.check_rows(operation, output, &args.output, bounds.tokens)?;
        Ok(bounds)
    }

    /// The expert rank's half of a combine that follows a dispatch that pulled.
    fn return_sums<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Combine<'_, 'a, B>,
        ordinal: u32,
        bounds: Bounds,
    ) -> Result<(), DispatchError> {
        let weighted = self.dispatcher().inner.geometry.weighted != 0;
        let parts = PushParts { push: true, release: true, weighted };
        self.reduce_push(step, args.handle, &args.expert_rows, ordinal, parts, bounds)
    }

    /// A combine after a dispatch that pushed, or a half of it, in one operation.
    fn push_back<'a>(
        &self,
        step: &Step<'a, B>,
        args: &Combine<'_, 'a, B>,
        ordinal: u32,
        halves: u32,
        bounds: Bounds,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let most_shared = inner.shared_bytes_per_block;
        let (g, blocks) = (&inner.geometry, self.push_blocks());
        let shape = launch::push_combine(g, bounds.tokens, blocks, most_shared).of_halves(halves);
        let params = PushCombineParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            blocks: self.blocks_at_hand(),
            handle: args.handle.params(),
            state: inner.shared.state.address(),
            peer_required: inner.shared.peer_required.address(),
            expert_rows: args.expert_rows.address(),
            output: args.output.address(),
            ordinal,
            weighted: inner.geometry.weighted,
            senders: shape.senders,
            halves,
            push_span: shape.push_span,
            sum_span: shape.sum_span,
            num_tokens: bounds.tokens,
            row_limit: bounds.rows,
        };
        // SAFETY: 1. addresses lie in the arguments, the lane, the handle or the dispatcher, which are
        // retained; more rows or tokens in the handle than were checked are a fault. 2. Landing slots
        // are this rank's by the sender's lists, ordered by the lane's signals and flags.
        Ok(unsafe {
            step.queue().launch::<kernels::PushCombine>(
                &inner.kernels.push_combine,
                shape.launch,
                &params,
                &[&args.expert_rows, &args.output],
                &self.keep(args.handle),
            )
        }?)
    }

    /// Queues the expert rank's half.
    pub(crate) fn reduce_push<'a>(
        &self,
        step: &Step<'a, B>,
        handle: &Handle<B>,
        expert_rows: &DeviceSlice<'a, B>,
        ordinal: u32,
        parts: PushParts,
        bounds: Bounds,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = ReducePushParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            state: inner.shared.state.address(),
            expert_rows: expert_rows.address(),
            ordinal,
            push: u32::from(parts.push),
            release: u32::from(parts.release),
            weighted: u32::from(parts.weighted),
            row_limit: bounds.rows,
            reserved: 0,
        };
        let shape = match parts.push {
            true => launch::items(&inner.geometry, inner.geometry.sum_bytes, self.blocks()),
            false => launch::peers(&inner.geometry),
        };
        // SAFETY: 1. addresses lie in `expert_rows`, the lane, the handle or the dispatcher, which
        // are retained; rows beyond the limit that was checked are a fault. 2. Landing slots are
        // this rank's by the sender's lists, ordered by the lane's signals.
        Ok(unsafe {
            step.queue().launch::<kernels::ReducePush>(
                &inner.kernels.reduce_push,
                shape,
                &params,
                &[expert_rows],
                &self.keep(handle),
            )
        }?)
    }

    /// Queues the owner's half: a wait, then sums.
    pub(crate) fn reduce<'a>(
        &self,
        step: &Step<'a, B>,
        handle: &Handle<B>,
        output: Option<&DeviceSlice<'a, B>>,
        weight_grads: Option<&DeviceSlice<'a, B>>,
        ordinal: u32,
        bounds: Bounds,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = FoldParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            state: inner.shared.state.address(),
            peer_required: inner.shared.peer_required.address(),
            ordinal,
            reserved: 0,
        };
        // SAFETY: every address lies in the lane or the dispatcher, which are retained.
        unsafe {
            step.queue().launch::<kernels::Fold>(
                &inner.kernels.fold,
                launch::peers(&inner.geometry),
                &params,
                &[],
                &self.keep(handle),
            )
        }?;
        let params = ReduceParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            output: output.map_or(0, DeviceSlice::address),
            weight_grads: weight_grads.map_or(0, DeviceSlice::address),
            num_tokens: bounds.tokens,
            reserved: 0,
        };
        let uses: SmallVec<[&DeviceSlice<'a, B>; 2]> =
            output.into_iter().chain(weight_grads).collect();
        // SAFETY: as above; output and gradients have a row for each token within the bounds, as the callers
        // check, and more tokens are a fault.
        Ok(unsafe {
            step.queue().launch::<kernels::Reduce>(
                &inner.kernels.reduce,
                launch::rows(
                    inner.geometry.max_tokens.into(),
                    inner.geometry.sum_bytes,
                    self.blocks(),
                ),
                &params,
                &uses,
                &self.keep(handle),
            )
        }?)
    }
}

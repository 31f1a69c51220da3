//! The backward pass, along the routes of a kept handle.
//!
//! A handle that no later dispatch has filled knows where every row came from. So the backward pass
//! of combine is a dispatch that builds no routes ([`Lane::combine_backward`]), and that of dispatch
//! is a combine without weights ([`Lane::dispatch_backward`]). Between them the caller's experts turn
//! gradients of their outputs into gradients of their inputs.
//!
//! After rounds a handle knows the last window only. [`Lane::rounds_backward`] therefore builds the
//! routes again from the same ids and gathers each window again, tokens and gradients alike.

use ep_context::{Backend, DeviceSlice};
use smallvec::SmallVec;

use crate::combine::PushParts;
use crate::config::Weighting;
use crate::dispatch::Dispatch;
use crate::error::DispatchError;
use crate::handle::Handle;
use crate::kernels;
use crate::lane::Lane;
use crate::launch;
use crate::params::{AcquireParams, PushWeightGradsParams, RegatherParams, RestageParams};
use crate::step::{Bounds, Step};

/// The arguments of a combine's backward pass.
#[derive(Debug)]
pub struct CombineBackward<'s, 'a, B: Backend> {
    /// The handle of the dispatch that was combined.
    pub handle: &'s Handle<B>,
    /// `[tokens, hidden]` values: gradients of the outputs.
    pub output_grads: DeviceSlice<'a, B>,
    /// `[capacity, hidden]` values: where gradients of the expert outputs arrive, multiplied by the
    /// weights if combine multiplied by them. Padding rows become zeros.
    pub row_grads: DeviceSlice<'a, B>,
    /// What the experts had made of each row, if gradients of the weights are wanted and combine
    /// multiplied by them.
    pub expert_rows: Option<DeviceSlice<'a, B>>,
}

/// The arguments of a dispatch's backward pass.
#[derive(Debug)]
pub struct DispatchBackward<'s, 'a, B: Backend> {
    /// The handle of the dispatch.
    pub handle: &'s Handle<B>,
    /// `[capacity, hidden]` values: gradients of the received rows.
    pub row_grads: DeviceSlice<'a, B>,
    /// Gradients of the weights that dispatch brought, if the caller multiplied by them: f32
    /// `[capacity]`, in the flat layout `[capacity, flat_width]`.
    pub row_weight_grads: Option<DeviceSlice<'a, B>>,
    /// `[tokens, hidden]` values: the gradients of the tokens.
    pub token_grads: DeviceSlice<'a, B>,
    /// `[tokens, top_k]` f32: the gradients of the weights, zero where a choice was not processed.
    pub weight_grads: Option<DeviceSlice<'a, B>>,
}

/// The arguments of the backward pass of [`Lane::rounds`].
#[derive(Debug)]
pub struct RoundsBackward<'s, 'a, B: Backend> {
    /// The dispatch as it was in the forward pass: the same tokens, ids and weights.
    pub dispatch: Dispatch<'s, 'a, B>,
    /// The lane on which gradients travel beside the tokens.
    pub gradient_lane: &'s Lane<B>,
    /// `[tokens, hidden]` values: gradients of the outputs.
    pub output_grads: DeviceSlice<'a, B>,
    /// `[capacity, hidden]` values: what the experts make of each row, again.
    pub expert_rows: DeviceSlice<'a, B>,
    /// `[capacity, hidden]` values: where gradients of the expert outputs arrive, and gradients of
    /// the rows are left in their place.
    pub row_grads: DeviceSlice<'a, B>,
    /// Where `backward` leaves gradients of the weights that dispatch brought, if the caller
    /// multiplied by them; as in [`DispatchBackward::row_weight_grads`].
    pub row_weight_grads: Option<DeviceSlice<'a, B>>,
    /// `[tokens, hidden]` values: the gradients of the tokens.
    pub token_grads: DeviceSlice<'a, B>,
    /// `[tokens, top_k]` f32: the gradients of the weights.
    pub weight_grads: Option<DeviceSlice<'a, B>>,
}

/// What the receiver's half may find in the handle.
#[derive(Clone, Copy, Debug)]
struct Received {
    bounds: Bounds,
    /// All that was received, rather than a later window of it.
    whole: bool,
}

impl<B: Backend> Lane<B> {
    /// Queues the backward pass of a combine. Opens a pair on this lane that
    /// [`Lane::dispatch_backward`] closes.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] without
    /// [`backward`](crate::DispatchConfigBuilder::backward), if a pair is open, and if no dispatch was queued or
    /// recorded into the handle, if the last one ran in rounds, or if receive rows were given back since;
    /// [`DispatchError::Argument`] for a slice that is too short.
    ///
    /// The last that was queued or recorded has to be the last that has run. Where replays leave another one in
    /// the handle, with more tokens or rows than there is memory for or a window of several, this is a fault of
    /// the rank: [`FaultKind::TooManyTokens`](ep_context::FaultKind::TooManyTokens) or
    /// [`FaultKind::OutOfStep`](ep_context::FaultKind::OutOfStep).
    pub fn combine_backward<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &CombineBackward<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        const OP: &str = "combine backward";
        self.check_backward(OP)?;
        let tokens = self.check_kept(OP, args.handle)?;
        let bounds = Bounds { tokens, rows: step.row_limit(args.handle.rows()) };
        let argument = "length of the row gradients in bytes";
        self.check_received(OP, argument, &args.row_grads, args.handle, bounds.rows)?;
        if let Some(rows) = &args.expert_rows {
            let argument = "length of the expert rows in bytes";
            self.check_received(OP, argument, rows, args.handle, bounds.rows)?;
        }
        self.check_rows(OP, "length of the output gradients in bytes", &args.output_grads, tokens)?;
        let ordinal = step.open(self, args.handle, bounds)?;
        self.restage(step, args.handle, &args.output_grads, ordinal, bounds)?;
        let expert_rows = match self.dispatcher().config().weighting() {
            Weighting::Combine => args.expert_rows.as_ref(),
            Weighting::Caller => None,
        };
        self.acquire(step, args.handle, ordinal)?;
        let received = Received { bounds, whole: true };
        self.regather(step, args.handle, &args.row_grads, expert_rows, received)
    }

    /// Queues the backward pass of a dispatch, after [`Lane::combine_backward`] into the same handle.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] if that did not come before; [`DispatchError::Argument`] for a slice
    /// that is too short. Where a replay has left more in the handle than there is memory for, that is a
    /// fault, as in [`Lane::combine`].
    pub fn dispatch_backward<'a>(
        &self,
        step: &mut Step<'a, B>,
        args: &DispatchBackward<'_, 'a, B>,
    ) -> Result<(), DispatchError> {
        const OP: &str = "dispatch backward";
        let bounds = step.bounds_of(self, args.handle);
        let argument = "length of the row gradients in bytes";
        self.check_received(OP, argument, &args.row_grads, args.handle, bounds.rows)?;
        self.check_grads(OP, &args.token_grads, args.weight_grads.as_ref(), bounds.tokens)?;
        let row_weights = args.row_weight_grads.as_ref();
        self.check_row_weights(OP, row_weights, args.handle, bounds.rows)?;
        let ordinal = step.close(self, args.handle.id())?;
        if let Some(grads) = row_weights {
            self.push_weight_grads(step, args.handle, grads, bounds.rows)?;
        }
        let parts = PushParts { push: true, release: true, weighted: false };
        self.reduce_push(step, args.handle, &args.row_grads, ordinal, parts, bounds)?;
        let (tokens, weights) = (Some(&args.token_grads), args.weight_grads.as_ref());
        self.reduce(step, args.handle, tokens, weights, ordinal, bounds)
    }

    /// Records the backward pass of [`Lane::rounds`]: routes are built again, and a loop on the device
    /// gathers each window again. `recompute` turns rows into expert outputs, `backward` the
    /// gradients of these, in `row_grads`, into those of the rows.
    ///
    /// # Errors
    ///
    /// As for [`Lane::rounds`] and [`Lane::combine_backward`].
    pub fn rounds_backward<'a, E: From<DispatchError>>(
        &self,
        step: &mut Step<'a, B>,
        args: &RoundsBackward<'_, 'a, B>,
        recompute: impl FnOnce(&mut Step<'a, B>) -> Result<(), E>,
        backward: impl FnOnce(&mut Step<'a, B>) -> Result<(), E>,
    ) -> Result<(), E> {
        const OP: &str = "rounds backward";
        let (dispatch, handle, beside) = (&args.dispatch, args.dispatch.handle, args.gradient_lane);
        self.check_backward(OP)?;
        self.check_rounds(OP, step, dispatch, &args.expert_rows)?;
        let limit = step.row_limit(handle.rows());
        let argument = "length of the row gradients in bytes";
        self.check_received(OP, argument, &args.row_grads, handle, limit)?;
        let most = dispatch.most_tokens().0 as u32;
        self.check_rows(OP, "length of the output gradients in bytes", &args.output_grads, most)?;
        self.check_grads(OP, &args.token_grads, args.weight_grads.as_ref(), most)?;
        self.check_row_weights(OP, args.row_weight_grads.as_ref(), handle, limit)?;
        let bounds = Bounds { tokens: most, rows: limit };
        let ordinal = self.send(step, dispatch)?;
        let gradients = step.open_beside(beside, handle, bounds)?;
        beside.restage(step, handle, &args.output_grads, gradients, bounds)?;
        let condition = step.condition()?;
        self.count(step, handle, ordinal, Some(condition))?;
        beside.acquire(step, handle, gradients)?;
        let expert_rows = match self.dispatcher().config().weighting() {
            Weighting::Combine => Some(&args.expert_rows),
            Weighting::Caller => None,
        };
        step.repeat(condition, |step| -> Result<(), E> {
            self.window(step, handle, Some(condition))?;
            self.gather(step, dispatch)?;
            recompute(step)?;
            let received = Received { bounds, whole: false };
            beside.regather(step, handle, &args.row_grads, expert_rows, received)?;
            backward(step)?;
            if let Some(grads) = &args.row_weight_grads {
                beside.push_weight_grads(step, handle, grads, bounds.rows)?;
            }
            let parts = PushParts { push: true, release: false, weighted: false };
            Ok(self.reduce_push(step, handle, &args.row_grads, ordinal, parts, bounds)?)
        })?;
        step.close(self, handle.id())?;
        step.close(beside, handle.id())?;
        let parts = PushParts { push: false, release: true, weighted: false };
        self.reduce_push(step, handle, &args.row_grads, ordinal, parts, bounds)?;
        beside.reduce_push(step, handle, &args.row_grads, gradients, parts, bounds)?;
        self.reduce(step, handle, Some(&args.token_grads), None, ordinal, bounds)?;
        let weights = args.weight_grads.as_ref();
        Ok(beside.reduce(step, handle, None, weights, gradients, bounds)?)
    }

    fn check_backward(&self, operation: &'static str) -> Result<(), DispatchError> {
        if self.dispatcher().config().backward {
            return Ok(());
        }
        Err(DispatchError::Order {
            operation,
            rank: self.dispatcher().rank(),
            reason: "the dispatcher was configured without backward passes".to_owned(),
        })
    }

    /// Checks that the handle may hold what one dispatch received, and returns the most tokens that it sent.
    fn check_kept(
        &self,
        operation: &'static str,
        handle: &Handle<B>,
    ) -> Result<u32, DispatchError> {
        let reason = match handle.filled() {
            None => "no dispatch was queued into the handle",
            Some(fill) if fill.in_rounds => {
                "the handle was filled in rounds and holds the last window only; use Lane::rounds_backward"
            }
            Some(fill) if fill.trims != handle.rows().trims() => {
                "receive rows were given back since the handle was filled, and what it holds with them"
            }
            Some(fill) => return Ok(fill.tokens),
        };
        let rank = self.dispatcher().rank();
        Err(DispatchError::Order { operation, rank, reason: reason.to_owned() })
    }

    fn check_row_weights(
        &self,
        operation: &'static str,
        grads: Option<&DeviceSlice<'_, B>>,
        handle: &Handle<B>,
        rows: u32,
    ) -> Result<(), DispatchError> {
        let Some(grads) = grads else { return Ok(()) };
        let geometry = &self.dispatcher().inner.geometry;
        let width = if geometry.flat == 0 { 1 } else { geometry.flat_width as usize };
        let argument = "length of the row weight gradients in bytes";
        self.has_received(operation, argument, grads, handle, (rows, width * size_of::<f32>()))?;
        self.aligned_to(operation, "address of the row weight gradients", grads, 4)
    }

    fn check_grads(
        &self,
        operation: &'static str,
        token_grads: &DeviceSlice<'_, B>,
        weight_grads: Option<&DeviceSlice<'_, B>>,
        tokens: u32,
    ) -> Result<(), DispatchError> {
        self.check_rows(operation, "length of the token gradients in bytes", token_grads, tokens)?;
        let least = tokens as usize * self.dispatcher().config().top_k() * size_of::<f32>();
        match weight_grads {
            Some(grads) => {
                let argument = "length of the weight gradients in bytes";
                self.at_least(operation, argument, grads.held(), least)?;
                self.aligned_to(operation, "address of the weight gradients", grads, 4)
            }
            None => Ok(()),
        }
    }

    /// Queues the sender's half of a dispatch along the handle's routes.
    fn restage<'a>(
        &self,
        step: &Step<'a, B>,
        handle: &Handle<B>,
        rows: &DeviceSlice<'a, B>,
        ordinal: u32,
        bounds: Bounds,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = RestageParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            state: inner.shared.state.address(),
            rows: rows.address(),
            ordinal,
            num_tokens: bounds.tokens,
        };
        // SAFETY: addresses lie in `rows` or what is retained; more tokens than were checked are a fault.
        // The pair is this step's alone.
        Ok(unsafe {
            step.queue().launch::<kernels::Restage>(
                &inner.kernels.restage,
                launch::stage(&inner.geometry, self.blocks()),
                &params,
                &[rows],
                &self.keep(handle),
            )
        }?)
    }

    /// Queues the wait for every sender.
    fn acquire(
        &self,
        step: &Step<'_, B>,
        handle: &Handle<B>,
        ordinal: u32,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = AcquireParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            state: inner.shared.state.address(),
            ordinal,
            reserved: 0,
        };
        // SAFETY: every address lies in the lane or the dispatcher, which are retained.
        Ok(unsafe {
            step.queue().launch::<kernels::Acquire>(
                &inner.kernels.acquire,
                launch::peers(&inner.geometry),
                &params,
                &[],
                &self.keep(handle),
            )
        }?)
    }

    /// Queues the receiver's half.
    fn regather<'a>(
        &self,
        step: &Step<'a, B>,
        handle: &Handle<B>,
        rows: &DeviceSlice<'a, B>,
        expert_rows: Option<&DeviceSlice<'a, B>>,
        received: Received,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = RegatherParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            rows: rows.address(),
            expert_rows: expert_rows.map_or(0, DeviceSlice::address),
            row_limit: received.bounds.rows,
            whole: u32::from(received.whole),
        };
        let uses: SmallVec<[&DeviceSlice<'a, B>; 2]> =
            [rows].into_iter().chain(expert_rows).collect();
        // SAFETY: addresses lie in `uses` or what is retained; rows beyond the limit that was checked are a
        // fault.
        Ok(unsafe {
            step.queue().launch::<kernels::Regather>(
                &inner.kernels.regather,
                launch::items_and_padding(&inner.geometry, inner.geometry.sum_bytes, self.blocks()),
                &params,
                &uses,
                &self.keep(handle),
            )
        }?)
    }

    fn push_weight_grads<'a>(
        &self,
        step: &Step<'a, B>,
        handle: &Handle<B>,
        grads: &DeviceSlice<'a, B>,
        row_limit: u32,
    ) -> Result<(), DispatchError> {
        let inner = &self.dispatcher().inner;
        let params = PushWeightGradsParams {
            geometry: inner.geometry,
            wait: self.dispatcher().wait_params(),
            lane: self.params(),
            handle: handle.params(),
            row_grads: grads.address(),
            row_limit,
            reserved: 0,
        };
        // SAFETY: addresses lie in `grads` or what is retained; rows of the handle beyond those of `grads`, as
        // the callers check its length, are a fault.
        Ok(unsafe {
            step.queue().launch::<kernels::PushWeightGrads>(
                &inner.kernels.push_weight_grads,
                launch::items(&inner.geometry, 0, self.blocks()),
                &params,
                &[grads],
                &self.keep(handle),
            )
        }?)
    }
}

//! Rounds: as many windows as it takes, looped on the device.

use ep_context::{Backend, DeviceSlice};

use crate::combine::PushParts;
use crate::dispatch::Dispatch;
use crate::error::DispatchError;
use crate::lane::Lane;
use crate::step::{Step, StepMode};

impl<B: Backend> Lane<B> {
    /// Records a dispatch, experts and combine that work through all rows with the capacity that
    /// there is: a loop on the device whose body takes a window, gathers it, runs what `experts`
    /// queues, and sends the window's sums. Each rank makes as many trips as its own rows need, none
    /// if it has none; a trip more costs no host and drops no row.
    ///
    /// `experts` queues on [`Step::queue`] of the step that it is given, which records the body. It
    /// may not communicate with other ranks, since these make other numbers of trips. Its outputs go
    /// to `expert_rows`, `[capacity, hidden]` values.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Order`] if the step does not run in rounds or nothing is being recorded;
    /// [`DispatchError::Argument`] also where the capacity could not hold a single token:
    /// see [`TokenDispatcher::least_rows`](crate::TokenDispatcher::least_rows). What `experts`
    /// returns.
    pub fn rounds<'a, E: From<DispatchError>>(
        &self,
        step: &mut Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
        expert_rows: &DeviceSlice<'a, B>,
        output: &DeviceSlice<'a, B>,
        experts: impl FnOnce(&mut Step<'a, B>) -> Result<(), E>,
    ) -> Result<(), E> {
        const OP: &str = "rounds";
        self.check_rounds(OP, step, args, expert_rows)?;
        let (most, _) = args.most_tokens();
        self.check_rows(OP, "length of the output in bytes", output, most as u32)?;
        let ordinal = self.send(step, args)?;
        let bounds = step.bounds_of(self, args.handle);
        let condition = step.condition()?;
        self.count(step, args.handle, ordinal, Some(condition))?;
        let weighted = self.dispatcher().inner.geometry.weighted != 0;
        step.repeat(condition, |step| -> Result<(), E> {
            self.window(step, args.handle, Some(condition))?;
            self.gather(step, args)?;
            experts(step)?;
            let parts = PushParts { push: true, release: false, weighted };
            Ok(self.reduce_push(step, args.handle, expert_rows, ordinal, parts, bounds)?)
        })?;
        step.close(self, args.handle.id())?;
        let parts = PushParts { push: false, release: true, weighted };
        self.reduce_push(step, args.handle, expert_rows, ordinal, parts, bounds)?;
        Ok(self.reduce(step, args.handle, Some(output), None, ordinal, bounds)?)
    }

    /// Checks what a loop over windows needs beyond what its operations do.
    pub(crate) fn check_rounds<'a>(
        &self,
        operation: &'static str,
        step: &Step<'a, B>,
        args: &Dispatch<'_, 'a, B>,
        expert_rows: &DeviceSlice<'a, B>,
    ) -> Result<(), DispatchError> {
        let rank = self.dispatcher().rank();
        let order =
            |reason: &str| DispatchError::Order { operation, rank, reason: reason.to_owned() };
        if step.options().mode != StepMode::Rounds {
            return Err(order("the step does not run in rounds"));
        }
        if !step.queue().is_recording() {
            return Err(order("a loop on the device has to be recorded"));
        }
        let rows =
            step.row_limit(args.handle.rows()).min(args.handle.rows().recording_shape().rows);
        let least = self.dispatcher().least_rows();
        if rows < least {
            let limit = format!("at least {least}, which one token may need");
            return Err(self.argument(operation, "capacity in rows", rows, limit));
        }
        let limit = step.row_limit(args.handle.rows());
        let argument = "length of the expert rows in bytes";
        self.check_received(operation, argument, expert_rows, args.handle, limit)
    }
}

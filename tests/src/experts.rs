//! Experts that read every payload and layout, forward and backward. They compute what the synthetic
//! ones do: expert `e` makes `scale(e, c) · x[c] + shift(e, c)` of column `c`.
//!
//! Where the caller multiplies by the weights, the result of each expert is rounded to the number
//! format, then multiplied, then, in the flat layout, added up in the order of the choices beside the
//! row, and rounded again.

use graph_ep::ep_context::Specialization;
use graph_ep::{
    Backend, BodyError, Buffer, DeviceSlice, Error, ExpertParallel, Handle, LaunchShape, Queue,
};

use crate::backend::TestBackend;
use crate::case::Case;
use crate::payload::RowFormat;
use crate::rig::Layer;

mod device;

pub use device::{Backward, BackwardParams, Forward, ForwardParams, RowParams};

/// The experts of one rank, ready to be queued.
#[derive(Debug)]
pub struct Experts<T: TestBackend> {
    forward: <T::Backend as Backend>::Loaded<Forward>,
    backward: <T::Backend as Backend>::Loaded<Backward>,
    ids: Buffer<T::Backend>,
    format: RowFormat,
    slots: usize,
    width: usize,
    rank: usize,
}

/// The slices of a handle's rows.
#[derive(Debug)]
pub struct Rows<'s, T: TestBackend> {
    /// `[capacity]` received rows.
    pub rows: DeviceSlice<'static, T::Backend>,
    /// `[capacity]` rows of scales.
    pub scales: Option<DeviceSlice<'static, T::Backend>>,
    /// What the dispatch filled.
    pub handle: &'s Handle<T::Backend>,
}

impl<'s, T: TestBackend> Rows<'s, T> {
    /// Those of a layer.
    pub fn of(layer: &'s Layer<T>) -> Self {
        let scales = layer.received_scales.as_ref().map(graph_ep::RowBuffer::slice);
        Self { rows: layer.rows.slice(), scales, handle: &layer.handle }
    }
}

impl<T: TestBackend> Experts<T> {
    /// The experts that `case` places on this rank. Allocates and loads kernels.
    ///
    /// # Errors
    ///
    /// Out of memory.
    pub fn new(group: &ExpertParallel<T::Backend>, case: &Case) -> Result<Self, Error> {
        let (backend, constants) = (group.context().backend(), Specialization::new());
        let rank = group.context().rank().index();
        let experts = Self {
            forward: backend.load::<Forward>(&constants)?,
            backward: backend.load::<Backward>(&constants)?,
            ids: group.allocate((4 * case.slots_of(rank)).max(4))?,
            format: RowFormat::of(case),
            slots: case.slots_of(rank),
            width: case.width(rank),
            rank,
        };
        experts.follow(group, case)?;
        Ok(experts)
    }

    /// Moves the experts to where `case` places them, before the next step.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn follow(&self, group: &ExpertParallel<T::Backend>, case: &Case) -> Result<(), Error> {
        // An empty slot receives no rows, so any expert will do there.
        let slots = case.slots(self.rank).into_iter();
        let ids: Vec<u32> = slots.map(|expert| expert.unwrap_or(0) as u32).collect();
        group.write(&self.ids, bytemuck::cast_slice(&ids))
    }

    fn rows(&self, rows: &Rows<'_, T>) -> (RowParams, Vec<DeviceSlice<'static, T::Backend>>) {
        let handle = rows.handle;
        let (offsets, counts) = (handle.expert_offsets(), handle.tokens_per_expert());
        let weights = handle.row_weights().map(graph_ep::RowBuffer::slice);
        let experts = handle.row_experts().map(graph_ep::RowBuffer::slice);
        let address = |slice: &Option<DeviceSlice<'static, T::Backend>>| {
            slice.as_ref().map_or(0, DeviceSlice::address)
        };
        let params = RowParams {
            rows: rows.rows.address(),
            scales: address(&rows.scales),
            expert_offsets: offsets.address(),
            tokens_per_expert: counts.address(),
            row_weights: address(&weights),
            row_experts: address(&experts),
            expert_ids: self.ids.address(),
            format: self.format,
            slots: self.slots as u32,
            width: self.width as u32,
        };
        let mut uses = vec![rows.rows.clone(), offsets, counts, self.ids.slice()];
        uses.extend([weights, experts, rows.scales.clone()].into_iter().flatten());
        (params, uses)
    }

    /// Queues all experts on what a dispatch received.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn queue(
        &self,
        queue: &Queue<'_, T::Backend>,
        rows: &Rows<'_, T>,
        outputs: &DeviceSlice<'static, T::Backend>,
    ) -> Result<(), BodyError> {
        let (rows, mut uses) = self.rows(rows);
        uses.push(outputs.clone());
        let params = ForwardParams { rows, outputs: outputs.address() };
        let uses: Vec<_> = uses.iter().collect();
        // SAFETY: every address lies in a slice of the list; the dispatch before and the combine
        // behind are of the same stream.
        unsafe {
            queue.launch::<Forward>(&self.forward, LaunchShape::ONE_WARP, &params, &uses, &[])
        }?;
        Ok(())
    }

    /// Queues their backward pass: gradients in `grads` become those of the rows.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn queue_backward(
        &self,
        queue: &Queue<'_, T::Backend>,
        rows: &Rows<'_, T>,
        grads: &DeviceSlice<'static, T::Backend>,
        weight_grads: Option<&DeviceSlice<'static, T::Backend>>,
    ) -> Result<(), BodyError> {
        let (rows, mut uses) = self.rows(rows);
        uses.push(grads.clone());
        uses.extend(weight_grads.cloned());
        let params = BackwardParams {
            rows,
            grads: grads.address(),
            weight_grads: weight_grads.map_or(0, DeviceSlice::address),
        };
        let uses: Vec<_> = uses.iter().collect();
        // SAFETY: as for the other.
        unsafe {
            queue.launch::<Backward>(&self.backward, LaunchShape::ONE_WARP, &params, &uses, &[])
        }?;
        Ok(())
    }
}

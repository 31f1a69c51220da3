//! Experts that read every payload and layout, forward and backward. They compute what the synthetic
//! ones do: expert `e` makes `scale(e, c) · x[c] + shift(e, c)` of column `c`.
//!
//! Where the caller multiplies by the weights, the result of each expert is rounded to the number
//! format, then multiplied, then, in the flat layout, added up in the order of the choices beside the
//! row, and rounded again.

use bytemuck::{Pod, Zeroable};
use graph_ep::ep_context::{KernelSource, Specialization};
use graph_ep::synthetic::{apply, coefficients};
use graph_ep::{
    Backend, BodyError, Buffer, DeviceSlice, Error, ExpertParallel, Handle, Kernel, LaunchShape,
    Queue,
};

use crate::backend::TestBackend;
use crate::case::Case;
use crate::inputs::{decode, encode};
use crate::payload::RowFormat;
use crate::rig::Layer;

/// Where the rows of a handle and what is beside them lie, and which experts they belong to.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RowParams {
    /// `[capacity]` received rows.
    pub rows: u64,
    /// `[capacity]` rows of scales; zero if there are none.
    pub scales: u64,
    /// `[slots + 1]` i32.
    pub expert_offsets: u64,
    /// `[slots]` i32.
    pub tokens_per_expert: u64,
    /// `[capacity, width]` f32; zero where combine multiplies by the weights.
    pub row_weights: u64,
    /// `[capacity, width]` i32 slots; zero where rows are grouped.
    pub row_experts: u64,
    /// `[slots]` u32: the expert in each.
    pub expert_ids: u64,
    /// What rows are made of.
    pub format: RowFormat,
    /// Expert slots.
    pub slots: u32,
    /// Weights beside a row.
    pub width: u32,
}

/// Parameters of [`Forward`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ForwardParams {
    /// The rows.
    pub rows: RowParams,
    /// `[capacity, hidden]`: what the experts make of each row.
    pub outputs: u64,
}

/// Parameters of [`Backward`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BackwardParams {
    /// The rows.
    pub rows: RowParams,
    /// `[capacity, hidden]`: gradients of what the experts made, which become those of the rows.
    pub grads: u64,
    /// `[capacity, width]` f32: gradients of the weights beside the rows; zero if there are none.
    pub weight_grads: u64,
}

/// Both passes, on a GPU.
const SOURCE: KernelSource = KernelSource {
    file: "experts.cu",
    text: include_str!("experts.cu"),
    headers: graph_ep_kernels::HEADERS,
};

/// What the experts make of each row.
#[derive(Debug)]
pub struct Forward;

impl Kernel for Forward {
    type Params = ForwardParams;
    const NAME: &'static str = "test_experts";
    const SOURCE: Option<KernelSource> = Some(SOURCE);

    unsafe fn run_on_host(p: &ForwardParams) {
        let format = p.rows.format;
        // SAFETY: for this whole body, the launch vouches for the addresses.
        for row in unsafe { rows(&p.rows) } {
            // SAFETY: see above; the row is one of the window's.
            let values = unsafe { row.values(&p.rows) };
            let mut sum = vec![0f32; format.hidden as usize];
            for (expert, weight) in &row.experts {
                for (sum, value) in sum.iter_mut().zip(apply(*expert, &values)) {
                    let value = format.round(value);
                    match weight {
                        // Two roundings: the product, then the sum.
                        Some(weight) => *sum += weight * value,
                        None => *sum = value,
                    }
                }
            }
            // SAFETY: see above.
            unsafe { bytes_mut(p.outputs, row.index, format.sum_bytes) }
                .copy_from_slice(&encode(format.number(), &sum));
        }
    }
}

/// From gradients of what the experts made of each row to those of the row and of its weights.
#[derive(Debug)]
pub struct Backward;

impl Kernel for Backward {
    type Params = BackwardParams;
    const NAME: &'static str = "test_experts_backward";
    const SOURCE: Option<KernelSource> = Some(SOURCE);

    unsafe fn run_on_host(p: &BackwardParams) {
        let format = p.rows.format;
        // SAFETY: as for the other.
        for row in unsafe { rows(&p.rows) } {
            // SAFETY: see above; the row is one of the window's.
            let (values, bytes) =
                unsafe { (row.values(&p.rows), bytes_mut(p.grads, row.index, format.sum_bytes)) };
            let grads = decode(format.number(), bytes);
            let mut sum = vec![0f32; format.hidden as usize];
            for (place, (expert, weight)) in row.experts.iter().enumerate() {
                for (column, (sum, grad)) in (0u32..).zip(sum.iter_mut().zip(&grads)) {
                    let weighted = weight.map_or(*grad, |weight| weight * grad);
                    *sum += coefficients(*expert, column).0 * weighted;
                }
                if p.weight_grads != 0 {
                    let results = apply(*expert, &values).into_iter();
                    let products = results.zip(&grads).map(|(v, g)| format.round(v) * g);
                    let at =
                        p.weight_grads + 4 * (row.index * p.rows.width as usize + place) as u64;
                    // SAFETY: the list has `width` entries for each row.
                    unsafe { *pointer::<f32>(at) = products.sum() };
                }
            }
            bytes.copy_from_slice(&encode(format.number(), &sum));
        }
    }
}

/// A received row: its place, and its experts with their weights if those are the caller's.
struct Row {
    index: usize,
    experts: Vec<(u32, Option<f32>)>,
}

impl Row {
    /// # Safety
    ///
    /// The row is one of those at `p`.
    unsafe fn values(&self, p: &RowParams) -> Vec<f32> {
        // SAFETY: as this function's contract says.
        unsafe {
            let row = bytes(p.rows, self.index, p.format.row_bytes);
            let scales = match p.scales {
                0 => &[],
                scales => bytes(scales, self.index, p.format.scale_bytes),
            };
            p.format.read(row, scales)
        }
    }
}

/// The rows of a window, in whichever layout.
///
/// # Safety
///
/// The addresses are those of a handle that a dispatch before has filled.
unsafe fn rows(p: &RowParams) -> Vec<Row> {
    let (slots, width) = (p.slots as usize, p.width as usize);
    // SAFETY: as this function's contract says.
    unsafe {
        let ids = table::<u32>(p.expert_ids, slots);
        let offsets = table::<i32>(p.expert_offsets, slots + 1);
        let counts = table::<i32>(p.tokens_per_expert, slots);
        let total = offsets[slots] as usize;
        let weights = match p.row_weights {
            0 => &[],
            address => table::<f32>(address, total * width),
        };
        if p.row_experts != 0 {
            let experts = table::<i32>(p.row_experts, total * width);
            let of_row = |index: usize| {
                let beside = index * width..(index + 1) * width;
                let beside = experts[beside.clone()].iter().zip(&weights[beside]);
                let named = beside.filter(|(slot, _)| **slot >= 0);
                named.map(|(slot, weight)| (ids[*slot as usize], Some(*weight))).collect()
            };
            return (0..total).map(|index| Row { index, experts: of_row(index) }).collect();
        }
        let groups = (0..slots).flat_map(|slot| {
            let first = offsets[slot] as usize;
            (first..first + counts[slot] as usize).map(move |index| (slot, index))
        });
        let row = |(slot, index): (usize, usize)| Row {
            index,
            experts: vec![(ids[slot], weights.get(index).copied())],
        };
        groups.map(row).collect()
    }
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// # Safety
///
/// `count` values lie at `address`, and nothing writes them meanwhile.
unsafe fn table<'a, T: Pod>(address: u64, count: usize) -> &'a [T] {
    // SAFETY: as this function's contract says.
    unsafe { std::slice::from_raw_parts(pointer(address), count) }
}

/// # Safety
///
/// Row `row` lies in the memory at `base`, and nothing writes it meanwhile.
unsafe fn bytes<'a>(base: u64, row: usize, row_bytes: u32) -> &'a [u8] {
    let row_bytes = row_bytes as usize;
    // SAFETY: as this function's contract says.
    unsafe { table(base + (row * row_bytes) as u64, row_bytes) }
}

/// # Safety
///
/// Row `row` lies in the memory at `base`, and nothing else touches it meanwhile.
unsafe fn bytes_mut<'a>(base: u64, row: usize, row_bytes: u32) -> &'a mut [u8] {
    let row_bytes = row_bytes as usize;
    let start = pointer::<u8>(base + (row * row_bytes) as u64);
    // SAFETY: as this function's contract says.
    unsafe { std::slice::from_raw_parts_mut(start, row_bytes) }
}

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

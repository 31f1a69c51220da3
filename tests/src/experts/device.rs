//! What the experts of the suite do on a device.

use bytemuck::{Pod, Zeroable};
use graph_ep::Kernel;
use graph_ep::ep_context::KernelSource;
use graph_ep::synthetic::{apply, coefficients};

use crate::inputs::{decode, encode};
use crate::payload::RowFormat;

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
    text: include_str!("../experts.cu"),
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

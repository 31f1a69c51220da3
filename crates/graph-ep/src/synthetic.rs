//! Experts that need no weights: for demonstrations, tests and benchmarks.
//!
//! Expert `e` makes of a row `x` the row `y[c] = scale(e, c) · x[c] + shift(e, c)`, in fp32 with a
//! rounding after the product and one after the sum, then rounded to the payload format. Scale and
//! shift are multiples of 2⁻⁸ in [−1, 1) derived from `e` and `c` alone, so every expert and column
//! differs, and a row that went to the wrong expert, or a column that moved, shows.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use ep_context::host::pointer;
use ep_context::{Backend, Buffer, Kernel, KernelSource, LaunchShape, Queue, Rank, Specialization};
use graph_capture::BodyError;
use graph_ep_kernels::{HEADERS, SYNTHETIC_EXPERTS};
use token_dispatch::{DType, DispatchConfig, DispatchError, ExpertMap, Layout, Payload};

use crate::error::Error;
use crate::layer::{ExpertParallel, Received};

/// What expert `expert` multiplies column `column` by, and adds to it.
pub fn coefficients(expert: u32, column: u32) -> (f32, f32) {
    // Two rounds of a 32-bit finaliser: cheap on a device, and without visible pattern.
    let mut word =
        expert.wrapping_mul(0x9e37_79b9) ^ column.wrapping_mul(0x85eb_ca6b) ^ 0x5bd1_e995;
    for multiplier in [0x7feb_352d_u32, 0x846c_a68b] {
        word = (word ^ (word >> 16)).wrapping_mul(multiplier);
    }
    word ^= word >> 15;
    let fraction = |bits: u32| (bits & 0x1ff) as f32 / 256.0 - 1.0;
    (fraction(word), fraction(word >> 16))
}

/// What expert `expert` makes of `row`, before it is rounded to the payload format.
pub fn apply(expert: u32, row: &[f32]) -> Vec<f32> {
    (0u32..)
        .zip(row)
        .map(|(column, value)| {
            let (scale, shift) = coefficients(expert, column);
            let product = scale * value;
            product + shift
        })
        .collect()
}

/// Parameters of [`SyntheticExpertKernel`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SyntheticExpertParams {
    /// `[capacity, hidden]` rows.
    pub rows: u64,
    /// `[capacity, hidden]` rows for the results.
    pub outputs: u64,
    /// `[local_experts + 1]` i32.
    pub expert_offsets: u64,
    /// `[local_experts]` i32.
    pub tokens_per_expert: u64,
    /// `[local_experts]` u32: the id of each local expert.
    pub expert_ids: u64,
    /// Local experts.
    pub local_experts: u32,
    /// Values in a row.
    pub hidden: u32,
    /// Code of the payload format.
    pub dtype: u32,
    /// Zero.
    pub reserved: u32,
}

/// Applies every local expert to its rows.
#[derive(Debug)]
pub struct SyntheticExpertKernel;

impl Kernel for SyntheticExpertKernel {
    type Params = SyntheticExpertParams;
    const NAME: &'static str = "synthetic_experts";
    const SOURCE: Option<KernelSource> = Some(KernelSource {
        file: SYNTHETIC_EXPERTS.0,
        text: SYNTHETIC_EXPERTS.1,
        headers: HEADERS,
    });

    unsafe fn run_on_host(p: &SyntheticExpertParams) {
        let local = p.local_experts as usize;
        let hidden = p.hidden as usize;
        let dtype = DType::from_code(p.dtype).unwrap_or(DType::Fp32);
        let row_bytes = hidden * dtype.bytes();
        // SAFETY: the launch vouches for the addresses and lengths, and nothing else touches them.
        let (offsets, counts, ids) = unsafe {
            (
                std::slice::from_raw_parts(pointer::<i32>(p.expert_offsets), local + 1),
                std::slice::from_raw_parts(pointer::<i32>(p.tokens_per_expert), local),
                std::slice::from_raw_parts(pointer::<u32>(p.expert_ids), local),
            )
        };
        let mut values = vec![0f32; hidden];
        for expert in 0..local {
            for row in offsets[expert]..offsets[expert] + counts[expert] {
                let at = u64::from(row.cast_unsigned()) * row_bytes as u64;
                // SAFETY: the row is below the total, and so inside both buffers, which are distinct.
                let (from, to) = unsafe {
                    (
                        std::slice::from_raw_parts(pointer::<u8>(p.rows + at), row_bytes),
                        std::slice::from_raw_parts_mut(pointer::<u8>(p.outputs + at), row_bytes),
                    )
                };
                dtype.decode(from, &mut values);
                dtype.encode(&apply(ids[expert], &values), to);
            }
        }
    }
}

impl SyntheticExpertKernel {
    /// The constants that its device code is compiled with.
    pub fn constants(dtype: DType) -> Specialization {
        Specialization::new().with("DTYPE", u64::from(dtype as u32))
    }
}

/// The synthetic experts of one rank, ready to be queued.
#[derive(Clone, Debug)]
pub struct SyntheticExperts<B: Backend> {
    inner: Arc<Inner<B>>,
}

#[derive(Debug)]
struct Inner<B: Backend> {
    kernel: B::Loaded<SyntheticExpertKernel>,
    ids: Buffer<B>,
    local_experts: u32,
    hidden: u32,
    dtype: DType,
}

impl<B: Backend> SyntheticExperts<B> {
    /// The experts that `group` places on this rank. Allocates and loads a kernel.
    ///
    /// # Errors
    ///
    /// [`DispatchError::Config`] for a payload other than values or rows that are not grouped by expert; out
    /// of memory.
    pub fn new(group: &ExpertParallel<B>) -> Result<Self, Error> {
        let config = group.dispatcher().config();
        if config.payload() != Payload::Values {
            return Err(cannot_read("payload", format!("{:?}", config.payload()), "Values"));
        }
        if config.layout() != Layout::ExpertGrouped {
            return Err(cannot_read("layout", format!("{:?}", config.layout()), "ExpertGrouped"));
        }
        let rank: Rank = group.context().rank();
        let ids = slot_ids(config, &group.dispatcher().expert_map(), rank);
        let buffer = group.allocate(ids.len() * 4)?;
        group.write(&buffer, bytemuck::cast_slice(&ids))?;
        let constants = SyntheticExpertKernel::constants(config.dtype());
        Ok(Self {
            inner: Arc::new(Inner {
                kernel: group.context().backend().load::<SyntheticExpertKernel>(&constants)?,
                ids: buffer,
                local_experts: ids.len() as u32,
                hidden: config.hidden() as u32,
                dtype: config.dtype(),
            }),
        })
    }

    /// Moves the experts to where `map` places them, before the next step.
    ///
    /// # Errors
    ///
    /// What the backend reports.
    pub fn follow(&self, group: &ExpertParallel<B>, map: &ExpertMap) -> Result<(), Error> {
        let ids = slot_ids(group.dispatcher().config(), map, group.context().rank());
        group.write(&self.inner.ids, bytemuck::cast_slice(&ids))
    }

    /// Queues all experts on what a dispatch of the group received.
    ///
    /// # Errors
    ///
    /// Rows that are not those of the group: shorter or longer, of another row set than the handle's, or of a
    /// rank with another number of experts. What the backend reports.
    pub fn queue(&self, queue: &Queue<'_, B>, received: &Received<'_, B>) -> Result<(), BodyError> {
        let (offsets, counts) =
            (received.handle.expert_offsets(), received.handle.tokens_per_expert());
        let (row_bytes, set) =
            (self.inner.hidden as usize * self.inner.dtype.bytes(), received.handle.rows().id());
        for rows in [received.rows, received.outputs] {
            if rows.row_bytes() != row_bytes {
                let given = rows.row_bytes();
                return Err(
                    format!("a row of {given} bytes, where experts read {row_bytes}").into()
                );
            }
            if rows.set_id() != set {
                return Err("rows of another row set than the handle's".into());
            }
        }
        let local = self.inner.local_experts as usize;
        if counts.bytes() != local * size_of::<i32>() {
            let given = counts.bytes() / size_of::<i32>();
            return Err(format!("a handle of {given} experts, where there are {local}").into());
        }
        let params = SyntheticExpertParams {
            rows: received.rows.address(),
            outputs: received.outputs.address(),
            expert_offsets: offsets.address(),
            tokens_per_expert: counts.address(),
            expert_ids: self.inner.ids.address(),
            local_experts: self.inner.local_experts,
            hidden: self.inner.hidden,
            dtype: self.inner.dtype as u32,
            reserved: 0,
        };
        let (rows, outputs, ids) =
            (received.rows.slice(), received.outputs.slice(), self.inner.ids.slice());
        // SAFETY: every address lies in a slice of the list, and rows of the handle's window in the buffers
        // of its set; the dispatch before and the combine behind are of the same stream.
        unsafe {
            queue.launch::<SyntheticExpertKernel>(
                &self.inner.kernel,
                LaunchShape::new(64, 256),
                &params,
                &[&rows, &outputs, &offsets, &counts, &ids],
                &[],
            )
        }?;
        Ok(())
    }
}

fn cannot_read(field: &'static str, value: String, limit: &str) -> Error {
    let limit = format!("{limit}, which is what synthetic experts read");
    DispatchError::Config { field, value, limit }.into()
}

/// The expert in each slot of a rank. An empty slot receives no rows, so any will do there.
fn slot_ids(config: &DispatchConfig, map: &ExpertMap, rank: Rank) -> Vec<u32> {
    let experts = map.experts_of(rank).into_iter().map(Option::unwrap_or_default);
    let mut ids: Vec<u32> = experts.collect();
    ids.resize(config.slots_of(rank) as usize, 0);
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_and_columns_differ() {
        let mut seen = std::collections::HashSet::new();
        for expert in 0..64 {
            for column in 0..256 {
                let (scale, shift) = coefficients(expert, column);
                assert!((-1.0..1.0).contains(&scale) && (-1.0..1.0).contains(&shift));
                seen.insert((scale.to_bits(), shift.to_bits()));
            }
        }
        // 16384 draws of 2¹⁸ pairs: about 500 repeat.
        assert!(seen.len() > 15_000, "{}", seen.len());
        assert_ne!(apply(0, &[1.0; 8]), apply(1, &[1.0; 8]));
    }
}

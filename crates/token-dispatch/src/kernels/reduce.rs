//! The owner's half of combine: partial sums to outputs.

use ep_context::signal::HostWaiter;
use ep_context::{FaultKind, Kernel, KernelSource, Phase};
use graph_ep_kernels::dispatch as device;

use super::memory::{LaneBlocks, load, raise, row_address, table, table_mut};
use super::source;
use crate::dtype::DType;
use crate::params::{CombineHeader, Destination, ReduceParams, WindowState};

/// Adds the partial sums of each token in the order of the ranks, after [`Fold`](super::Fold) has
/// acquired them.
#[derive(Debug)]
pub(crate) struct Reduce;

impl Kernel for Reduce {
    type Params = ReduceParams;
    const NAME: &'static str = "reduce";
    const SOURCE: Option<KernelSource> = Some(source(device::REDUCE));

    unsafe fn run_on_host(p: &ReduceParams) {
        let g = &p.geometry;
        // SAFETY: for this whole body, the launch vouches for every address in `p`. Headers and landing
        // slots were acquired by the fold before, and are written again only after this rank's next
        // dispatch signal. Handle and output belong to this stream.
        let waiter = unsafe { HostWaiter::from_params(&p.wait) };
        if waiter.fault(Phase::Combine).is_some() {
            return;
        }
        // SAFETY: see above; the route of this dispatch wrote the handle's tables.
        let tokens = unsafe { load::<WindowState>(p.handle.window) }.tokens;
        if tokens > p.num_tokens {
            return raise(&waiter, g, Phase::Combine, FaultKind::TooManyTokens);
        }
        let tokens = tokens as usize;
        // SAFETY: see above.
        unsafe {
            let blocks = LaneBlocks::new(&p.lane, g);
            if p.output != 0 {
                add_partials(p, &blocks, tokens, |_, _| true);
            }
            if p.weight_grads != 0 {
                let count = tokens * g.top_k as usize;
                table_mut::<f32>(p.weight_grads, count)
                    .copy_from_slice(table(blocks.own(g.lane.weight_grads), count));
            }
        }
    }
}

/// Writes the output of every token; ends early where a partial sum, of which `arrived(rank, slot)` is
/// asked, does not come.
///
/// # Safety
///
/// As for [`Reduce`], but for the landing slots: they may be read once `arrived` says so.
pub(super) unsafe fn add_partials(
    p: &ReduceParams,
    blocks: &LaneBlocks<'_>,
    tokens: usize,
    arrived: impl Fn(u32, usize) -> bool,
) {
    let g = &p.geometry;
    let (fanout, hidden, row_bytes) = (g.fanout as usize, g.hidden as usize, g.sum_bytes as usize);
    let dtype = DType::from_code(g.dtype).unwrap_or(DType::Fp32);
    let landing = blocks.own(g.lane.landing);
    // SAFETY: the kernel's contract.
    let (headers, fanouts, destinations) = unsafe {
        (
            table::<CombineHeader>(blocks.own(g.lane.combine_headers), g.world as usize),
            table::<u32>(p.handle.fanouts, tokens),
            table::<Destination>(p.handle.destinations, tokens * fanout),
        )
    };
    let (mut sum, mut values) = (vec![0f32; hidden], vec![0f32; hidden]);
    for (token, fanout_of_token) in fanouts.iter().enumerate() {
        sum.fill(0.0);
        for reached in 0..*fanout_of_token as usize {
            let slot = token * fanout + reached;
            let destination = destinations[slot];
            if destination.position >= headers[destination.rank as usize].prefix {
                continue;
            }
            if !arrived(destination.rank, slot) {
                return;
            }
            // SAFETY: the destination wrote this slot before its signal.
            let bytes = unsafe { table::<u8>(row_address(landing, slot, g.sum_bytes), row_bytes) };
            dtype.decode(bytes, &mut values);
            for (sum, value) in sum.iter_mut().zip(&values) {
                *sum += value;
            }
        }
        // SAFETY: the output has a row for each token.
        let output =
            unsafe { table_mut::<u8>(row_address(p.output, token, g.sum_bytes), row_bytes) };
        dtype.encode(&sum, output);
    }
}

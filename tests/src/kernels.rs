//! Device operations that tests need.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use graph_ep::Kernel;
use graph_ep::ep_context::KernelSource;

/// Parameters of [`RouteByOutput`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RouteByOutputParams {
    /// `[tokens, row_bytes]`: what the layer before gave out.
    pub output: u64,
    /// `[tokens, row_bytes]`: becomes a copy of it.
    pub tokens: u64,
    /// `[tokens]` i32.
    pub ids: u64,
    /// Tokens.
    pub count: u32,
    /// Bytes of a row.
    pub row_bytes: u32,
}

/// Makes the output of a layer the tokens of the next, top-1, and lets it decide where they go: see
/// [`route`].
#[derive(Debug)]
pub struct RouteByOutput;

/// Where a token goes whose row is `row`: to expert 0 or 1 by its bytes, and to expert 4 if it is
/// zero, which is what a row looks like that was left out of the layer before.
pub fn route(row: &[u8]) -> i32 {
    if row.iter().all(|byte| byte & 0x7f == 0) {
        return 4;
    }
    i32::from(row.iter().fold(0, |all, byte| all ^ byte).count_ones() % 2 == 1)
}

impl Kernel for RouteByOutput {
    type Params = RouteByOutputParams;
    const NAME: &'static str = "route_by_output";
    const SOURCE: Option<KernelSource> = Some(KernelSource {
        file: "route_by_output.cu",
        text: include_str!("route_by_output.cu"),
        headers: graph_ep_kernels::HEADERS,
    });

    unsafe fn run_on_host(p: &RouteByOutputParams) {
        let (count, row_bytes) = (p.count as usize, p.row_bytes as usize);
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: the launch vouches for the addresses and lengths; the three are different memory,
        // and nothing else touches them.
        let (output, tokens, ids) = unsafe {
            (
                std::slice::from_raw_parts(pointer(p.output), count * row_bytes),
                std::slice::from_raw_parts_mut(pointer(p.tokens), count * row_bytes),
                std::slice::from_raw_parts_mut(pointer(p.ids), count * 4),
            )
        };
        tokens.copy_from_slice(output);
        for (row, id) in output.chunks_exact(row_bytes).zip(ids.chunks_exact_mut(4)) {
            id.copy_from_slice(&route(row).to_le_bytes());
        }
    }
}

/// Parameters of [`Stall`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct StallParams {
    /// A u32 that the host sets to let it end.
    pub word: u64,
    /// The most nanoseconds that it takes.
    pub limit_ns: u64,
}

/// An operation that takes until the host lets it end.
#[derive(Debug)]
pub struct Stall;

impl Kernel for Stall {
    type Params = StallParams;
    const NAME: &'static str = "stall";
    const SOURCE: Option<KernelSource> = Some(KernelSource {
        file: "stall.cu",
        text: include_str!("stall.cu"),
        headers: graph_ep_kernels::HEADERS,
    });

    unsafe fn run_on_host(p: &StallParams) {
        // SAFETY: the launch vouches for the word, which everybody accesses by atomics only.
        let word =
            unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(p.word as usize)) };
        let (start, limit) = (Instant::now(), Duration::from_nanos(p.limit_ns));
        while word.load(Ordering::Acquire) == 0 && start.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// An operation that fails when it runs; on a GPU it takes the context with it.
#[derive(Debug)]
pub struct Broken;

impl Kernel for Broken {
    type Params = u32;
    const NAME: &'static str = "broken";
    const SOURCE: Option<KernelSource> = Some(KernelSource {
        file: "broken.cu",
        text: include_str!("broken.cu"),
        headers: graph_ep_kernels::HEADERS,
    });

    unsafe fn run_on_host(_: &u32) {
        // Without the hook, which would print a panic that is wanted.
        std::panic::resume_unwind(Box::new("an operation that breaks"));
    }
}

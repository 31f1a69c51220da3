//! What ranks run on.

use graph_ep::ep_context::cuda::{
    CudaBackend, CudaOptions, DeviceProperties, driver_version, nvrtc_version,
};
use graph_ep::ep_context::host::HostOptions;
use graph_ep::{BackendError, HostBackend};

use crate::args::BackendChoice;
use crate::output;

/// What ranks run on.
#[derive(Debug)]
pub(crate) enum Devices {
    /// Threads of the CPU.
    Host,
    /// GPUs, shared out among the ranks in turn.
    Cuda(Vec<DeviceProperties>),
}

impl Devices {
    /// Finds what was asked for. `auto` says on stderr that it takes the host, and why.
    pub(crate) fn find(choice: BackendChoice) -> Result<Self, BackendError> {
        if choice == BackendChoice::Host {
            return Ok(Self::Host);
        }
        let found = DeviceProperties::all().and_then(|devices| match devices.is_empty() {
            true => Err(BackendError::Unavailable {
                what: "a GPU".to_owned(),
                reason: "the CUDA driver shows this process none".to_owned(),
            }),
            // Without a compiler for its kernels a GPU is of no use.
            false => nvrtc_version().map(|_| devices),
        });
        match found {
            Ok(devices) => Ok(Self::Cuda(devices)),
            Err(error) if choice == BackendChoice::Auto => {
                if speaks() {
                    output::tell(&format!("running on the host: {error}"));
                }
                Ok(Self::Host)
            }
            Err(error) => Err(error),
        }
    }

    /// Lines for a report.
    pub(crate) fn describe(&self) -> Vec<String> {
        let Self::Cuda(gpus) = self else {
            let threads = std::thread::available_parallelism().map_or(0, |threads| threads.get());
            return vec![format!(
                "host backend, {threads} hardware threads, {}",
                std::env::consts::ARCH
            )];
        };
        let mut lines: Vec<String> = gpus
            .iter()
            .map(|gpu| {
                let (major, minor) = gpu.capability;
                format!(
                    "GPU {}: {}, sm_{major}{minor}, {} SMs, {} MiB",
                    gpu.ordinal,
                    gpu.name,
                    gpu.multiprocessors,
                    gpu.memory >> 20
                )
            })
            .collect();
        let unknown = |error: BackendError| format!("unknown: {error}");
        lines.push(format!("driver for CUDA {}", driver_version().unwrap_or_else(unknown)));
        lines.push(match nvrtc_version() {
            Ok((_, (major, minor))) => format!("NVRTC {major}.{minor}"),
            Err(error) => format!("NVRTC {}", unknown(error)),
        });
        lines
    }
}

/// Whether this process speaks for all: it is not a rank beside rank 0.
fn speaks() -> bool {
    std::env::var_os("RANK").is_none_or(|rank| rank == "0")
}

/// The host as a device for one rank.
pub(crate) fn host(rank: usize) -> Result<HostBackend, BackendError> {
    Ok(HostBackend::new(HostOptions::new(format!("rank-{rank}"))))
}

/// The GPU of one rank.
pub(crate) fn cuda(devices: &[DeviceProperties], rank: usize) -> Result<CudaBackend, BackendError> {
    CudaBackend::new(cuda_options(devices, rank))
}

/// The constant with which kernels count nothing.
pub(crate) const NO_COUNTERS: (&str, u64) = ("COUNTERS", 0);

/// The same with kernels that count nothing, for measuring what counting costs.
pub(crate) fn cuda_without_counters(
    devices: &[DeviceProperties],
    rank: usize,
) -> Result<CudaBackend, BackendError> {
    let (name, value) = NO_COUNTERS;
    CudaBackend::new(cuda_options(devices, rank).with_constant(name, value))
}

fn cuda_options(devices: &[DeviceProperties], rank: usize) -> CudaOptions {
    let ordinal = devices.get(rank % devices.len().max(1)).map_or(0, |device| device.ordinal);
    CudaOptions::new(ordinal).with_label(format!("rank-{rank}"))
}

//! `graph-ep doctor`: what a user needs to know before filing a bug.
//!
//! Everything is tried rather than asked for, since drivers claim what machines then refuse.

use std::fmt::Write as _;
use std::time::Instant;

use graph_ep::ep_context::backend::Memory;
use graph_ep::ep_context::backend::SharedMemory;
use graph_ep::ep_context::cuda::{
    CacheFolder, CudaBackend, CudaOptions, DeviceProperties, driver_version, nvrtc_version,
};
use graph_ep::{Backend, BackendError};

use crate::output;
use crate::verdict::Verdict;

/// Prints what was found. A machine without GPUs is no failure: the host backend works there.
pub fn run() -> Verdict {
    let mut text = String::new();
    examine(&mut text);
    output::show(&text);
    Verdict::Verified
}

/// Writes one line a finding.
fn examine(text: &mut String) {
    line(text, "graph-ep", env!("CARGO_PKG_VERSION"));
    line(text, "open files", &open_files());
    let cache = CacheFolder::from_environment();
    let folder = cache.path().map(|path| path.display().to_string());
    line(text, "kernel cache", &folder.unwrap_or("none: every start compiles".to_owned()));
    line(text, "driver", &said(driver_version().map(|version| format!("for CUDA {version}"))));
    let nvrtc = nvrtc_version();
    let compiles = nvrtc.is_ok();
    line(
        text,
        "NVRTC",
        &said(nvrtc.map(|(place, (major, minor))| format!("{major}.{minor} at {place}"))),
    );
    let devices = match DeviceProperties::all() {
        Ok(devices) => devices,
        Err(error) => {
            line(text, "GPUs", &error.to_string());
            line(text, "modes", "all, on the host backend");
            return;
        }
    };
    let mut sound = compiles && !devices.is_empty();
    let mut backends = Vec::new();
    for device in &devices {
        let (major, minor) = device.capability;
        let what = format!(
            "{}, sm_{major}{minor}, {} SMs, {} MiB",
            device.name,
            device.multiprocessors,
            device.memory >> 20
        );
        line(text, &format!("GPU {}", device.ordinal), &what);
        match CudaBackend::new(CudaOptions::new(device.ordinal).with_cache(CacheFolder::none())) {
            Ok(backend) => backends.push(backend),
            Err(error) => {
                sound = false;
                line(text, "  context", &error.to_string());
            }
        }
    }
    for backend in &backends {
        let name = format!("GPU {}", backend.properties().ordinal);
        for (what, tried) in [
            ("grows in place", grows(backend)),
            ("exports memory", exports(backend, backend).map(drop)),
            ("loops in graphs", loops(backend)),
        ] {
            sound &= tried.is_ok();
            line(text, &format!("{name} {what}"), &said(tried.map(|()| "yes".to_owned())));
        }
    }
    for from in &backends {
        for to in backends.iter().filter(|to| to.properties().ordinal != from.properties().ordinal)
        {
            let pair = format!("GPU {} -> {}", from.properties().ordinal, to.properties().ordinal);
            let rate = exports(from, to).map(|rate| format!("{rate:.0} GB/s by copy"));
            sound &= rate.is_ok();
            line(text, &pair, &said(rate));
        }
    }
    let modes =
        if sound { "all, on the CUDA and the host backend" } else { "all, on the host backend" };
    line(text, "modes", modes);
}

fn line(text: &mut String, what: &str, found: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{what:<22} {found}");
}

fn said(result: Result<String, BackendError>) -> String {
    result.unwrap_or_else(|error| format!("no: {error}"))
}

fn open_files() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    match limit.current {
        Some(limit) => format!("at most {limit}; a rank takes a few for each peer and lane"),
        None => "unlimited".to_owned(),
    }
}

/// Bytes that are copied to see how fast a pair is.
const PROBE: usize = 256 << 20;

fn grows(backend: &CudaBackend) -> Result<(), BackendError> {
    use graph_ep::ep_context::backend::GrowableMemory;
    let memory = backend.reserve(1 << 30)?;
    memory.grow(1 << 21)?;
    memory.grow(1 << 22)
}

/// Lets `to` map memory of `from` and copies it there; GB/s.
fn exports(from: &CudaBackend, to: &CudaBackend) -> Result<f64, BackendError> {
    let shared = from.allocate_shared(PROBE)?;
    let peer = to.import(shared.export()?, PROBE)?;
    let own = to.allocate(PROBE)?;
    let stream = to.stream("doctor")?;
    let mut fastest = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        // SAFETY: two allocations of this length that nothing else uses, alive until the stream has
        // been waited for.
        unsafe { to.copy(&stream, own.address(), peer.address(), PROBE, &[]) }?;
        to.synchronize(&stream)?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(PROBE as f64 / fastest / 1e9)
}

/// Records, instantiates and replays a loop that makes no trip.
fn loops(backend: &CudaBackend) -> Result<(), BackendError> {
    let memory = backend.allocate(256)?;
    let stream = backend.stream("doctor")?;
    let key = backend.begin_recording(&stream)?;
    let recorded = (|| {
        let condition = backend.condition(&stream)?;
        let body = backend.begin_while(&stream, condition)?;
        // SAFETY: memory that nothing else uses, alive until the stream has been waited for.
        unsafe { backend.fill(&body, memory.address(), 1, 256, &[]) }?;
        backend.end_while(&stream, body)?;
        backend.end_recording(&key)
    })();
    if recorded.is_err() {
        backend.abandon_recording(&key);
    }
    let graph = backend.instantiate(recorded?)?;
    backend.replay(&stream, &graph)?;
    backend.synchronize(&stream)
}
